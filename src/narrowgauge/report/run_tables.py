"""Tables of a page's runs: what happened in them, and their settings and environment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
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
            kind = event.get("kind", "")
            text = event.get("message", "") if kind == "note" else ""
            group = (name, kind, event.get("advice", ""), text)
            groups.setdefault(group, []).append(event)
    rows = []
    for (label, kind, advice, _), events in groups.items():
        first = str(events[0].get("step", ""))
        last = str(events[-1].get("step", ""))
        message = events[0].get("message", "")
        more = len(events) - 1
        if more:
            message = f"{message} ({counted(more, 'more event')}: see events.jsonl)"
        steps = first if first == last else f"{first}–{last}"
        words = {"message": message, "advice": advice}
        rows.append({"step": steps, "run": label, "kind": kind, **words})
    return Table(_COLUMNS, sorted(rows, key=lambda row: row["kind"] in ROUTINE))


_NOT_SHOWN = "config.out"
"""A meaningless setting that differs between any two runs."""


def setting_tables(named: Sequence[tuple[Run, str]]) -> tuple[Table, Table]:
    """Return the settings that differ between runs, a row per run, and the others, a row per
    setting.
    """
    settings = [_flat(run.run) for run, _ in named]
    runs: list[Row] = [{"run": name} for _, name in named]
    shared = []
    columns = [Column("run", "run")]
    for key in dict.fromkeys(chain(*settings)):
        if key == _NOT_SHOWN:
            continue
        values = [row.get(key, "–") for row in settings]
        if len(set(map(repr, values))) == 1:
            shared.append({"setting": key, "value": values[0]})
            continue
        columns.append(Column(key, key))
        for row, value in zip(runs, values, strict=True):
            row[key] = value
    differing = Table(tuple(columns), runs if len(columns) > 1 else [])
    return differing, Table(text_columns(setting="setting", value="value"), shared)


def _flat(table: Row, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
