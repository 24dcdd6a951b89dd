"""The rows of a comparison, its baseline, its verdicts, and the cheapest recipe."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from measuring.made_runs import COLUMNS, MASTER, make_run, seeds
from narrowgauge.measuring.diagnose.comparison import FIT, Comparison, compare_runs
from narrowgauge.runs.record import Run

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


def with_data(runs: list[Run], **data: Any) -> list[Run]:
    return [replace(run, run={**run.run, "data": data}) for run in runs]


def test_a_file_has_the_documented_columns_of_the_seeds_that_count():
    group = [*word(4.0, 4.2, 4.4, step_seconds=0.25), make_run("bfloat16/word", 3, None)]
    comparison = compared(MASTER, group, [make_run("bfloat16/compact", 0, 4.0)])
    master, row, compact = json.loads(comparison.json())
    assert list(row) == COLUMNS
    numbers = [row[name] for name in COLUMNS[1:7]]
    assert numbers == [pytest.approx(4.2), 8.0, 400, 1 << 20, 1.0, 3]
    assert row["difference"] == pytest.approx(0.1) == sum(row["difference_interval"]) / 2
    assert (master["verdict"], master["difference"]) == ("the baseline", None)
    assert compact["difference_interval"] is None
    assert "late EDQ" in comparison.table().shown
    assert "late EDQ" not in compared(word(4.0, edq=None)).table().shown


def test_differences_are_paired_by_seed_and_only_by_seed():
    # Seed 7 is word's alone; the order of the runs does not matter.
    group = []
    for seed, loss in ((7, 9.0), (2, 4.23), (0, 4.01), (1, 4.12)):
        group.append(make_run("bfloat16/word", seed, loss))
    row = compared(group, MASTER).rows[0]
    assert row["difference"] == pytest.approx(0.02)
    by_table = 4.302653 * statistics.stdev([0.01, 0.02, 0.03]) / 3**0.5
    low, high = row["difference_interval"]
    assert (high - low) / 2 == pytest.approx(by_table)
    on_other_data = with_data(group, fingerprint="b")
    other = compared(on_other_data, with_data(MASTER, fingerprint="a"))
    assert other.rows[0]["difference"] is None


# A group beside three seeds of bfloat16/master at 4.0, 4.1 and 4.2, and its verdict.
VERDICTS = [
    (word(4.01, 4.09, 4.2), "within the noise"),
    # +0.0005 on 4.1 is an eighth of a thousandth: certain, and too small to matter.
    (word(4.0005, 4.1005, 4.2005), "within the noise"),
    (word(3.9, 4.001, 4.1), "better"),
    (word(3.9976, 4.097, 4.1964), "better"),  # not all of it within a thousandth
    (word(4.02, 4.121, 4.22), "worse"),
    (word(4.2, 4.0, 4.2), "not distinguishable"),
    (word(4.02, 4.1, 4.18), "not distinguishable"),  # up to 1.2 %
    (word(4.01), "no interval"),
    (word(None, None), "no final validation loss"),
    (word(4.0, math.nan, 4.2), "diverged"),
    (word(*EQUAL, edq=0.85), "loses its updates"),
    (word(*EQUAL, edq=0.91), "within the noise"),
    # The median of the seeds counts.
    (
        [*word(4.0, 4.1), make_run("bfloat16/word", 2, 4.2, edq=0.3)],
        "within the noise",
    ),
]


@pytest.mark.parametrize(("group", "verdict"), VERDICTS)
def test_runs_have_a_verdict(group, verdict):
    comparison = compared(MASTER, group)
    assert comparison.rows[1]["verdict"] == verdict
    is_named = comparison.verdict.startswith("bfloat16/word is the cheapest")
    assert is_named is (verdict in FIT)


COMPACT = seeds("bfloat16/compact", EQUAL)
UNSURE = seeds("bfloat16/compact", (4.2, 4.0, 4.2))
LOSSY = {"edq": 0.1}
WIDE = [*seeds("float32/float32", EQUAL), *seeds("bfloat16/float32", (4.3, 4.1, 4.0))]


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
            "No smaller recipe is known to be as good as bfloat16/master.",
        ),
        ([MASTER, word(*EQUAL), UNSURE], "bfloat16/word is the cheapest"),
        ([MASTER[:1], word(4.0)], "No smaller recipe is known to be as good as bfloat16/master"),
        (
            [sized(seeds("a", EQUAL), None), sized(seeds("b", EQUAL), None)],
            "No smaller recipe is known to be as good as a.",
        ),
        (
            [seeds("bfloat16/master", EQUAL, **LOSSY), word(*EQUAL, **LOSSY)],
            "No recipe is named. bfloat16/master: loses its updates.",
        ),
        ([sized(WIDE, 16.0)], "No smaller recipe is known to be as good as float32/float32"),
        ([MASTER], "bfloat16/master ends at a validation loss of 4.1000."),
        ([word(None), seeds("mine", (None,))], "No two recipes have finished runs"),
    ],
)
def test_the_cheapest_is_fit(groups, cheapest):
    assert compared(*groups).verdict.startswith(cheapest)


@pytest.mark.parametrize(
    ("groups", "chosen"),
    [
        ([seeds("float8-row/word", EQUAL), word(*EQUAL)], "bfloat16/word"),
        ([word(*EQUAL), seeds("tfloat32/float32", EQUAL), WIDE], "float32/float32"),
        ([seeds("mine", EQUAL), seeds("yours", EQUAL)], "mine"),
        # What loses its updates is no baseline.
        ([seeds("bfloat16/master", EQUAL, **LOSSY), word(*EQUAL)], "bfloat16/word"),
        ([word(None), seeds("float8-row/word", (4.0,), **LOSSY)], "float8-row/word"),
    ],
)
def test_the_baseline_is_the_wider_compute_then_the_first(groups, chosen):
    assert compared(*groups).baseline == chosen
