"""Step times: terms worked out by hand, laws over layouts, and what cannot run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from narrowgauge.planner.exchanges import parameters_of
from narrowgauge.planner.layouts import Layout, unsuited
from narrowgauge.planner.machine import cluster_of
from narrowgauge.planner.model import read_model
from narrowgauge.planner.roofline import operation_seconds
from narrowgauge.planner.step_time import step_terms
from narrowgauge.planner.terms import Term, Terms
from narrowgauge.spec.chips import get_chip
from narrowgauge.spec.notation import parse
from planner.jobs import LLAMA, estimate, exact

SHARED = Layout(shard=8)
MIXTRAL = read_model("mixtral-8x7b")


def terms_of(
    layout: Layout, length: int = 4096, recipe: str = "bfloat16/word", model: Any = LLAMA,
    cluster: Any = None, **rows: float,
) -> Terms:  # fmt: skip
    """The step of a layout with exact shares, but for ``rows``."""
    cluster = cluster or cluster_of("H100-SXM", layout.num_ranks)
    job = estimate(
        layout=layout, length=length, recipe=recipe, model=model, cluster=cluster, shares=exact(**rows)
    )  # fmt: skip
    return step_terms(job)


def by_name(terms: Terms) -> dict[str, Term]:
    return {term.name: term for term in terms}


def test_matmuls_and_attention_by_hand() -> None:
    tokens = 2 * 8192
    groups = terms_of(replace(SHARED, micro_batch=2), 8192).groups
    weights = sum(matmul.num_parameters for matmul in LLAMA.matmuls)
    assert groups["matmuls"] == pytest.approx(6 * weights * tokens / 989e12, rel=1e-3)
    scores = LLAMA.attention_flops(8192) / 3 * 3.5 * tokens
    assert groups["attention"] == pytest.approx(scores / 989e12)
    # Eight bytes a parameter are read and written, the gradient's two are read; an eighth of them
    # on each rank.
    assert groups["optimizer"] == pytest.approx(LLAMA.num_parameters / 8 * 14 / 3350e9)


def test_sharded_weights_are_gathered_twice_and_gradients_reduced() -> None:
    name = "weights and gradients between shards"
    exchange = by_name(terms_of(SHARED, 8192))[name]
    latency = 32 * 3 * 7 * 4e-6
    assert exchange.value == pytest.approx(LLAMA.num_parameters * 6 * 7 / 8 / 450e9 + latency)
    for zero, gathers, sums in ((1, 1, 1), (2, 1, 4), (3, 8, 4)):  # of four micro-batches
        bytes_moved = LLAMA.num_parameters * 2 * (gathers + sums)
        value = by_name(terms_of(Layout(shard=8, zero=zero, micro_batches=4)))[name].value
        assert value == pytest.approx(bytes_moved * 7 / 8 / 450e9, rel=0.05), zero
    wide = terms_of(SHARED, 8192, "bfloat16/word/float32")
    assert wide.groups["communication"] > exchange.value


@pytest.mark.parametrize(
    ("compute", "passes"), [("scalify", 1), ("float8-row", 1), ("float8-tensor", 2)]
)
def test_a_cast_reads_its_operand_twice_if_the_scale_is_of_all_of_it(
    compute: str, passes: int
) -> None:
    recipe = parse(f"{compute}/split")
    chip = get_chip("H100-SXM")
    seconds = operation_seconds(64, 64, recipe.compute, recipe, 1e6, chip, exact())
    assert seconds["output.left"] == pytest.approx(64e6 * (2 * passes + 1) / 3350e9)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_stage_has_one_of_embedding_and_head(is_tied: bool) -> None:
    job = estimate(layout=Layout(pipeline=2, zero=0), model=replace(LLAMA, tie_embeddings=is_tied))
    dense = (
        LLAMA.parameters["layers"] / 2 + LLAMA.vocab_size * LLAMA.hidden_size + LLAMA.outer_vectors
    )
    assert parameters_of(job, 16) == (pytest.approx(dense), 0)


def test_layouts_that_do_not_suit_a_model() -> None:
    """Embedding and head may count as two of 128 groups of layers."""
    large = read_model("llama-405b")
    for model, layout, why in (
        (large, Layout(pipeline=16, interleave=8), ""),
        (large, Layout(pipeline=16, interleave=9), "144 groups of layers and 126 layers"),
        (LLAMA, Layout(shard=16, expert=8), "8 expert ranks do not divide 1 expert"),
    ):
        assert unsuited(model, layout, 8192) == why


def test_what_is_hidden_is_not_counted() -> None:
    hidden = terms_of(SHARED, 8192, **{"overlap.shard": 1.0})
    assert hidden.groups["communication"] == 0.0
    # Over a link of 1 GB/s computing cannot hide all.
    exposed = terms_of(SHARED, 8192, **{"overlap.shard": 1.0, "link": 1 / 450})
    assert exposed.groups["communication"] > 10


@pytest.mark.parametrize("batches", [4, 32])
def test_the_bubble_is_the_pipelines(batches: int) -> None:
    shape = replace(LLAMA, vocab_size=1)  # without a head all stages are equal
    layout = Layout(pipeline=4, zero=0, micro_batches=batches)
    groups = terms_of(layout, model=shape).groups
    busy = sum(groups[group] for group in ("matmuls", "attention", "elementwise", "loss"))
    share = groups["bubble"] / (groups["bubble"] + busy)
    assert share == pytest.approx(3 / (batches + 3), rel=1e-2)  # arXiv 2104.04473, section 2.2
    halved = terms_of(replace(layout, interleave=2), model=shape)
    assert halved.groups["bubble"] == pytest.approx(groups["bubble"] / 2)


def test_recomputation_costs_a_forward() -> None:
    none, full = (terms_of(replace(SHARED, recompute=how)).groups for how in ("none", "full"))
    layers = sum(matmul.num_parameters for matmul in LLAMA.matmuls if matmul.part != "head")
    again = 2 * layers * 4096 / 989e12
    assert full["matmuls"] - none["matmuls"] == pytest.approx(again, rel=1e-3)
    assert full["loss"] == none["loss"]


def test_tensor_ranks_halve_the_matmuls_and_exchange_activations() -> None:
    single, two = (terms_of(Layout(tensor=ranks, zero=0), 8192) for ranks in (1, 2))
    assert two.groups["matmuls"] == pytest.approx(single.groups["matmuls"] / 2, rel=1e-2)
    moved = 32 * 8 * (8192 * 4096 * 2 / 2 / 450e9 + 4e-6)
    assert by_name(two)["activations between tensor ranks"].value == pytest.approx(moved)


def test_a_token_travels_once_to_a_node_or_once_to_each_expert() -> None:
    cluster = cluster_of("H100-SXM", 16, chips_per_node=2)
    layout = Layout(shard=16, expert=8)
    each, once = (
        by_name(terms_of(layout, model=MIXTRAL, cluster=cluster, once_per_node=share))
        for share in (0.0, 1.0)
    )
    name = "tokens between experts"
    # Two experts on four nodes: 2 × 3/4 copies leave the node, for 3 × (1 - 9/16) nodes.
    assert once[name].value / each[name].value == pytest.approx(3 * (1 - 9 / 16) / 1.5, rel=5e-3)
