"""What a page shows of a run's gauges, whatever the rows hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.analysis.diagnose import Diagnosis
from narrowgauge.report.figures.histograms import MOST_STEPS, histogram
from narrowgauge.report.recipe_groups import details_of
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.writer import RunWriter
from report.made_pages import page_of

MakeRun = Callable[..., Run]


@pytest.mark.parametrize("values", [None, "low", {}, ["low"], [], [None], [math.nan] * 9])
def test_a_damaged_reading_adds_nothing(make_run: MakeRun, values: Any) -> None:
    row = {
        "step": 1,
        **{table: {"a": values} for table in ("tensors", "updates", "moments", "attention")},
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
    assert "Every tensor over time" in page_of([make_run(gauges=[row])])


def test_the_lowest_edq_is_of_the_last_sample(make_run: MakeRun) -> None:
    rows = [{"step": 1, "updates": {"a": [0.25]}}, {"step": 2, "updates": {"a": [1.0], "b": [0.75]}}]
    assert details_of(make_run(gauges=rows), 0).lowest_edq == 0.75


def test_damaged_gauges_of_one_run_are_left_out(tmp_path: Path) -> None:
    RunWriter.create(tmp_path / "run", {"config": {"recipe": "bfloat16/word"}}).close()
    (tmp_path / "run" / "gauges.jsonl").write_text("{]\n")
    assert not details_of(read_run(tmp_path / "run"), 0).has_gauges


def test_histograms_are_thinned() -> None:
    figure = histogram([{"step": step, "histograms": {"weight": [step]}} for step in range(1, 101)], 0)
    assert figure is not None
    labels = [step["label"] for step in figure["layout"]["sliders"][0]["steps"]]
    assert (labels[0], labels[-1], len(labels), len(figure["frames"])) == ("1", "100", MOST_STEPS, MOST_STEPS)
