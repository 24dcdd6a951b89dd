"""Questions of the page "Planning" beside what a hand works out; their texts are golden files."""

from __future__ import annotations

from typing import Any

import pytest

from narrowgauge.planner.plan import plan
from narrowgauge.spec.chips import get_chip

DAYS = 10e9
"""Tokens for which days are asked."""


@pytest.mark.parametrize(
    ("chip", "days"), [("A100-SXM4-80GB", 24), ("H100-SXM", 7.5), ("B200", 3.3)]
)
def test_days_of_ten_billion_tokens(chip: str, days: float) -> None:
    """Worked by hand: (6 P + 6 L h s) × 10^10 / (8 × peak × 40 %)."""
    best = plan("llama-33b", recipes="bfloat16/word", chip=chip, chips=8, tokens=DAYS).best
    flops = 6 * 32.5e9 + 6 * 60 * 6656 * 4096
    by_hand = flops * DAYS / (8 * get_chip(chip).peak_tflops["bfloat16"] * 1e12 * 0.4) / 86_400
    assert by_hand == pytest.approx(days, rel=0.05)
    low, high = best.days_interval(DAYS)
    assert low < best.days(DAYS) < high
    slow, fast = (DAYS / rate / 86_400 for rate in best.rate_interval)
    # Restarts take time, and are not in a rate. The hand's 40 % of the peak is a guess.
    assert (fast, slow * 1.25) == pytest.approx((low, high))
    assert best.days(DAYS) / 1.1 * best.mfu == pytest.approx(by_hand * 0.4, rel=0.03)


def test_seventy_billion_on_a_node() -> None:
    """70.6 GB of state on 85.9: with layers computed again, or without a sum of micro-batches."""
    question: dict[str, Any] = {"recipes": "bfloat16/word", "chips": 8}
    tight = plan("llama-70b", chip="H100-SXM", **question).best
    assert tight.fits and (tight.layout.recompute == "full" or tight.layout.micro_batches == 1)
    roomy = plan("llama-70b", chip="H200", **question).best
    assert roomy.has_room and roomy.layout.recompute == "none"
    never = plan("llama-33b", chip="H100-SXM", layout="ddp", **question)
    assert not never.best.fits and "Nothing fits" in never.sentences()[0]


def test_slow_links_are_named_where_stages_avoid_them() -> None:
    """The best layout of 32 chips has stages. Without stages the links limit it."""
    question: dict[str, Any] = {"recipes": "bfloat16/word", "chip": "H100-SXM", "chips": 32}
    many, ours = (
        plan("llama-8b", interconnect_gbit_per_second=25, layout=layout, **question).best
        for layout in ("", "fsdp2")
    )
    assert many.layout.pipeline > 1 and ours.step.total > many.step.total
    assert ours.step.groups["communication"] / ours.step.total > 0.2


def test_what_is_known_to_be_far_off_is_said() -> None:
    for ranks in (4, 1):
        answer = plan(
            "llama-8b", recipes="bfloat16/word", chip="H100-SXM", chips=8, layout=f"context={ranks}",
            sequence_length=32_768,
        )  # fmt: skip
        assert ("context ranks" in answer.sentences()[-1]) == (ranks == 4)
