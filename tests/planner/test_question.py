"""The worked questions of the page "Planning": each answer, and the premise that it rests on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.errors import ChipError
from narrowgauge.planner.inputs.clusters import Cluster, Nodes
from narrowgauge.planner.inputs.layouts import NAMED_LAYOUTS, Layout
from narrowgauge.planner.measured.scaling_law import Scaling, fit, read_points, scaling_lines
from narrowgauge.planner.plan import plan
from narrowgauge.planner.plan_report import Plan
from narrowgauge.planner.question import Option
from narrowgauge.spec.chips import get_chip
from narrowgauge.spec.notation import parse

BYTES = {"master": 16, "split": 12, "word": 8, "compact": 7, "states8": 6}
RECIPES = [f"bfloat16/{storage}" for storage in BYTES]
THIRTY = 30e9
DAYS = 10e9
"""Tokens for which days are asked."""


def said(found: Plan) -> str:
    return " ".join(found.sentences())


def gigabytes_each(found: Plan) -> dict[str, float]:
    """Of the worst rank, by storage."""
    return {option.recipe.storage.name: option.memory.total / 1e9 for option in found.options}


def best_of(found: Plan, recipe: str) -> Option:
    return next(option for option in found.options if option.recipe.name == recipe)


# ── state alone ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_state_of_ten_billion_parameters() -> None:
    assert [parse(recipe).bytes_per_param for recipe in RECIPES] == list(BYTES.values())
    found = plan(params=10e9, recipes=RECIPES)
    assert gigabytes_each(found) == {"master": 160, "split": 120, "word": 80, "compact": 70, "states8": 60}
    assert found.is_state_only and found.best.step is None and found.best.fits is None


def test_the_state_of_a_model_is_that_of_its_parameters() -> None:
    found = plan("llama-8b", recipes=["bfloat16/master", "bfloat16/word"])
    assert gigabytes_each(found) == pytest.approx({"master": 128.48, "word": 64.24}, rel=1e-4)


@pytest.mark.parametrize(
    ("chips", "each"),
    [(8, [60, 45, 30, 26.25, 22.5]), (32, [15, 11.25, 7.5, 6.5625, 5.625])],
)
def test_thirty_billion_over_eight_and_over_32(chips: int, each: list[float]) -> None:
    found = plan(params=THIRTY, recipes=RECIPES, chips=chips)
    assert gigabytes_each(found) == pytest.approx(dict(zip(BYTES, each, strict=True)))
    assert "Pure data parallelism keeps the whole state on every chip: 480 GB at 16 B" in said(found)


def test_seventy_billion_over_eight() -> None:
    found = plan(params=70e9, recipes=RECIPES, chips=8)
    assert gigabytes_each(found) == pytest.approx(dict(zip(BYTES, [140, 105, 70, 61.25, 52.5], strict=True)))


# ── one node ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_thirty_billion_on_eight_times_forty_gigabytes() -> None:
    found = plan("llama-33b", recipes=RECIPES, chip="A100-SXM4-40GB", chips=8)
    assert found.question.architecture.num_parameters == 32_528_943_616
    fitting = [option for option in found.options if option.fits]
    assert {option.recipe.storage.name for option in fitting} == {"word", "compact", "states8"}
    assert all(option.layout.recompute == "full" for option in fitting)
    for option in found.options[len(fitting) :]:
        assert option.recipe.bytes_per_param > 8 and "GB on a chip of 42.9 GB" in option.reason
        assert "offload" in option.advice
    # The other way: states in the host's memory.
    offloaded = plan("llama-33b", recipes=RECIPES, chip="A100-SXM4-40GB", chips=8, layout={"offload": "optimizer"})
    assert all(option.fits for option in offloaded.options)


def test_thirty_billion_on_eight_times_eighty_gigabytes() -> None:
    found = plan("llama-33b", recipes=RECIPES, chip="H100-SXM", chips=8)
    assert all(option.fits and (option.headroom_bytes or 0.0) > 0 for option in found.options)
    # 16 B: 65 GB of state leave room for what is computed again, or for one micro-batch whose tensors four ranks share.
    word, wide = best_of(found, "bfloat16/word"), best_of(found, "bfloat16/master")
    assert wide.layout.recompute == "full" or (wide.layout.tensor > 2 and wide.layout.micro_batches == 1)
    assert word.layout.recompute == "none" and word.layout.micro_batches > 1
    assert (wide.headroom_bytes or 0.0) < 8e9 < (word.headroom_bytes or 0.0)
    alone = plan("llama-33b", recipes=["bfloat16/master"], chip="H100-SXM", chips=8, layout=NAMED_LAYOUTS["fsdp2"]).best
    assert alone.fits and alone.layout.recompute == "full"
    never = plan("llama-33b", recipes=RECIPES, chip="H100-SXM", chips=8, layout=NAMED_LAYOUTS["ddp"])
    assert not any(option.fits for option in never.options)
    assert "Nothing fits" in said(never) and "impossible" in said(never)


def test_a_recipe_has_the_same_layout_alone_and_among_others() -> None:
    """What must compute layers again in the shapes that suit another recipe is searched for by itself."""
    alone = plan("llama-33b", recipes=["bfloat16/master"], chip="A100-SXM4-80GB", chips=8).best
    among = best_of(plan("llama-33b", recipes=RECIPES, chip="A100-SXM4-80GB", chips=8), "bfloat16/master")
    assert among.layout == alone.layout and among.tokens_per_second == alone.tokens_per_second


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
    found = plan("llama-70b", recipes=["bfloat16/word"], chip="H100-SXM", chips=8)
    assert found.question.architecture.num_parameters == 70_553_706_496
    # 70.6 GB of state on 85.9: with layers computed again, or without a sum of several micro-batches.
    for option in found.options:
        assert option.fits and (option.layout.recompute == "full" or option.layout.micro_batches == 1)
    roomy = plan("llama-70b", recipes=["bfloat16/word"], chip="H200", chips=8).best
    assert roomy.fits and roomy.is_certain and roomy.layout.recompute == "none"


# ── hardware refresh: 32 × 24 GB ────────────────────────────────────────────────────────────────────────────────────


def test_pure_data_parallelism_of_thirty_billion_is_impossible() -> None:
    found = plan(params=THIRTY, recipes=["bfloat16/master"], chip="RTX-4090", chips=32, layout={"data": 32})
    assert found.best.memory.total == 480e9 and found.best.fits is False
    assert "480 GB on a chip of 25.8 GB" in found.best.reason


@pytest.mark.parametrize(
    ("recipe", "layout", "gigabytes"),
    [
        ("bfloat16/master", {"data": 4}, 60),
        ("bfloat16/master", {"shard": 4, "zero": 1}, 26.25),
        ("bfloat16/word", {"shard": 4, "zero": 1}, 18.75),
        ("bfloat16/master", {"shard": 4, "zero": 3}, 15),
    ],
)
def test_four_stages_of_two_ranks_in_four_replicas(recipe: str, layout: dict[str, int], gigabytes: float) -> None:
    found = plan(
        params=THIRTY, recipes=[recipe], chip="RTX-4090", chips=32, layout={"pipeline": 4, "tensor": 2, **layout}
    )
    assert found.best.num_chips == 32
    assert found.best.memory.total / 1e9 == pytest.approx(gigabytes)
    assert found.best.fits is (gigabytes < 25.7)


def test_the_bubble_of_four_stages() -> None:
    bubbles = [Layout(pipeline=4, micro_batches=number).bubble for number in (4, 8, 16, 32)]
    assert [round(100 * bubble, 1) for bubble in bubbles] == [42.9, 27.3, 15.8, 8.6]


# ── several clusters ────────────────────────────────────────────────────────────────────────────────────────────────


def nodes(chip: str, gbit: float, count: int = 4, name: str = "") -> Cluster:
    group = Nodes(get_chip(chip), count=count, interconnect_gbit_per_second=gbit)
    return Cluster(name or str(group), (group,))


def test_one_configuration_for_two_clusters() -> None:
    large, small = nodes("A100-SXM4-80GB", 200), nodes("A100-SXM4-40GB", 100)
    found = plan("llama-33b", recipes=["bfloat16/master", "bfloat16/word"], cluster=[large, small])
    assert {option.cluster for option in found.shared} == {large.name, small.name}
    first, second = found.shared
    assert first.recipe == second.recipe and first.fits and second.fits
    assert (first.layout.shard, first.layout.tensor, first.layout.pipeline) == (
        second.layout.shard, second.layout.tensor, second.layout.pipeline,
    )  # fmt: skip
    assert "One configuration for" in said(found)
    assert "impossible" in said(found), "pure data parallelism of 30 B is, on either"


def test_one_configuration_is_refused_with_a_reason() -> None:
    large, small = nodes("A100-SXM4-80GB", 200, 1), nodes("TPU-v5e", 100, 1)
    found = plan("llama-33b", recipes=["bfloat16/word"], cluster=[large, small])
    assert not found.shared
    assert "No configuration fits" in said(found) and any(option.reason for option in found.options)


def test_a_weekend_in_unstable_float16() -> None:
    """One plan for memory, utilization and stability."""
    found = plan(
        "llama-33b",
        recipes=["float16/master", "bfloat16/word"],
        chip="A100-SXM4-80GB",
        chips=8,
        tokens=2.5 * 86_400 * 5_000,
    )
    text = said(found)
    assert found.best.recipe.name == "bfloat16/word" and found.best.fits
    assert "to spare" in text and "% of the peak" in text and "float16 has a largest value of 65504" in text
    wide, narrow = (best_of(found, name) for name in ("float16/master", "bfloat16/word"))
    assert wide.memory.total > 65e9 > 33e9 < narrow.memory.total


def test_sixty_four_chips_in_replicas_of_four_and_twice_the_replicas() -> None:
    def layouts(chips: int, replicas: int, shard: int) -> list[Option]:
        fixed = {"data": replicas, "shard": shard, "tensor": 1, "pipeline": 1}
        return list(plan("llama-8b", recipes=["bfloat16/word"], chip="H100-SXM", chips=chips, layout=fixed).options)

    assert Layout(data=16, shard=4).num_ranks == 64
    assert Layout(data=32, shard=4).num_ranks == 128 and Layout(data=32, shard=2).num_ranks == 64
    fours, more, twos = layouts(64, 16, 4)[0], layouts(128, 32, 4)[0], layouts(64, 32, 2)[0]
    assert fours.fits and more.fits and twos.fits
    # Replicas of two hold twice the state of replicas of four.
    held = [option.memory.groups["optimizer"] for option in (fours, more, twos)]
    assert held[0] == pytest.approx(held[1]) and held[2] == pytest.approx(2 * held[0], rel=0.02)


# ── scaling ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def measured() -> Scaling:
    return fit(read_points("128:10d,256:7d"))


def test_twice_the_units_and_seven_days() -> None:
    found = measured()
    assert found.speed_up(128, 256) == pytest.approx(10 / 7) and found.efficiency(128, 256) == pytest.approx(
        0.714, abs=1e-3
    )
    assert str(found.law) == "768 d / N + 4 d"
    assert [found.seconds(chips) / 86_400 for chips in (512, 64)] == pytest.approx([5.5, 16])
    assert not found.is_checked
    text = " ".join(scaling_lines(found, [512, 64]))
    assert "nothing checks this one" in text and "Measure a third size" in text


def test_eight_to_32_over_slow_links() -> None:
    found = plan(
        "llama-8b",
        recipes=["bfloat16/word"],
        chip="H100-SXM",
        chips=[8, 32],
        interconnect_gbit_per_second=25,
        layout={"data": 1, **NAMED_LAYOUTS["fsdp2"]},
    )
    (sentence,) = [line for line in found.sentences() if line.startswith("From 8 to 32 chips")]
    assert "the first bottleneck is communication" in sentence
    assert re.search(r"overlap|HSDP", sentence), "a mitigation"


def test_slow_links_are_named_where_stages_avoid_them() -> None:
    """The best layout of 32 chips has stages; what grew in it is the last stage, and without stages it is the links."""
    found = plan("llama-8b", recipes=["bfloat16/word"], chip="H100-SXM", chips=[8, 32], interconnect_gbit_per_second=25)
    many = next(option for option in found.options if option.num_chips == 32)
    assert many.layout.pipeline > 1
    (sentence,) = [line for line in found.sentences() if line.startswith("From 8 to 32 chips")]
    assert "stages of unequal work" in sentence and "it would be communication: overlap" in sentence


def test_two_late_machines_of_eight() -> None:
    equal, late = Nodes(get_chip("H100-SXM"), count=6), Nodes(get_chip("H100-SXM"), count=2, speed=0.8)
    found = plan("llama-33b", recipes=["bfloat16/word"], cluster=Cluster("eight machines", (equal, late)))
    assert found.best.step is not None
    (term,) = [term for term in found.best.step if term.name == "for late nodes"]
    assert term.value > 0.1 * found.best.step.total
    assert "all chips wait for 16 of them" in said(found)


def test_why_64_chips_are_not_64_times_one() -> None:
    found = plan("llama-8b", recipes=["bfloat16/word"], chip="H100-SXM", chips=[1, 64], tokens_per_step=1 << 20)
    (sentence,) = [line for line in found.sentences() if line.startswith("Of a step of")]
    assert "communication" in sentence and "waiting" in sentence and re.search(r"\d m?s", sentence)
    many = next(option for option in found.options if option.num_chips == 64)
    one = next(option for option in found.options if option.num_chips == 1)
    assert many.fits and many.tokens_per_second and one.tokens_per_second
    assert 16 < many.tokens_per_second / one.tokens_per_second < 64 or not one.fits


def test_three_hundred_billion_tokens_in_two_weeks_or_for_a_budget() -> None:
    asked: dict[str, Any] = {"recipes": ["bfloat16/word"], "chip": "H100-SXM", "tokens": 300e9, "dollars_per_hour": 2.5}
    in_time = plan("llama-8b", **asked, days=14)
    assert in_time.best.num_chips == 32 and in_time.options[1].num_chips == 24
    assert in_time.best.days(300e9) == pytest.approx(11.5, rel=0.05)
    assert in_time.best.cost(300e9) == pytest.approx(22_000, rel=0.05)
    assert 15 < (in_time.options[1].days(300e9) or 0.0) < 16
    assert "The fewest chips that train 300B tokens within 14 d are 32 × H100" in said(in_time)
    assert re.search(r"; 24 × H100-SXM5-80GB \(\S+ d, \S+\) do not\.", said(in_time))
    budget = 1.001 * (in_time.options[1].cost(300e9) or 0.0)
    assert plan("llama-8b", **asked, budget=budget).best.num_chips == 24


def test_the_longest_context_and_the_largest_batch_on_eight() -> None:
    asked: dict[str, Any] = {"recipes": ["bfloat16/word"], "chip": "H100-SXM", "chips": 8}
    longest = plan("llama-8b", **asked, largest="context")
    assert longest.best.sequence_length == pytest.approx(223_232, rel=0.07) and longest.best.layout.tensor == 8
    own = plan("llama-8b", **asked, largest="context", layout=NAMED_LAYOUTS["fsdp2"])
    assert own.best.sequence_length == pytest.approx(99_328, rel=0.07)
    assert "The longest sequences that fit for certain have" in said(longest)
    batch = plan("llama-8b", **asked, largest="batch")
    assert batch.best.layout.num_sequences == pytest.approx(192, rel=0.07)
    assert f"{batch.best.layout.num_sequences} sequences of 4,096 tokens" in said(batch)


def test_adapters_on_one_chip() -> None:
    def one(model: str, chip: str, **how: Any) -> Option:
        return plan(model, recipes=["bfloat16/master"], chip=chip, sequence_length=2048, **how).best

    small = [one("llama-8b", "RTX-4090", **how) for how in ({}, {"lora": 16}, {"lora": 16, "base": "nf4"})]
    assert [option.fits for option in small] == [False, True, True]
    assert (small[1].headroom_bytes or 0.0) < (small[2].headroom_bytes or 0.0)
    large = [one("llama-70b", "H100-SXM", lora=16, base=base) for base in ("bfloat16", "nf4")]
    assert [option.fits for option in large] == [False, True]
    assert "LoRA of rank 16" in said(plan("llama-70b", recipes=["bfloat16/word"], chip="H100-SXM", lora=16, base="nf4"))


def test_what_muon_and_adafactor_save() -> None:
    found = {}
    for optimizer in ("adamw", "muon", "adafactor"):
        best = plan("llama-8b", recipes=["bfloat16/master"], chip="H100-SXM", chips=8, optimizer=optimizer).best
        found[optimizer] = best.recipe.bytes_per_param, round(best.memory.groups["optimizer"] / 1e9, 1)
    assert found == {"adamw": (16.0, 12.0), "muon": (12.0, 8.6), "adafactor": (8.0, 4.0)}


def test_energy_and_price_of_a_token() -> None:
    asked: dict[str, Any] = {"recipes": ["bfloat16/word"], "chip": "H100-SXM", "chips": 32}
    found = plan("llama-8b", **asked, tokens=300e9, dollars_per_hour=2.5)
    assert found.best.kilowatt_hours(300e9) == pytest.approx(8500, rel=0.05)
    assert found.best.joules_per_token == pytest.approx(0.102, rel=0.05)
    assert found.best.dollars_per_token == pytest.approx(74e-9, rel=0.05)
    assert "32 chips of 700 W, and nodes at 1.38 times that" in said(found)
    assert any(table.title.startswith("Energy of 300B tokens") for table in found.explanation())


# ── the page ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_question_is_a_paragraph_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    for words in (
        "10 billion",
        "30 billion",
        "40 GB",
        "70 billion",
        "24 GB",
        "weekend",
        "replicas of four",
        "7 days",
        "late",
        "64",
        "300 billion tokens in 14 days",
        "for a budget",
        "longest context",
        "QLoRA",
        "Muon and Adafactor",
        "energy",
        "a token cost",
    ):
        assert words in page, f"the page does not answer the question about {words}"


def test_states_in_the_hosts_memory_without_a_cluster_file() -> None:
    """`--host-memory`: 16 B a parameter on 8 × 40 GB fit where a host has a terabyte, and not where it has 64 GB."""
    asked = {"recipes": ["bfloat16/master"], "chip": "A100-SXM4-40GB", "chips": 8}
    roomy, tight = (plan("llama-33b", **asked, host_memory_gb=size).best for size in (1024, 64))  # type: ignore[arg-type]
    assert roomy.fits and roomy.layout.offload != "none"
    assert tight.fits is False
    with pytest.raises(ChipError, match="a cluster and host_memory_gb were requested together"):
        plan("llama-8b", cluster=nodes("H100-SXM", 400), host_memory_gb=64)


def test_a_small_step_is_said_where_nobody_asked_for_it() -> None:
    found = plan("llama-70b", recipes=["bfloat16/word"], chip="H100-SXM", chips=8)
    assert "fewer than the 524k of the smallest usual steps" in said(found)
    asked = plan("llama-70b", recipes=["bfloat16/word"], chip="H100-SXM", chips=8, tokens_per_step=8 * 4096)
    assert "fewer than" not in said(asked)
