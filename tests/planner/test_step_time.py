"""Step times: terms worked out by hand, laws over layouts, and what cannot run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from narrowgauge.errors import ChipError, NarrowgaugeError, RecipeError
from narrowgauge.planner.inputs.architectures import of_size
from narrowgauge.planner.inputs.clusters import Cluster, Nodes, cluster_of
from narrowgauge.planner.inputs.efficiency import Share, Shares, shares_of
from narrowgauge.planner.inputs.jobs import Job
from narrowgauge.planner.inputs.layouts import Layout
from narrowgauge.planner.inputs.model_configs import read_architecture
from narrowgauge.planner.question import STEP_GROUPS
from narrowgauge.planner.terms import Term, Terms
from narrowgauge.planner.time.step_time import (
    LATE_NODES,
    SLOWEST_KIND,
    UNSTEADY_GROUPS,
    stage_layers,
    step_terms,
    why_not,
)
from narrowgauge.spec.chips import get_chip
from narrowgauge.spec.notation import parse

LLAMA, H100 = read_architecture("llama-8b"), cluster_of("H100-SXM", 8)
WORD = parse("bfloat16/word")
SHARED = Layout(shard=8)


def exact(chip: str, **rows: float) -> Shares:
    """Shares that reach every printed rate, start kernels in no time and hide nothing."""
    shares = shares_of(get_chip(chip))
    values = {
        name: 0.0 if name.endswith("seconds") or name.startswith(("overlap", "slowed")) else 1.0 for name in shares.rows
    }
    values |= {"spread": 0.0, "data": 0.0} | rows
    return Shares({name: Share(value, value, value, "by hand") for name, value in values.items()})


def by_name(terms: Terms) -> dict[str, Term]:
    return {term.name: term for term in terms}


def test_matmuls_and_attention_by_hand() -> None:
    tokens = 2 * 8192
    terms = step_terms(Job(LLAMA, WORD, replace(SHARED, micro_batch=2), H100, 8192, exact("H100-SXM")))
    weights = sum(matmul.num_parameters for matmul in LLAMA.matmuls)
    assert terms.groups["matmuls"] == pytest.approx(6 * weights * tokens / 989e12, rel=1e-3)
    scores = LLAMA.attention_flops(8192) / 3 * 3.5 * tokens
    assert terms.groups["attention"] == pytest.approx(scores / 989e12)
    # Eight bytes a parameter are read and written, the gradient's two are read; an eighth of them on each rank.
    assert terms.groups["optimizer"] == pytest.approx(LLAMA.num_parameters / 8 * 14 / 3350e9)


def test_sharded_weights_are_gathered_twice_and_gradients_reduced() -> None:
    terms = step_terms(Job(LLAMA, WORD, SHARED, H100, 8192, exact("H100-SXM")))
    found = by_name(terms)["weights and gradients between shards"]
    latency = 32 * 3 * 7 * 4e-6
    assert found.value == pytest.approx(LLAMA.num_parameters * 6 * 7 / 8 / 450e9 + latency)
    wide = step_terms(Job(LLAMA, parse("bfloat16/word/float32"), SHARED, H100, 8192, exact("H100-SXM")))
    assert wide.groups["communication"] > found.value


def test_what_is_hidden_is_not_counted() -> None:
    hidden = step_terms(Job(LLAMA, WORD, SHARED, H100, 8192, exact("H100-SXM", **{"overlap.shard": 1.0})))
    assert hidden.groups["communication"] == 0.0
    # Over a link of 1 GB/s computing cannot hide all.
    slow = Cluster("slow", (Nodes(get_chip("H100-SXM"), link_gb_per_second=1.0),))
    exposed = step_terms(Job(LLAMA, WORD, SHARED, slow, 8192, exact("H100-SXM", **{"overlap.shard": 1.0})))
    assert exposed.groups["communication"] > 10


@pytest.mark.parametrize("batches", [4, 8, 16, 32])
def test_the_bubble_is_the_pipelines(batches: int) -> None:
    shape = replace(LLAMA, vocab_size=1)  # without a head all stages are equal
    layout = Layout(pipeline=4, zero=0, micro_batches=batches)
    terms = step_terms(Job(shape, WORD, layout, cluster_of("H100-SXM", 4), 4096, exact("H100-SXM")))
    busy = sum(terms.groups[group] for group in ("matmuls", "attention", "elementwise", "loss"))
    assert terms.groups["bubble"] / (terms.groups["bubble"] + busy) == pytest.approx(layout.bubble, rel=1e-2)
    halved = step_terms(
        Job(shape, WORD, replace(layout, interleave=2), cluster_of("H100-SXM", 4), 4096, exact("H100-SXM"))
    )
    assert halved.groups["bubble"] == pytest.approx(terms.groups["bubble"] / 2)


def test_recomputation_costs_a_forward() -> None:
    none, full = (
        step_terms(Job(LLAMA, WORD, replace(SHARED, recompute=how), H100, 4096, exact("H100-SXM")))
        for how in ("none", "full")
    )
    layers = sum(matmul.num_parameters for matmul in LLAMA.matmuls if matmul.part != "head")
    assert full.groups["matmuls"] - none.groups["matmuls"] == pytest.approx(2 * layers * 4096 / 989e12, rel=1e-3)
    assert full.groups["loss"] == none.groups["loss"]


@pytest.mark.parametrize(
    ("layout", "is_cast_again"),
    [(SHARED, True), (replace(SHARED, zero=2), False), (Layout(data=8), False), (Layout(data=8, zero=0), False)],
)
def test_weights_that_stay_gathered_are_cast_once_a_step(layout: Layout, is_cast_again: bool) -> None:
    """Those that are gathered for each micro-batch are cast for each."""
    recipe = parse("float8-row/word")
    one, four = (
        step_terms(Job(LLAMA, recipe, replace(layout, micro_batches=count), H100, 4096, exact("H100-SXM")))
        for count in (1, 4)
    )
    if is_cast_again:
        assert four.groups["casts"] == pytest.approx(4 * one.groups["casts"])
    else:
        assert one.groups["casts"] < four.groups["casts"] < 3.9 * one.groups["casts"]


def test_tensor_ranks_halve_the_matmuls_and_exchange_activations() -> None:
    one, two = (
        step_terms(
            Job(LLAMA, WORD, Layout(tensor=ranks, zero=0), cluster_of("H100-SXM", ranks), 8192, exact("H100-SXM"))
        )
        for ranks in (1, 2)
    )
    assert two.groups["matmuls"] == pytest.approx(one.groups["matmuls"] / 2, rel=1e-2)
    moved = 32 * 8 * (8192 * 4096 * 2 / 2 / 450e9 + 4e-6)
    assert by_name(two)["activations between tensor ranks"].value == pytest.approx(moved)


def test_experts_get_the_tokens_that_chose_them() -> None:
    mixtral, dense = read_architecture("mixtral-8x7b"), read_architecture("llama-8b")
    cluster = cluster_of("H100-SXM", 16)
    terms = step_terms(Job(mixtral, WORD, Layout(shard=16, expert=8), cluster, 4096, exact("H100-SXM")))
    active = 6 * sum(m.num_parameters * m.tokens_share for m in mixtral.matmuls)
    assert terms.groups["matmuls"] == pytest.approx(active * 4096 / 989e12, rel=2e-2)
    assert by_name(terms)["tokens between experts"].value > 0
    assert why_not(dense, Layout(shard=16, expert=8), 4096) == "8 expert ranks do not divide 1 expert"


def test_a_token_travels_once_to_a_node_or_once_to_each_expert() -> None:
    shape, cluster = read_architecture("mixtral-8x7b"), cluster_of("H100-SXM", 16, chips_per_node=2)
    layout = Layout(shard=16, expert=8)
    times = [
        by_name(step_terms(Job(shape, WORD, layout, cluster, 4096, exact("H100-SXM", once_per_node=once))))[
            "tokens between experts"
        ].value
        for once in (0.0, 1.0)
    ]
    # Two experts on four nodes: 2 × 3/4 copies leave the node, for 3 × (1 - 9/16) nodes.
    assert times[1] / times[0] == pytest.approx(3 * (1 - 9 / 16) / 1.5, rel=5e-3)


def test_experts_have_fewer_copies_than_other_parameters() -> None:
    """Two replicas of 8 ranks: gradients of experts are summed once, as those of other parameters are."""
    shape, cluster = read_architecture("mixtral-8x7b"), cluster_of("H100-SXM", 16)
    summed = []
    for expert in (1, 8):
        terms = step_terms(Job(shape, WORD, Layout(data=2, shard=8, expert=expert), cluster, 4096, exact("H100-SXM")))
        text = by_name(terms)["gradients between replicas"].formula
        summed.append(float(text.split("an all-reduce of ")[1].split(" MB")[0].replace(",", "")))
    # Whoever computes with them, each rank is left with an eighth of all gradients, 2 bytes each.
    assert summed == pytest.approx([shape.num_parameters / 8 * 2 / 1e6] * 2, rel=5e-3)
    # Where every expert is on one rank alone, only the others are summed.
    terms = step_terms(Job(shape, WORD, Layout(data=8, zero=0, expert=8), H100, 4096, exact("H100-SXM")))
    others = (shape.num_parameters - shape.expert_parameters) * 2
    term = by_name(terms)["gradients between replicas"]
    assert float(term.formula.split(": ")[1].split(" s,")[0]) < 2.1 * others / 450e9 + 1e-3


@pytest.mark.parametrize(
    ("recipe", "layout", "moved"),
    [
        ("bfloat16/word", Layout(shard=8, offload="optimizer"), 4 / 8),
        ("float32/float32", Layout(shard=8, offload="optimizer"), 8 / 8),
        ("bfloat16/word", Layout(shard=8, offload="all", micro_batches=3), 3 * 6 / 8),
        ("bfloat16/word", Layout(shard=8, zero=1, offload="all"), 6),
    ],
)
def test_what_passes_between_chip_and_host(recipe: str, layout: Layout, moved: float) -> None:
    """Gradients and weights, each once; or weights twice and gradients for each micro-batch, of what a rank holds."""
    terms = step_terms(Job(LLAMA, parse(recipe), layout, H100, 4096, exact("H100-SXM")))
    formula = by_name(terms)["weights and gradients from and to the host"].formula
    assert float(formula.split(" GB")[0]) == pytest.approx(moved * LLAMA.num_parameters / 1e9, rel=5e-3)


def test_failures_and_checkpoints_follow_young_and_daly() -> None:
    cluster = replace(H100, chip_mtbf_hours=1000.0)
    terms = by_name(
        step_terms(Job(LLAMA, WORD, SHARED, cluster, 8192, exact("H100-SXM", host=1.0, restart_seconds=600.0)))
    )
    step = sum(t.value for t in terms.values() if t.group not in ("data", "checkpoints", "faults"))
    mtbf, saved = 1000 * 3600 / 8, LLAMA.num_parameters * 8 / 8 / 63e9
    interval = math.sqrt(2 * saved * mtbf)
    assert terms["copying states"].value == pytest.approx(step * saved / interval)
    assert terms["work lost and restarts"].value == pytest.approx(step * (interval / 2 + 600) / mtbf)
    assert "work lost and restarts" not in by_name(step_terms(Job(LLAMA, WORD, SHARED, H100, 8192)))


def test_the_slowest_generation_sets_the_pace() -> None:
    mixed = Cluster("mixed", (Nodes(get_chip("H100-SXM")), Nodes(get_chip("A100-SXM4-80GB"))))
    layout = Layout(shard=16)
    terms = step_terms(Job(LLAMA, WORD, layout, mixed, 8192))
    slow = step_terms(Job(LLAMA, WORD, layout, cluster_of("A100-SXM4-80GB", 16), 8192))
    assert terms.total == pytest.approx(slow.total)
    assert "A100-SXM4-80GB sets the pace; alone: H100-SXM5-80GB" in by_name(terms)[SLOWEST_KIND].formula


LAYOUTS = (
    SHARED,
    Layout(data=2, shard=4, recompute="full"),
    Layout(tensor=4, pipeline=2, micro_batches=8, zero=0),
    Layout(shard=4, context=2, offload="optimizer"),
    Layout(shard=8, offload="all"),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("recipe", ["bfloat16/float32", "float8-row/word", "float16/exact/reproducible"])
def test_every_term_has_a_group_an_interval_and_a_source(layout: Layout, recipe: str) -> None:
    terms = step_terms(Job(LLAMA, parse(recipe), layout, H100, 4096))
    for term in terms:
        assert term.group in STEP_GROUPS and term.source and term.formula
        low, high = term.interval
        assert 0 <= low <= term.value <= high < math.inf
    low, high = terms.interval
    assert low < terms.total < high
    assert 0 < terms.without(*UNSTEADY_GROUPS).total < terms.total


def test_unfused_attention_is_slower_and_selective_recomputation_repeats_it() -> None:
    flash, eager = (step_terms(Job(LLAMA, WORD, SHARED, H100, 4096), attention=kind) for kind in ("flash", "eager"))
    again = step_terms(Job(LLAMA, WORD, replace(SHARED, recompute="selective"), H100, 4096), attention="eager")
    assert flash.groups["attention"] < eager.groups["attention"] < again.groups["attention"]
    assert again.groups["matmuls"] == eager.groups["matmuls"]


@pytest.mark.parametrize(
    ("layers", "stages", "slowest"), [(32, 4, 8), (126, 16, 8), (105, 35, 3), (3, 2, 3), (2, 2, 1)]
)
def test_layers_of_the_slowest_stage(layers: int, stages: int, slowest: int) -> None:
    assert stage_layers(layers, stages)[0] == slowest


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(shard=16), "16 ranks was requested on 8 chips"),
        (Layout(tensor=3), "3 tensor ranks do not divide 32 heads"),
        (Layout(context=3), "3 context ranks do not divide"),
        (Layout(pipeline=8, interleave=8), "64 groups of layers and 32 layers"),
        (Layout(shard=8, expert=2), "2 expert ranks do not divide 1 expert"),
    ],
)
def test_a_layout_that_does_not_suit_is_refused_in_a_line(layout: Layout, message: str) -> None:
    with pytest.raises(NarrowgaugeError) as caught:
        step_terms(Job(LLAMA, WORD, layout, H100, 4096))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_what_a_chip_does_not_multiply_is_refused() -> None:
    with pytest.raises(ChipError, match="V100-SXM2-32GB, which does not multiply bfloat16"):
        step_terms(Job(LLAMA, WORD, SHARED, cluster_of("V100", 8), 4096))
    with pytest.raises(RecipeError, match="only the size"):
        step_terms(Job(of_size(8e9), WORD, SHARED, H100, 4096))


def test_all_chips_wait_for_late_nodes() -> None:
    equal = Nodes(get_chip("H100-SXM"), count=8)
    late = (replace(equal, count=6), replace(equal, count=2, speed=0.8))
    layout = Layout(shard=64, micro_batches=16)
    found = [
        step_terms(
            Job(read_architecture("llama-33b"), parse("bfloat16/word"), layout, Cluster("eight nodes", groups), 4096)
        )
        for groups in ((equal,), late)
    ]
    waiting = [term for term in found[1] if term.name == LATE_NODES]
    assert len(waiting) == 1 and "all chips wait for 16 of them" in waiting[0].formula
    # Everything but what hides behind it takes a quarter longer.
    assert found[1].total == pytest.approx(1.25 * found[0].total, rel=0.01)
    with pytest.raises(ChipError, match="Use a share"):
        replace(equal, speed=1.2)


def test_expert_ranks_may_take_tensor_ranks_as_well() -> None:
    """DeepSeek-V3 as Megatron-Bridge lists it: 64 expert ranks over 32 data ranks of 2 tensor ranks, on 512 chips."""
    model, recipe = read_architecture("deepseek-v3"), parse("bfloat16/master")
    layout = Layout(shard=32, zero=1, tensor=2, pipeline=8, expert=64, micro_batches=32)
    assert why_not(model, layout, 4096) == ""
    assert "128 expert ranks do not divide 32 data ranks and 2 tensor ranks" in why_not(
        model, replace(layout, expert=128), 4096
    )
    cluster = cluster_of("H100-SXM", 512)
    folded = step_terms(Job(model, recipe, layout, cluster, 4096))
    split = step_terms(Job(model, recipe, replace(layout, expert=32), cluster, 4096))
    # The same operations; each expert is multiplied whole, by half as many tokens on each of twice the ranks.
    assert folded.groups["matmuls"] == pytest.approx(split.groups["matmuls"], rel=0.05)


def test_without_sequence_parallelism_norms_take_longer() -> None:
    gpt, recipe, cluster = read_architecture("megatron-22b"), parse("bfloat16/master"), cluster_of("A100-SXM4-80GB", 8)
    whole, shared = (
        step_terms(Job(gpt, recipe, Layout(tensor=8, sequence_parallel=parallel), cluster, 2048)).groups
        for parallel in (False, True)
    )
    assert whole["elementwise"] > 3 * shared["elementwise"]
    assert whole["matmuls"] == shared["matmuls"]


def test_software_decides_how_fast_the_same_chips_are() -> None:
    gpt, recipe = read_architecture("gpt3-175b"), parse("bfloat16/master")
    layout = Layout(tensor=8, pipeline=8, data=6, zero=0, micro_batches=32, recompute="full", sequence_parallel=False)
    seconds = {
        name: step_terms(Job(gpt, recipe, layout, cluster_of("A100-SXM4-80GB", 384, software=name), 2048))
        for name in ("megatron-lm-2022", "megatron-deepspeed-2022", "")
    }
    fast, slow, assumed = seconds.values()
    assert 1.15 < slow.total / fast.total < 1.3
    low, high = assumed.interval
    assert low < fast.total < assumed.total < slow.total < high
    with pytest.raises(NarrowgaugeError, match="software 'megatron'"):
        cluster_of("A100-SXM4-80GB", 8, software="megatron")


def test_embedding_and_head_may_stand_for_a_layer_each() -> None:
    """Llama 3 405B has 126 layers so that 128 groups are equal in work (arXiv 2407.21783, section 3.3.2); 16 × 8 of them ran."""
    model = read_architecture("llama-405b")
    layout = Layout(shard=4, zero=1, tensor=4, pipeline=16, interleave=8, micro_batches=64)
    assert why_not(model, layout, 8192) == ""
    assert "144 groups of layers and 126 layers" in why_not(model, replace(layout, interleave=9), 8192)
    assert step_terms(Job(model, WORD, layout, cluster_of("H100-SXM", 256), 8192)).total > 0
