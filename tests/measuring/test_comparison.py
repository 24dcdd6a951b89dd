"""The rows of a comparison, its baseline, its verdicts, and the cheapest recipe."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from measuring.made_runs import COLUMNS, MASTER, make_run, seeds
from narrowgauge.measuring.comparison import FIT, Comparison, compare_runs
from narrowgauge.measuring.intervals import interval
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
    assert row["verdict"] == "loses its updates"
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
    assert row["verdict"] == "diverged"
    assert comparison.verdict[0].startswith("No smaller recipe is known to be as good")
    assert comparison.verdict[1].startswith("Left out of every mean: bfloat16/word, seed 1 (")


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


EQUAL = (4.0, 4.1, 4.2)


def compared(*groups: Sequence[Run]) -> Comparison:
    return compare_runs([run for group in groups for run in group])


def word(*losses: float | None, **more: Any) -> list[Run]:
    return seeds("bfloat16/word", losses, **more)


def sized(runs: list[Run], size: float | None) -> list[Run]:
    for run in runs:
        assert run.summary is not None
        run.summary["bytes_per_param"] = size
    return runs


# A group beside three seeds of bfloat16/master at 4.0, 4.1 and 4.2, and its verdict.
VERDICTS: list[tuple[list[Run], str]] = [
    (word(4.01, 4.09, 4.2), "within the noise"),
    # +0.0005 on 4.1 is an eighth of a thousandth: certain, and too small to matter.
    (word(4.0005, 4.1005, 4.2005), "within the noise"),
    (word(3.9, 4.001, 4.1), "better"),
    (word(3.9976, 4.097, 4.1964), "better"),  # not all of it within a thousandth
    # Certain, below a hundredth of the loss: a price, not a fault.
    (word(4.02, 4.121, 4.22), "worse"),
    (word(4.1, 4.2, 4.31), "worse by more than 1 %"),
    (word(4.2, 4.0, 4.2), "not distinguishable"),
    (word(4.01), "no interval"),
    (word(None, None), "no loss"),
    (word(4.0, math.nan, 4.2), "diverged"),
    (word(math.nan, math.nan), "diverged"),
    # The summary's EDQ is 1.0: the first steps dominate the sums over a run.
    (word(*EQUAL, edq=(1.0, 0.4, 0.3, 0.3)), "loses its updates"),
    (word(*EQUAL, edq=(0.91, 0.91, 0.91)), "within the noise"),
    # The median of the seeds counts.
    (
        [*word(4.0, 4.1), make_run("bfloat16/word", 2, 4.2, edq=(0.3, 0.3, 0.3))],
        "within the noise",
    ),
    (word(*EQUAL, skipped=1), "skips steps"),
    (word(*EQUAL, skipped=1, steps=20), "within the noise"),
]


@pytest.mark.parametrize(("group", "verdict"), VERDICTS)
def test_runs_have_a_verdict(group: list[Run], verdict: str) -> None:
    comparison = compared(MASTER, group)
    assert comparison.rows[1]["verdict"] == verdict
    is_named = comparison.verdict[0].startswith("bfloat16/word is the cheapest")
    assert is_named is (verdict in FIT)


COMPACT = seeds("bfloat16/compact", EQUAL)
UNSURE = seeds("bfloat16/compact", (4.2, 4.0, 4.2))


@pytest.mark.parametrize(
    ("groups", "cheapest"),
    [
        ([MASTER, word(4.01, 4.09, 4.2), COMPACT], "bfloat16/compact is the cheapest"),
        # Equal bytes are ordered by time; less than a tenth of a byte is no saving.
        (
            [MASTER, word(*EQUAL), seeds("float8-row/word", EQUAL, step_seconds=0.3)],
            "float8-row/word is the cheapest",
        ),
        (
            [MASTER, sized(word(*EQUAL), 8.04), sized(seeds("mine", EQUAL, step_seconds=0.3), 8.0)],
            "mine is the cheapest",
        ),
        # Two seeds, +0.0866 ± 0.1372 on 1.28: it may be worse by more than 1 %, or no worse.
        (
            [seeds("bfloat16/master", (1.216, 1.344)), seeds("float8-row/word", (1.2918, 1.4414))],
            "No smaller recipe is known to be as good as bfloat16/master",
        ),
        ([MASTER, word(*EQUAL), UNSURE], "bfloat16/word is the cheapest"),
        ([MASTER[:1], word(4.0)], "bfloat16/word costs least (one seed"),
        (
            [sized(seeds("a", EQUAL), None), sized(seeds("b", EQUAL), None)],
            "No recipe of known bytes",
        ),
        (
            [seeds("bfloat16/master", EQUAL, edq=(0.1,) * 3), word(*EQUAL, edq=(0.1,) * 3)],
            "No recipe of known bytes",
        ),
    ],
)
def test_the_cheapest_is_fit(groups: list[list[Run]], cheapest: str) -> None:
    assert compared(*groups).verdict[0].startswith(cheapest)


def test_models_that_learned_nothing_give_no_verdict() -> None:
    runs = []
    for run in (*MASTER, *word(4.0, 4.1, 4.2)):
        runs.append(replace(run, run={**run.run, "data": {"unigram_loss": 4.05}}))
    assert "No recipe is named: bfloat16/master learned no more" in compared(runs).verdict[0]
