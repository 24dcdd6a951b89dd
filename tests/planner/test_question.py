"""The worked questions of the page "Planning": each answer, and the premise that it rests on."""

from __future__ import annotations

from typing import Any

import pytest

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.planner.layouts import NAMED_LAYOUTS
from narrowgauge.planner.plan import plan
from narrowgauge.spec.chips import get_chip

BYTES = {"master": 16, "split": 12, "word": 8, "compact": 7, "states8": 6}
RECIPES = [f"bfloat16/{storage}" for storage in BYTES]
DAYS = 10e9
"""Tokens for which days are asked."""


def test_thirty_billion_on_eight_times_eighty_gigabytes() -> None:
    answer = plan("llama-33b", recipes=RECIPES, chip="H100-SXM", chips=8)
    for option in answer.options:
        assert option.fits and option.headroom_bytes > 0
    # 16 B: 65 GB of state leave room for what is computed again, or for one micro-batch whose
    # tensors four ranks share.
    jobs = {option.recipe.name: option for option in answer.options}
    word = jobs["bfloat16/word"]
    wide = jobs["bfloat16/master"]
    assert wide.layout.recompute == "full" or (
        wide.layout.tensor > 2 and wide.layout.micro_batches == 1
    )
    assert word.layout.recompute == "none" and word.layout.micro_batches > 1
    assert wide.headroom_bytes < 8e9 < word.headroom_bytes
    alone = plan(
        "llama-33b",
        recipes=["bfloat16/master"],
        chip="H100-SXM",
        chips=8,
        layout=NAMED_LAYOUTS["fsdp2"],
    ).best
    assert alone.fits and alone.layout.recompute == "full"
    never = plan(
        "llama-33b", recipes=RECIPES, chip="H100-SXM", chips=8, layout=NAMED_LAYOUTS["ddp"]
    )
    assert not any(option.fits for option in never.options)
    assert "Nothing fits" in never.sentences()[0]


@pytest.mark.parametrize(
    ("chip", "days"), [("A100-SXM4-80GB", 24), ("H100-SXM", 7.5), ("B200", 3.3)]
)
def test_days_of_ten_billion_tokens(chip: str, days: float) -> None:
    """Worked by hand: (6 P + 6 L h s) × 10^10 / (8 × peak × 40 %)."""
    best = plan("llama-33b", recipes=["bfloat16/word"], chip=chip, chips=8, tokens=DAYS).best
    flops = 6 * 32.5e9 + 6 * 60 * 6656 * 4096
    by_hand = flops * DAYS / (8 * get_chip(chip).peak_tflops["bfloat16"] * 1e12 * 0.4) / 86_400
    assert by_hand == pytest.approx(days, rel=0.05)
    low, high = best.days_interval(DAYS)
    planned = best.days(DAYS)
    assert low < planned < high
    slow, fast = (DAYS / rate / 86_400 for rate in best.rate_interval)
    assert (fast, slow * 1.25) == pytest.approx(
        (low, high)
    )  # restarts take time, and are not in a rate
    # The hand's 40 % of the peak is a guess; what is planned says its own share, and adds restarts
    # to the steps.
    assert planned / 1.1 * best.mfu == pytest.approx(by_hand * 0.4, rel=0.03)


def test_seventy_billion_on_a_node() -> None:
    answer = plan("llama-70b", recipes=["bfloat16/word"], chip="H100-SXM", chips=8)
    assert answer.best.architecture.num_parameters == 70_553_706_496
    # 70.6 GB of state on 85.9: with layers computed again, or without a sum of several
    # micro-batches.
    for option in answer.options:
        assert option.fits
        assert option.layout.recompute == "full" or option.layout.micro_batches == 1
    roomy = plan("llama-70b", recipes=["bfloat16/word"], chip="H200", chips=8).best
    assert roomy.fits and roomy.has_room and roomy.layout.recompute == "none"


def test_slow_links_are_named_where_stages_avoid_them() -> None:
    """The best layout of 32 chips has stages. Without stages the links limit it."""
    answer = plan(
        "llama-8b",
        recipes=["bfloat16/word"],
        chip="H100-SXM",
        chips=[8, 32],
        interconnect_gbit_per_second=25,
    )
    many = next(job for job in answer.options if job.num_chips == 32)
    assert many.layout.pipeline > 1
    ours = plan(
        "llama-8b",
        recipes="bfloat16/word",
        chip="H100-SXM",
        chips=32,
        interconnect_gbit_per_second=25,
        layout="fsdp2",
    ).best
    share = ours.step.groups["communication"] / ours.step.total
    assert share > 0.2 and ours.step.total > many.step.total


def test_a_step_holds_a_sequence() -> None:
    with pytest.raises(NarrowgaugeError, match="100 tokens because a sequence has 4,096"):
        plan("llama-8b", recipes="bfloat16/word", chip="H100-SXM", chips=8, tokens_per_step=100)


def test_what_is_known_to_be_far_off_is_said() -> None:
    arguments: dict[str, Any] = {
        "recipes": "bfloat16/word",
        "chip": "H100-SXM",
        "chips": 8,
        "sequence_length": 32_768,
    }
    ring, unsplit = (plan("llama-8b", layout=f"context={ranks}", **arguments) for ranks in (4, 1))
    assert "context ranks" in ring.sentences()[-1]
    assert "context ranks" not in unsplit.sentences()[-1]
