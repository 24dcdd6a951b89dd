"""Search: every chip is used, what is fixed stays, what is returned fits, and what does not fit says what would."""

from __future__ import annotations

from dataclasses import replace

import pytest

from narrowgauge.errors import RecipeError
from narrowgauge.planner.clusters import Cluster, Nodes, cluster_of
from narrowgauge.planner.model import read_model
from narrowgauge.planner.search import LEAST_TOKENS_PER_STEP, search
from narrowgauge.spec.chips import get_chip
from narrowgauge.spec.notation import parse

SMALL, LARGE = read_model("llama-8b"), read_model("llama-33b")
H100 = cluster_of("H100-SXM", 8)
WORD, MASTER = parse("bfloat16/word"), parse("bfloat16/master")


def test_what_is_fixed_stays() -> None:
    fixed = {"tensor": 2, "recompute": "full", "micro_batch": 2, "zero": 1}
    for option in search(SMALL, WORD, H100, 4096, fixed=fixed):
        assert {name: getattr(option.layout, name) for name in fixed} == fixed
    stages = search(LARGE, WORD, cluster_of("A100-SXM4-80GB", 32), 4096, fixed={"pipeline": 4, "tensor": 2, "shard": 4})
    assert {(o.layout.pipeline, o.layout.tensor, o.layout.shard) for o in stages} == {(4, 2, 4)}


def test_advice_is_the_smallest_change_and_it_is_true() -> None:
    cluster = cluster_of("A100-SXM4-40GB", 8)
    [option] = search(LARGE, MASTER, cluster, 4096)
    assert option.fits is False and "too large by" in option.reason
    assert "at 8 B/param (bfloat16/word)" in option.advice and "on 16 chips" in option.advice
    assert search(LARGE, WORD, cluster, 4096)[0].fits
    assert search(LARGE, MASTER, cluster_of("A100-SXM4-40GB", 16), 4096)[0].fits
    for wider in ("bfloat16/split", "bfloat16/split8"):
        assert not search(LARGE, parse(wider), cluster, 4096)[0].fits


def test_the_host_holds_states_only_where_it_is_known_to_have_room() -> None:
    nodes = Nodes(get_chip("A100-SXM4-40GB"))
    for gigabytes, fits in ((None, False), (64.0, False), (2000.0, True)):
        cluster = Cluster("hosts", (replace(nodes, host_memory_gb=gigabytes),))
        options = search(LARGE, MASTER, cluster, 2048)
        assert bool(options[0].fits) is fits
        assert not fits or {option.layout.offload for option in options} <= {"optimizer", "all"}


def test_a_step_has_the_tokens_that_were_asked_for() -> None:
    """16,384 replicas cannot share 4,096 sequences: layouts in which several chips compute one sequence are taken."""
    many, model = cluster_of("H100-SXM", 16_384), read_model("llama-405b")
    for asked in (1 << 24, None):
        best = search(model, WORD, many, 4096, asked)[0]
        assert best.fits and best.tokens_per_step <= 1 << 25
    assert best.layout.model_ranks > 1
    with pytest.raises(
        RecipeError, match=r"a step of 4,096 tokens was requested on 8 chips, which compute 32,768 at once"
    ):
        search(SMALL, WORD, H100, 4096, 4096, fixed={"tensor": 1})


def test_steps_are_not_smaller_than_half_a_million_tokens_where_any_fit() -> None:
    """On one chip of a large model a single micro-batch would need no sum of gradients, and 4,096 tokens a step."""
    options = search(LARGE, MASTER, H100, 4096)
    assert all(option.tokens_per_step >= LEAST_TOKENS_PER_STEP for option in options)
    # Where the sum fits nowhere, one micro-batch is all there is.
    large = search(read_model("llama-70b"), WORD, H100, 4096)
    assert large[0].fits and large[0].tokens_per_step < LEAST_TOKENS_PER_STEP
    asked = search(LARGE, MASTER, H100, 4096, 8 * 4096)
    assert asked[0].tokens_per_step == 8 * 4096
