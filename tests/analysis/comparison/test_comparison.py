"""The rows of a comparison, its baseline, and its table."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest

from analysis.comparison.made_runs import COLUMNS, MASTER, make_run, seeds
from narrowgauge.analysis.comparison.comparison import compare_runs
from narrowgauge.analysis.comparison.intervals import interval, seeds_needed
from narrowgauge.runs.record import Run


def test_a_row_has_the_documented_columns() -> None:
    comparison = compare_runs(
        [*MASTER, *seeds("bfloat16/word", (4.0, 4.2, 4.4), step_seconds=0.25)]
    )
    assert [list(row) for row in comparison.rows] == [COLUMNS] * 2
    row = comparison.rows[1]
    assert row["val_loss"] == pytest.approx(4.2) and row["val_loss_std"] == pytest.approx(0.2)
    assert row["tokens_per_second"] == 400
    assert row["bytes_per_param"] == 8
    assert row["step_memory_bytes"] == 1 << 20
    assert [row[n] for n in ("edq", "noise", "lost_fraction", "diverged", "num_seeds")] == [
        1,
        0.01,
        0.25,
        False,
        3,
    ]


def test_the_file_says_what_the_page_says() -> None:
    """Averages over a run hide that its updates are lost at the end.

    A script that reads the file must see it.
    """
    naive = seeds("bfloat16/naive", (4.02, 4.12, 4.22), edq=(0.5, 0.5, 0.5))
    comparison = compare_runs([*MASTER, *naive, make_run("bfloat16/word", 0, 4.0)])
    rows = {row["recipe"]: row for row in json.loads(comparison.json())}
    row = rows["bfloat16/naive"]
    assert row["edq"] == 1
    assert row["late_edq"] == 0.5
    assert row["verdict"] == "not to be used"
    assert len(row["faults"]) == 1
    assert row["difference"] == pytest.approx(0.02) == sum(row["difference_interval"]) / 2
    assert rows["bfloat16/master"]["verdict"] == "the baseline"
    assert rows["bfloat16/master"]["difference"] is None
    assert rows["bfloat16/word"]["difference_interval"] is None


def test_differences_are_paired_by_seed_and_only_by_seed() -> None:
    # Seed 7 is word's alone; the order of the runs does not matter.
    word = []
    for seed, loss in ((7, 9.0), (2, 4.23), (0, 4.01), (1, 4.12)):
        word.append(make_run("bfloat16/word", seed, loss))
    (difference,) = compare_runs([*word, *MASTER]).differences
    assert difference.num_pairs == 3 and difference.mean == pytest.approx(0.02)
    assert difference.half == pytest.approx(
        4.302653 * statistics.stdev([0.01, 0.02, 0.03]) / 3**0.5
    )


@pytest.mark.parametrize(
    "spoil",
    [
        lambda run: run.summary.update(val_loss=math.nan),
        lambda run: run.events.append({"what": "divergence", "step": 3, "text": "the loss is inf"}),
        lambda run: [row.update(loss=11.0) for row in run.steps[5:]],
    ],
)
def test_a_diverged_run_is_named_and_not_averaged(spoil: Callable[[Run], Any]) -> None:
    word = seeds("bfloat16/word", (4.0, 4.1, 4.2))
    spoil(word[1])
    comparison = compare_runs([*MASTER, *word])
    row = comparison.rows[1]
    assert row["diverged"] and row["num_seeds"] == 2 and row["val_loss"] == pytest.approx(4.1)
    (fault,) = comparison.classes["bfloat16/word"].faults
    assert fault.startswith("diverged in 1 of 3 runs (seed 1, ")
    assert comparison.cheapest is comparison.classes["bfloat16/master"]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (("float8-row/word", "bfloat16/word"), "bfloat16/word"),
        (("bfloat16/word", "tfloat32/float32", "float32/float32"), "float32/float32"),
        (("mine", "yours"), "mine"),
    ],
)
def test_among_equal_sizes_the_baseline_is_the_wider_compute_then_the_first(
    names: tuple[str, str], chosen: str
) -> None:
    assert (
        compare_runs([run for name in names for run in seeds(name, (4.0, 4.1))]).baseline == chosen
    )


def test_what_loses_its_updates_is_no_baseline() -> None:
    runs = [
        *seeds("bfloat16/master", (4.0, 4.1), edq=(0.2, 0.2, 0.2)),
        *seeds("bfloat16/word", (4.0, 4.1)),
    ]
    assert compare_runs(runs).baseline == "bfloat16/word"


def test_the_verdict_says_when_nothing_is_smaller() -> None:
    wide = [*seeds("float32/float32", (4.0, 4.1, 4.2)), *seeds("bfloat16/float32", (4.3, 4.1, 4.0))]
    for run in wide:
        assert run.summary is not None
        run.summary["bytes_per_param"] = 16.0
    (first, *_) = compare_runs(wide).verdict
    assert first == "No recipe takes fewer bytes than float32/float32: 16.00 bytes per parameter."
    (first, *_) = compare_runs([*wide, *seeds("bfloat16/word", (4.9, 4.1, 3.5))]).verdict
    assert (
        first
        == "No smaller recipe is known to be as good as float32/float32: 16.00 bytes per parameter."
    )
    fast = seeds("bfloat16/master", (4.0, 4.1, 4.2), step_seconds=0.25)
    (first, *_) = compare_runs([*wide, *fast]).verdict
    assert first.startswith("bfloat16/master is the cheapest")
    assert "16.00 bytes per parameter, where float32/float32 takes 16.00." in first


def test_a_single_seed_has_no_interval_and_equal_ones_one_of_zero_width() -> None:
    assert interval([1.0, 2.0, 3.0]) == (2.0, pytest.approx(2.484, abs=5e-4)), (
        "by a table of Student's t"
    )
    assert interval([0.5]) == (0.5, math.inf)
    assert interval([0.5, 0.5]) == (0.5, 0.0)
    assert interval([0.5, math.nan])[1] == math.inf


@pytest.mark.parametrize(
    ("difference", "seeds"), [(11.6, 2), (11.5, 3), (3.3, 3), (1.7, 5), (1e-3, None)]
)
def test_the_fewest_seeds_that_tell_a_difference_by_hand(
    difference: float, seeds: int | None
) -> None:
    # Four of five times: 16.334 / √2 = 11.55, 5.653 / √3 = 3.26, 3.761 / √5 = 1.68 standard
    # deviations.
    assert seeds_needed(1.0, difference) == seeds
