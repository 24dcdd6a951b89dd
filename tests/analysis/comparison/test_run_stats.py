"""The statistics of one run: its loss over time, its divergence, its late metrics and its recipe."""

from __future__ import annotations

import math

from analysis.comparison.made_runs import made
from narrowgauge.analysis.comparison.run_stats import LossCurve, divergence, losses_at_common_times


def test_a_curve_counts_compiling_steps_as_median_ones_and_interpolates_losses() -> None:
    run = made("bfloat16/word", 0, 4.0, evals=[(2, 7.0), (4, 6.0), (10, 3.0)])
    run.steps[0]["seconds"] = 100.0
    curve = LossCurve.of(run)
    assert curve.step_seconds == 0.5 and curve.points == ((1.0, 7.0), (2.0, 6.0), (5.0, 3.0))
    assert [curve.loss_at(at) for at in (0.9, 1.0, 1.5, 2.0, 3.0, 5.0, 5.1)] == [None, 7.0, 6.5, 6.0, 5.0, 3.0, None]


def test_a_run_that_diverged_and_never_ended_has_diverged() -> None:
    run = made("bfloat16/word", 0, None)
    assert divergence(run) == ""
    run.steps[-1]["loss"] = math.inf
    assert divergence(run) == "its loss is inf"


def test_losses_at_common_times_are_those_of_each_curve() -> None:
    curves = [
        LossCurve.of(made("bfloat16/word", 0, 4.0, evals=[(2, 7.0), (10, 3.0)], step_seconds=step))
        for step in (0.5, 0.25)
    ]
    # Seconds 1 to 5, and 0.5 to 2.5.
    found = losses_at_common_times(curves)
    assert [at for at, _ in found] == [1.0, 2.5] and found[0][1] == [7.0, 6.0] and found[1][1] == [5.5, 3.0]
    assert all(losses == [curve.loss_at(at) for curve in curves] for at, losses in found)
    assert losses_at_common_times([]) == losses_at_common_times([*curves, LossCurve(())]) == []
    assert losses_at_common_times(curves[:1]) == [(1.0, [7.0]), (5.0, [3.0])]
