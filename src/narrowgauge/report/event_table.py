"""The table of events on a page: repetitions share a row, and what needs attention comes first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from narrowgauge.analysis.diagnose import NOT_ALARMS
from narrowgauge.runs.finding import counted
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row
from narrowgauge.spec.tables import Table, text_columns

ROUTINE = NOT_ALARMS - {"skip"}
"""Kinds of events of every healthy run. All others need attention, unknown kinds too."""
_COLUMNS = text_columns(step="step", run="run", kind="kind", what_happened="message", what_to_do="advice")


def event_table(named: Iterable[tuple[Run, str]]) -> Table:
    """Return a row per run, kind and advice: its steps, its first message, and the number of others. Each note has its own."""
    groups: dict[tuple[str, Any, Any, Any], list[Row]] = {}
    for run, name in named:
        for event in run.events:
            text = event.get("message", "") if event.get("kind") == "note" else ""
            groups.setdefault((name, event.get("kind", ""), event.get("advice", ""), text), []).append(event)
    rows = []
    for (label, kind, advice, _), events in groups.items():
        steps = dict.fromkeys(str(event.get("step", "")) for event in (events[0], events[-1]))
        message, more = events[0].get("message", ""), len(events) - 1
        if more:
            message = f"{message} ({counted(more, 'more event')}: see events.jsonl)"
        rows.append({"step": "–".join(steps), "run": label, "kind": kind, "message": message, "advice": advice})
    return Table(_COLUMNS, sorted(rows, key=lambda row: row["kind"] in ROUTINE))
