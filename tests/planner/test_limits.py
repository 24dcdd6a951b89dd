"""Deadlines, budgets, the largest that fits, energy and prices: each found by search, and each limit is one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.planner.inputs.clusters import Cluster, Nodes
from narrowgauge.planner.plan import LONGEST_DAYS, plan, sizes_of
from narrowgauge.planner.plan_report import energy_terms
from narrowgauge.planner.question import NODE_POWER
from narrowgauge.spec.chips import CHIPS, get_chip

WORD: dict[str, Any] = {"recipes": ["bfloat16/word"], "chip": "H100-SXM"}


@pytest.mark.parametrize("days", [0.5, 3, 14, 100])
def test_a_deadline_is_met_by_as_few_chips_as_were_found(days: float) -> None:
    found = plan("llama-8b", **WORD, tokens=300e9, days=days)
    best = found.best
    assert found.question.meets(best) and (best.days(300e9) or 0.0) <= days
    for option in found.options[1:]:
        assert (option.num_chips < best.num_chips) == (
            not found.question.meets(option)
        ) or option.num_chips > best.num_chips
    # With an eighth fewer chips it would be late: numbers between powers of two are tried.
    fewer = max((option.num_chips for option in found.options if not found.question.meets(option)), default=0)
    assert fewer >= 0.5 * best.num_chips
    assert best.num_chips <= 8 or fewer >= 0.7 * best.num_chips


def test_a_deadline_within_given_chips() -> None:
    found = plan("llama-8b", **WORD, chips=64, tokens=300e9, days=14)
    assert found.question.meets(found.best) and found.best.num_chips < 64
    late = plan("llama-8b", **WORD, chips=8, tokens=300e9, days=14)
    assert not late.question.meets(late.best) and late.best.num_chips == 8
    assert "None of the tried numbers of chips trains 300B tokens within 14 d" in "\n".join(late.sentences())


def test_a_deadline_tries_every_recipe() -> None:
    """One row for each number of chips, with the recipe that is fastest there."""
    found = plan("llama-8b", chip="H100-SXM", tokens=300e9, days=14)
    assert len({option.cluster for option in found.options}) == len(found.options)
    word = plan("llama-8b", **WORD, tokens=300e9, days=14)
    assert found.best.num_chips <= word.best.num_chips


@pytest.mark.parametrize("more", [1.001, 1.02, 1.07])
def test_a_budget_is_kept_by_the_fastest(more: float) -> None:
    """What a run costs goes up and down with the chips: the answer once was the last size before it first went up."""
    given: dict[str, Any] = {**WORD, "tokens": 300e9, "dollars_per_hour": 2.5}
    budget = more * (plan("llama-8b", **given, chips=16).best.cost(300e9) or 0.0)
    found = plan("llama-8b", **given, budget=budget)
    assert found.question.meets(found.best)
    larger = [chips for chips in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048) if chips > found.best.num_chips]
    assert all((plan("llama-8b", **given, chips=chips).best.cost(300e9) or 0.0) > budget for chips in larger)


def test_a_page_of_a_deadline_has_the_sizes_that_were_tried() -> None:
    found = plan("llama-8b", **WORD, tokens=300e9, days=14)
    assert [option.num_chips for option in sizes_of(found)] == sorted(option.num_chips for option in found.options)
    assert "Networks are assumed" in "\n".join(found.sentences())


def test_both_limits() -> None:
    given: dict[str, Any] = {**WORD, "tokens": 300e9, "dollars_per_hour": 2.5}
    both = plan("llama-8b", **given, days=14, budget=25_000)
    assert both.question.meets(both.best)
    poor = plan("llama-8b", **given, days=14, budget=10_000)
    assert not poor.question.meets(poor.best)
    assert "for at most $10,000" in "\n".join(poor.sentences())


def test_the_fewest_chips_end_within_months() -> None:
    """`--minimize chips` once answered one chip and 816 days."""
    found = plan("llama-33b", **WORD, chips=64, tokens=100e9, minimize="chips")
    assert (found.best.days(100e9) or 0.0) <= LONGEST_DAYS
    assert "no deadline was given" in "\n".join(found.sentences())
    # Without tokens there is no time that could be long.
    assert plan("llama-8b", **WORD, chips=8, minimize="chips").best.num_chips == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"days": 14}, "days = 14 was requested for a run whose tokens are not known"),
        ({"budget": 100, "tokens": 1e9}, "no price of a chip is known"),
        ({"days": 0, "tokens": 1e9}, "days = 0 was requested"),
        ({"largest": "context", "days": 3, "tokens": 1e9}, "the largest context and a deadline"),
        ({"largest": "contxt"}, "Did you mean 'context'"),
        ({"largest": "context", "sequence_length": 4096}, "sequence_length = 4096 as well"),
        ({"largest": "batch", "tokens_per_step": 1_000_000}, "tokens_per_step = 1000000 as well"),
        ({"largest": "batch", "layout": {"micro_batch": 2}}, "micro_batch = 2 as well"),
    ],
)
def test_wrong_limits_are_refused_in_a_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(NarrowgaugeError) as caught:
        plan("llama-8b", **WORD, **given)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given", [{"days": 3, "tokens": 1e9}, {"budget": 3, "tokens": 1e9}, {"largest": "batch"}, {"lora": 8}]
)
def test_the_state_alone_answers_no_other_question(given: dict[str, Any]) -> None:
    """Without machines these were left out without a word; adapters were counted as the training of all parameters."""
    with pytest.raises(NarrowgaugeError, match="was requested without machines"):
        plan("llama-8b", **given)


def test_the_longest_sequences_fit_and_longer_ones_do_not() -> None:
    found = plan("llama-8b", **WORD, chips=8, largest="context")
    longest = found.best.sequence_length
    assert longest % 1024 == 0 and longest > 131_072
    assert plan("llama-8b", **WORD, chips=8, sequence_length=8192).best.is_certain
    asked = replace(found.question.architecture, name="other")
    longer = plan(asked, **WORD, chips=8, sequence_length=longest * 17 // 16 // 1024 * 1024 + 1024).best
    assert not (longer.fits and longer.is_certain)
    at = plan(asked, **WORD, chips=8, sequence_length=longest).best
    assert (at.fits, at.is_certain, at.layout) == (True, True, found.best.layout)


def test_positions_that_are_learned_end_a_context() -> None:
    found = plan("gpt2-124m", **WORD, largest="context")
    assert found.best.sequence_length == 1024
    assert "fit for certain, in bfloat16/word: as many as the model has positions for." in "\n".join(found.sentences())


def test_the_largest_batch_fits_and_a_larger_one_does_not() -> None:
    found = plan("llama-8b", **WORD, chips=8, largest="batch")
    each = found.best.layout.micro_batch
    assert found.best.layout.micro_batches == 1 and found.best.is_certain
    more = {"tensor": 1, "zero": 3, "micro_batch": each + max(1, each // 15), "micro_batches": 1}
    larger = plan("llama-8b", **WORD, chips=8, layout=more).best
    assert not (larger.fits and larger.is_certain)


def test_the_largest_of_many_recipes_is_that_of_each_alone() -> None:
    """The search of a recipe begins where the one before ended; its answer does not depend on that."""
    table = plan("llama-8b", chip="H100-SXM", chips=8, largest="batch")
    for row in table.options[::6]:
        assert plan("llama-8b", recipes=[row.recipe], chip="H100-SXM", chips=8, largest="batch").best == row


def test_energy_is_power_times_time() -> None:
    best = plan("llama-8b", **WORD, chips=64, tokens=300e9).best
    seconds = 86_400 * (best.days(300e9) or 0.0)
    assert best.kilowatt_hours(300e9) == pytest.approx(NODE_POWER[0] * 64 * 700 * seconds / 3.6e6)
    assert best.joules_per_token == pytest.approx(3.6e6 * (best.kilowatt_hours(1.0) or 0.0))
    low, high = best.confidence()["joules_per_token"]
    assert low < (best.joules_per_token or 0.0) < high
    terms = energy_terms(best, 300e9)
    assert terms is not None and terms.total == pytest.approx(3.6e6 * (best.kilowatt_hours(300e9) or 0.0))
    assert terms.interval == pytest.approx((300e9 * low, 300e9 * high))


def test_power_that_is_not_published_is_not_assumed() -> None:
    assert get_chip("TPU-v5p").watts is None
    unknown = plan("llama-8b", recipes=["bfloat16/word"], chip="TPU-v5p", chips=8, tokens=1e9)
    assert unknown.best.joules_per_token is None and "Energy" not in "\n".join(unknown.sentences())
    given = Cluster("measured", (Nodes(get_chip("TPU-v5p"), watts=400.0),))
    assert plan("llama-8b", recipes=["bfloat16/word"], cluster=given).best.watts == 8 * 400


def test_every_power_has_a_source() -> None:
    for chip in CHIPS.values():
        assert (chip.watts is None) == (not chip.watts_source), chip.name
        assert chip.watts is None or 50 <= chip.watts <= 1500


def test_no_price_is_assumed() -> None:
    free, paid = (plan("llama-8b", **WORD, chips=8, tokens=1e9, dollars_per_hour=price) for price in (None, 2.5))
    assert free.best.cost(1e9) is None and "$" not in "\n".join(free.sentences())
    assert paid.best.dollars_per_token == pytest.approx((paid.best.cost(1e9) or 0.0) / 1e9)
    assert "A billion tokens cost $" in "\n".join(paid.sentences())
    row = paid.row()["options"][0]
    assert row["cost"] == pytest.approx(row["dollars_per_token"] * 1e9) and row["kilowatt_hours"] > 0
