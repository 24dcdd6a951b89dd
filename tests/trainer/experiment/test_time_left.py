"""The time left: exact at constant speed, never more for less to do, and corrected by measurements."""

from __future__ import annotations

import random

import pytest

from narrowgauge.trainer.experiment.time_left import RunEstimate, TimeLeft


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


def run(time_left: TimeLeft, clock: Clock, number: int, steps: int, step: float, once: float) -> None:
    """A whole run: what comes once, its steps, its end."""
    time_left.begin(number)
    clock.passes(once)
    for done in range(1, steps + 1):
        clock.passes(step)
        time_left.step(done)
    time_left.end(number)


def test_no_time_is_known_before_a_step_is_measured() -> None:
    clock = Clock()
    time_left = TimeLeft([("a", 10)], clock=clock)
    assert time_left.seconds() is None and time_left.share_done == 0
    time_left.begin(0)
    time_left.step(1)
    assert time_left.seconds() is None
    clock.passes(2)
    time_left.step(2)
    assert time_left.seconds() == 16 and time_left.share_done == 0.2


def test_at_constant_speed_it_falls_by_exactly_the_time_that_passes() -> None:
    clock = Clock()
    time_left = TimeLeft(
        [("a", 20), ("b", 30), ("a", 20)], {"a": RunEstimate(0.5, 4), "b": RunEstimate(0.25, 4)}, clock
    )
    assert time_left.seconds() == 4 + 10 + 4 + 7.5 + 4 + 10
    end = clock.now + 39.5
    for number, (steps, step) in enumerate([(20, 0.5), (30, 0.25), (20, 0.5)]):
        time_left.begin(number)
        for _ in range(8):
            assert time_left.seconds() == pytest.approx(end - clock.now)
            clock.passes(0.5)
        for done in range(1, steps + 1):
            clock.passes(step / 2)
            assert time_left.seconds() == pytest.approx(end - clock.now)
            clock.passes(step / 2)
            time_left.step(done)
            assert time_left.seconds() == pytest.approx(end - clock.now)
        time_left.end(number)
    assert clock.now == end and time_left.seconds() == 0 and time_left.share_done == 1


def test_a_step_that_hangs_leaves_the_rest_where_it_is() -> None:
    clock = Clock()
    time_left = TimeLeft([("a", 10)], clock=clock)
    time_left.begin(0)
    for done in (1, 2):
        clock.passes(1)
        time_left.step(done)
    clock.passes(1000)
    assert time_left.seconds() == 7
    time_left.step(10)
    assert time_left.seconds() == 0


def test_a_run_takes_as_long_as_the_last_of_its_recipe_and_a_first_run_compiles() -> None:
    clock = Clock()
    time_left = TimeLeft([("a", 10), ("b", 10), ("a", 10), ("b", 10)], clock=clock)
    run(time_left, clock, 0, 10, step=1, once=30)
    # Of b nothing is known: it may compile as long.
    assert time_left.seconds() == (30 + 10) * 3
    run(time_left, clock, 1, 10, step=3, once=5)
    assert time_left.seconds() == 5 + 10 + 5 + 30


def test_only_the_first_run_of_a_recipe_compiles() -> None:
    clock = Clock()
    time_left = TimeLeft([("a", 10), ("a", 10)], {"a": RunEstimate(1, 2, compile_seconds=30)}, clock)
    assert time_left.seconds() == 30 + 2 + 10 + 2 + 10
    time_left.end(0)  # in an earlier command; this process compiles again
    assert time_left.seconds() == 30 + 2 + 10


def test_an_estimate_is_scaled_by_how_far_the_others_were_off() -> None:
    clock = Clock()
    time_left = TimeLeft([("a", 10), ("b", 10), ("c", 10)], {"a": RunEstimate(1), "b": RunEstimate(2)}, clock)
    assert time_left.seconds() == 10 + 20 + 15
    run(time_left, clock, 0, 10, step=3, once=0)
    assert time_left.seconds() == pytest.approx(60 + 30)


def test_a_resumed_run_is_measured_from_where_it_resumes() -> None:
    clock = Clock()
    time_left = TimeLeft([("a", 100), ("a", 100)], clock=clock)
    time_left.end(0)
    time_left.begin(1)
    for done in (91, 92, 93):
        clock.passes(2)
        time_left.step(done)
    assert time_left.seconds() == 14 and time_left.share_done == 193 / 200


@pytest.mark.parametrize("seed", range(20))
def test_more_steps_never_take_less_and_no_time_is_negative(seed: int) -> None:
    draw = random.Random(seed)
    runs = [(draw.choice("abc"), draw.randint(1, 9)) for _ in range(5)]
    longer = [(recipe, steps + draw.randint(0, 3)) for recipe, steps in runs] + [("a", 3)]
    estimates = {name: RunEstimate(draw.random(), draw.random()) for name in "abc"[: draw.randint(1, 3)]}
    clock = Clock()
    fewer, more = TimeLeft(runs, estimates, clock), TimeLeft(longer, estimates, clock)
    for number, (_, steps) in enumerate(runs):
        for time_left in (fewer, more):
            time_left.begin(number)
        for done in range(draw.randint(0, 2), steps + 1):
            clock.passes(draw.expovariate(1))
            for time_left in (fewer, more):
                time_left.step(done)
            left, its = fewer.seconds(), more.seconds()
            assert left is not None and its is not None and 0 <= left <= its + 1e-9
        for time_left in (fewer, more):
            time_left.end(number)
