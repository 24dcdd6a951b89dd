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
