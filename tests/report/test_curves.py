"""The figures' data: known answers on made-up runs, one colour per recipe, and a sentence for every
reader.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from narrowgauge.analysis.comparison.comparison import compare_runs
from narrowgauge.report.figures import curves
from narrowgauge.report.figures.curves import comparison_figures
from narrowgauge.report.figures.series import NUM_COLUMNS
from narrowgauge.report.figures.traces import Figure
from narrowgauge.report.figures.verdict_figure import differences
from narrowgauge.report.recipe_groups import Group, groups_of
from narrowgauge.report.run_tables import event_table
from narrowgauge.report.runs_page import run_readings
from narrowgauge.runs.record import Run

MakeRun = Callable[..., Run]


def group_runs(runs: Sequence[Run]) -> list[Group]:
    return groups_of(compare_runs(runs))


def mean_of(figure: Figure | None, place: int) -> dict[str, Any]:
    """The line of a group's mean."""
    (trace,) = (
        trace for trace in figure.data if trace["meta"]["group"] == place and trace.get("name")
    )
    return trace


def bands_of(figure: Figure | None) -> list[dict[str, Any]]:
    return [trace for trace in figure.data if trace.get("fill") == "toself"]


@pytest.fixture
def groups(make_run: MakeRun) -> list[Group]:
    """Two seeds of one recipe half a nat apart, and one of another, a nat worse at half the bytes."""
    return group_runs(
        [
            make_run("bfloat16/master", 0, loss=lambda step: 3.0, bytes_per_param=16.0),
            make_run("bfloat16/master", 1, loss=lambda step: 3.5, bytes_per_param=16.0),
            make_run("bfloat16/word", 0, loss=lambda step: 4.0, bytes_per_param=8.0),
        ]
    )


def test_seeds_become_a_mean_and_a_band(groups: list[Group]) -> None:
    figure = curves.validation_loss(groups)
    assert mean_of(figure, 0)["x"] == [20, 40, 60, 80, 100]
    assert mean_of(figure, 0)["y"] == pytest.approx([3.35] * 5)
    (band,) = bands_of(figure)
    assert band["meta"]["group"] == 0
    assert (min(band["y"]), max(band["y"])) == (3.1, 3.6)


def test_a_loss_that_is_not_finite_is_a_gap_and_a_cross(make_run: MakeRun) -> None:
    run = make_run(steps=100, loss=lambda step: math.nan if step in (30, 31) else 1.0)
    figure = curves.training_loss(group_runs([run]))
    line = mean_of(figure, 0)
    assert [x for x, y in zip(line["x"], line["y"], strict=True) if y is None] == [30, 31]
    (crosses,) = (trace for trace in figure.data if trace.get("yaxis") == "y2")
    assert crosses["x"] == [30, 31]


def test_a_reading_of_several_runs_is_a_row_with_the_first_step(make_run: MakeRun) -> None:
    runs = [
        make_run(seed=seed, loss=lambda step, bad=bad: math.nan if step == bad else 2.0)
        for seed, bad in enumerate((60, 30))
    ]
    row, *_ = run_readings(
        group_runs(runs)
    ).table.rows  # the others are of the loss, which stays flat
    assert (row["what"], row["step"], row["seeds"]) == ("nonfinite-step", 30, "0, 1")


def test_differences_are_paired_by_seed(make_run: MakeRun) -> None:
    runs = [
        make_run("bfloat16/master", seed, loss=lambda step, seed=seed: 3.0 + seed)
        for seed in (0, 1)
    ]
    runs += [
        make_run("bfloat16/word", seed, loss=lambda step, seed=seed: 3.25 + seed)
        for seed in (0, 1, 2)
    ]
    figure = curves.difference(group_runs(runs), "bfloat16/master")
    # Seeds lie a whole nat apart; each pair differs by a quarter, so the band has no height.
    assert mean_of(figure, 1)["y"] == pytest.approx([0.25] * 5)
    assert not bands_of(figure)
    assert "bfloat16/master" in figure.title
    assert curves.difference(group_runs(runs[:2])) is None


def test_a_long_run_keeps_its_spikes_in_the_band(make_run: MakeRun) -> None:
    run = make_run(steps=10_000, loss=lambda step: 50.0 if step == 4321 else 2.0 + step % 2)
    figure = curves.training_loss(group_runs([run]))
    line, (band,) = mean_of(figure, 0), bands_of(figure)
    assert len(line["x"]) <= NUM_COLUMNS and line["x"][-1] == 10_000
    assert min(line["y"]) > 2.4 and max(line["y"]) < 4.0
    assert sorted({y for y in band["y"] if y is not None}) == [2.0, 3.0, 50.0]
    assert figure is not None
    assert figure.layout["yaxis"]["range"][1] < 5.0
    assert "Double-click" in figure.how


def test_events_of_one_kind_share_a_row_and_alarms_come_first(make_run: MakeRun) -> None:
    happened = (
        {"what": "start", "step": 0, "advice": "begun"},
        {"what": "lost", "step": 7, "advice": "<b>lost</b>"},
        {"what": "lost", "step": 9, "advice": "again"},
        {"what": "note"},
    )
    table = event_table(group_runs([make_run(events=happened)])[0].named)
    assert [(row["what"], row["step"]) for row in table.rows] == [
        ("lost", "7–9"),
        ("start", "0"),
        ("note", ""),
    ]
    assert table.rows[0]["advice"] == "<b>lost</b> (1 more event: see events.jsonl)"


def test_every_figure_is_valid_json(make_run: MakeRun) -> None:
    rows = [{"step": 1, "tensors": {"input:a": [1, 1, 0, 0.1, 0.1, None]}}]
    runs = [
        make_run(
            "bfloat16/word",
            gauges=rows,
            more={"skipped": True, "loss_scale": 2.0},
            loss=lambda step: math.inf if step == 5 else 2.0,
        ),
        make_run("bfloat16/naive", loss=lambda step: 3.0),
    ]
    figures = []
    for section in comparison_figures(group_runs(runs)).values():
        figures.extend(section)
    assert len(figures) == 5
    for figure in figures:
        json.dumps([figure.data, figure.layout], allow_nan=False)


def test_each_recipe_has_its_difference_and_interval_and_the_band_is_the_threshold(
    make_run: MakeRun,
) -> None:
    losses = {
        "bfloat16/master": [2.0, 2.0],
        "bfloat16/word": [2.001, 2.003],
        "bfloat16/split": [1.99, 1.992],
    }
    runs = [
        make_run(
            name,
            seed,
            bytes_per_param=16.0 if "master" in name else 8.0,
            loss=lambda _, loss=loss: loss - 0.1,
        )
        for name, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    comparison = compare_runs(runs)
    figure = differences(groups_of(comparison), comparison)
    expected = {paired.recipe: paired for paired in comparison.differences}
    names = [trace["name"] for trace in figure.data]
    assert names == ["bfloat16/word", "bfloat16/split"] == figure.layout["yaxis"]["ticktext"]
    for trace in figure.data:
        paired = expected[trace["name"]]
        assert trace["x"] == [pytest.approx(paired.mean)] and trace["error_x"]["visible"]
        assert trace["error_x"]["array"] == [pytest.approx(paired.half, rel=1e-5)]
    (band,) = figure.layout["shapes"]
    assert (band["x0"], band["x1"]) == (-0.02, 0.02) and "± 0.02 nats" in figure.how
    low, high = figure.layout["xaxis"]["range"]
    assert low == -high and low < min(paired.low for paired in expected.values())
