"""Tables of a page's runs: what happened in them, and their settings and environment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from narrowgauge.analysis.diagnose import NOT_ALARMS
from narrowgauge.runs.finding import counted
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row
from narrowgauge.spec.tables import Column, Table, text_columns

ROUTINE = NOT_ALARMS - {"skip"}
"""Kinds of events of every healthy run. All others need attention, unknown kinds too."""
_COLUMNS = text_columns(
    step="step", run="run", kind="kind", what_happened="message", what_to_do="advice"
)


def event_table(named: Iterable[tuple[Run, str]]) -> Table:
    """Return a row per run, kind and advice: its steps, its first message, and the number of
    others. Each note has its own.
    """
    groups: dict[tuple[str, Any, Any, Any], list[Row]] = {}
    for run, name in named:
        for event in run.events:
            text = event.get("message", "") if event.get("kind") == "note" else ""
            groups.setdefault(
                (name, event.get("kind", ""), event.get("advice", ""), text), []
            ).append(event)
    rows = []
    for (label, kind, advice, _), events in groups.items():
        steps = dict.fromkeys(str(event.get("step", "")) for event in (events[0], events[-1]))
        message = events[0].get("message", "")
        more = len(events) - 1
        if more:
            message = f"{message} ({counted(more, 'more event')}: see events.jsonl)"
        rows.append(
            {
                "step": "–".join(steps),
                "run": label,
                "kind": kind,
                "message": message,
                "advice": advice,
            }
        )
    return Table(_COLUMNS, sorted(rows, key=lambda row: row["kind"] in ROUTINE))


_NOT_SHOWN = "config.out"
"""A meaningless setting that differs between any two runs."""


def setting_tables(named: Sequence[tuple[Run, str]]) -> tuple[Table, Table]:
    """Return the settings that differ between runs, a row per run, and the others, a row per
    setting.
    """
    flat = [(name, _flat(run.run)) for run, name in named]
    keys = dict.fromkeys(key for _, settings in flat for key in settings if key != _NOT_SHOWN)
    values = {key: [settings.get(key, "–") for _, settings in flat] for key in keys}
    differing = [key for key in keys if len(set(map(repr, values[key]))) > 1]
    runs = [
        {"run": name, **{key: values[key][place] for key in differing}}
        for place, (name, _) in enumerate(flat)
    ]
    shared = [{"setting": key, "value": values[key][0]} for key in keys if key not in differing]
    columns = tuple(Column(key, key) for key in ("run", *differing))
    return Table(columns, runs if differing else []), Table(
        text_columns(setting="setting", value="value"), shared
    )


def _flat(table: Row, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        flat |= (
            _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
        )
    return flat
