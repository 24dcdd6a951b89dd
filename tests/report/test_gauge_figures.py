"""What a page shows of a run's gauges: heat maps, histograms over the ranges of formats, and
nothing of damaged rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.analysis.comparison.comparison import compare_runs
from narrowgauge.analysis.diagnose import Diagnosis
from narrowgauge.report.figures.heat_maps import heat_maps
from narrowgauge.report.figures.histograms import (
    MOST_STEPS,
    SHOWN_FORMATS,
    format_ranges,
    histogram,
)
from narrowgauge.report.recipe_groups import details_of
from narrowgauge.report.runs_page import render
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.schema import FIRST_EXPONENT, NUM_EXPONENTS
from narrowgauge.runs.writer import RunWriter
from narrowgauge.spec.formats import get_format

MakeRun = Callable[..., Run]


@pytest.mark.parametrize("values", [None, "low", {}, ["low"], [], [None], [math.nan] * 9])
def test_a_damaged_reading_adds_nothing(make_run: MakeRun, values: Any) -> None:
    row = {
        "step": 1,
        **{table: {"a": values} for table in ("tensors", "updates", "attention")},
        "histograms": {"weight": values},
        "logits": {"max": values},
    }
    details = details_of(make_run(gauges=[row]), 0)
    assert isinstance(details.diagnosis, Diagnosis)
    assert not details.heat_maps and details.histogram is None and details.lowest_edq == 1.0
    # A valid tensor in the same row is read.
    row["updates"]["b"] = [0.25]
    details = details_of(make_run(gauges=[row]), 0)
    assert details.lowest_edq == 0.25 and list(details.heat_maps) == ["edq"]
    assert "Every tensor over time" in render(compare_runs([make_run(gauges=[row])]))


def test_the_lowest_edq_is_of_the_last_sample(make_run: MakeRun) -> None:
    rows = [
        {"step": 1, "updates": {"a": [0.25]}},
        {"step": 2, "updates": {"a": [1.0], "b": [0.75]}},
    ]
    assert details_of(make_run(gauges=rows), 0).lowest_edq == 0.75


def test_damaged_gauges_of_one_run_are_left_out(tmp_path: Path) -> None:
    RunWriter.create(tmp_path / "run", {"config": {"recipe": "bfloat16/word"}}).close()
    (tmp_path / "run" / "gauges.jsonl").write_text("{]\n")
    assert not details_of(read_run(tmp_path / "run"), 0).has_gauges


def test_histograms_are_thinned() -> None:
    figure = histogram(
        [{"step": step, "histograms": {"weight": [step]}} for step in range(1, 101)], 0
    )
    steps = figure["steps"]
    assert (steps[0], steps[-1]) == (1, 100)
    assert len(steps) == len(figure["frames"]) == MOST_STEPS


def updates(step: int, **edq: float | None) -> dict[str, object]:
    return {
        "step": step,
        "updates": {name: [value, None, None, None, None, None] for name, value in edq.items()},
    }


def test_a_cell_is_a_value() -> None:
    rows = [updates(10, a=1.0, b=0.25), updates(20, a=0.5), updates(30, a=math.nan, b=2.5)]
    maps = heat_maps(rows)
    assert list(maps) == ["edq"]
    (trace,) = maps["edq"]["data"]
    assert trace["x"] == [10, 20, 30]
    assert trace["z"] == [[1.0, 0.5, None], [0.25, None, 2.5]]
    assert maps["edq"]["layout"]["yaxis"]["ticktext"] == ["a", "b"]
    assert "Shown are" not in maps["edq"]["how"]


def test_joined_steps_keep_the_value_farthest_from_health() -> None:
    values = [1.0] * 1000
    values[321] = 0.125
    values[654] = 1.75
    rows = [updates(step, a=value) for step, value in enumerate(values)]
    maps = heat_maps(rows)
    (cells,) = maps["edq"]["data"][0]["z"]
    assert len(cells) < 1000
    assert sorted(value for value in cells if value != 1.0) == [0.125, 1.75]
    assert "shows the worst" in maps["edq"]["how"]


def test_of_too_many_tensors_the_most_troubled_stay_in_order() -> None:
    names = [f"p{place:03d}" for place in range(200)]
    rows = [updates(1, **{name: 0.0 if name in ("p150", "p007") else 1.0 for name in names})]
    maps = heat_maps(rows)
    names = maps["edq"]["data"][0]["meta"]["names"]
    assert {"p007", "p150"} <= set(names)
    assert names == sorted(names)
    assert len(names) == 64
    assert "64 of 200" in maps["edq"]["how"]


def counts(**at: int) -> list[int]:
    """``counts(m3=7)``: seven values at exponent −3."""
    bins = [0] * NUM_EXPONENTS
    for name, count in at.items():
        bins[(-1 if name[0] == "m" else 1) * int(name[1:]) - FIRST_EXPONENT] = count
    return bins


def test_bars_are_shares_at_their_exponents() -> None:
    rows = [
        {"step": 10, "histograms": {"weight": counts(m4=1, m3=2, m1=1)}},
        {"step": 20, "histograms": {"weight": counts(m2=5), "grad": counts(p3=1)}},
    ]
    figure = histogram(rows, 2)
    assert figure["steps"] == [10, 20]
    weights, grads = [trace for trace in figure["data"] if trace["type"] == "bar"]
    assert weights["x"] == [-4, -3, -2, -1]
    assert weights["marker"]["color"] == "@c2"
    assert figure["frames"] == [[[0.25, 0.5, None, 0.25], None], [[None, None, 1.0, None], [1.0]]]
    assert grads["y"] == [1.0]
    assert [weights["meta"]["title"], grads["meta"]["title"]] == ["Weights", "Parameter gradients"]


def test_windows_are_the_formats_own() -> None:
    rows = {row["name"]: row for row in format_ranges()}
    assert tuple(rows) == SHOWN_FORMATS
    e4m3 = rows["float8_e4m3fn"]
    assert (e4m3["subnormal"], e4m3["normal"], e4m3["last"]) == (-9, -6, 8)
    assert math.isclose(2 ** e4m3["max"], 448, rel_tol=1e-3)
    for name, row in rows.items():
        form = get_format(name)
        # The largest value that a bin counted as lost holds becomes zero; the next bin's smallest
        # does not all do.
        top_of_lost = math.nextafter(2.0 ** row["zero_below"], 0)
        assert form.decode(form.encode(top_of_lost)) == 0
        assert form.decode(form.encode(1.5 * 2.0 ** row["zero_below"])) > 0
        assert 2.0 ** row["last"] <= form.max < 2.0 ** (row["last"] + 1)
