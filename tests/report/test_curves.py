"""The figures' data: known answers on made-up runs, one colour per recipe, and a sentence for every
reader.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

import pytest

from narrowgauge.analysis.comparison.comparison import compare_runs
from narrowgauge.report.figures.curves import comparison_figures
from narrowgauge.report.figures.figure import Figure
from narrowgauge.report.figures.ranges import ranges_figure
from narrowgauge.report.figures.verdict_figure import differences
from narrowgauge.report.page_runs import PageRun, page_runs
from narrowgauge.report.run_tables import event_table
from narrowgauge.report.runs_page import run_readings
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import FIRST_EXPONENT, NUM_EXPONENTS

MakeRun = Callable[..., Run]


def compared(runs: Sequence[Run]) -> list[PageRun]:
    return page_runs(compare_runs(runs))


def figures_by_name(runs: Sequence[Run], baseline: str | None = None) -> dict[str, Figure]:
    sections = comparison_figures(compared(runs), baseline)
    return {figure.name: figure for section in sections.values() for figure in section}


def test_a_figure_without_a_second_point_is_not_drawn(make_run: MakeRun) -> None:
    """A line needs two points; of one recipe there is no difference."""
    short = [make_run(name, steps=1) for name in ("bfloat16/master", "bfloat16/word")]
    assert not figures_by_name(short)
    assert "difference" not in " ".join(figures_by_name([make_run()]))
    for run in (first := make_run(), make_run("bfloat16/word")):
        del run.evals[1:]
    assert "validation-loss" not in figures_by_name([first])


def test_a_loss_that_is_not_finite_is_a_gap_and_a_cross(make_run: MakeRun) -> None:
    run = make_run(steps=100, loss=lambda step: math.nan if step in (30, 31) else 1.0)
    line, crosses = figures_by_name([run])["training-loss"].data
    assert [x for x, y in zip(line["x"], line["y"], strict=True) if y is None] == [30, 31]
    assert crosses["yaxis"] == "y2" and crosses["x"] == [30, 31]


def test_a_reading_of_several_runs_is_a_row_with_the_first_step(make_run: MakeRun) -> None:
    runs = [
        make_run(seed=seed, loss=lambda step, bad=bad: math.nan if step == bad else 2.0)
        for seed, bad in enumerate((60, 30))
    ]
    row, *_ = run_readings(
        compared(runs)
    ).table.rows  # the others are of the loss, which stays flat
    assert (row["what"], row["step"], row["seeds"]) == ("nonfinite-step", 30, "0, 1")


@pytest.mark.parametrize("name", ["training", "validation"])
def test_differences_are_paired_by_seed(name: str, make_run: MakeRun) -> None:
    """Seeds lie a whole nat apart; each pair differs by a quarter."""
    runs = []
    for recipe, more, seeds in (("bfloat16/master", 0.0, 2), ("bfloat16/word", 0.25, 3)):
        for seed in range(seeds):
            start = 3.0 + seed + more
            runs.append(make_run(recipe, seed, loss=lambda step, start=start: start + step % 2))
    figure = figures_by_name(runs, "bfloat16/master")[f"{name}-loss-against-bfloat16-master"]
    assert [trace["name"] for trace in figure.data] == [f"bfloat16/word · seed {n}" for n in (0, 1)]
    for trace in figure.data:
        assert trace["y"] == pytest.approx([0.25] * len(trace["y"])) and trace["meta"]["group"] == 1


def test_a_long_run_keeps_its_spikes(make_run: MakeRun) -> None:
    run = make_run(steps=10_000, loss=lambda step: 50.0 if step == 4321 else 2.0 + step % 2)
    figure = figures_by_name([run])["training-loss"]
    (line,) = figure.data
    assert line["x"][-1] == 10_000
    assert sorted(set(line["y"])) == [2.0, 3.0, 50.0]
    assert figure.layout["yaxis"]["range"][1] < 5.0 and "double-click" in figure.how


def test_events_of_one_kind_share_a_row_and_alarms_come_first(make_run: MakeRun) -> None:
    happened = (
        {"what": "start", "step": 0, "advice": "begun"},
        {"what": "lost", "step": 7, "advice": "<b>lost</b>"},
        {"what": "lost", "step": 9, "advice": "again"},
        {"what": "note", "step": 9},
    )
    table = event_table(compared([make_run(events=happened)]))
    assert [(row["what"], row["step"]) for row in table.rows] == [
        ("lost", "7–9"),
        ("start", "0"),
        ("note", "9"),
    ]
    assert table.rows[0]["advice"] == "<b>lost</b> (1 more event: see events.jsonl)"


def test_exponents_are_drawn_beside_the_formats() -> None:
    counts = [0.0] * NUM_EXPONENTS
    for exponent, count in ((-20, 1.0), (0, 3.0)):
        counts[exponent - FIRST_EXPONENT] = count
    figure = ranges_figure("word", {"grad": counts, "input": [0.0] * NUM_EXPONENTS})
    assert figure is not None
    line, *bars = figure.data
    assert line["name"] == "grad" and (line["x"][0], line["x"][-1]) == (-20, 0)
    assert (line["y"][0], line["y"][1], line["y"][-1]) == (0.25, None, 0.75)
    ends = {}
    for bar in bars:
        ends.setdefault(bar["name"], []).extend(bar["x"])
    assert ends["float8_e4m3fn"] == [-9, -6, -6, 8.8074]  # 448 = 1.75 · 2^8
    assert ranges_figure("word", {}) is None


def test_a_column_without_a_value_is_left_out(make_run: MakeRun) -> None:
    assert "MiB a step" not in compare_runs([make_run()]).table().heads


def test_every_figure_is_valid_json(make_run: MakeRun) -> None:
    rows = [{"step": 1, "tensors": {"input:a": [1, 1, 0, 0.1, 0.1, None]}}]
    more = {"skipped": True, "loss_scale": 2.0}
    runs = [
        make_run(gauges=rows, more=more, loss=lambda step: math.inf if step == 5 else 2.0),
        make_run("bfloat16/naive", loss=lambda step: 3.0),
    ]
    figures = figures_by_name(runs)
    assert len(figures) == 5
    for figure in figures.values():
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
    figure = differences(comparison)
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
