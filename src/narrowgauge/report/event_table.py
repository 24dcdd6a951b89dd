"""The table of events: what happened in the runs, what asks for attention first, with advice.

A run that has broken says so in every step. Such a stretch is one row, ``steps 3–60``, and every run gets its share of
the rows, so that the loudest does not silence the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from narrowgauge.report.history_figures import ROUTINE
from narrowgauge.report.markup import scroll, text
from narrowgauge.report.series import number
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row

MAX_EVENT_ROWS = 300
MAX_REPETITIONS = 100
"""Repetitions of one happening that its row lists."""


@dataclass
class _Told:
    """A row of the table: a happening and what is only more of it."""

    name: str
    event: Row
    last: float | None
    more: list[str] = field(default_factory=list)

    @property
    def is_routine(self) -> bool:
        return str(self.event.get("kind", "")) in ROUTINE

    @property
    def steps(self) -> str:
        first = self.event.get("step", "")
        return str(first) if self.last is None or number(first) == self.last else f"{first}–{self.last:g}"


def events_table(named: Iterable[tuple[Run, str]]) -> str:
    """What happened, with advice; repetitions of one happening are told once.

    Law: a happening of the same kind with the same advice in the same or the next step is a repetition; of more rows than
    the table holds, every run keeps its first ones.
    """
    told = [(place, row) for run, name in named for place, row in enumerate(_told(run, name))]
    if not told:
        return '<p class="empty">These runs wrote down no events.</p>'
    # The first of every run, then the second: those beyond the limit are the last ones of the longest lists.
    kept = {id(row) for _, row in sorted(told, key=lambda at: (at[1].is_routine, at[0]))[:MAX_EVENT_ROWS]}
    rows = sorted((row for _, row in told if id(row) in kept), key=lambda row: row.is_routine)
    left_out = len(told) - len(rows)
    note = f'<p class="empty">{left_out} more rows are in the runs’ events.jsonl.</p>' if left_out > 0 else ""
    return (
        f'{scroll("Events", "scroll tall")}<table class="events" id="event-table">'
        "<caption>Events: those that ask for attention come first, then the routine</caption>"
        '<thead><tr><th scope="col">Step</th><th scope="col">Run</th><th scope="col">Kind</th><th scope="col">What happened</th>'
        f'<th scope="col">What to do</th></tr></thead><tbody>{"".join(map(_row, rows))}</tbody></table></div>{note}'
    )


def _told(run: Run, name: str) -> list[_Told]:
    """The rows of a run."""
    rows: list[_Told] = []
    open_rows: dict[tuple[object, object], _Told] = {}
    for event in run.events:
        key, step = (event.get("kind"), event.get("advice")), number(event.get("step"))
        row = open_rows.get(key)
        if row is None or row.is_routine or not _follows(row.last, step):
            row = open_rows[key] = _Told(name, event, step)
            rows.append(row)
            continue
        where = "" if step == number(row.event.get("step")) else f"step {event.get('step')}: "
        row.more.append(f"{where}{event.get('tensor') or event.get('message', '')}")
        row.last = step
    return rows


def _follows(last: float | None, step: float | None) -> bool:
    return last == step if last is None or step is None else last <= step <= last + 1


def _row(row: _Told) -> str:
    event, more = row.event, row.more
    message = _breakable(text(event.get("message", "")))
    if more:
        items = "".join(f"<li>{_breakable(text(item))}</li>" for item in more[:MAX_REPETITIONS])
        if len(more) > MAX_REPETITIONS:
            items += f"<li>and {len(more) - MAX_REPETITIONS} more in events.jsonl</li>"
        message += f"<details><summary>and {len(more)} more like it</summary><ul>{items}</ul></details>"
    return (
        f'<tr class="{"routine" if row.is_routine else "notable"}"><td>{text(row.steps)}</td>'
        f'<td>{text(row.name)}</td><td><span class="kind">{text(event.get("kind", ""))}</span></td><td>{message}</td>'
        f"<td>{_breakable(text(event.get('advice', '')))}</td></tr>"
    )


def _breakable(markup: str) -> str:
    """Long names may end a line at a dot, a slash or an underline, and nowhere else."""
    return re.sub(r"(?<=\w)([._/])(?=[A-Za-z_])", r"\1<wbr>", markup)
