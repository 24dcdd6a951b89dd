"""Events of runs on a page: a figure with a line per run, and a table that joins repetitions into one row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from narrowgauge.report.figures.palette import plain
from narrowgauge.report.figures.traces import labelled_rows
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row, finite_number

ROUTINE = frozenset({"start", "resume", "stop", "finish", "checkpoint", "note"})
"""Kinds of events of every healthy run. All others need attention, unknown kinds too."""
MAX_REPETITIONS = 100
"""Maximum number of listed repetitions per event."""
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
    """Describe a row of the event table: a run's first event of one kind and advice, and its repetitions."""

    run: str
    event: Row
    more: list[Row] = field(default_factory=list)

    @property
    def is_routine(self) -> bool:
        return str(self.event.get("kind", "")) in ROUTINE

    @property
    def steps(self) -> str:
        """Return the step, or the first and the last."""
        steps = dict.fromkeys(str(event.get("step", "")) for event in (self.event, *self.more[-1:]))
        return "–".join(steps)

    @property
    def lines(self) -> list[str]:
        """Return a line per repetition, up to :data:`MAX_REPETITIONS`."""
        return [
            f"step {event.get('step', '?')}: {event.get('tensor') or event.get('message', '')}"
            for event in self.more[:MAX_REPETITIONS]
        ]


def event_rows(named: Iterable[tuple[Run, str]]) -> list[EventRow]:
    """Return rows of the event table: one per run, kind and advice. Events that need attention come first."""
    rows: dict[tuple[object, ...], EventRow] = {}
    for run, name in named:
        for event in run.events:
            key = name, event.get("kind"), event.get("advice")
            if key in rows:
                rows[key].more.append(event)
            else:
                rows[key] = EventRow(name, event)
    return sorted(rows.values(), key=lambda row: row.is_routine)
