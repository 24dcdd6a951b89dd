"""Deadlines: the fewest chips that meet one, by search."""

from __future__ import annotations

from typing import Any

import pytest

from narrowgauge.planner.plan import plan

WORD: dict[str, Any] = {"recipes": ["bfloat16/word"], "chip": "H100-SXM"}


@pytest.mark.parametrize("days", [0.5, 3, 14, 100])
def test_a_deadline_is_met_by_as_few_chips_as_were_found(days: float) -> None:
    answer = plan("llama-8b", **WORD, tokens=300e9, days=days)
    best = answer.best
    assert answer.is_met_by(best) and best.days(300e9) <= days
    for option in answer.options[1:]:
        assert (option.num_chips < best.num_chips) == (
            not answer.is_met_by(option)
        ) or option.num_chips > best.num_chips
    # With an eighth fewer chips it would be late: numbers between powers of two are tried.
    fewer = max((option.num_chips for option in answer.options if not answer.is_met_by(option)), default=0)
    assert fewer >= 0.5 * best.num_chips
    assert best.num_chips <= 8 or fewer >= 0.7 * best.num_chips


def test_a_deadline_within_given_chips() -> None:
    answer = plan("llama-8b", **WORD, chips=[16, 64, 128], tokens=300e9, days=14)
    assert answer.is_met_by(answer.best) and answer.best.num_chips == 64
    late = plan("llama-8b", **WORD, chips=8, tokens=300e9, days=14)
    assert not late.is_met_by(late.best) and late.best.num_chips == 8
    assert "No tried number of chips trains 300B tokens within 14 d" in "\n".join(late.sentences())


def test_a_deadline_tries_every_recipe() -> None:
    """One row for each number of chips, with the recipe that is fastest there."""
    answer = plan("llama-8b", chip="H100-SXM", tokens=300e9, days=14)
    assert len({option.hardware.name for option in answer.options}) == len(answer.options)
    word = plan("llama-8b", **WORD, tokens=300e9, days=14)
    assert answer.best.num_chips <= word.best.num_chips
