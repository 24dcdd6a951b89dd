"""Search: every chip is used, what is fixed stays, and what is returned fits."""

from __future__ import annotations

import pytest

from narrowgauge.errors import RecipeError
from narrowgauge.planner.estimate import Estimate as Job
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.machine import cluster_of
from narrowgauge.planner.model import read_model
from narrowgauge.planner.plan import plan
from narrowgauge.planner.roofline import multiplies
from narrowgauge.planner.search import LEAST_TOKENS_PER_STEP, _shapes, search
from narrowgauge.spec.chips import get_chip
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.notation import parse

SMALL = read_model("llama-8b")
LARGE = read_model("llama-33b")
H100 = cluster_of("H100-SXM", 8)
WORD = parse("bfloat16/word")
MASTER = parse("bfloat16/master")


@pytest.mark.parametrize("chips", [1, 8, 64])
@pytest.mark.parametrize("recipe", ["bfloat16/word", "float8-tensor/word"])
def test_the_best_fits_and_uses_every_chip(chips: int, recipe: str) -> None:
    best = search(SMALL, parse(recipe), cluster_of("H200", chips), 4096, 1 << 20)
    assert best.fits and best.layout.num_ranks == chips
    assert best.tokens_per_step == pytest.approx(1 << 20, rel=0.5)


def test_what_is_fixed_stays() -> None:
    fixed = {"tensor": 2, "recompute": "full", "micro_batch": 2, "zero": 1}
    layout = search(SMALL, WORD, H100, 4096, fixed=fixed).layout
    assert {name: getattr(layout, name) for name in fixed} == fixed
    fixed = {"pipeline": 4, "tensor": 2, "shard": 4}
    layout = search(LARGE, WORD, cluster_of("A100-SXM4-80GB", 32), 4096, fixed=fixed).layout
    assert {name: getattr(layout, name) for name in fixed} == fixed


def test_virtual_stages_need_a_pipeline() -> None:
    layout = search(
        LARGE, WORD, cluster_of("A100-SXM4-80GB", 32), 4096, fixed={"interleave": 2}
    ).layout
    assert layout.interleave == 2 and layout.pipeline > 1


def sum_bytes(recipe: str, **fixed: str) -> float:
    """The buffers that sum micro-batches, for each parameter of a rank."""
    layout = {"tensor": 1, "shard": 8, "zero": 3, "micro_batch": 1, "micro_batches": 4, **fixed}
    memory = search(SMALL, parse(recipe), H100, 4096, fixed=layout).memory
    sums = []
    for term in memory.addends:
        if "sum" in term.name and term.group == "gradients":
            sums.append(term.value)
    return sum(sums) / (SMALL.num_parameters / 8)


def test_sums_of_micro_batches_take_the_bytes_of_their_format() -> None:
    assert sum_bytes("bfloat16/word") == pytest.approx(4)
    assert sum_bytes("bfloat16/word/reproducible") == pytest.approx(16)  # two float64 words
    for recipe in ("bfloat16/word", "float32/float32"):
        assert sum_bytes(recipe, accumulation_dtype="float64") == pytest.approx(8)
    for recipe, dtype in (("bfloat16/word", "bfloat16"), ("float32/float32", "float32")):
        assert sum_bytes(recipe, accumulation_dtype=dtype) == 0  # autograd's own


def test_what_does_not_fit_says_by_how_much() -> None:
    cluster = cluster_of("A100-SXM4-40GB", 8)
    option = search(LARGE, MASTER, cluster, 4096)
    assert not option.fits and option.headroom_bytes == pytest.approx(-27.3e9, abs=1e8)
    assert search(LARGE, WORD, cluster, 4096).fits
    assert search(LARGE, MASTER, cluster_of("A100-SXM4-40GB", 16), 4096).fits
    for wider in ("bfloat16/split", "bfloat16/exact"):
        assert not search(LARGE, parse(wider), cluster, 4096).fits


def test_a_free_batch_may_save_the_sums_of_gradients() -> None:
    """Where the tokens of a step are given, they are kept: gradients are then summed over
    micro-batches.
    """
    free = search(
        SMALL, MASTER, cluster_of("H100-SXM", 2), 8192, fixed={"tensor": 1, "shard": 2, "zero": 3}
    )
    asked = search(
        SMALL,
        MASTER,
        cluster_of("H100-SXM", 2),
        8192,
        1 << 22,
        fixed={"tensor": 1, "shard": 2, "zero": 3},
    )
    assert free.memory.total <= asked.memory.total and asked.tokens_per_step == 1 << 22


def test_a_step_has_the_tokens_that_were_asked_for() -> None:
    """16,384 replicas cannot share 4,096 sequences: layouts in which several chips compute one
    sequence are taken.
    """
    many = cluster_of("H100-SXM", 16_384)
    model = read_model("llama-405b")
    for asked in (1 << 24, None):
        best = search(model, WORD, many, 4096, asked)
        assert best.fits and best.tokens_per_step <= 1 << 25
    assert best.layout.num_replicas < many.chips
    with pytest.raises(
        RecipeError, match=r"a step of 4,096 tokens on 8 chips because they compute 32,768 at once"
    ):
        search(SMALL, WORD, H100, 4096, 4096, fixed={"tensor": 1})


def test_tokens_and_micro_batches_are_not_both_taken() -> None:
    with pytest.raises(RecipeError, match="one follows from the other"):
        search(SMALL, WORD, H100, 4096, 1 << 22, fixed={"micro_batches": 3})


def test_a_narrower_storage_does_not_fit_worse() -> None:
    """It once fitted barely in steps of half a million tokens where a wider one, which did not, got
    smaller steps for certain.
    """
    cluster = cluster_of("A100-SXM4-40GB", 8)
    for storage in ("states8", "compact", "word"):
        best = search(LARGE, parse(f"bfloat16/{storage}"), cluster, 4096)
        assert best.fits and best.layout.micro_batches > 1


def test_steps_are_not_smaller_than_half_a_million_tokens_where_any_fit() -> None:
    """On one chip of a large model a single micro-batch would need no sum of gradients, and 4,096
    tokens a step.
    """
    assert search(LARGE, MASTER, H100, 4096).tokens_per_step >= LEAST_TOKENS_PER_STEP
    # Where a float32 sum fits nowhere, gradients are summed in the weights' dtype: no step of one
    # micro-batch once, 11 % slower.
    large = search(read_model("llama-70b"), WORD, H100, 4096)
    assert large.fits and large.tokens_per_step >= LEAST_TOKENS_PER_STEP
    assert large.layout.accumulation_dtype == "bfloat16"
    asked = search(LARGE, MASTER, H100, 4096, 8 * 4096)
    assert asked.tokens_per_step == 8 * 4096


def test_mixtures_are_searched_without_expert_parallelism() -> None:
    """Plain FSDP of a mixture is among the candidates, so that a layout of the trainer can win
    within the noise.
    """
    job = Job(read_model("mixtral-8x7b"), WORD, Layout(), cluster_of("H200", 8), 4096)
    shapes = list(
        _shapes(job, {"tensor": 1, "pipeline": 1, "zero": 3, "accumulation_dtype": "float32"})
    )
    assert {shape.expert for shape in shapes} >= {1, 8}


def test_chips_of_amd_multiply_float8() -> None:
    """gfx942 multiplies float8_e4m3fnuz, the same numbers as halves (spec/kernels.py; AMD's MI300X
    data sheet: 2,614.9).
    """
    for chip in ("MI300X", "MI325X"):
        assert multiplies(COMPUTES["float8-row"], get_chip(chip))
    assert plan("llama-8b", chip="MI300X", chips=8).best.recipe.compute.name == "float8-row"
