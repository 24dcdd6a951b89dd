"""Where the time of a step goes: parts that add up to the step, of what the run recorded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from narrowgauge.report.figures.step_time_figure import PARTS, parts_of_step, time_of_a_step
from narrowgauge.runs.record import Run
from report.made_pages import group_runs

MakeRun = Callable[..., Run]
TIMED = {"seconds": 1.0, "data_seconds": 0.0625, "gradient_seconds": 0.5, "update_seconds": 0.25}


def timed(make_run: MakeRun, recipe: str = "bfloat16/word", **more: Any) -> Run:
    run = make_run(recipe, more={**TIMED, **more}, steps=40)
    # The first steps compile, and one is slow.
    for place in (0, 1, 20):
        run.steps[place] |= {"seconds": 90.0, "gradient_seconds": 80.0}
    return run


def test_the_parts_add_up_to_a_step_and_slow_steps_do_not_count(make_run: MakeRun) -> None:
    parts = parts_of_step(timed(make_run))
    assert parts == {
        "waiting for tokens": 0.0625, "forward and backward": 0.5, "optimizer": 0.25, "all else in the step": 0.1875,
    }  # fmt: skip
    assert math.fsum(parts.values()) == 1.0


def test_communication_is_taken_from_forward_and_backward(make_run: MakeRun) -> None:
    parts = parts_of_step(timed(make_run, communication_seconds=0.125))
    assert parts["forward and backward"] == 0.375 and parts["communication"] == 0.125
    assert math.fsum(parts.values()) == 1.0
    # Overlapped, it may be longer than what it overlaps with.
    assert "forward and backward" not in parts_of_step(timed(make_run, communication_seconds=0.75))


def test_evaluations_are_spread_over_the_steps(make_run: MakeRun) -> None:
    run = timed(make_run)
    for row in run.evals:
        row["evaluation_seconds"] = 4.0
    assert parts_of_step(run)["evaluation"] == 4.0 * len(run.evals) / 40


def test_an_older_record_has_what_it_recorded_and_one_without_parts_no_bar(make_run: MakeRun) -> None:
    old = make_run("bfloat16/master", more={"seconds": 1.0, "data_seconds": 0.25})
    assert parts_of_step(old) == {"waiting for tokens": 0.25, "forward and backward": 0.75}
    assert parts_of_step(make_run()) == {} and time_of_a_step(group_runs([make_run()])) is None
    figure = time_of_a_step(group_runs([make_run(), old]))
    assert figure is not None and len(figure.layout["yaxis"]["ticktext"]) == 1


def test_each_recipe_is_one_bar_in_its_colour_with_its_tokens_per_second(make_run: MakeRun) -> None:
    runs = [timed(make_run, recipe) for recipe in ("bfloat16/word", "bfloat16/master")]
    figure = time_of_a_step(group_runs(runs))
    assert figure is not None
    bars = [trace for trace in figure.data if trace["type"] == "bar"]
    for index in (0, 1):
        mine = [bar for bar in bars if bar["meta"]["group"] == index]
        assert [bar["meta"]["part"] for bar in mine] == [part for part in PARTS if part in parts_of_step(runs[0])]
        assert math.fsum(bar["x"][0] for bar in mine) == pytest.approx(1000.0)
        assert {bar["marker"]["color"].partition("/")[0] for bar in mine} == {f"@c{index}"}
    rates = [trace["text"] for trace in figure.data if trace["type"] == "scatter"]
    assert rates == [[" 1,000 tokens/s"]] * 2
