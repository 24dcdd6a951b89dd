"""Where the time of a step goes: parts that add up to the step, of what the run recorded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from narrowgauge.report.figures.step_time_figure import parts_of_step
from narrowgauge.runs.record import Run

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
