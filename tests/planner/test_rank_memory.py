"""Memory of a rank against counts by hand: published tables, worked answers, and sums over all ranks."""

from __future__ import annotations

import dataclasses

import pytest

from narrowgauge.errors import RecipeError
from narrowgauge.planner.inputs.architectures import of_size
from narrowgauge.planner.inputs.layouts import Layout
from narrowgauge.planner.inputs.model_configs import read_architecture
from narrowgauge.planner.memory.rank_memory import FIXED, host_bytes, memory_terms, stages_of
from narrowgauge.planner.question import MEMORY_GROUPS
from narrowgauge.spec.notation import parse, parse_table

_NOTHING = dict.fromkeys(FIXED, 0.0)
_STORAGES = ("master", "split", "word", "compact", "states8")


def _total(size: float, storage: str, layout: Layout) -> float:
    return memory_terms(of_size(size), parse(f"bfloat16/{storage}"), layout, 0).total / 1e9


@pytest.mark.parametrize(
    ("size", "ranks", "expected"),
    [
        (10e9, 1, (160, 120, 80, 70, 60)),
        (30e9, 8, (60, 45, 30, 26.25, 22.5)),
        (30e9, 32, (15, 11.25, 7.5, 6.5625, 5.625)),
        (70e9, 8, (140, 105, 70, 61.25, 52.5)),
    ],
)
def test_state_of_known_sizes(size: float, ranks: int, expected: tuple[float, ...]) -> None:
    assert [_total(size, storage, Layout(shard=ranks)) for storage in _STORAGES] == pytest.approx(expected)


def test_state_of_four_stages_of_two_ranks_in_four_replicas() -> None:
    """A quarter of the layers, half of each matrix, and what each ZeRO stage shares over the four replicas."""
    layouts = [Layout(tensor=2, pipeline=4, shard=4, zero=zero) for zero in (0, 1, 2, 3)]  # type: ignore[arg-type]
    assert [_total(30e9, "master", layout) for layout in layouts] == pytest.approx([60, 26.25, 20.625, 15])
    assert _total(30e9, "word", layouts[1]) == pytest.approx(18.75)
    assert _total(30e9, "master", Layout(data=32)) == 480


@pytest.mark.parametrize("name", ["llama-8b", "gpt2-124m", "mixtral-8x7b", "deepseek-v3", "qwen3-8b"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2, pipeline=2, expert=2, shard=2, zero=1)])
def test_state_of_all_ranks_is_at_least_the_model(name: str, layout: Layout) -> None:
    """Every parameter is on some rank, and what lies on several is small: vectors, routers, outer parts of the worst stage."""
    architecture = read_architecture(name)
    terms = memory_terms(architecture, parse("bfloat16/master"), layout, 1024, fixed=_NOTHING)
    weights = terms.groups["weights"] * layout.tensor * layout.pipeline * (layout.expert if architecture.mixture else 1)
    if layout.num_ranks == 1:
        assert weights == 2 * architecture.num_parameters
    elif architecture.mixture is None:
        outer = 2 * architecture.vocab_size * architecture.hidden_size * 2
        assert 2 * architecture.num_parameters <= weights <= 2 * architecture.num_parameters * 1.04 + outer


def test_expert_ranks_share_experts_alone() -> None:
    mixtral, recipe = read_architecture("mixtral-8x7b"), parse("bfloat16/master")
    experts = 32 * 8 * 3 * 4096 * 14_336
    assert mixtral.expert_parameters == experts
    for ranks in (1, 2, 8):
        terms = memory_terms(mixtral, recipe, Layout(data=8, expert=ranks), 512)
        assert terms.groups["weights"] == 2 * (mixtral.num_parameters - experts + experts / ranks)


def test_keep_and_overrides_have_the_storage_of_their_own() -> None:
    llama = read_architecture("llama-1m")
    plain = memory_terms(llama, parse("bfloat16/word"), Layout(), 64).groups
    kept = memory_terms(
        llama, parse_table({"recipe": "bfloat16/word", "keep": ["model.layers.0"]}), Layout(), 64
    ).groups
    matrices = 4 * 128 * 128 + 3 * 128 * 320
    assert kept["weights"] - plain["weights"] == 2 * matrices + 2 * 2 * 128
    assert kept["optimizer"] - plain["optimizer"] == 4 * matrices - 4 * 2 * 128  # norms have no master beside float32


def test_groups_are_those_of_the_plan_and_every_term_says_how() -> None:
    for layout in (Layout(), Layout(shard=8), Layout(tensor=2, pipeline=2, micro_batches=4), Layout(offload="all")):
        terms = memory_terms(read_architecture("llama-8b"), parse("bfloat16/word"), layout, 4096)
        assert set(terms.groups) <= set(MEMORY_GROUPS)
        assert all(term.formula and term.source and term.value >= 0 for term in terms)
        low, high = terms.interval
        assert low < terms.total < high


def test_overhead_that_is_known_is_exact() -> None:
    fixed = {**_NOTHING, "context": 5e8}
    terms = memory_terms(read_architecture("llama-8b"), parse("bfloat16/word"), Layout(shard=8), 4096, fixed=fixed)
    assert terms.groups["overhead"] == 5e8
    assert all(term.interval == (term.value, term.value) for term in terms if term.group in ("overhead", "optimizer"))
    # Formulas of a step's tensors are as far off as counted steps say: a few per cent.
    low, high = terms.interval
    assert 0.95 * terms.total < low < terms.total < high < 1.05 * terms.total


def test_offloading_moves_the_state_to_the_host() -> None:
    llama, recipe = read_architecture("llama-8b"), parse("bfloat16/master")
    state = 16 * llama.num_parameters / 8
    for offload, share in (("optimizer", 12 / 16), ("all", 1)):
        layout = Layout(shard=8, offload=offload)  # type: ignore[arg-type]
        groups = memory_terms(llama, recipe, layout, 4096).groups
        assert groups["optimizer"] == 0
        assert host_bytes(llama, recipe, layout) == pytest.approx(state * share, rel=1e-3)


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages() -> None:
    """1F1B: stage 0 runs p micro-batches before its first backward; interleaving adds (p - 1) / (p v)."""
    gpt = read_architecture("gpt3-175b")
    assert [stage.in_flight for stage in stages_of(gpt, Layout(pipeline=8, micro_batches=64))] == [96, 12]
    assert stages_of(gpt, Layout(pipeline=8, micro_batches=2))[0].in_flight == 24  # no more than there are
    first = stages_of(gpt, Layout(pipeline=8, interleave=3, micro_batches=64))[0]
    assert first.in_flight == pytest.approx(96 * (1 + 7 / 24))
    assert sum(stage.layers for stage in stages_of(read_architecture("llama-405b"), Layout(pipeline=2))) == 126


def test_activations_of_published_models() -> None:
    """Calculon's and Korthikanti's closed forms: 22B and 175B without recomputation, GiB a chip, attention's scores kept."""
    recipe = parse("bfloat16/master")
    for name, pipeline, interleave, expected in (("megatron-22b", 1, 1, 59.25), ("gpt3-175b", 8, 3, 66.84)):
        layout = Layout(
            tensor=8, pipeline=pipeline, interleave=interleave, micro_batch=4 if pipeline == 1 else 1, micro_batches=64
        )
        terms = memory_terms(read_architecture(name), recipe, layout, 2048, attention="eager")
        kept = next(term.value for term in terms if term.name == "kept by the layers") / 2**30
        # Without sequence parallelism theirs keeps 10 of 34 whole on each rank, with dropout masks; ours is shared and has none.
        heads, hidden = (64, 6144) if pipeline == 1 else (96, 12_288)
        scores = heads * 2048 / hidden
        assert kept == pytest.approx(expected * (32 + 2 * scores) / 8 / (10 + 24 / 8 + 5 * scores / 8), rel=0.01)


def test_two_layers_are_gathered_at_once() -> None:
    llama = read_architecture("llama-8b")
    terms = {term.name: term.value for term in memory_terms(llama, parse("bfloat16/word"), Layout(shard=8), 8192)}
    assert terms["two layers, gathered"] == 2 * 2 * llama.layer_parameters
    large = read_architecture("llama-33b")
    full = memory_terms(large, parse("bfloat16/master"), Layout(shard=8, recompute="full"), 4096)
    assert next(t.value for t in full if t.name == "gradients of two layers") == 2 * 2 * large.layer_parameters
    assert terms["outer weights, gathered"] == 2 * llama.outer_parameters
    assert "two layers, gathered" not in {
        t.name for t in memory_terms(llama, parse("bfloat16/word"), Layout(data=8), 8192)
    }


def test_recomputation_keeps_inputs_alone() -> None:
    llama, recipe = read_architecture("llama-8b"), parse("bfloat16/word")
    full = memory_terms(llama, recipe, Layout(shard=8, recompute="full"), 8192)
    inputs = next(term.value for term in full if term.name == "inputs of the layers")
    assert inputs == 32 * 8192 * 2 * 4096
    assert full.total < memory_terms(llama, recipe, Layout(shard=8), 8192).total / 2


@pytest.mark.parametrize("name", ["llama-8b", "llama-33b", "llama-70b", "qwen3-8b"])
@pytest.mark.parametrize("recipe", ["bfloat16/master", "bfloat16/word", "float32/float32"])
def test_what_more_is_sharded_takes_less(name: str, recipe: str) -> None:
    """Stage 1 shares the optimizer's states, 2 gradients too, 3 weights too: the layers are the same in all of them."""
    model = read_architecture(name)
    for shard, micro_batches, recompute in ((8, 1, "none"), (8, 4, "full"), (64, 4, "none")):
        totals = [
            memory_terms(
                model,
                parse(recipe),
                Layout(shard=shard, zero=zero, micro_batches=micro_batches, recompute=recompute),  # type: ignore[arg-type]
                4096,
            ).total
            for zero in (0, 1, 2, 3)
        ]
        assert totals == sorted(totals, reverse=True)


def test_a_sum_of_micro_batches_is_the_only_gradient_where_each_is_added_at_once() -> None:
    """Megatron-LM: 4 bytes a parameter; this project's trainer: the sum, and the gradients of the last micro-batch."""
    model, recipe = read_architecture("llama-8b"), parse("bfloat16/word")
    held = model.num_parameters / 2
    theirs = memory_terms(model, recipe, Layout(tensor=2, micro_batches=4), 512).groups["gradients"]
    head = model.vocab_size * model.hidden_size / 2 * 2
    assert theirs == pytest.approx(4 * held + head, rel=1e-3)
    ours = memory_terms(model, recipe, Layout(micro_batches=4), 512).groups["gradients"]
    assert ours == pytest.approx(6 * model.num_parameters, rel=1e-3)


def test_gradients_are_summed_in_the_dtype_that_was_asked_for() -> None:
    """An 8B layout that ran in 70.8 GB: with float32 sums it is planned at 88.4 GB, and nothing else could be asked for."""
    llama, recipe = read_architecture("llama-8b"), parse("bfloat16/master")
    wide = Layout(context=2, shard=4, zero=1, micro_batches=4)
    narrow = dataclasses.replace(wide, accumulation_dtype="bfloat16")
    totals = [memory_terms(llama, recipe, layout, 8192).total / 1e9 for layout in (wide, narrow)]
    assert totals == pytest.approx([88.4, 71.9], abs=0.1)
    with pytest.raises(RecipeError, match="accumulation_dtype = 'bfloat'"):
        Layout(accumulation_dtype="bfloat")


def test_gradients_may_stay_beside_their_sum() -> None:
    """DeepSpeed's BF16_Optimizer: 2 and 4 bytes a parameter at every moment, beside 2 of the weights."""
    gpt, recipe = read_architecture("megatron-22b"), parse("bfloat16/master")
    alone = Layout(tensor=4, pipeline=4, micro_batches=16, recompute="full")
    beside = dataclasses.replace(alone, keeps_gradients=True)
    found = [memory_terms(gpt, recipe, layout, 2048, fixed=_NOTHING).groups for layout in (alone, beside)]
    assert found[1]["gradients"] == pytest.approx(3 * found[1]["weights"])
    assert found[1]["gradients"] - found[0]["gradients"] == pytest.approx(found[1]["weights"], rel=0.05)


def test_without_sequence_parallelism_norms_and_their_inputs_are_whole() -> None:
    """Korthikanti et al., equations 2 and 4: 10 + 24 / t against 34 / t, two of them masks of dropout; full: 2 against 2 / t."""
    gpt, recipe = read_architecture("megatron-22b"), parse("bfloat16/master")
    whole, shared = Layout(tensor=8, sequence_parallel=False), Layout(tensor=8)
    units = []
    for layout in (whole, shared):
        terms = memory_terms(gpt, recipe, layout, 2048)
        kept = next(term.value for term in terms if term.name == "kept by the layers")
        units.append(kept / 48 / 2048 / 6144)
    assert units == pytest.approx([8 + 24 / 8, 32 / 8], rel=0.01)
    full = [dataclasses.replace(layout, recompute="full") for layout in (whole, shared)]
    inputs = [
        next(t.value for t in memory_terms(gpt, recipe, layout, 2048) if t.name == "inputs of the layers")
        for layout in full
    ]
    assert inputs[0] == 8 * inputs[1]
    # One rank has nothing to share.
    alone = [memory_terms(gpt, recipe, Layout(sequence_parallel=parallel), 2048).total for parallel in (True, False)]
    assert alone[0] == alone[1]


def test_expert_ranks_inside_tensor_ranks_hold_whole_experts() -> None:
    """As many experts on a rank, each whole instead of a half: twice the weights, and optimizer states on twice the ranks."""
    model, recipe = read_architecture("deepseek-v3"), parse("bfloat16/master")
    split = Layout(tensor=2, pipeline=8, shard=64, zero=1, expert=32, recompute="full")
    folded = dataclasses.replace(split, expert_tensor=1)
    found = [memory_terms(model, recipe, layout, 4096, fixed=_NOTHING).groups for layout in (split, folded)]
    dense = (model.num_parameters - model.expert_parameters) / 16
    experts = model.expert_parameters / 8 / 32
    assert found[0]["weights"] == pytest.approx(2 * (dense + experts / 2), rel=0.15)
    assert found[1]["weights"] - found[0]["weights"] == pytest.approx(experts, rel=0.1)
    assert found[1]["optimizer"] == pytest.approx(found[0]["optimizer"], rel=1e-6)
