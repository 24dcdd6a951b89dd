"""Recipes at equal time: their losses and ranks, and which recipe is called the fastest."""

from __future__ import annotations

import pytest

from analysis.comparison.made_runs import made
from narrowgauge.analysis.comparison.classification import Rank
from narrowgauge.analysis.comparison.comparison import Comparison, compare_runs


def ranks(found: Comparison) -> dict[str, Rank]:
    """At equal time, the lowest loss first."""
    return {one.label: one.rank_at_equal_time for one in found.at_equal_time}


def losses(found: Comparison) -> dict[str, float]:
    return {row["recipe"]: row["val_loss"] for row in found.equal_time}


# ── losses ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_losses_at_equal_time_are_those_when_the_fastest_finished() -> None:
    slow = [made("bfloat16/master", k, 4.0, evals=[(2, 7.0), (10, 3.0)]) for k in (0, 1)]
    fast = [made("bfloat16/word", k, 4.0, evals=[(2, 7.0), (10, 4.0)], step_seconds=0.25) for k in (0, 1)]
    found = compare_runs([*slow, *fast])
    # The fast one ends at 2.5 s; the slow one is then 1.5 / 4 of the way from 7 to 3.
    assert losses(found) == {"bfloat16/master": pytest.approx(5.5), "bfloat16/word": 4.0}
    word = found.classes["bfloat16/word"].equal_time
    assert word is not None and word["difference"] == pytest.approx(-1.5) and word["half"] == 0.0
    assert ranks(found) == {"bfloat16/word": Rank.BETTER, "bfloat16/master": Rank.BASELINE}
    assert any("had not reached the end of their schedule" in text for text in found.verdict)


def test_losses_at_equal_time_differ_by_their_reported_difference() -> None:
    # With seed 0 the baseline's first validation comes too late, and its loss is the higher one of the two seeds.
    master = [
        made("bfloat16/master", 0, 6.0, evals=[(8, 7.0), (10, 6.0)]),
        made("bfloat16/master", 1, 4.0, evals=[(2, 6.0), (10, 4.0)]),
    ]
    word = [
        made("bfloat16/word", seed, loss, evals=[(2, 7.0), (10, loss)], step_seconds=0.25)
        for seed, loss in ((0, 5.9), (1, 3.9))
    ]
    found = compare_runs([*master, *word])
    rows = {row["recipe"]: row for row in found.equal_time}
    assert rows["bfloat16/master"]["val_loss"] == pytest.approx(5.25) and rows["bfloat16/word"]["num_seeds"] == 1
    assert rows["bfloat16/word"]["val_loss"] == pytest.approx(3.9)
    assert rows["bfloat16/word"]["difference"] == pytest.approx(3.9 - 5.25)
    assert ranks(found) == {"bfloat16/word": Rank.NO_INTERVAL, "bfloat16/master": Rank.BASELINE}
    assert any("after 2.5 s of training steps and over 1 seed," in text for text in found.verdict)
