"""What the page shows of a storage: weights that stand still, decay that is lost, moments that are wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from narrowgauge.report.figures.storage_figures import lost_decay, unchanged_weights, wrong_moments
from narrowgauge.runs.record import Run
from report.made_pages import group_runs, page_of
from report.test_loss_figures import mean_of

MakeRun = Callable[..., Run]


def test_unchanged_weights_are_a_curve_over_audited_steps(make_run: MakeRun) -> None:
    run = make_run("bfloat16/naive", steps=4)
    for row, share in zip(run.steps, (None, 0.25, None, 0.75), strict=True):
        row |= {} if share is None else {"imprecision_share": share}
    figure = unchanged_weights(group_runs([run]))
    line = mean_of(figure, 0)
    assert (line["x"], line["y"]) == ([2, 4], [0.25, 0.75])
    assert figure is not None and "tail" in figure.how and figure.layout["yaxis"]["range"] == [0, 1]
    assert unchanged_weights(group_runs([make_run()])) is None


def test_lost_decay_is_a_curve_that_may_scatter_below_zero(make_run: MakeRun) -> None:
    run = make_run("bfloat16/naive", steps=4)
    for row, share in zip(run.steps, (None, -0.125, None, 0.75), strict=True):
        row |= {} if share is None else {"lost_decay": share}
    line = mean_of(lost_decay(group_runs([run])), 0)
    assert (line["x"], line["y"]) == ([2, 4], [-0.125, 0.75])
    assert lost_decay(group_runs([make_run(more={"imprecision_share": 0.5})])) is None


def test_the_second_moment_that_is_farthest_off_is_named_per_step(make_run: MakeRun) -> None:
    """0.5 is as far off as 2, and farther than 1.5; what was not measured is not far off."""
    rows = [
        {"step": 10, "moments": {"<i>a</i>": [1.5, 0.0], "b": [1.25, 0.0]}},
        {"step": 20, "moments": {"<i>a</i>": [1.5, 0.0], "b": [0.5, 0.0]}},
        {"step": 30, "moments": {"<i>a</i>": [None, None], "b": [1.0, 0.0]}},
    ]
    figure = wrong_moments(group_runs([make_run(gauges=rows)]))
    line = mean_of(figure, 0)
    assert (line["x"], line["y"]) == ([10, 20, 30], [1.5, 0.5, 1.0])
    assert line["customdata"] == ["&lt;i&gt;a&lt;/i&gt;", "b", "b"]
    assert figure is not None and figure.layout["yaxis"]["type"] == "log"
    assert wrong_moments(group_runs([make_run(gauges=[{"step": 1}])])) is None


@pytest.mark.parametrize("has_audit", [True, False])
def test_the_page_has_the_section_where_there_is_something_to_show(make_run: MakeRun, has_audit: bool) -> None:
    page = page_of([make_run(more={"imprecision_share": 0.5} if has_audit else None)])
    assert ('id="unchanged-weights"' in page) is ("What the storage kept" in page) is has_audit
