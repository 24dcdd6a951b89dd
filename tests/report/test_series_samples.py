"""What is kept of a run's gauges: all that a figure may ask for, of one run after the other, whatever the rows hold."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.report.figures.heat_maps import MOST_TENSORS
from narrowgauge.report.recipe_groups import MOST_HISTOGRAMS, read_samples
from narrowgauge.runs import record
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import NUM_EXPONENTS
from report.made_pages import page_of

MakeRun = Callable[..., Run]


class Rows(list[dict[str, Any]]):
    """A list that can be watched."""


def test_of_all_runs_one_at_a_time_is_held_and_each_is_read_once(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[weakref.ref[Rows]] = []
    alive: list[int] = []

    def rows_of(file: Path) -> Rows:
        if file.name != "gauges.jsonl":
            return Rows()
        alive.append(sum(found() is not None for found in read))
        rows = Rows([{"step": 1, "updates": {"a": [0.5]}, "histograms": {"weight": [1] * NUM_EXPONENTS}}])
        read.append(weakref.ref(rows))
        return rows

    monkeypatch.setattr(record, "read_rows", rows_of)
    runs = [make_run(recipe, seed) for recipe in ("bfloat16/word", "bfloat16/master") for seed in (0, 1)]
    for run in runs:
        del vars(run)["gauges"]
    assert "Every tensor over time" in page_of(runs)
    assert alive == [0] * 4
    assert not any("gauges" in vars(run) for run in runs)


@pytest.mark.parametrize("damaged", [None, [], "low", {}, [None], ["low"], [math.nan] * 9, [math.inf] * 9, 3])
def test_a_damaged_reading_adds_nothing(make_run: MakeRun, damaged: Any) -> None:
    row = {
        "step": 1,
        **{table: {"a": damaged} for table in ("tensors", "updates", "moments", "attention")},
        "histograms": {"weight": damaged},
        "logits": {"max": damaged},
        "block_scales": {"weight:a": damaged},
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
