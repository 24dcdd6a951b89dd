"""Days of a training beside a calculation by hand; other worked questions are golden texts."""

from __future__ import annotations

import pytest

from narrowgauge.planner.plan import plan
from narrowgauge.spec.chips import get_chip

DAYS = 10e9
"""Tokens for which days are asked."""


@pytest.mark.parametrize(("chip", "days"), [("A100-SXM4-80GB", 24), ("B200", 3.3)])
def test_days_of_ten_billion_tokens(chip: str, days: float) -> None:
    """Worked by hand: (6 P + 6 L h s) × 10^10 / (8 × peak × 40 %)."""
    best = plan("llama-33b", recipes=["bfloat16/word"], chip=chip, chips=8, tokens=DAYS).best
    flops = 6 * 32.5e9 + 6 * 60 * 6656 * 4096
    by_hand = flops * DAYS / (8 * get_chip(chip).peak_tflops["bfloat16"] * 1e12 * 0.4) / 86_400
    assert by_hand == pytest.approx(days, rel=0.05)
    low, high = best.confidence(DAYS)["days"]
    planned = best.days(DAYS)
    assert planned is not None and low < planned < high
    # The hand's 40 % of the peak is a guess; what is planned says its own share.
    assert best.mfu is not None and planned * best.mfu == pytest.approx(by_hand * 0.4, rel=0.03)
