"""Search: every chip is used, what is fixed stays, what is returned fits, and what does not fit says what would."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from narrowgauge.errors import ChipError, NarrowgaugeError, RecipeError
from narrowgauge.planner.inputs.clusters import Cluster, Nodes, cluster_of
from narrowgauge.planner.inputs.jobs import Job
from narrowgauge.planner.inputs.layouts import Layout
from narrowgauge.planner.inputs.model_configs import read_architecture
from narrowgauge.planner.memory.rank_memory import memory_terms
from narrowgauge.planner.search import LEAST_TOKENS_PER_STEP, _Request, search
from narrowgauge.planner.time.step_time import step_terms
from narrowgauge.spec.chips import get_chip
from narrowgauge.spec.notation import parse

SMALL, LARGE = read_architecture("llama-8b"), read_architecture("llama-33b")
H100 = cluster_of("H100-SXM", 8)
WORD, MASTER = parse("bfloat16/word"), parse("bfloat16/master")


@pytest.mark.parametrize("chips", [1, 8, 64])
@pytest.mark.parametrize("recipe", ["bfloat16/word", "float8-tensor/word"])
def test_options_fit_use_every_chip_and_come_fastest_first(chips: int, recipe: str) -> None:
    cluster = cluster_of("H200", chips)
    found = search(SMALL, parse(recipe), cluster, 4096, 1 << 20)
    rates = [option.tokens_per_second or 0.0 for option in found]
    assert rates == sorted(rates, reverse=True)
    for option in found:
        assert option.fits and not option.advice
        assert option.layout.num_ranks == chips
        assert option.memory == memory_terms(SMALL, parse(recipe), option.layout, 4096)
        assert option.step == step_terms(Job(SMALL, parse(recipe), option.layout, cluster, 4096))
        assert option.tokens_per_step == pytest.approx(1 << 20, rel=0.5)


def test_what_is_fixed_stays() -> None:
    fixed = {"tensor": 2, "recompute": "full", "micro_batch": 2, "zero": 1}
    for option in search(SMALL, WORD, H100, 4096, fixed=fixed):
        assert {name: getattr(option.layout, name) for name in fixed} == fixed
    stages = search(LARGE, WORD, cluster_of("A100-SXM4-80GB", 32), 4096, fixed={"pipeline": 4, "tensor": 2, "shard": 4})
    assert {(o.layout.pipeline, o.layout.tensor, o.layout.shard) for o in stages} == {(4, 2, 4)}


def test_pure_data_parallelism_of_thirty_billion_never_fits() -> None:
    for cluster in (cluster_of("A100-SXM4-80GB", 8), cluster_of("RTX-4090", 32), cluster_of("H200", 8)):
        [option] = search(LARGE, MASTER, cluster, 2048, fixed={"data": cluster.num_chips, "zero": 0})
        assert option.fits is False
        assert f"all {cluster.num_chips} replicas" in option.advice or "offload" in option.advice
        assert option.memory.groups["optimizer"] > 300e9


def test_advice_is_the_smallest_change_and_it_is_true() -> None:
    cluster = cluster_of("A100-SXM4-40GB", 8)
    [option] = search(LARGE, MASTER, cluster, 4096)
    assert option.fits is False and "needs" in option.reason
    assert "at 8 B/param (bfloat16/word)" in option.advice and "on 16 chips" in option.advice
    assert search(LARGE, WORD, cluster, 4096)[0].fits
    assert search(LARGE, MASTER, cluster_of("A100-SXM4-40GB", 16), 4096)[0].fits
    for wider in ("bfloat16/split", "bfloat16/split8"):
        assert not search(LARGE, parse(wider), cluster, 4096)[0].fits


@pytest.mark.parametrize("recipe", ["float8/collage-plus", "float16/split", "scalify-float16/scaled16"])
def test_computes_with_storages_of_their_own_get_advice(recipe: str) -> None:
    [option] = search(LARGE, parse(recipe), cluster_of("RTX-4090", 8), 4096)
    assert option.fits is False and option.advice


def test_the_host_holds_states_only_where_it_is_known_to_have_room() -> None:
    nodes = Nodes(get_chip("A100-SXM4-40GB"))
    for gigabytes, fits in ((None, False), (64.0, False), (2000.0, True)):
        cluster = Cluster("hosts", (replace(nodes, host_memory_gb=gigabytes),))
        found = search(LARGE, MASTER, cluster, 2048)
        assert bool(found[0].fits) is fits
        assert not fits or {option.layout.offload for option in found} <= {"optimizer", "all"}


def test_less_memory_or_less_time() -> None:
    cluster = cluster_of("H200", 8)
    small = search(SMALL, WORD, cluster, 4096, minimize="memory")[0]
    fast = search(SMALL, WORD, cluster, 4096, minimize="days")[0]
    assert small.memory.total <= fast.memory.total
    # The least of all layouts: everything shared, computed again, one sequence at a time.
    for layout in (Layout(shard=8, recompute="full"), Layout(tensor=8, zero=0, recompute="full")):
        assert small.memory.total <= memory_terms(SMALL, WORD, layout, 4096).total
    assert (small.tokens_per_second or 0.0) <= (fast.tokens_per_second or 0.0)


def test_experts_and_long_sequences_get_their_axes() -> None:
    mixture = read_architecture("mixtral-8x7b")
    assert any(option.layout.expert == 8 for option in search(mixture, WORD, cluster_of("H200", 32), 4096))
    long = search(SMALL, WORD, cluster_of("H100-SXM", 32), 131_072, fixed={"tensor": 1})
    assert any(option.layout.context > 1 for option in long)


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({"tensor": 3}, "3 tensor ranks do not divide 32 heads"),
        ({"tensor": 2, "data": 3}, "6 ranks do not divide 8 chips"),
        ({"shard": 16}, "16 ranks do not divide 8 chips"),
        ({"expert": 2}, "2 expert ranks do not divide 1 expert"),
    ],
)
def test_what_no_layout_has_is_refused_in_a_line(fixed: dict[str, int], message: str) -> None:
    with pytest.raises(NarrowgaugeError) as caught:
        search(SMALL, WORD, H100, 4096, fixed=fixed)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_chip_that_cannot_multiply_is_refused() -> None:
    with pytest.raises(ChipError, match="does not multiply bfloat16"):
        search(SMALL, WORD, cluster_of("V100", 8), 4096)
    with pytest.raises(RecipeError, match="no layout with"):
        search(SMALL, WORD, H100, 4096, fixed={"pipeline": 64})


def test_a_free_batch_may_save_the_sums_of_gradients() -> None:
    """Where the tokens of a step are given, they are kept: gradients are then summed over micro-batches."""
    free = search(SMALL, MASTER, cluster_of("H100-SXM", 2), 8192, fixed={"tensor": 1, "shard": 2, "zero": 3})
    given = search(SMALL, MASTER, cluster_of("H100-SXM", 2), 8192, 1 << 22, fixed={"tensor": 1, "shard": 2, "zero": 3})
    assert free[0].memory.total <= given[0].memory.total
    assert isinstance(given[0].layout, Layout) and given[0].tokens_per_step == 1 << 22


def test_a_step_has_the_tokens_that_were_asked_for() -> None:
    """16,384 replicas cannot share 4,096 sequences: layouts in which several chips compute one sequence are taken."""
    many, model = cluster_of("H100-SXM", 16_384), read_architecture("llama-405b")
    for asked in (1 << 24, None):
        best = search(model, WORD, many, 4096, asked)[0]
        assert best.fits and best.tokens_per_step <= 1 << 25
    assert best.layout.model_ranks > 1
    with pytest.raises(
        RecipeError, match=r"a step of 4,096 tokens was requested on 8 chips, which compute 32,768 at once"
    ):
        search(SMALL, WORD, H100, 4096, 4096, fixed={"tensor": 1})


def test_advice_counts_the_chips_that_share_what_one_replica_cannot() -> None:
    """A layout of eight tensor ranks has one replica, which shares nothing; on more chips its replicas do."""
    [option] = search(read_architecture("deepseek-v3"), WORD, H100, 4096)
    assert option.fits is False and option.layout.shard == 1
    count = int(option.advice.partition(" chips")[0].rpartition("on ")[2])
    shared = replace(option.layout, shard=count // 8, zero=3)
    assert memory_terms(read_architecture("deepseek-v3"), WORD, shared, 4096).total < 80 * 2**30


@pytest.mark.parametrize(
    ("name", "chip", "chips", "given"),
    [
        ("llama-8b", "H100-SXM", 8, {}),
        ("llama-33b", "A100-SXM4-40GB", 16, {}),
        ("llama-70b", "H100-SXM", 32, {"minimize": "memory"}),
        ("mixtral-8x7b", "H100-SXM", 16, {}),
        ("llama-33b", "H100-SXM", 8, {"fixed": {"zero": 1}}),
        ("qwen3-8b", "A100-SXM4-40GB", 8, {"fixed": {"offload": "all"}}),
    ],
)
def test_what_is_not_looked_at_would_not_have_been_taken(
    name: str, chip: str, chips: int, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the lower bound of the memory and without, the options are the same; and it is a lower bound."""
    model, cluster, bound = read_architecture(name), cluster_of(chip, chips), _Request.least_bytes
    looked_at: list[tuple[float, float]] = []

    def without(request: _Request, layout: Layout) -> float:
        looked_at.append((bound(request, layout), request.memory(layout).total))
        return 0.0

    for recipe in ("bfloat16/master", "int8-row/word"):
        pruned = search(model, parse(recipe), cluster, 4096, **given)
        with monkeypatch.context() as patched:
            patched.setattr(_Request, "least_bytes", without)
            assert search(model, parse(recipe), cluster, 4096, **given) == pruned
    assert len(looked_at) > 5 and all(least <= held for least, held in looked_at)


def test_a_narrower_storage_does_not_fit_worse() -> None:
    """It once fitted barely in steps of half a million tokens where a wider one, which did not, got smaller steps for certain."""
    cluster = cluster_of("A100-SXM4-40GB", 8)
    for storage in ("states8", "compact", "word"):
        options = search(LARGE, parse(f"bfloat16/{storage}"), cluster, 4096)
        assert any(option.is_certain and option.fits for option in options)


def test_steps_are_not_smaller_than_half_a_million_tokens_where_any_fit() -> None:
    """On one chip of a large model a single micro-batch would need no sum of gradients, and 4,096 tokens a step."""
    options = search(LARGE, MASTER, H100, 4096)
    assert all(option.tokens_per_step >= LEAST_TOKENS_PER_STEP for option in options)
    # Where the sum fits nowhere, one micro-batch is all there is.
    large = search(read_architecture("llama-70b"), WORD, H100, 4096)
    assert large[0].fits and large[0].tokens_per_step < LEAST_TOKENS_PER_STEP
    asked = search(LARGE, MASTER, H100, 4096, 8 * 4096)
    assert asked[0].tokens_per_step == 8 * 4096
