"""The time that is left: exact at a steady pace, never more for less to do, and corrected by what is measured."""

from __future__ import annotations

import random

import pytest

from narrowgauge.experiment.pace import Forecast, Pace


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


def run(pace: Pace, clock: Clock, number: int, steps: int, step: float, once: float) -> None:
    """A whole run: what comes once, its steps, its end."""
    pace.begin(number)
    clock.passes(once)
    for done in range(1, steps + 1):
        clock.passes(step)
        pace.at(done)
    pace.end(number)


def test_nothing_is_said_before_anything_is_measured() -> None:
    clock = Clock()
    pace = Pace([("a", 10)], clock=clock)
    assert pace.seconds_left() is None and pace.share_done == 0
    pace.begin(0)
    pace.at(1)
    assert pace.seconds_left() is None
    clock.passes(2)
    pace.at(2)
    assert pace.seconds_left() == 16 and pace.share_done == 0.2


def test_at_a_steady_pace_it_falls_by_just_the_time_that_passes() -> None:
    clock = Clock()
    pace = Pace([("a", 20), ("b", 30), ("a", 20)], {"a": Forecast(0.5, 4), "b": Forecast(0.25, 4)}, clock)
    assert pace.seconds_left() == 4 + 10 + 4 + 7.5 + 4 + 10
    end = clock.now + 39.5
    for number, (steps, step) in enumerate([(20, 0.5), (30, 0.25), (20, 0.5)]):
        pace.begin(number)
        for _ in range(8):
            assert pace.seconds_left() == pytest.approx(end - clock.now)
            clock.passes(0.5)
        for done in range(1, steps + 1):
            clock.passes(step / 2)
            assert pace.seconds_left() == pytest.approx(end - clock.now)
            clock.passes(step / 2)
            pace.at(done)
            assert pace.seconds_left() == pytest.approx(end - clock.now)
        pace.end(number)
    assert clock.now == end and pace.seconds_left() == 0 and pace.share_done == 1


def test_a_step_that_hangs_leaves_the_rest_where_it_is() -> None:
    clock = Clock()
    pace = Pace([("a", 10)], clock=clock)
    pace.begin(0)
    for done in (1, 2):
        clock.passes(1)
        pace.at(done)
    clock.passes(1000)
    assert pace.seconds_left() == 7
    pace.at(10)
    assert pace.seconds_left() == 0


def test_what_a_recipe_took_is_what_its_next_run_takes_and_a_first_run_compiles() -> None:
    clock = Clock()
    pace = Pace([("a", 10), ("b", 10), ("a", 10), ("b", 10)], clock=clock)
    run(pace, clock, 0, 10, step=1, once=30)
    # Of b nothing is known: it may compile as long.
    assert pace.seconds_left() == (30 + 10) * 3
    run(pace, clock, 1, 10, step=3, once=5)
    assert pace.seconds_left() == 5 + 10 + 5 + 30


def test_a_forecast_is_corrected_by_how_far_the_others_were_off() -> None:
    clock = Clock()
    pace = Pace([("a", 10), ("b", 10), ("c", 10)], {"a": Forecast(1), "b": Forecast(2)}, clock)
    assert pace.seconds_left() == 10 + 20 + 15
    run(pace, clock, 0, 10, step=3, once=0)
    assert pace.seconds_left() == pytest.approx(60 + 30)


def test_a_run_that_goes_on_is_measured_from_where_it_goes_on() -> None:
    clock = Clock()
    pace = Pace([("a", 100), ("a", 100)], clock=clock)
    pace.end(0)
    pace.begin(1)
    for done in (91, 92, 93):
        clock.passes(2)
        pace.at(done)
    assert pace.seconds_left() == 14 and pace.share_done == 193 / 200


@pytest.mark.parametrize("seed", range(20))
def test_more_to_do_never_takes_less_and_nothing_takes_less_than_no_time(seed: int) -> None:
    draw = random.Random(seed)
    runs = [(draw.choice("abc"), draw.randint(1, 9)) for _ in range(5)]
    longer = [(recipe, steps + draw.randint(0, 3)) for recipe, steps in runs] + [("a", 3)]
    forecast = {name: Forecast(draw.random(), draw.random()) for name in "abc"[: draw.randint(1, 3)]}
    clock = Clock()
    fewer, more = Pace(runs, forecast, clock), Pace(longer, forecast, clock)
    for number, (_, steps) in enumerate(runs):
        for pace in (fewer, more):
            pace.begin(number)
        for done in range(draw.randint(0, 2), steps + 1):
            clock.passes(draw.expovariate(1))
            for pace in (fewer, more):
                pace.at(done)
            left, its = fewer.seconds_left(), more.seconds_left()
            assert left is not None and its is not None and 0 <= left <= its + 1e-9
        for pace in (fewer, more):
            pace.end(number)
