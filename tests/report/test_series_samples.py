"""What is kept of a run's gauges: all that a figure may ask for, of one run after the other, whatever the rows hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from narrowgauge.report.figures.heat_maps import MOST_TENSORS
from narrowgauge.report.recipe_groups import MOST_HISTOGRAMS, read_samples
from narrowgauge.runs.record import Run
from report.made_pages import page_of

MakeRun = Callable[..., Run]


@pytest.mark.parametrize("damaged", [None, "low", {}, ["low"], [math.nan] * 9])
def test_a_damaged_reading_adds_nothing(make_run: MakeRun, damaged: Any) -> None:
    row = {
        "step": 1,
        **{table: {"a": damaged} for table in ("tensors", "updates", "moments", "attention")},
        "histograms": {"weight": damaged},
    }
    samples = read_samples(make_run(gauges=[row]))
    assert not samples.metrics and not samples.spans and samples.lowest_edq == 1.0
    # A valid tensor in the same row is read.
    row["updates"]["b"] = [0.25]
    assert read_samples(make_run(gauges=[row])).lowest_edq == 0.25
    assert "Every tensor over time" in page_of([make_run(gauges=[row])])


def test_tensors_and_histograms_are_thinned_and_counted(make_run: MakeRun) -> None:
    rows = [
        {
            "step": step,
            "updates": {f"p{place:03}": [place / 200] for place in range(200)},
            "histograms": {"weight": [step]},
        }
        for step in range(1, 101)
    ]
    samples = read_samples(make_run(gauges=rows))
    edq = samples.metrics["edq"]
    assert (edq.names, edq.num_tensors) == ([f"p{place:03}" for place in range(MOST_TENSORS)], 200)
    assert edq.values[10].tolist() == [0.05] * 100
    assert (len(samples.histograms), samples.num_histograms) == (MOST_HISTOGRAMS, 100)
    assert [samples.histograms[place]["step"] for place in (0, -1)] == [1, 100]
