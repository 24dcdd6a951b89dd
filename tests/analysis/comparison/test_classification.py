"""The classification of recipes, as tables: runs in; rank, faults, noise, cheapest and best metrics
out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from analysis.comparison.made_runs import MASTER, make_run, seeds
from narrowgauge.analysis.comparison.classification import Rank
from narrowgauge.analysis.comparison.comparison import Comparison, compare_runs
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


# A group beside three seeds of bfloat16/master at 4.0, 4.1 and 4.2: its rank, and the names of its
# faults.
RANKS: list[tuple[list[Run], Rank, list[str]]] = [
    (word(4.01, 4.09, 4.2), Rank.WITHIN_NOISE, []),
    # +0.0005 on 4.1 is an eighth of a thousandth: certain, and too small to matter.
    (word(4.0005, 4.1005, 4.2005), Rank.WITHIN_NOISE, []),
    (word(3.9, 4.001, 4.1), Rank.BETTER, []),
    (word(3.9976, 4.097, 4.1964), Rank.BETTER, []),  # not all of it within a thousandth
    # Certain, below a hundredth of the loss: a price, not a fault.
    (word(4.02, 4.121, 4.22), Rank.WORSE, []),
    (word(4.1, 4.2, 4.31), Rank.WORSE, ["ends worse than bfloat16/master"]),
    (word(4.2, 4.0, 4.2), Rank.INCONCLUSIVE, []),
    (word(4.01), Rank.NO_INTERVAL, []),
    (word(None, None), Rank.NO_LOSS, []),
    (word(4.0, math.nan, 4.2), Rank.WITHIN_NOISE, ["diverged in 1 of 3 runs"]),
    (word(math.nan, math.nan), Rank.NO_LOSS, ["diverged in 2 of 2 runs"]),
    # The summary's EDQ is 1.0: the first steps dominate the sums over a run.
    (word(*EQUAL, edq=(1.0, 0.4, 0.3, 0.3)), Rank.WITHIN_NOISE, ["loses its updates"]),
    (word(*EQUAL, edq=(0.91, 0.91, 0.91)), Rank.WITHIN_NOISE, []),
    # The median of the seeds counts.
    (
        [*word(4.0, 4.1), make_run("bfloat16/word", 2, 4.2, edq=(0.3, 0.3, 0.3))],
        Rank.WITHIN_NOISE,
        [],
    ),
    (word(*EQUAL, skipped=1), Rank.WITHIN_NOISE, ["skipped 3 of its 30 steps"]),
    (word(*EQUAL, skipped=1, steps=20), Rank.WITHIN_NOISE, []),
    (
        word(4.1, 4.2, 4.31, edq=(0.3, 0.3, 0.3)),
        Rank.WORSE,
        ["loses its updates", "ends worse than bfloat16/master"],
    ),
]


@pytest.mark.parametrize(("group", "rank", "faults"), RANKS)
def test_runs_have_a_rank_and_faults(group: list[Run], rank: Rank, faults: list[str]) -> None:
    stats = compared(MASTER, group).classes["bfloat16/word"]
    assert stats.rank is rank and len(stats.faults) == len(faults)
    for fault, name in zip(stats.faults, faults, strict=True):
        assert fault.startswith(name)
    is_fit = rank in (Rank.WITHIN_NOISE, Rank.BETTER) and not faults
    assert stats.is_fit is is_fit
    assert stats.usable_rank is (None if faults else rank)


# ── the cheapest ──────────────────────────────────────────────────────────────────────────────────

COMPACT = seeds("bfloat16/compact", EQUAL)
UNSURE = seeds("bfloat16/compact", (4.2, 4.0, 4.2))


@pytest.mark.parametrize(
    ("groups", "cheapest"),
    [
        ([MASTER, word(4.01, 4.09, 4.2), COMPACT], "bfloat16/compact"),
        # Equal bytes are ordered by time; less than a tenth of a byte is no saving.
        (
            [MASTER, word(*EQUAL), seeds("float8-row/word", EQUAL, step_seconds=0.3)],
            "float8-row/word",
        ),
        (
            [MASTER, sized(word(*EQUAL), 8.04), sized(seeds("mine", EQUAL, step_seconds=0.3), 8.0)],
            "mine",
        ),
        ([MASTER, word(4.1, 4.2, 4.31)], "bfloat16/master"),
        ([MASTER, word(*EQUAL, edq=(1.0, 0.3, 0.3, 0.3))], "bfloat16/master"),
        # Two seeds, +0.0866 ± 0.1372 on 1.28: it may be worse by more than 1 %, or no worse.
        (
            [seeds("bfloat16/master", (1.216, 1.344)), seeds("float8-row/word", (1.2918, 1.4414))],
            "bfloat16/master",
        ),
        ([MASTER, word(*EQUAL), UNSURE], "bfloat16/word"),
        ([sized(seeds("a", EQUAL), None), sized(seeds("b", EQUAL), None)], None),
        ([seeds("bfloat16/master", EQUAL, edq=(0.1,) * 3), word(*EQUAL, edq=(0.1,) * 3)], None),
    ],
)
def test_the_cheapest_is_fit(groups: list[list[Run]], cheapest: str | None) -> None:
    comparison = compared(*groups)
    assert (comparison.cheapest.label if comparison.cheapest else None) == cheapest


def test_what_might_be_cheaper_is_named_with_the_seeds_that_would_tell() -> None:
    assert any(
        "bfloat16/compact" in line and "seeds tell it" in line
        for line in compared(MASTER, UNSURE).verdict
    )


def test_models_that_learned_nothing_give_no_verdict() -> None:
    runs = []
    for run in (*MASTER, *word(4.0, 4.1, 4.2)):
        runs.append(replace(run, run={**run.run, "data": {"unigram_loss": 4.05}}))
    assert "No recipe is named: bfloat16/master learned no more" in compared(runs).verdict[0]
