"""The page: its figures on made-up runs, and what it says about learning and findings."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest

from narrowgauge.measuring.comparison import compare_runs
from narrowgauge.report.curves import axis_range, curves_of, intervals_of
from narrowgauge.report.page import learned, page_runs, render
from narrowgauge.runs.record import Run

MakeRun = Callable[..., Run]


def drawn(runs: list[Run], baseline: str | None = None) -> dict[str, list[dict]]:
    return {title: figure["data"] for title, _, figure in curves_of(page_runs(runs), baseline)}


def test_a_figure_without_a_second_point_is_not_drawn(make_run: MakeRun) -> None:
    assert not drawn([make_run(name, steps=1) for name in ("bfloat16/master", "bfloat16/word")])
    assert {*drawn([make_run()])} == {"Training loss", "Validation loss"}
    assert "EDQ" in drawn([make_run(edq=1.0)])


@pytest.mark.parametrize("name", ["Training", "Validation"])
def test_differences_are_paired_by_seed(name: str, make_run: MakeRun) -> None:
    """Seeds lie a whole nat apart; each pair differs by a quarter."""
    runs = []
    for recipe, more, seeds in (("bfloat16/master", 0.0, 2), ("bfloat16/word", 0.25, 3)):
        for seed in range(seeds):
            start = 3.0 + seed + more
            runs.append(make_run(recipe, seed, loss=lambda step, start=start: start + step % 2))
    lines = drawn(runs, "bfloat16/master")[f"{name} loss minus bfloat16/master"]
    assert [line["name"] for line in lines] == ["bfloat16/word"] * 2
    for line in lines:
        assert line["y"] == pytest.approx([0.25] * len(line["y"]))


def test_a_value_that_is_not_finite_is_a_gap_and_a_spike_does_not_end_the_axis(
    make_run: MakeRun,
) -> None:
    run = make_run(steps=100, loss=lambda step: math.nan if step in (30, 31) else 1.0)
    (line,) = drawn([run])["Training loss"]
    assert [x for x, y in zip(line["x"], line["y"], strict=True) if math.isnan(y)] == [30, 31]
    assert axis_range([*range(100), 1e6], 0.0)[1] < 1000
    assert axis_range([1.0, 2.0, 3.0, 4.0, 1000.0], 0.0) == pytest.approx([0.1, 16.9])
    assert axis_range([0.0, 1e-6], 0.001) == pytest.approx([-0.00112, 0.00112])


def test_a_long_run_is_drawn_by_means_and_keeps_its_last_step(make_run: MakeRun) -> None:
    run = make_run(steps=10_000, loss=lambda step: 2.0 + step % 2)
    (line,) = drawn([run])["Training loss"]
    assert len(line["x"]) <= 400 and line["x"][-1] == 10_000
    assert line["y"] == pytest.approx([2.5] * len(line["y"]), abs=0.05)


def test_the_interval_figure_shows_each_difference_with_its_interval(make_run: MakeRun) -> None:
    losses = {"bfloat16/master": (2.0, 2.0), "bfloat16/word": (2.001, 2.003)}
    runs = []
    for recipe, values in losses.items():
        for seed, value in enumerate(values):
            runs.append(make_run(recipe, seed, loss=lambda _, value=value: value - 0.1))
    comparison = compare_runs(runs)
    figure = intervals_of(comparison)
    baseline, word = comparison.rows
    low, high = word["difference_interval"]
    (drawn,) = figure["data"]
    assert drawn["y"] == ["bfloat16/word"] and drawn["x"] == [word["difference"]]
    assert drawn["error_x"]["array"] == pytest.approx([(high - low) / 2])
    (band,) = figure["layout"]["shapes"]
    assert -band["x0"] == band["x1"] == comparison.acceptable > 0 and baseline["difference"] is None
    assert intervals_of(compare_runs(runs[:2])) == {}


def test_the_page_says_whether_the_models_learned(make_run: MakeRun) -> None:
    runs = [make_run(seed=0), make_run("bfloat16/naive", seed=0, loss=lambda _: 6.0)]
    for run in runs:
        run.run["data"] = {"unigram_loss": 5.0}
    (sentence,) = learned(compare_runs(runs), runs)
    assert sentence.startswith(
        "Token frequencies alone have a loss of 5.0000; the recipes end at 2.2"
    )
    assert sentence.endswith(" to 6.1000.")
    assert sentence in render(compare_runs(runs), runs, "")


def test_a_finding_begins_with_its_sentence_and_has_the_numbers_of_its_first_step(
    make_run: MakeRun,
) -> None:
    runs = []
    for seed, bad in enumerate((60, 30)):
        loss = lambda step, bad=bad: math.nan if step == bad else 2.0 + 1 / step  # noqa: E731
        runs.append(make_run(seed=seed, loss=loss))
    page = render(compare_runs(runs), runs, "")
    item = re.search(r"<li><p>([^<]+)</p><p class=\"muted\">([^<]*nonfinite[^<]*)", page)
    assert item[1].endswith(".") and "seed 0, 1" in item[2] and "step 30" in item[2]
