"""Hugging Face's Trainer with a recipe computes what our trainer computes, and what its arguments ask for."""

from __future__ import annotations

import runpy
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip(
    "accelerate", reason="narrowgauge[huggingface] is not installed: ./dev test integrations installs it"
)

import torch
from transformers import LlamaForCausalLM, Trainer, TrainerCallback

import narrowgauge as ng
from integrations.huggingface_runs import MyTrainer, arguments, history, plain_arguments, rows_of, same_bits, trainer_of
from integrations.own_trainer import reference
from narrowgauge.errors import RecipeError
from narrowgauge.integrations.huggingface import NarrowgaugeCallback, optimizer_factory
from narrowgauge.integrations.huggingface.training_arguments import require_whole_weights
from narrowgauge.runs.departure_table import DEPARTURES
from narrowgauge.spec.recipes import Phase

TWO = {"gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("recipe", "settings", "flags"),
    [
        ("bfloat16/word", {}, {"bf16": True}),
        ("bfloat16/split", {"gradient_accumulation_steps": 4, "accumulation_dtype": "kahan"}, {}),
        ("bfloat16/float32", TWO, {"bf16": True}),
        ("float8-delayed/word", TWO, {"bf16": True}),
        ("float16/compact", TWO, {"fp16": True}),
        (
            "bfloat16/word",
            {"max_grad_norm": 0.1, "shape": {"tie_word_embeddings": True}},
            {"gradient_checkpointing": True},
        ),
    ],
)
def test_losses_norms_and_weights_are_the_trainers_bit_for_bit(
    tmp_path: Path, recipe: str, settings: dict[str, Any], flags: dict[str, Any]
) -> None:
    run = reference(recipe, steps=4, **dict(settings))
    mixin: dict[str, Any] = {
        "recipe": recipe,
        "audit_every": 2,
        "accumulation_dtype": settings.get("accumulation_dtype"),
    }
    trainer = trainer_of(tmp_path, run, mixin=mixin, **flags)
    trainer.train()
    assert history(trainer, "loss") == run.losses and history(trainer, "grad_norm") == run.grad_norms
    assert same_bits(trainer, run)
    readings = [row["edq"] for row in run.rows if "edq" in row]
    assert len(history(trainer, "edq")) == 3 and history(trainer, "edq")[0] == pytest.approx(readings[0])


def test_a_compiled_model_trains_alike_and_is_saved_under_its_own_names(tmp_path: Path) -> None:
    """Not the same bits: a captured graph adds gradients of the residual stream in another order."""
    run = reference("bfloat16/word", steps=4)
    trainer = trainer_of(tmp_path, run, torch_compile=True, torch_compile_backend="eager")
    trainer.train()
    assert history(trainer, "loss") == pytest.approx(run.losses, rel=1e-4)
    assert history(trainer, "grad_norm") == pytest.approx(run.grad_norms, rel=1e-2)
    trainer.save_model(str(tmp_path / "saved"))
    again = LlamaForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in trainer.model.state_dict().items())


@pytest.mark.parametrize("recipe", ["float8-delayed/word", "float16/split8"])
def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path, recipe: str) -> None:
    run = reference(recipe, steps=4, **TWO)
    trainer_of(tmp_path, run, save_strategy="steps", save_steps=2).train()
    resumed = trainer_of(tmp_path / "resumed", run)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert history(resumed, "loss") == run.losses and same_bits(resumed, run)
    assert history(resumed, "grad_norm") == run.grad_norms


def test_a_plain_trainer_with_the_factory_computes_the_same(tmp_path: Path) -> None:
    run = reference("bfloat16/word", steps=4)
    args = arguments(tmp_path, run, max_grad_norm=0)
    made = optimizer_factory(args, run.recipe, max_grad_norm=run.settings.max_grad_norm, audit_every=2)
    callback = NarrowgaugeCallback()
    given = {"args": args, "optimizer_cls_and_kwargs": made, "callbacks": [callback]}
    trainer = trainer_of(tmp_path, run, Trainer, mixin=given)
    trainer.train()
    trainer.recipe_optimizer = trainer.optimizer.optimizer
    assert history(trainer, "loss") == run.losses and same_bits(trainer, run)
    assert len(history(trainer, "edq")) == 3 and history(trainer, "num_skipped") == [0] * 4


@pytest.mark.parametrize(
    ("recipe", "changes", "words"),
    [
        ("bfloat16/word", {"fp16": True}, "fp16=True .* computes in bfloat16"),
        ("float32/float32", {"bf16": True}, "bf16=True .* computes in float32"),
        ("float16/word", {"bf16": True}, "bf16=True .* computes in float16"),
        ("bfloat16/word", {"bf16_full_eval": True}, "Leave bf16_full_eval out"),
        ("unit/word", {}, "unit scaling"),
        ("bfloat16/word/reproducible", {}, "reduction 'reproducible'"),
        ("bfloat16/word", {"optim": "adamw_8bit"}, "optim='adamw_8bit' .* galore_adamw"),
        ("bfloat16/word", {"optim": "sgd", "optim_args": "momentum=much"}, "'momentum=much' .* nesterov"),
        ("bfloat16/word", {"optim_target_modules": ["q_proj"]}, "goes with optim='galore_adamw'"),
        ("bfloat16/word", {"optim": "galore_adamw", "optim_target_modules": ["nothing"]}, "matches no linear layer"),
    ],
)
def test_what_contradicts_a_recipe_is_refused_in_one_line(
    tmp_path: Path, recipe: str, changes: dict[str, Any], words: str
) -> None:
    run = reference(steps=2)
    with pytest.raises(RecipeError, match=words) as refused:
        trainer_of(tmp_path, run, mixin={"recipe": recipe}, **changes).train()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("version", "spares", "words"), [(1, False, "FSDP1"), (2, True, "cpu_ram_efficient_loading")])
def test_shards_that_would_come_before_the_tails_are_refused(version: int, spares: bool, words: str) -> None:
    plugin = SimpleNamespace(fsdp_version=version, cpu_ram_efficient_loading=spares)
    with pytest.raises(RecipeError, match=words):
        require_whole_weights(plugin, ng.parse("bfloat16/word"))


def test_an_optimizer_of_others_is_refused(tmp_path: Path) -> None:
    run = reference(steps=2)
    model = run.model()
    with pytest.raises(RecipeError, match="makes its own"):
        MyTrainer(model, plain_arguments(tmp_path), optimizers=(torch.optim.SGD(model.parameters()), None))
    for given, words in (
        ((torch.optim.AdamW, {}), "names AdamW"),
        ((ng.AdamW, {"storage": "word"}), "gives storage"),
    ):
        with pytest.raises(RecipeError, match=words):
            trainer_of(tmp_path, run, mixin={"optimizer_cls_and_kwargs": given}).train()


def test_a_class_without_lr_gets_the_arguments_rate_and_a_plain_trainer_is_told(tmp_path: Path) -> None:
    run = reference(steps=2)
    trainer = trainer_of(tmp_path, run, mixin={"optimizer_cls_and_kwargs": (ng.Lion, {})}, lr_scheduler_type="constant")
    trainer.callback_handler.callbacks = [c for c in trainer.callback_handler.callbacks if not hasattr(c, "rates")]
    trainer.train()
    groups = trainer.recipe_optimizer.param_groups
    assert {group["lr"] for group in groups} == {run.settings.lr} and trainer.recipe_optimizer.rule.name == "lion"
    assert {group["betas"] for group in groups} == {run.settings.betas}
    for settings, words in (
        ({"storage": "float32"}, "learning_rate=0.003.*default, 0.001"),
        ({"storage": "float32", "lr": 3e-3, "max_grad_norm": 1.0}, "clipped twice"),
    ):
        given = {"optimizer_cls_and_kwargs": (ng.AdamW, settings), "callbacks": [NarrowgaugeCallback()]}
        with pytest.raises(RecipeError, match=words):
            trainer_of(tmp_path, run, Trainer, mixin=given).train()
    with pytest.raises(RecipeError, match="optimizer is a AdamW"):
        trainer_of(tmp_path, run, Trainer, mixin={"callbacks": [NarrowgaugeCallback()]}).train()


def test_the_factory_refuses_what_a_plain_trainer_would_round_autocast_or_not_do(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="max_grad_norm=0 there and pass max_grad_norm=1 here"):
        optimizer_factory(plain_arguments(tmp_path))
    with pytest.raises(RecipeError, match="autocast over the bfloat16 weights"):
        optimizer_factory(plain_arguments(tmp_path, max_grad_norm=0, bf16=True))
    phases = replace(ng.parse("float8-row/word"), phases=(Phase(0.5, ng.spec.COMPUTES["bfloat16"]),))
    with pytest.raises(RecipeError, match="has phases"):
        optimizer_factory(plain_arguments(tmp_path, max_grad_norm=0), phases)


def test_decay_names_and_rules_are_those_of_the_arguments(tmp_path: Path) -> None:
    class OnlyHead(MyTrainer):
        def get_decay_parameter_names(self, model: Any) -> list[str]:
            return ["lm_head.weight"]

    run = reference(steps=2)
    trainer = trainer_of(tmp_path, run, OnlyHead, weight_decay=0.25)
    groups = trainer.create_optimizer().param_groups
    assert [g["param_names"] for g in groups if g["weight_decay"] == 0.25] == [["lm_head.weight"]]
    galore = {"optim": "galore_adamw", "optim_target_modules": ["q_proj", "up_proj"], "optim_args": "rank=4,scale=0.5"}
    trainer = trainer_of(tmp_path, run, **galore)
    trainer.train()
    names = {n for g in trainer.recipe_optimizer.param_groups if g.get("rule") != "adamw" for n in g["param_names"]}
    assert names == {f"model.layers.{k}.{n}.weight" for k in (0, 1) for n in ("self_attn.q_proj", "mlp.up_proj")}
    assert {(g["rank"], g["scale"], g["betas"]) for g in trainer.recipe_optimizer.param_groups} == {
        (4, 0.5, (0.9, 0.95))
    }
    sgd = trainer_of(tmp_path, run, optim="sgd", optim_args="momentum=0.5, nesterov=true").create_optimizer()
    assert sgd.rule.name == "sgd" and {(g["momentum"], g["nesterov"]) for g in sgd.param_groups} == {(0.5, True)}


def test_the_saved_folder_is_the_model(tmp_path: Path) -> None:
    run = reference("bfloat16/word", steps=4, shape={"tie_word_embeddings": True})
    trainer = trainer_of(tmp_path, run, per_device_eval_batch_size=4)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    again = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.dtype is torch.bfloat16 and again.lm_head.weight is again.model.embed_tokens.weight
    assert all(torch.equal(again.state_dict()[name], weight) for name, weight in run.state.items())
    with torch.no_grad():
        rows = {name: torch.stack([row[name] for row in rows_of(run)[:4]]) for name in rows_of(run)[0]}
        found = again.eval()(**rows).loss
    assert trainer.evaluate(rows_of(run)[:4])["eval_loss"] == pytest.approx(found.item(), rel=1e-3)


def test_the_best_model_is_loaded_at_the_end_and_adopted(tmp_path: Path) -> None:
    run = reference("bfloat16/word", steps=4)
    every = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 1, "eval_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    given = {"recipe": run.recipe, "eval_dataset": rows_of(run)[:4]}
    trainer = trainer_of(tmp_path, run, mixin=given, **every, **best)
    with pytest.warns(UserWarning, match="modified outside this optimizer"):
        trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-1").state_dict()
    assert all(torch.equal(saved[name], weight) for name, weight in trainer.model.state_dict().items())
    parameter = trainer.model.lm_head.weight
    stored = trainer.recipe_optimizer.stored(parameter)
    assert torch.equal(ng.round_to(stored, "bfloat16"), parameter.float())


def test_labels_are_smoothed_in_float32(tmp_path: Path) -> None:
    run = reference("bfloat16/word", steps=2)
    trainer = trainer_of(tmp_path, run, label_smoothing_factor=0.1, max_steps=1)
    for row in trainer.train_dataset:
        del row["shift_labels"]
    trainer.train()
    model, _ = ng.prepare(run.model(), run.recipe)
    with torch.no_grad():
        logits = model(input_ids=run.batches[0][:, :-1]).logits[:, :-1].float().log_softmax(-1)
    wanted = run.batches[0][:, 1:-1, None]
    smoothed = 0.9 * -logits.gather(-1, wanted).mean() + 0.1 * -logits.mean()
    assert history(trainer, "loss") == [pytest.approx(smoothed.item(), rel=1e-6)]


def test_lengths_are_grouped_padded_and_counted(tmp_path: Path) -> None:
    """Micro-batches with other numbers of tokens each add up to the loss and gradient of the whole batch."""
    run = reference("float32/float32", steps=4)
    rows = [{"input_ids": row[: 5 + 3 * (k % 7)].tolist()} for k, row in enumerate(torch.cat(run.batches))]

    def collate(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(feature["input_ids"]) for feature in features)
        ids = torch.tensor([f["input_ids"] + [0] * (longest - len(f["input_ids"])) for f in features])
        lengths = torch.tensor([len(f["input_ids"]) for f in features])
        mask = torch.arange(longest) < lengths[:, None]
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}

    losses = []
    for parts in (1, 4):
        args = plain_arguments(
            tmp_path, per_device_train_batch_size=4 // parts, gradient_accumulation_steps=parts, max_steps=4, seed=1,
            train_sampling_strategy="group_by_length", learning_rate=1e-2,
        )  # fmt: skip
        trainer = MyTrainer(run.model(), args, train_dataset=rows, data_collator=collate, recipe="float32/float32")
        trainer.train()
        losses.append(history(trainer, "loss"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_phases_and_the_compute_of_evaluation_are_obeyed(tmp_path: Path) -> None:
    run = reference("bfloat16/word", steps=4)
    recipe = ng.parse("float8-row/word")
    wide = ng.spec.COMPUTES["bfloat16"]
    recipe = replace(recipe, phases=(Phase(0.5, wide),), evaluation=wide)
    trainer = trainer_of(tmp_path, run, mixin={"recipe": recipe})
    seen: list[str] = []
    layer = "model.layers.0.mlp.up_proj"
    trainer.model.register_forward_pre_hook(lambda model, _: seen.append(model.get_submodule(layer).compute.name))
    trainer.train()
    trainer.evaluate(rows_of(run)[:1])
    assert seen == ["bfloat16", "bfloat16", "float8-row", "float8-row", "bfloat16"]


def test_the_run_folder_is_one_that_reports_and_comparisons_read(tmp_path: Path) -> None:
    run = reference("bfloat16/word", steps=4)
    every = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    given = {"recipe": run.recipe, "audit_every": 2, "eval_dataset": rows_of(run)[:4]}
    trainer_of(tmp_path, run, mixin=dict(given), **every).train()
    made = ng.read_run(tmp_path / "narrowgauge")
    assert [row["loss"] for row in made.steps] == run.losses and [row["lr"] for row in made.steps] == run.rates
    assert [row["grad_norm"] for row in made.steps] == run.grad_norms
    assert [row["tokens"] for row in made.steps] == [row["tokens"] for row in run.rows]
    assert [row["edq"] for row in made.steps if "edq" in row] == [row["edq"] for row in run.rows if "edq" in row]
    assert made.summary["steps"] == 4 and len(made.evals) == 2
    assert (made.config["lr"], made.config["steps"], made.config["batch_size"]) == (3e-3, 4, 4)
    trainer_of(tmp_path, run, mixin=dict(given), **every).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    again = ng.read_run(tmp_path / "narrowgauge")
    assert [row["loss"] for row in again.steps] == run.losses and again.summary["steps"] == 4
    assert "resume" in [event["kind"] for event in again.events]
    assert again.summary["weights_fingerprint"] == made.summary["weights_fingerprint"]


def test_a_second_training_has_a_folder_of_its_own_with_gauges(tmp_path: Path) -> None:
    run = reference("bfloat16/word", steps=2)
    for count in (1, 2):
        callback = NarrowgaugeCallback(tmp_path / "run", gauges_every=1)
        trainer_of(tmp_path, run, mixin={"recipe": run.recipe, "callbacks": [callback]}).train()
        assert len(ng.read_run(tmp_path / ("run" if count == 1 else "run-2")).gauges) > 0
    assert not (tmp_path / "narrowgauge").exists()


class OneLayer(TrainerCallback):
    """Multiplies the gradient of the head within the step's line."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        named["model"].lm_head.weight.grad.mul_(2.0)


@pytest.mark.parametrize("kind", [MyTrainer, Trainer])
@pytest.mark.parametrize("is_faulty", [False, True])
def test_steps_are_computed_again_with_one_argument(kind: type[Trainer], is_faulty: bool, tmp_path: Path) -> None:
    run = reference("bfloat16/word", steps=3)
    callbacks = [NarrowgaugeCallback(tmp_path / "run", audit_every=2), *([OneLayer()] if is_faulty else [])]
    given: dict[str, Any] = {"recipe": run.recipe, "callbacks": callbacks}
    if kind is Trainer:
        args = arguments(tmp_path, run, max_grad_norm=0)
        made = optimizer_factory(args, run.recipe, max_grad_norm=run.settings.max_grad_norm)
        given = {"args": args, "optimizer_cls_and_kwargs": made, "callbacks": callbacks}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer_of(tmp_path, run, kind, mixin=given).train()
    found = ng.read_run(tmp_path / "run")
    named = {(each["detector"], each["tensor"]) for each in found.events if each.get("detector") in DEPARTURES}
    assert named == ({("gradient-scaled", "lm_head.weight")} if is_faulty else set()), found.events
    assert is_faulty or [row["loss"] for row in found.steps] == run.losses


def test_an_audit_of_steps_needs_a_folder() -> None:
    with pytest.raises(RecipeError, match="without a run folder"):
        NarrowgaugeCallback(audit_every=100)


def test_a_plain_trainer_is_recorded_from_its_log(tmp_path: Path) -> None:
    run = reference("bfloat16/word", steps=2)
    args = arguments(tmp_path, run, max_grad_norm=0)
    made = optimizer_factory(args, run.recipe, max_grad_norm=run.settings.max_grad_norm)
    given = {"args": args, "optimizer_cls_and_kwargs": made, "callbacks": [NarrowgaugeCallback(tmp_path / "run")]}
    trainer_of(tmp_path, run, Trainer, mixin=dict(given)).train()
    assert [row["loss"] for row in ng.read_run(tmp_path / "run").steps] == run.losses
    args.logging_steps = 2
    with pytest.raises(RecipeError, match="logging_steps=1"):
        trainer_of(tmp_path, run, Trainer, mixin=dict(given)).train()


def test_the_example_resumes_and_saves(capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "huggingface_trainer.py"
    assert len(example.read_text().splitlines()) <= 60
    runpy.run_path(str(example), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert "resumed at step 10: the same bits True" in lines and "saved in torch.bfloat16" in lines
    assert lines[-1].startswith("a run folder of 20 steps")
