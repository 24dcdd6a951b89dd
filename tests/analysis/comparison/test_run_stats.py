"""The statistics of one run: its loss over time, its divergence, its late metrics and its recipe."""

from __future__ import annotations

import math
from pathlib import Path

from analysis.comparison.made_runs import made
from narrowgauge.analysis.comparison.run_stats import (
    LossCurve,
    RunStats,
    divergence,
    late_median,
    losses_at_common_times,
)
from narrowgauge.runs.record import Run


def test_a_curve_counts_compiling_steps_as_median_ones_and_interpolates_losses() -> None:
    run = made("bfloat16/word", 0, 4.0, evals=[(2, 7.0), (4, 6.0), (10, 3.0)])
    run.steps[0]["seconds"] = 100.0
    curve = LossCurve.of(run)
    assert curve.step_seconds == 0.5 and curve.points == ((1.0, 7.0), (2.0, 6.0), (5.0, 3.0))
    assert [curve.loss_at(at) for at in (0.9, 1.0, 1.5, 2.0, 3.0, 5.0, 5.1)] == [None, 7.0, 6.5, 6.0, 5.0, 3.0, None]


def test_a_curve_without_timed_steps_takes_the_seconds_of_its_validations() -> None:
    run = Run(Path("a"), {}, evals=[{"step": 1, "val_loss": 2.0, "seconds": 3.0}, {"step": 2, "val_loss": 1.0}])
    assert LossCurve.of(run) == LossCurve(((3.0, 2.0),), None)


def test_a_curve_is_in_the_order_of_time_and_keeps_the_first_of_two_losses_at_once() -> None:
    evals = [
        {"step": 1, "val_loss": loss, "seconds": at} for at, loss in ((3.0, 1.0), (1.0, 4.0), (3.0, 2.0), (5.0, 0.0))
    ]
    curve = LossCurve.of(Run(Path("a"), {}, evals=evals))
    assert curve.points == ((1.0, 4.0), (3.0, 1.0), (3.0, 2.0), (5.0, 0.0)) and curve.end == 5.0
    assert [curve.loss_at(at) for at in (2.0, 3.0, 4.0)] == [2.5, 1.0, 1.0]
    assert LossCurve(()).loss_at(1.0) is None


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


def test_late_values_are_the_last_audits_of_runs_that_count() -> None:
    # The summary holds an EDQ of 1.0, dominated by the first steps.
    runs = [
        RunStats.of(made("bfloat16/naive", k, loss, edq=(1.0, 0.4, 0.3, 0.3)), "a") for k, loss in ((0, 4.0), (1, None))
    ]
    assert [run.late("edq") for run in runs] == [0.3, 0.3] and runs[0].late("lost_fraction") == 0.25
    assert late_median(runs, "edq") == 0.3 and late_median(runs[1:], "edq") is None


def test_the_recipe_of_a_run_is_that_of_its_record_and_not_of_its_label() -> None:
    assert RunStats.of(made("unit/word", 0, 4.0), "bfloat16/word").is_unit_scaled
    assert not RunStats.of(made("bfloat16/word", 0, 4.0), "unit/word").is_unit_scaled
    assert RunStats.of(made("mine", 0, 4.0), "bfloat16/word").recipe is None
