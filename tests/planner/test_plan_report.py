"""What is said about options that are made up: tables, sentences, JSON and settings agree with their terms."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.planner.inputs.clusters import Cluster, Nodes
from narrowgauge.planner.inputs.efficiency import RESTARTS
from narrowgauge.planner.inputs.layouts import NAMED_LAYOUTS, Layout
from narrowgauge.planner.plan import plan
from narrowgauge.planner.plan_report import Plan, fits_text, train_settings
from narrowgauge.spec.chips import get_chip
from narrowgauge.spec.recipes import DEFAULT_RECIPE
from narrowgauge.trainer.config import TrainConfig
from planner.made_plans import STEP, made_option, made_plan

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FIELDS = {
    "recipe", "parallelism", "fits", "why_not", "memory_bytes", "headroom_bytes", "tokens_per_second", "mfu", "days", "cost",
    "limited_by", "confidence",
}  # fmt: skip
"""What JSON promises of every option."""


def said(plan: Plan) -> str:
    return " ".join(plan.sentences())


def test_where_no_recipe_is_named_the_default_comes_before_the_best() -> None:
    asked = {"chip": "H100-SXM", "chips": 8, "sequence_length": 2048}
    found = plan("llama-1b", **asked)
    first, second, *_ = found.sentences()
    assert found.best.recipe.title != DEFAULT_RECIPE and second.startswith(found.best.recipe.title)
    (usual,) = (option for option in found.options if option.recipe.title == DEFAULT_RECIPE)
    assert first.startswith(f"No recipe was named, so {len(found.options)} are compared. {DEFAULT_RECIPE}, the default")
    assert f"takes {usual.tokens_per_second:,.0f} tokens/s" in first
    named = plan("llama-1b", recipes=[found.best.recipe, DEFAULT_RECIPE], **asked)
    assert named.sentences()[0].startswith(found.best.recipe.title), "what was asked for is answered at once"


def test_json_has_every_promised_field_and_only_plain_values() -> None:
    row = made_plan(tokens=1e12).row()
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    (option,) = row["options"]
    assert set(option) >= FIELDS
    assert set(option["parallelism"]) >= {
        "data", "shard", "tensor", "pipeline", "context", "expert", "micro_batch", "micro_batches", "recompute", "offload",
    }  # fmt: skip
    memory = option["memory_bytes"]
    assert memory["total"] == pytest.approx(40e9) == sum(memory.values()) - memory["total"]
    assert {"weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead", "total"} == set(memory)


def test_figures_follow_from_the_terms() -> None:
    option = made_option(dollars_per_hour=16.0)
    seconds = sum(STEP.values())
    assert option.tokens_per_step == 8 * 16 * 4096
    assert option.tokens_per_second == pytest.approx(option.tokens_per_step / seconds)
    assert option.mfu == pytest.approx(option.tokens_per_step / seconds * 5e10 / (8 * 989e12))
    days = option.days(1e12)
    assert days == pytest.approx(1e12 / option.tokens_per_step * seconds / 86_400)
    assert option.cost(1e12) == pytest.approx(days * 24 * 16)
    low, high = option.confidence(1e12)["days"]
    # A whole run has restarts, which no step shows; where failures are among the terms they are counted there.
    assert low == pytest.approx(0.9 * days) and high == pytest.approx(1.1 * days * (1 + RESTARTS))
    counted = made_option(step={**STEP, "faults": 0.1})
    assert (option.restarts, counted.restarts) == (RESTARTS, 0.0)


@pytest.mark.parametrize(
    ("gigabytes", "fits", "text"), [(40, True, "yes"), (80, True, "barely"), (90, False, "hardly"), (120, False, "no")]
)
def test_an_option_is_unsure_where_the_chip_lies_within_its_interval(gigabytes: int, fits: bool, text: str) -> None:
    option = made_option(memory=gigabytes * 1e9)
    assert option.fits is fits and fits_text(option) == text
    assert option.is_certain is (text in ("yes", "no"))
    assert bool(option.reason) is not fits


def test_a_plan_says_which_chips_the_others_wait_for() -> None:
    slow, late = Nodes(get_chip("A100-SXM4-80GB")), Nodes(get_chip("H100-SXM"), speed=0.5)
    for nodes, text in ((slow, "A100-SXM4-80GB sets the pace"), (late, "all chips wait for 8 of them")):
        mixed = Cluster("mixed", (Nodes(get_chip("H100-SXM")), nodes))
        assert text in said(plan("llama-8b", recipes=["bfloat16/word"], cluster=mixed))


def test_a_plan_says_whose_software_its_times_are_of() -> None:
    """In text, in JSON, and in the source of the term that it decides."""
    assert (
        "Times are assumed to be those of FSDP, torchtitan or Megatron-Core of 2023 to 2026 on H100-SXM5-80GB"
        in said(made_plan())
    )
    found = plan("llama-8b", recipes=["bfloat16/word"], chip="H100-SXM", chips=8, software="fsdp-2023")
    (sentence,) = (line for line in found.sentences() if line.startswith("Times are"))
    assert "PyTorch FSDP" in sentence and "2022 to 2023" in sentence and "assumed" not in sentence
    [software] = found.row()["question"]["clusters"][0]["software"]
    assert (software["name"], software["years"]) == ("fsdp-2023", [2022, 2023])
    assert found.best.step is not None
    (gaps,) = (term for term in found.best.step if term.name == "between kernels")
    assert "of 2022 to 2023" in gaps.source
    newer = plan("llama-8b", recipes=["bfloat16/word"], chip="H100-SXM", chips=8, software="megatron-core-2025")
    assert (newer.best.tokens_per_second or 0) > 1.15 * (found.best.tokens_per_second or 0)


def test_a_plan_says_why_it_is_not_faster() -> None:
    text = said(made_plan(tokens=1e12))
    assert (
        "Of a step of 5 s (524,288 tokens), matmuls and attention take 4.5 s; the rest is communication 400 ms" in text
    )
    assert (
        "limited by matmuls" in text
        and "1T tokens take 110 d (80 % interval 99.3 d to 152 d, with up to 25% for restarts)" in text
    )


def test_what_does_not_fit_says_what_would() -> None:
    text = said(made_plan(made_option(memory=120e9, advice="16 chips would do.")))
    assert text.startswith("Nothing fits. The closest is bfloat16/word")
    assert ": needs 120 GB on a chip of 85.9 GB (weights 60 GB). 16 chips would do." in text
    layout = made_option(why_not="30 layers do not divide into 4 stages", advice="Use 3 stages.")
    assert ": 30 layers do not divide into 4 stages. Use 3 stages." in said(made_plan(layout))


def test_more_chips_name_what_grew() -> None:
    few = made_option()
    slow = {**STEP, "communication": 2.0}
    many = made_option(layout=Layout(shard=32, micro_batches=4), step=slow, cluster="32 × H100-SXM5-80GB")
    text = said(made_plan(many, few))
    assert (
        "From 8 to 32 chips bfloat16/word is 0.758 times as fast on 32 × H100-SXM5-80GB, an efficiency of 19%" in text
    )
    assert "the first bottleneck is matmuls" in text, "a step of a quarter of the tokens takes as long"


def test_lossy_recipes_and_loss_scales_are_named() -> None:
    text = said(made_plan(made_option(), made_option("float16/split"), made_option("bfloat16/naive")))
    assert "bfloat16/naive are listed last" in text and "float16/split: float16 has a largest value of 65504" in text


def test_the_table_leaves_out_what_nobody_asked_for() -> None:
    (table,) = made_plan().tables()
    titles = [column.title for column in table.columns]
    assert "days" not in titles and "$" not in titles and "why not" not in titles and "cluster" not in titles
    (table,) = made_plan(made_option(dollars_per_hour=16.0), tokens=1e12).tables()
    assert {"days", "$"} <= {column.title for column in table.columns}


def test_every_term_is_explained_and_they_add_up() -> None:
    memory, step = made_plan().explanation()
    assert [row["group"] for row in memory.rows] == ["weights", "optimizer", "activations", "total"]
    values = [float(row["value"]) for row in memory.rows]
    assert sum(values[:-1]) == pytest.approx(values[-1]) == 40.0
    assert {row["source"] for row in step.rows[:-1]} == {"a paper"}


# ── settings for the trainer ────────────────────────────────────────────────────────────────────────────────────────


def test_settings_are_those_of_the_trainer() -> None:
    option = made_option(layout=Layout(data=2, shard=4, micro_batch=2, micro_batches=3, recompute="full"))
    table = tomllib.loads(train_settings(made_plan(option, tokens=1e9)))
    config = TrainConfig.from_dict(table).validated()
    assert config.tokens_per_step == option.tokens_per_step and config.micro_batch_size == 2
    # Each rank has as many micro-batches as planned.
    assert config.gradient_accumulation_steps == 8 * 3 and config.replicas == 2 and config.activation_checkpointing
    assert config.steps == round(1e9 / option.tokens_per_step) and config.recipe.name == "bfloat16/word"


def test_settings_name_the_rule_whose_states_were_planned() -> None:
    trained = {**NAMED_LAYOUTS["fsdp2"], "offload": "none"}
    planned = plan("llama-8b", recipes=["bfloat16/word"], chip="B200", chips=8, optimizer="muon", layout=trained)
    table = tomllib.loads(train_settings(planned))
    assert table["rule"] == "muon" and TrainConfig.from_dict(table).validated().rule == "muon"


@pytest.mark.parametrize(
    ("option", "model", "message"),
    [
        (made_option(memory=200e9), "llama-8b", "nothing fits"),
        (made_option(layout=Layout(tensor=8)), "llama-8b", "does not run"),
        (made_option(), "llama-405b", "only the shape is known"),
    ],
)
def test_settings_that_cannot_run_are_refused(option: object, model: str, message: str) -> None:
    plan = made_plan(option, model=model)  # type: ignore[arg-type]
    with pytest.raises(NarrowgaugeError, match=message):
        train_settings(plan)


def test_ranks_that_hold_the_whole_state_are_not_sharded() -> None:
    table = tomllib.loads(train_settings(made_plan(made_option(layout=Layout(data=8, micro_batches=16)))))
    assert table["shard"] == "none" and "replicas" not in table
    assert dataclasses.replace(TrainConfig.from_dict(table)).validated().gradient_accumulation_steps == 128
