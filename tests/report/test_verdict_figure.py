"""The figure beside the verdict: differences and intervals as the verdict has them, the threshold as a band."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from narrowgauge.analysis.comparison.comparison import compare_runs
from narrowgauge.report.figures.traces import Figure
from narrowgauge.report.figures.verdict_figure import differences
from narrowgauge.report.recipe_groups import groups_of
from narrowgauge.runs.record import Run

MakeRun = Callable[..., Run]


def made(make_run: MakeRun, losses: dict[str, list[float]]) -> tuple[list[Run], Figure | None]:
    """Runs with these final losses by seed, and their figure; the baseline has 2.0."""
    everything = {"bfloat16/master": [2.0] * max(map(len, losses.values())), **losses}
    runs = [
        make_run(
            recipe, seed, bytes_per_param=16.0 if "master" in recipe else 8.0, loss=lambda _, loss=loss: loss - 0.1
        )
        for recipe, values in everything.items()
        for seed, loss in enumerate(values)
    ]
    values = compare_runs(runs)
    return runs, differences(groups_of(values), values)


def test_each_recipe_has_its_difference_and_interval_and_the_band_is_the_threshold(make_run: MakeRun) -> None:
    runs, figure = made(make_run, {"bfloat16/word": [2.001, 2.003], "bfloat16/split": [1.99, 1.992]})
    assert figure is not None
    expected = {paired.recipe: paired for paired in compare_runs(runs).differences}
    assert (
        [trace["name"] for trace in figure.data]
        == ["bfloat16/word", "bfloat16/split"]
        == figure.layout["yaxis"]["ticktext"]
    )
    for trace in figure.data:
        paired = expected[trace["name"]]
        assert trace["x"] == [pytest.approx(paired.mean)] and trace["error_x"]["array"] == [
            pytest.approx(paired.half, rel=1e-5)
        ]
        assert trace["error_x"]["visible"]
    (band,) = figure.layout["shapes"]
    assert (band["x0"], band["x1"]) == (-0.02, 0.02) and "± 0.02 nats" in figure.how
    low, high = figure.layout["xaxis"]["range"]
    assert low == -high and low < min(paired.low for paired in expected.values())
