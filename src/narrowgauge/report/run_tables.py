"""Tables of a page's runs: what happened in them, and their settings and environment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from narrowgauge.runs.finding import counted
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row
from narrowgauge.spec.tables import Column, Table, text_columns

ROUTINE = frozenset({"start", "resume", "stop", "finish", "checkpoint", "note", "unseen"})
"""What happens in every healthy run. All other events need attention, unknown ones too."""
_COLUMNS = text_columns(step="step", run="run", what="what", advice="advice")


def event_table(named: Iterable[tuple[Run, str]]) -> Table:
    """Return a row per run and kind of event: its steps, its first advice, and the number of
    others. Each note has its own.
    """
    groups: dict[tuple[str, Any, Any], list[Row]] = {}
    for run, name in named:
        for event in run.events:
            what = event.get("what", "")
            text = event.get("advice", "") if what == "note" else ""
            groups.setdefault((name, what, text), []).append(event)
    rows = []
    for (label, what, _), events in groups.items():
        first = str(events[0].get("step", ""))
        last = str(events[-1].get("step", ""))
        advice = events[0].get("advice", "")
        more = len(events) - 1
        if more:
            advice = f"{advice} ({counted(more, 'more event')}: see events.jsonl)"
        steps = first if first == last else f"{first}–{last}"
        rows.append({"step": steps, "run": label, "what": what, "advice": advice})
    return Table(_COLUMNS, sorted(rows, key=lambda row: row["what"] in ROUTINE))


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
