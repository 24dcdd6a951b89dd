"""The events of runs on a page: a figure with a line per run, and a table in which repetitions are one row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from narrowgauge.report.figures.palette import plain
from narrowgauge.report.figures.traces import labelled_rows
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row, finite_number

ROUTINE = frozenset({"start", "resume", "stop", "finish", "checkpoint", "note"})
"""Kinds of events that every healthy run has; all others, unknown ones too, need attention."""
MAX_EVENT_ROWS = 300
MAX_REPETITIONS = 100
"""The most repetitions of one event that its row lists."""
_SYMBOLS = ("triangle-up", "square", "diamond", "x", "star", "pentagon", "hexagon", "triangle-down", "bowtie")


def event_strip(named: Sequence[tuple[Run, str]]) -> Row | None:
    """Draw events over steps, a line per run, a trace per kind."""
    kinds: dict[str, Row] = {}
    for line, (run, _) in enumerate(named):
        for event in run.events:
            step, name = finite_number(event.get("step")), str(event.get("kind", ""))
            if step is not None:
                kind = "routine" if name in ROUTINE else name
                trace = kinds.setdefault(kind, _kind_trace(kind, len(kinds)))
                trace["x"].append(step)
                trace["y"].append(line)
                trace["text"].append(plain(f"{name}: {event.get('message', '')}"[:200]))
    if not kinds:
        return None
    layout = {
        "xaxis": {"title": {"text": "step"}, "rangemode": "tozero"},
        "yaxis": labelled_rows([name for _, name in named]) | {"showgrid": True},
        "showlegend": True,
        "height": 150 + 26 * len(named),
    }
    return {"data": [kinds[kind] for kind in sorted(kinds, key=lambda kind: kind != "routine")], "layout": layout}


def _kind_trace(kind: str, index: int) -> Row:
    if kind == "routine":
        marker: Row = {"symbol": "line-ns", "size": 9, "color": "@muted", "line": {"width": 2, "color": "@muted"}}
    else:
        symbol = _SYMBOLS[index % len(_SYMBOLS)]
        marker = {"symbol": symbol, "size": 10, "color": "@alarm", "line": {"width": 1, "color": "@paper"}}
    return {
        "type": "scatter", "mode": "markers", "name": plain(kind), "x": [], "y": [], "text": [], "marker": marker,
        "hovertemplate": "step %{x}<br>%{text}<extra></extra>",
    }  # fmt: skip


@dataclass
class EventRow:
    """A row of the table of events: an event of a run, the step of its last repetition, and a line for each repetition."""

    run: str
    event: Row
    last: float | None
    more: list[str] = field(default_factory=list)

    @property
    def is_routine(self) -> bool:
        return str(self.event.get("kind", "")) in ROUTINE

    @property
    def steps(self) -> str:
        first = self.event.get("step", "")
        return str(first) if self.last is None or finite_number(first) == self.last else f"{first}–{self.last:g}"


def event_rows(named: Iterable[tuple[Run, str]]) -> tuple[list[EventRow], int]:
    """Return rows of the table of events, those that need attention first, and how many more there are.

    Events of the same kind with the same advice in the same or the next step are one row. Of more rows than the table
    holds, every run keeps its first ones, so that a run with many events does not displace the others.
    """
    rows = [(place, row) for run, name in named for place, row in enumerate(_event_rows(run, name))]
    # The first of every run, then the second: those beyond the limit are the last ones of the longest lists.
    shown = {id(row) for _, row in sorted(rows, key=lambda at: (at[1].is_routine, at[0]))[:MAX_EVENT_ROWS]}
    return sorted((r for _, r in rows if id(r) in shown), key=lambda row: row.is_routine), len(rows) - len(shown)


def _event_rows(run: Run, name: str) -> list[EventRow]:
    rows: list[EventRow] = []
    open_rows: dict[tuple[object, object], EventRow] = {}
    for event in run.events:
        key, step = (event.get("kind"), event.get("advice")), finite_number(event.get("step"))
        row = open_rows.get(key)
        is_next = row is not None and (
            row.last == step if row.last is None or step is None else row.last <= step <= row.last + 1
        )
        if row is None or row.is_routine or not is_next:
            row = open_rows[key] = EventRow(name, event, step)
            rows.append(row)
            continue
        where = "" if step == finite_number(row.event.get("step")) else f"step {event.get('step')}: "
        row.more.append(f"{where}{event.get('tensor') or event.get('message', '')}")
        row.last = step
    return rows
