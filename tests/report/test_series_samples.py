"""What is kept of a run's gauges: all that a figure may ask for, of one run after the other, whatever the rows hold."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.report.figures.heat_maps import MOST_TENSORS
from narrowgauge.report.recipe_groups import MOST_HISTOGRAMS, read_samples, spread
from narrowgauge.runs import record
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.schema import NUM_EXPONENTS
from narrowgauge.runs.writer import RunWriter
from report.made_pages import page_of

MakeRun = Callable[..., Run]


class Rows(list[dict[str, Any]]):
    """A list that can be watched."""


def test_of_all_runs_one_at_a_time_is_held_and_each_is_read_once(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[weakref.ref[Rows]] = []
    held: list[int] = []

    def rows_of(file: Path) -> Rows:
        held.append(sum(found() is not None for found in read))
        rows = Rows([{"step": 1, "updates": {"a": [0.5]}, "histograms": {"weight": [1] * NUM_EXPONENTS}}])
        read.append(weakref.ref(rows))
        return rows

    monkeypatch.setattr(record, "read_rows", rows_of)
    runs = [make_run(recipe, seed) for recipe in ("bfloat16/word", "bfloat16/master") for seed in (0, 1)]
    for run in runs:
        del vars(run)["gauges"]
    assert "Every tensor over time" in page_of(runs)
    assert held == [0] * 4
    assert not any("gauges" in vars(run) for run in runs)


def test_rows_that_were_read_before_are_left_to_their_owner(make_run: MakeRun) -> None:
    run = make_run(gauges=[{"step": 1, "updates": {"a": [0.5]}}])
    assert read_samples(run).lowest_edq == 0.5 == read_samples(run).lowest_edq


@pytest.mark.parametrize("damaged", [None, [], "low", {}, [None], ["low"], [math.nan] * 9, [math.inf] * 9, 3])
def test_a_damaged_reading_adds_nothing(make_run: MakeRun, damaged: Any) -> None:
    row = {
        "step": 1,
        **{table: {"a": damaged} for table in ("tensors", "updates", "moments", "attention")},
        "histograms": {"weight": damaged},
        "logits": {"max": damaged},
        "block_scales": {"weight:a": damaged},
    }
    found = read_samples(make_run(gauges=[row]))
    assert not found.metrics and not found.spans and found.lowest_edq == 1.0
    assert not any(found.worst.values())
    # A valid tensor in the same row is read.
    row["updates"]["b"] = [0.25]
    assert read_samples(make_run(gauges=[row])).lowest_edq == 0.25
    assert "Every tensor over time" in page_of([make_run(gauges=[row])])


@pytest.mark.parametrize("damaged", ["null", "[]", "[null]", '["nan"]'])
def test_a_file_with_a_damaged_list_has_a_page(tmp_path: Path, damaged: str) -> None:
    config = {"recipe": "bfloat16/word", "seed": 0, "steps": 1}
    with RunWriter.create(tmp_path / "run", {"config": config}) as writer:
        writer.step({"step": 1, "loss": 2.0})
    tables = ",".join(f'"{name}":{{"a":{damaged}}}' for name in ("tensors", "updates", "moments", "attention"))
    line = f'{{"step":1,{tables},"histograms":{{"weight":{damaged}}}}}\n'
    (tmp_path / "run" / "gauges.jsonl").write_text(line)
    assert "Inside the layers" in page_of([read_run(tmp_path / "run")])


@pytest.mark.parametrize("table", ["tensors", "updates", "moments", "attention", "histograms"])
def test_a_damaged_table_adds_nothing(make_run: MakeRun, table: str) -> None:
    for damaged in (None, [], "low", 3):
        found = read_samples(make_run(gauges=[{"step": 1, table: damaged}, {table: {"a": [1.0]}}]))
        assert (found.num_rows, found.metrics, found.spans) == (2, {}, {})


def test_bins_without_a_count_are_empty(make_run: MakeRun) -> None:
    rows = [{"step": 1, "histograms": {"weight": [None, 3, "low", math.nan, -2, 2.0, 0]}}]
    found = read_samples(make_run(gauges=rows))
    assert list(found.histograms[0]["histograms"]["weight"]) == [0, 3, 0, 0, 0, 2, 0]
    assert found.spans == {"weight": (1, 6)}


def test_the_worst_tensor_of_each_step(make_run: MakeRun) -> None:
    rows = [
        {"step": 2, "tensors": {"a": [1, 1, 0, 0.25, 0.5], "b": [1, 1, 0, 0.5, None]}},
        {"step": 4, "tensors": {"a": [1, 1, 0, 0.125, None], "b": [1, 1, 0, math.inf, None]}},
    ]
    found = read_samples(make_run(gauges=rows)).worst
    assert found == {"underflow": {2.0: ("b", 0.5), 4.0: ("a", 0.125)}, "overflow": {2.0: ("a", 0.5)}}


def test_tensors_and_histograms_are_thinned_and_counted(make_run: MakeRun) -> None:
    rows = [
        {
            "step": step,
            "updates": {f"p{place:03}": [place / 200] for place in range(200)},
            "histograms": {"weight": [step]},
        }
        for step in range(1, 101)
    ]
    found = read_samples(make_run(gauges=rows))
    edq = found.metrics["edq"]
    assert (edq.names, edq.num_tensors) == ([f"p{place:03}" for place in range(MOST_TENSORS)], 200)
    assert edq.values[10].tolist() == [0.05] * 100
    assert (len(found.histograms), found.num_histograms) == (MOST_HISTOGRAMS, 100)
    assert [found.histograms[place]["step"] for place in (0, -1)] == [1, 100]


def test_rows_are_spread_with_their_ends() -> None:
    rows = [{"step": step} for step in range(10)]
    assert [row["step"] for row in spread(rows, 4)] == [0, 3, 6, 9]
    assert spread(rows, 10) == rows
