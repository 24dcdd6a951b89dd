"""Programs: memory and time follow one description, and adapters need what was published."""

from __future__ import annotations

from typing import Any

import pytest

from narrowgauge.planner.estimate import Estimate
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.model import decoder
from narrowgauge.planner.plan import plan
from narrowgauge.planner.program import adapters
from narrowgauge.spec.chips import CHIPS
from planner.jobs import LLAMA, estimate

EIGHT = Layout(shard=8)


def job(program: str, layout: Layout = EIGHT, **fields: Any) -> Estimate:
    return estimate(program, layout, **{"recipe": "bfloat16/master", "length": 8192, **fields})


@pytest.mark.parametrize(("loss", "width"), [("whole", 14), ("compiled", 4)])
def test_logits_take_the_bytes_of_the_loss(loss: str, width: float) -> None:
    """By hand: bfloat16 logits, float32 logits, log-softmax and its gradient; or logits and their
    gradient.
    """
    planned = job(f"loss={loss}", Layout(shard=8, recompute="full"), length=131_072)
    assert planned.memory.of("logits") == pytest.approx(131_072 * 128_256 * width)
    assert job("loss=whole").step.groups["loss"] > job("loss=compiled").step.groups["loss"]
    assert job("loss=chunked").memory.total < job("loss=whole").memory.total


def test_what_is_saved_by_hand() -> None:
    """torchtitan's Llama saves the input, queries, values, attention and its statistics, gate and
    down, two bytes each. Unfused attention saves its scores.
    """
    planned = job("torchtitan", Layout(shard=8, recompute="selective", micro_batch=2))
    saved = 2 * (4096 + 4096 + 1024 + 4096 + 14_336 + 4096) + 4 * 32
    assert planned.memory.of("kept by the layers") == pytest.approx(32 * 2 * 8192 * saved)
    eager, flash = (job(text).memory.groups["activations"] for text in ("attention=eager", ""))
    assert eager - flash == pytest.approx(5 * 32 * 32 * 8192**2, rel=0.01)


@pytest.mark.parametrize("chip", CHIPS)
def test_eager_is_never_faster_than_compiled_nor_compiled_than_fused(chip: str) -> None:
    """The trainer of transformers was once 11 to 28 % faster than torchtitan in the same layout."""
    recipe = "bfloat16/word" if "bfloat16" in CHIPS[chip].peak_tflops else "float16/split"
    rates = []
    for kernels in ("eager", "compiled", "fused"):
        rates.append(estimate(f"kernels={kernels}", chip=chip, recipe=recipe).tokens_per_second)
    assert rates == sorted(rates)


# ── adapters, as published ────────────────────────────────────────────────────────────────────────

QWEN = decoder(
    "qwen-7b", num_layers=32, hidden_size=4096, num_heads=32, intermediate_size=11_008, vocab_size=151_936
)  # fmt: skip
PUBLISHED = {256: (20.1, 11.5), 512: (20.4, 11.5), 1024: (21.5, 12.3), 2048: (23.8, 13.9), 4096: (29.7, 16.9)}  # fmt: skip
"""Qwen-7B, config.json (22,016 counts gate and up) and README, profiling of memory: batch 1, 8
micro-batches, one A100, rank 64 (GB of LoRA and Q-LoRA)."""


@pytest.mark.parametrize("length", PUBLISHED)
def test_adapters_need_what_qwen_published(length: int) -> None:
    layout = Layout(micro_batches=8, recompute="full")
    for base, error, measured in zip(
        ("bfloat16", "nf4"), (0.055, 0.18), PUBLISHED[length], strict=True
    ):
        planned = job(
            "hf-trainer", layout, length=length, chip="A100-SXM4-80GB", model=QWEN, parts=adapters(64, base)
        ).allocated_bytes  # fmt: skip
        assert planned == pytest.approx(measured * 1e9, rel=error)


def test_frozen_weights_have_no_gradients() -> None:
    all_weights = job("hf-trainer", Layout())
    narrow = job("hf-trainer", Layout(), parts=adapters(8, "bfloat16"))
    ratio = narrow.step.groups["matmuls"] / all_weights.step.groups["matmuls"]
    assert 2 / 3 < ratio < 0.8  # products of rank 8 take the bytes of their operands
    inner = [m.count * (m.in_features + m.out_features) for m in LLAMA.matmuls if m.part != "head"]
    assert narrow.trained_parameters == 8 * sum(inner)


def test_seven_billion_on_a_card_of_24_gigabytes() -> None:
    """torchtune's QLoRA of Llama-2 7B takes less than 10 GB. GaLore's 8-bit states and updates by
    layer train all of it (arXiv 2403.03507). All weights do not fit otherwise.
    """
    lora = plan(
        "llama-7b", chip="RTX-4090", lora=8, base="nf4", sequence_length=512, program="torchtune",
        layout="micro_batch=2,recompute=full",
    ).best  # fmt: skip
    assert lora.fits and lora.memory.total < 10e9
    for recipe, optimizer, program, fits in (
        ("bfloat16/word", "adamw", "", False),
        ("bfloat16/states8", "galore", "", False),
        ("bfloat16/states8", "galore", "release=true", True),
    ):
        best = plan(
            "llama-7b", recipes=recipe, chip="RTX-4090", optimizer=optimizer, program=program, advise=False
        ).best  # fmt: skip
        assert best.fits == fits


# ── published runs ────────────────────────────────────────────────────────────────────────────────


def test_405_billion_are_planned_as_they_ran() -> None:
    """Llama 3 on 16,384 H100 reached 38 to 43 % and took 78 days (arXiv 2407.21783, table 4; 30.84
    million GPU-hours).
    """
    best = plan(
        "llama-405b", recipes="bfloat16/master", chip="H100-SXM", chips=16_384, sequence_length=8192,
        tokens_per_step=1 << 24, tokens=15.6e12, program="megatron-core",
    ).best  # fmt: skip
    assert best.fits and best.layout.interleave > 1
    assert 0.36 <= best.mfu <= 0.5
    low, high = best.days_interval(15.6e12)
    steps = 15.6e12 / best.tokens_per_second / 86_400
    assert low < steps < best.days(15.6e12) < 78 < high


def test_a_chip_without_a_format_is_named() -> None:
    answer = plan(
        "llama-8b", recipes=["bfloat16/word", "float16/master"], chip=["V100", "H100-SXM"], chips=8
    )
    assert {job.chip.name for job in answer.options} == {"V100-SXM2-32GB", "H100-SXM5-80GB"}
    assert any("V100" in line and "bfloat16" in line for line in answer.sentences())
