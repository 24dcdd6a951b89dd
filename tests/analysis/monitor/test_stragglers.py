"""Stragglers: a rank that is late in nearly every step is named once, and equal ranks never."""

from __future__ import annotations

import random
from typing import Any

import pytest

import narrowgauge as ng
from narrowgauge.analysis.monitor.stragglers import WINDOW
from narrowgauge.runs.events import Event
from narrowgauge.runs.schema import Row

EVERY = 10


def rows(num_last: list[int], late: float, num_windows: int = 1, first: int = 0) -> list[Row]:
    """Steps of a second, with a table of ranks every ten."""
    table = {"num_steps": EVERY, "num_last": num_last, "late_seconds": [late if count else 0.0 for count in num_last]}
    return [
        {"step": step, "loss": 2.0, "seconds": 1.0, **({} if step % EVERY else {"ranks": table})}
        for step in range(first + 1, first + 1 + num_windows * WINDOW)
    ]


def run(given: list[Row]) -> list[Event]:
    alarms = ng.analysis.Alarms("bfloat16/word")
    return [event for row in given for event in alarms.on_step(row) if event.kind == "straggler"]


def test_a_rank_that_is_late_in_most_steps_is_named_once() -> None:
    (event,) = run(rows([1, 0, 9], 0.12, num_windows=4))
    assert event.step == WINDOW
    assert event.message == "rank 2 was the last to arrive in 45 of 50 steps, 0.12 s late on average (12% of a step)"
    assert event.value == pytest.approx(0.12)
    assert event.threshold == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("num_last", "late"),
    [([3, 7], 0.5), ([10, 0], 0.04), ([0, 10], 0.0), ([5, 5], 0.5)],
    ids=["often not", "too little", "not at all", "in turn"],
)
def test_a_rank_that_is_late_seldom_or_little_is_not(num_last: list[int], late: float) -> None:
    assert run(rows(num_last, late, num_windows=3)) == []


def test_it_is_named_again_after_a_window_in_which_it_was_not_slow() -> None:
    slow, fast, other = [0, 10], [5, 5], [10, 0]
    given = [
        row
        for window, last in enumerate((slow, slow, fast, slow, other, slow))
        for row in rows(last, 0.2, first=window * WINDOW)
    ]
    assert [(event.step // WINDOW, event.message[:6]) for event in run(given)] == [
        (1, "rank 1"), (4, "rank 1"), (5, "rank 0"), (6, "rank 1"),
    ]  # fmt: skip


def test_a_job_that_goes_on_with_fewer_ranks_begins_its_window_anew() -> None:
    given = rows([0, 0, 10], 0.2)[:-EVERY] + rows([0, 10], 0.2, num_windows=2, first=WINDOW - EVERY)
    assert [(event.step, event.message[:6]) for event in run(given)] == [(2 * WINDOW - EVERY, "rank 1")]


def test_equal_ranks_are_never_named() -> None:
    draw = random.Random(0)
    given: list[Row] = []
    for window in range(200):
        last = sum(draw.random() < 0.5 for _ in range(EVERY))
        given += rows([last, EVERY - last], 0.3, first=window * WINDOW)[:EVERY]
    assert run(given) == []


@pytest.mark.parametrize("table", [{}, [], None, {"num_steps": 50}])
def test_a_foreign_column_of_that_name_is_passed_over(table: Any) -> None:
    assert run([{"step": 1, "loss": 2.0, "seconds": 1.0, "ranks": table}]) == []
