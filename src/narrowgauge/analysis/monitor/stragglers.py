"""Stragglers: ranks for which the others wait.

Every collective waits for its last rank, so one slow machine slows the whole job, and no average shows which. A rank is named
where it was the last to arrive in nearly all steps of a window, and late enough to matter. Where ranks are equally fast, chance
decides who is last, and no one is named.
"""

from __future__ import annotations

from typing import Any

from narrowgauge.runs.events import Event
from narrowgauge.runs.schema import Row

WINDOW = 50
"""Steps in which a straggler shows: with two equal ranks one is the last in 80 % of 50 by chance once in 42,000 windows."""
MIN_SHARE = 0.8
"""The least share of the steps in which it is the last to arrive."""
MIN_LATE = 0.05
"""The least share of a step for which the others wait for it: less is the noise of a network."""


class Stragglers:
    """Names slow ranks from the rows of ``steps.jsonl``: each once, until a window in which it was not slow.

    Example:
        >>> stragglers = Stragglers()
        >>> table = {"num_steps": 50, "num_last": [1, 0, 1, 48], "late_seconds": [0.01, 0.0, 0.01, 0.125]}
        >>> stragglers.on_step({"step": 50, "seconds": 1.0, "ranks": table})[0].message
        'rank 3 was the last to arrive in 48 of 50 steps, 0.12 s late on average (12% of a step)'
    """

    def __init__(self) -> None:
        self.named: int | None = None
        """The rank that the last window named."""
        self._begin(0)

    def _begin(self, num_ranks: int) -> None:
        self._num_steps, self._seconds, self._num_rows = 0, 0.0, 0
        self._num_last, self._late = [0] * num_ranks, [0.0] * num_ranks

    def on_step(self, row: Row) -> list[Event]:
        """Read a row of ``steps.jsonl``; returns an event at the end of a window with a straggler."""
        seconds = row.get("seconds")
        if isinstance(seconds, (int, float)):
            self._seconds, self._num_rows = self._seconds + seconds, self._num_rows + 1
        table = row.get("ranks")
        if not isinstance(table, dict) or not table.keys() >= {"num_steps", "num_last", "late_seconds"}:
            return []
        if len(table["num_last"]) != len(self._num_last):
            seconds, num_rows = self._seconds, self._num_rows
            self._begin(len(table["num_last"]))  # the job goes on with another number of ranks
            self._seconds, self._num_rows = seconds, num_rows
        self._add(table)
        if self._num_steps < WINDOW:
            return []
        event = self._judge(int(row["step"]))
        self._begin(len(self._num_last))
        return [event] if event is not None else []

    def _add(self, table: dict[str, Any]) -> None:
        self._num_steps += table["num_steps"]
        for rank, (count, late) in enumerate(zip(table["num_last"], table["late_seconds"], strict=True)):
            self._num_last[rank] += count
            self._late[rank] += count * late

    def _judge(self, step: int) -> Event | None:
        """The event of a window, where it names another rank than the last one did."""
        rank = max(range(len(self._num_last)), key=self._num_last.__getitem__)
        count, duration = self._num_last[rank], self._seconds / max(1, self._num_rows)
        late, threshold = self._late[rank] / max(1, count), MIN_LATE * duration
        before, self.named = self.named, None
        if count < MIN_SHARE * self._num_steps or late < threshold:
            return None
        self.named = rank
        return None if rank == before else _event(step, rank, count, self._num_steps, late, duration)


def _event(step: int, rank: int, count: int, num_steps: int, late: float, duration: float) -> Event:
    share = f" ({late / duration:.0%} of a step)" if duration else ""
    return Event(
        "straggler",
        step,
        f"rank {rank} was the last to arrive in {count} of {num_steps} steps, {late:.2g} s late on average{share}",
        value=late,
        threshold=MIN_LATE * duration,
        rank=rank,
        detector="straggler",
        advice="Look for other programs, throttled clocks and slow links on its machine, and for layers or data that only it has",
    )
