"""Deadlines, budgets, the largest that fits, energy and prices: each found by search, and each limit is one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from narrowgauge.planner.plan import plan

WORD: dict[str, Any] = {"recipes": ["bfloat16/word"], "chip": "H100-SXM"}


@pytest.mark.parametrize("days", [0.5, 3, 14, 100])
def test_a_deadline_is_met_by_as_few_chips_as_were_found(days: float) -> None:
    answer = plan("llama-8b", **WORD, tokens=300e9, days=days)
    best = answer.best
    assert answer.question.meets(best) and (best.days(300e9) or 0.0) <= days
    for option in answer.options[1:]:
        assert (option.num_chips < best.num_chips) == (
            not answer.question.meets(option)
        ) or option.num_chips > best.num_chips
    # With an eighth fewer chips it would be late: numbers between powers of two are tried.
    fewer = max((option.num_chips for option in answer.options if not answer.question.meets(option)), default=0)
    assert fewer >= 0.5 * best.num_chips
    assert best.num_chips <= 8 or fewer >= 0.7 * best.num_chips


def test_a_deadline_within_given_chips() -> None:
    answer = plan("llama-8b", **WORD, chips=64, tokens=300e9, days=14)
    assert answer.question.meets(answer.best) and answer.best.num_chips < 64
    late = plan("llama-8b", **WORD, chips=8, tokens=300e9, days=14)
    assert not late.question.meets(late.best) and late.best.num_chips == 8
    assert "No tried number of chips trains 300B tokens within 14 d" in "\n".join(late.sentences())


def test_a_deadline_tries_every_recipe() -> None:
    """One row for each number of chips, with the recipe that is fastest there."""
    answer = plan("llama-8b", chip="H100-SXM", tokens=300e9, days=14)
    assert len({option.place for option in answer.options}) == len(answer.options)
    word = plan("llama-8b", **WORD, tokens=300e9, days=14)
    assert answer.best.num_chips <= word.best.num_chips


@pytest.mark.parametrize("more", [1.001, 1.07])
def test_a_budget_is_kept_by_the_fastest(more: float) -> None:
    """What a run costs goes up and down with the chips: the answer once was the last size before it first went up."""
    arguments: dict[str, Any] = {**WORD, "tokens": 300e9, "dollars_per_hour": 2.5}
    budget = more * (plan("llama-8b", **arguments, chips=16).best.cost(300e9) or 0.0)
    answer = plan("llama-8b", **arguments, budget=budget)
    assert answer.question.meets(answer.best)
    larger = [chips for chips in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048) if chips > answer.best.num_chips]
    assert all((plan("llama-8b", **arguments, chips=chips).best.cost(300e9) or 0.0) > budget for chips in larger)


def test_the_longest_sequences_fit_and_longer_ones_do_not() -> None:
    answer = plan("llama-8b", **WORD, chips=8, largest="context")
    longest = answer.best.sequence_length
    assert longest % 1024 == 0 and longest > 131_072
    assert plan("llama-8b", **WORD, chips=8, sequence_length=8192).best.is_certain
    asked = replace(answer.question.architecture, name="other")
    longer = plan(asked, **WORD, chips=8, sequence_length=longest * 17 // 16 // 1024 * 1024 + 1024).best
    assert not (longer.fits and longer.is_certain)
    at = plan(asked, **WORD, chips=8, sequence_length=longest).best
    assert (at.fits, at.is_certain, at.layout) == (True, True, answer.best.layout)


def test_the_largest_batch_fits_and_a_larger_one_does_not() -> None:
    answer = plan("llama-8b", **WORD, chips=8, largest="batch")
    micro_batch = answer.best.layout.micro_batch
    assert answer.best.layout.micro_batches == 1 and answer.best.is_certain
    more = {"tensor": 1, "zero": 3, "micro_batch": micro_batch + max(1, micro_batch // 15), "micro_batches": 1}
    larger = plan("llama-8b", **WORD, chips=8, layout=more).best
    assert not (larger.fits and larger.is_certain)
