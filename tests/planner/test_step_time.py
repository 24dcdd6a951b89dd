"""Step times: terms worked out by hand, laws over layouts, and what cannot run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from narrowgauge.planner.efficiency import Efficiency, efficiency_of
from narrowgauge.planner.estimate import Estimate as Job
from narrowgauge.planner.exchanges import parameters_of
from narrowgauge.planner.layouts import Layout, unsuited
from narrowgauge.planner.machine import cluster_of
from narrowgauge.planner.model import read_model
from narrowgauge.planner.program import DEFAULT
from narrowgauge.planner.roofline import operation_seconds
from narrowgauge.planner.step_time import step_terms
from narrowgauge.planner.terms import Term, Terms
from narrowgauge.spec.chips import get_chip
from narrowgauge.spec.notation import parse

LLAMA = read_model("llama-8b")
WORD = parse("bfloat16/word")
SHARED = Layout(shard=8)


def exact(chip: str, **rows: float) -> Efficiency:
    """Shares that reach every printed rate, start kernels in no time and hide nothing."""
    names = efficiency_of(get_chip(chip), DEFAULT).values
    values = {}
    for name in names:
        values[name] = (
            0.0 if name.endswith("seconds") or name.startswith(("overlap", "slowed")) else 1.0
        )
    return Efficiency({**values, "spread": 0.0, **rows})


def terms_of(
    layout: Layout, length: int = 4096, *, recipe: str = "bfloat16/word", **rows: Any
) -> Terms:
    """The step of a layout, by default of a Llama on as many chips as there are ranks."""
    cluster = rows.pop("cluster", cluster_of("H100-SXM", layout.num_ranks))
    shape = rows.pop("shape", LLAMA)
    return step_terms(Job(shape, parse(recipe), layout, cluster, length, exact("H100-SXM", **rows)))


def by_name(terms: Terms) -> dict[str, Term]:
    return {term.name: term for term in terms}


def test_matmuls_and_attention_by_hand() -> None:
    tokens = 2 * 8192
    terms = terms_of(replace(SHARED, micro_batch=2), 8192)
    weights = sum(matmul.num_parameters for matmul in LLAMA.matmuls)
    assert terms.groups["matmuls"] == pytest.approx(6 * weights * tokens / 989e12, rel=1e-3)
    scores = LLAMA.attention_flops(8192) / 3 * 3.5 * tokens
    assert terms.groups["attention"] == pytest.approx(scores / 989e12)
    # Eight bytes a parameter are read and written, the gradient's two are read; an eighth of them
    # on each rank.
    assert terms.groups["optimizer"] == pytest.approx(LLAMA.num_parameters / 8 * 14 / 3350e9)


def test_sharded_weights_are_gathered_twice_and_gradients_reduced() -> None:
    terms = terms_of(SHARED, 8192)
    exchange = by_name(terms)["weights and gradients between shards"]
    latency = 32 * 3 * 7 * 4e-6
    assert exchange.value == pytest.approx(LLAMA.num_parameters * 6 * 7 / 8 / 450e9 + latency)
    for zero, gathers, sums in ((1, 1, 1), (2, 1, 4), (3, 8, 4)):  # of four micro-batches
        terms = terms_of(Layout(shard=8, zero=zero, micro_batches=4))
        bytes_moved = LLAMA.num_parameters * 2 * (gathers + sums)
        value = by_name(terms)["weights and gradients between shards"].value
        assert value == pytest.approx(bytes_moved * 7 / 8 / 450e9, rel=0.05), zero
    wide = terms_of(SHARED, 8192, recipe="bfloat16/word/float32")
    assert wide.groups["communication"] > exchange.value


@pytest.mark.parametrize(
    ("compute", "passes"), [("scalify", 1), ("float8-row", 1), ("float8-tensor", 2)]
)
def test_a_cast_reads_its_operand_twice_if_the_scale_is_of_all_of_it(
    compute: str, passes: int
) -> None:
    recipe = parse(f"{compute}/split")
    chip = get_chip("H100-SXM")
    seconds = operation_seconds(64, 64, recipe.compute, recipe, 1e6, chip, exact("H100-SXM"))
    assert seconds["output.left"] == pytest.approx(64e6 * (2 * passes + 1) / 3350e9)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_stage_has_one_of_embedding_and_head(is_tied: bool) -> None:
    shape = replace(LLAMA, tie_embeddings=is_tied)
    layout = Layout(pipeline=2, zero=0)
    job = Job(shape, WORD, layout, cluster_of("H100-SXM", 2), 4096)
    layers = LLAMA.num_parameters - LLAMA.outer_parameters
    dense = layers / 2 + LLAMA.vocab_size * LLAMA.hidden_size + LLAMA.outer_vectors
    assert parameters_of(job, 16) == (pytest.approx(dense), 0)
    # Embedding and head may count as two of 128 groups of layers.
    model = read_model("llama-405b")
    assert unsuited(model, Layout(pipeline=16, interleave=8), 8192) == ""
    assert (
        unsuited(model, Layout(pipeline=16, interleave=9), 8192)
        == "144 groups of layers and 126 layers"
    )


def test_what_is_hidden_is_not_counted() -> None:
    hidden = terms_of(SHARED, 8192, **{"overlap.shard": 1.0})
    assert hidden.groups["communication"] == 0.0
    # Over a link of 1 GB/s computing cannot hide all.
    exposed = terms_of(SHARED, 8192, **{"overlap.shard": 1.0, "link": 1 / 450})
    assert exposed.groups["communication"] > 10


@pytest.mark.parametrize("batches", [4, 8, 16, 32])
def test_the_bubble_is_the_pipelines(batches: int) -> None:
    head = replace(LLAMA.matmuls[-1], out_features=1)
    shape = replace(
        LLAMA, vocab_size=1, matmuls=(*LLAMA.matmuls[:-1], head)
    )  # without a head all stages are equal
    layout = Layout(pipeline=4, zero=0, micro_batches=batches)
    terms = terms_of(layout, shape=shape)
    busy = sum(terms.groups[group] for group in ("matmuls", "attention", "elementwise", "loss"))
    share = terms.groups["bubble"] / (terms.groups["bubble"] + busy)
    assert share == pytest.approx(3 / (batches + 3), rel=1e-2)  # arXiv 2104.04473, section 2.2
    halved = terms_of(replace(layout, interleave=2), shape=shape)
    assert halved.groups["bubble"] == pytest.approx(terms.groups["bubble"] / 2)


def test_recomputation_costs_a_forward() -> None:
    none, full = (terms_of(replace(SHARED, recompute=how)) for how in ("none", "full"))
    layers = sum(matmul.num_parameters for matmul in LLAMA.matmuls if matmul.part != "head")
    assert full.groups["matmuls"] - none.groups["matmuls"] == pytest.approx(
        2 * layers * 4096 / 989e12, rel=1e-3
    )
    assert full.groups["loss"] == none.groups["loss"]


@pytest.mark.parametrize(
    ("layout", "is_cast_again"),
    [
        (SHARED, True),
        (replace(SHARED, zero=2), False),
        (Layout(data=8), False),
        (Layout(data=8, zero=0), False),
    ],
)
def test_weights_that_stay_gathered_are_cast_once_a_step(
    layout: Layout, is_cast_again: bool
) -> None:
    """Those that are gathered for each micro-batch are cast for each."""
    single, four = (
        terms_of(replace(layout, micro_batches=count), recipe="float8-row/word") for count in (1, 4)
    )
    if is_cast_again:
        assert four.groups["casts"] == pytest.approx(4 * single.groups["casts"])
    else:
        assert single.groups["casts"] < four.groups["casts"] < 3.9 * single.groups["casts"]


def test_tensor_ranks_halve_the_matmuls_and_exchange_activations() -> None:
    single, two = (terms_of(Layout(tensor=ranks, zero=0), 8192) for ranks in (1, 2))
    assert two.groups["matmuls"] == pytest.approx(single.groups["matmuls"] / 2, rel=1e-2)
    moved = 32 * 8 * (8192 * 4096 * 2 / 2 / 450e9 + 4e-6)
    assert by_name(two)["activations between tensor ranks"].value == pytest.approx(moved)


def test_experts_get_the_tokens_that_chose_them() -> None:
    mixtral = read_model("mixtral-8x7b")
    dense = read_model("llama-8b")
    terms = terms_of(Layout(shard=16, expert=8), shape=mixtral)
    active = 6 * sum(m.num_parameters * m.tokens_share for m in mixtral.matmuls)
    assert terms.groups["matmuls"] == pytest.approx(active * 4096 / 989e12, rel=2e-2)
    assert by_name(terms)["tokens between experts"].value > 0
    assert (
        unsuited(dense, Layout(shard=16, expert=8), 4096) == "8 expert ranks do not divide 1 expert"
    )


def test_a_token_travels_once_to_a_node_or_once_to_each_expert() -> None:
    shape = read_model("mixtral-8x7b")
    cluster = cluster_of("H100-SXM", 16, chips_per_node=2)
    steps = (
        terms_of(Layout(shard=16, expert=8), shape=shape, cluster=cluster, once_per_node=n)
        for n in (0.0, 1.0)
    )
    times = [by_name(terms)["tokens between experts"].value for terms in steps]
    # Two experts on four nodes: 2 × 3/4 copies leave the node, for 3 × (1 - 9/16) nodes.
    assert times[1] / times[0] == pytest.approx(3 * (1 - 9 / 16) / 1.5, rel=5e-3)


def test_an_all_to_all_waits_for_the_host_by_expert_and_hides_under_interleaving() -> None:
    """Routers take a millisecond a layer and micro-batch, and the launches of each expert on the
    rank a tenth of it.
    """
    rows = {"mixture_seconds": 1e-3, "expert_seconds": 1e-4, "overlap.interleaved": 1.0}
    shape = replace(read_model("mixtral-8x7b"), num_layers=32)
    for expert, layout in (
        (2, Layout(shard=16, expert=2)),
        (8, Layout(shard=16, expert=8, micro_batches=2)),
    ):
        waiting = by_name(terms_of(layout, shape=shape, **rows))[
            "routers, sorting and launches of mixtures"
        ]
        assert waiting.value == pytest.approx(
            layout.micro_batches * 32 * (1e-3 + 1e-4 * 8 / expert)
        )
    plain, interleaved = (
        by_name(
            terms_of(
                Layout(shard=8, expert=8, pipeline=2, interleave=v, micro_batches=4),
                shape=shape,
                **rows,
            )
        )
        for v in (1, 4)
    )
    assert plain["tokens between experts"].value > 0 == interleaved["tokens between experts"].value


def test_experts_have_fewer_copies_than_other_parameters() -> None:
    """Two replicas of 8 ranks: gradients of experts are summed once, as those of other parameters
    are.
    """
    shape = read_model("mixtral-8x7b")
    summed = []
    for expert in (1, 8):
        terms = terms_of(Layout(data=2, shard=8, expert=expert), shape=shape)
        text = by_name(terms)["gradients between replicas"].formula
        summed.append(float(text.split("an all-reduce of ")[1].split(" MB")[0].replace(",", "")))
    # Whoever computes with them, each rank is left with an eighth of all gradients, 2 bytes each.
    assert summed == pytest.approx([shape.num_parameters / 8 * 2 / 1e6] * 2, rel=5e-3)
    # Where every expert is on one rank alone, only the others are summed.
    terms = terms_of(Layout(data=8, zero=0, expert=8), shape=shape)
    dense_bytes = (shape.num_parameters - shape.expert_parameters) * 2
    term = by_name(terms)["gradients between replicas"]
    assert float(term.formula.split(": ")[1].split(" s,")[0]) < 2.1 * dense_bytes / 450e9 + 1e-3


def test_context_ranks_share_the_state_with_shards() -> None:
    """Memory and time agree on who shards (torchtitan's mesh axis ``fsdp``): 64 ranks share it
    however they are divided.
    """
    cluster = cluster_of("H100-SXM", 64)
    groups = []
    for context in (1, 4, 8):
        layout = Layout(shard=64 // context, context=context)
        job = Job(LLAMA, WORD, layout, cluster, 32_768, exact("H100-SXM"))
        terms = step_terms(job)
        state = job.memory.groups["optimizer"]
        gathered = by_name(terms)["weights and gradients between shards"].formula.split(", ")[1]
        groups.append((state, terms.groups["optimizer"], gathered))
    assert groups[0] == groups[1] == groups[2] and groups[0][2].startswith("64 ranks")
