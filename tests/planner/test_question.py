"""The worked questions of the page "Planning": each answer, and the premise that it rests on."""

from __future__ import annotations

from typing import Any

import pytest

from narrowgauge.errors import ChipError
from narrowgauge.planner.clusters import Cluster, Nodes
from narrowgauge.planner.layouts import NAMED_LAYOUTS
from narrowgauge.planner.option import Option
from narrowgauge.planner.plan import plan
from narrowgauge.planner.plan_tables import Plan
from narrowgauge.spec.chips import get_chip
from narrowgauge.spec.notation import parse

BYTES = {"master": 16, "split": 12, "word": 8, "compact": 7, "states8": 6}
RECIPES = [f"bfloat16/{storage}" for storage in BYTES]
THIRTY = 30e9
DAYS = 10e9
"""Tokens for which days are asked."""


def sentences(answer: Plan) -> str:
    return " ".join(answer.sentences())


def gigabytes_each(answer: Plan) -> dict[str, float]:
    """Of the worst rank, by storage."""
    return {option.recipe.storage.name: option.memory.total / 1e9 for option in answer.options}


def best_of(answer: Plan, recipe: str) -> Option:
    return next(option for option in answer.options if option.recipe.name == recipe)


# ── state alone ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_state_of_ten_billion_parameters() -> None:
    assert [parse(recipe).bytes_per_param for recipe in RECIPES] == list(BYTES.values())
    answer = plan(params=10e9, recipes=RECIPES)
    assert gigabytes_each(answer) == {"master": 160, "split": 120, "word": 80, "compact": 70, "states8": 60}
    assert answer.is_state_only and answer.best.step is None and answer.best.fits is None


@pytest.mark.parametrize(
    ("chips", "sizes"),
    [(8, [60, 45, 30, 26.25, 22.5]), (32, [15, 11.25, 7.5, 6.5625, 5.625])],
)
def test_thirty_billion_over_eight_and_over_32(chips: int, sizes: list[float]) -> None:
    answer = plan(params=THIRTY, recipes=RECIPES, chips=chips)
    assert gigabytes_each(answer) == pytest.approx(dict(zip(BYTES, sizes, strict=True)))
    assert "Pure data parallelism keeps the whole state on every chip: 480 GB at 16 B" in sentences(answer)


# ── one node ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_thirty_billion_on_eight_times_eighty_gigabytes() -> None:
    answer = plan("llama-33b", recipes=RECIPES, chip="H100-SXM", chips=8)
    assert all(option.fits and (option.headroom_bytes or 0.0) > 0 for option in answer.options)
    # 16 B: 65 GB of state leave room for what is computed again, or for one micro-batch whose tensors four ranks share.
    word, wide = best_of(answer, "bfloat16/word"), best_of(answer, "bfloat16/master")
    assert wide.layout.recompute == "full" or (wide.layout.tensor > 2 and wide.layout.micro_batches == 1)
    assert word.layout.recompute == "none" and word.layout.micro_batches > 1
    assert (wide.headroom_bytes or 0.0) < 8e9 < (word.headroom_bytes or 0.0)
    alone = plan("llama-33b", recipes=["bfloat16/master"], chip="H100-SXM", chips=8, layout=NAMED_LAYOUTS["fsdp2"]).best
    assert alone.fits and alone.layout.recompute == "full"
    never = plan("llama-33b", recipes=RECIPES, chip="H100-SXM", chips=8, layout=NAMED_LAYOUTS["ddp"])
    assert not any(option.fits for option in never.options)
    assert "Nothing fits" in sentences(never) and "impossible" in sentences(never)


@pytest.mark.parametrize(("chip", "days"), [("A100-SXM4-80GB", 24), ("H100-SXM", 7.5), ("B200", 3.3)])
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


def test_seventy_billion_on_a_node() -> None:
    answer = plan("llama-70b", recipes=["bfloat16/word"], chip="H100-SXM", chips=8)
    assert answer.question.architecture.num_parameters == 70_553_706_496
    # 70.6 GB of state on 85.9: with layers computed again, or without a sum of several micro-batches.
    for option in answer.options:
        assert option.fits and (option.layout.recompute == "full" or option.layout.micro_batches == 1)
    roomy = plan("llama-70b", recipes=["bfloat16/word"], chip="H200", chips=8).best
    assert roomy.fits and roomy.is_certain and roomy.layout.recompute == "none"


# ── several clusters ────────────────────────────────────────────────────────────────────────────────────────────────


def nodes(chip: str, gbit: float, count: int = 4, name: str = "") -> Cluster:
    group = Nodes(get_chip(chip), count=count, interconnect_gbit_per_second=gbit)
    return Cluster(name or str(group), (group,))


# ── scaling ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_slow_links_are_named_where_stages_avoid_them() -> None:
    """The best layout of 32 chips has stages; what grew in it is the last stage, and without stages it is the links."""
    answer = plan(
        "llama-8b", recipes=["bfloat16/word"], chip="H100-SXM", chips=[8, 32], interconnect_gbit_per_second=25
    )
    many = next(option for option in answer.options if option.num_chips == 32)
    assert many.layout.pipeline > 1
    ours = answer.tables()[-1].rows[-1]
    assert ours["grew"] == "communication" and "HSDP" in ours["remedy"]


def test_adapters_on_one_chip() -> None:
    def best_on(model: str, chip: str, **how: Any) -> Option:
        return plan(model, recipes=["bfloat16/master"], chip=chip, sequence_length=2048, **how).best

    small = [best_on("llama-8b", "RTX-4090", **how) for how in ({}, {"lora": 16}, {"lora": 16, "base": "nf4"})]
    assert [option.fits for option in small] == [False, True, True]
    assert (small[1].headroom_bytes or 0.0) < (small[2].headroom_bytes or 0.0)
    large = [best_on("llama-70b", "H100-SXM", lora=16, base=base) for base in ("bfloat16", "nf4")]
    assert [option.fits for option in large] == [False, True]
    assert "LoRA of rank 16" in sentences(
        plan("llama-70b", recipes=["bfloat16/word"], chip="H100-SXM", lora=16, base="nf4")
    )


# ── the page ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_states_in_the_hosts_memory_without_a_cluster_file() -> None:
    """`--host-memory`: 16 B a parameter on 8 × 40 GB fit where a host has a terabyte, and not where it has 64 GB."""
    asked = {"recipes": ["bfloat16/master"], "chip": "A100-SXM4-40GB", "chips": 8}
    roomy, tight = (plan("llama-33b", **asked, host_memory_gb=size).best for size in (1024, 64))  # type: ignore[arg-type]
    assert roomy.fits and roomy.layout.offload != "none"
    assert tight.fits is False
    with pytest.raises(ChipError, match="a cluster and host_memory_gb were requested together"):
        plan("llama-8b", cluster=nodes("H100-SXM", 400), host_memory_gb=64)
