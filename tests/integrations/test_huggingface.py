"""Hugging Face's Trainer and TRL's with our optimizers: the bits of a loop of one's own, and the
callback's record.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

import narrowgauge as ng
from integrations.bfloat16_loop import LR, STEPS, llama, same_weights, sequences, trained
from narrowgauge.integrations.huggingface import NarrowgaugeCallback, use_adamw
from text.refusals import refused

pytestmark = [pytest.mark.frameworks, pytest.mark.usefixtures("one_thread")]


def trainer_of(
    folder: Path,
    options: dict[str, Any],
    *,
    compute: str | None = None,
    callbacks: Any = (),
    **changes: Any,
) -> Any:
    """A Trainer of its own defaults, but for its speed, its size and what ``changes``."""
    settings = {
        "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": LR, "report_to": "none", "use_cpu": True,
        "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no", "train_sampling_strategy": "sequential",
    }  # fmt: skip
    args = TrainingArguments(str(folder), **{**settings, **changes})
    rows = [{"input_ids": row, "labels": row} for row in sequences(4 * STEPS)]
    return Trainer(
        llama(compute), args, train_dataset=rows, eval_dataset=rows[:4], callbacks=list(callbacks),
        optimizer_cls_and_kwargs=(ng.AdamW, {"lr": LR, **options}),
    )  # fmt: skip


def history(trainer: Any, name: str) -> list[Any]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_losses_and_weights_are_those_of_a_loop_of_ones_own(tmp_path):
    # The Trainer sorts parameters without names, so their random low bits would be others.
    options = {"storage": "word", "max_grad_norm": 1.0, "low_bits": "zero"}
    compute = "float8-tensor"
    trainer = trainer_of(
        tmp_path, options, compute=compute, max_grad_norm=0, gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
    )  # fmt: skip
    trainer.train()
    model = llama(compute)
    optimizer = ng.AdamW(model.parameters(), lr=LR, weight_decay=0.0, **options)
    rates = history(trainer, "learning_rate")
    losses = trained(model, optimizer, sequences(4 * STEPS).split(4), rates, parts=2)
    assert history(trainer, "loss") == losses and losses[-1] < losses[0]
    assert same_weights(trainer.model, model)


def test_the_callback_records_the_run_and_a_resume_has_the_same_bits(tmp_path):
    every = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}

    def new_trainer():
        options = {"storage": "word", "audit_every": 2}
        callbacks = [NarrowgaugeCallback()]
        return trainer_of(tmp_path, options, callbacks=callbacks, **every)

    trainer = new_trainer()
    trainer.train()
    run = ng.read_run(tmp_path / "narrowgauge")
    losses = history(trainer, "loss")
    assert [row["loss"] for row in run.steps] == losses
    assert [row["lr"] for row in run.steps] == history(trainer, "learning_rate")
    # Each audit stands in one entry, and in no other.
    assert [entry["step"] for entry in trainer.state.log_history if "edq" in entry] == [2, 4, 6]
    assert [row["step"] for row in run.evals] == [3, 6]
    assert [row["tokens"] for row in run.steps] == [68 * step for step in range(1, STEPS + 1)]
    assert not [event for event in run.events if event["severity"] != "note"]
    again = new_trainer()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert same_weights(trainer.model, again.model) and history(again, "loss") == losses
    resumed = ng.read_run(tmp_path / "narrowgauge")
    assert [row["loss"] for row in resumed.steps] == losses
    assert resumed.summary["weights_fingerprint"] == run.summary["weights_fingerprint"]


def test_a_row_has_a_loss_where_the_log_has_an_entry_and_as_it_is(tmp_path):
    options = {"logging_steps": 4, "logging_nan_inf_filter": False}
    callbacks = [NarrowgaugeCallback()]
    trainer = trainer_of(tmp_path, {"max_grad_norm": 1.0}, callbacks=callbacks, **options)
    with torch.no_grad():
        trainer.model.lm_head.weight.fill_(math.nan)
    trainer.train()
    steps = ng.read_run(tmp_path / "narrowgauge").steps
    assert [row["step"] for row in steps] == [*range(1, STEPS + 1)]
    assert [row["step"] for row in steps if "loss" in row] == [4]
    assert math.isnan(steps[3]["loss"]) and math.isnan(steps[3]["grad_norm"])


def test_use_adamw_takes_the_arguments(tmp_path):
    changes = {"adam_beta2": 0.95, "adam_epsilon": 1e-6, "weight_decay": 0.1, "learning_rate": 3e-4}
    trainer = trainer_of(tmp_path, {}, **changes)
    use_adamw(trainer, storage="compact")
    decayed, rest = trainer.create_optimizer().param_groups
    with refused("a trainer with an optimizer"):
        use_adamw(trainer)
    expected = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-6, "storage": "compact"}
    assert expected.items() <= decayed.items() and expected.items() <= rest.items()
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)


def test_a_float32_model_under_bf16_trains_and_resumes_from_torchs_checkpoint(
    tmp_path,
):
    """The change is one argument.

    Losses stay within 0.01 of torch's AdamW, which also wrote the checkpoint.
    """

    def wide(name):
        every = {"save_strategy": "steps", "save_steps": 3, "bf16": True}
        trainer = trainer_of(tmp_path / name, {"storage": "word"}, **every)
        ng.cast_parameters(trainer.model, torch.float32)
        return trainer

    theirs = wide("theirs")
    theirs.optimizer_cls_and_kwargs = (torch.optim.AdamW, {"lr": LR})
    theirs.train()
    for name, checkpoint in (("ours", None), ("resumed", tmp_path / "theirs" / "checkpoint-3")):
        trainer = wide(name)
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
        assert history(trainer, "loss") == pytest.approx(history(theirs, "loss"), abs=0.01)
