"""Hugging Face's Trainer and TRL's with our optimizers: the bits of a loop of one's own, and the callback's record."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

import narrowgauge as ng
from integrations.bfloat16_loop import LR, STEPS, llama, same_weights, sequences, trained
from narrowgauge.integrations.huggingface import NarrowgaugeCallback

pytestmark = [pytest.mark.frameworks, pytest.mark.usefixtures("one_thread")]


def trainer_of(
    folder: Path, options: dict[str, Any], *, compute: str | None = None, callbacks: Any = (), **changes: Any
) -> Any:
    """A Trainer of its own defaults, but for its speed, its size and what ``changes``."""
    settings: dict[str, Any] = {
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


@pytest.mark.parametrize(("storage", "compute", "parts"), [("word", "float8-tensor", 2), ("compact", "int8-row", 1)])
def test_losses_and_weights_are_those_of_a_loop_of_ones_own(
    storage: str, compute: str | None, parts: int, tmp_path: Path
) -> None:
    options = {"storage": storage, "max_grad_norm": 1.0}
    trainer = trainer_of(
        tmp_path, options, compute=compute, max_grad_norm=0, gradient_accumulation_steps=parts,
        per_device_train_batch_size=4 // parts,
    )  # fmt: skip
    trainer.train()
    model = llama(compute)
    optimizer = ng.AdamW(model.parameters(), lr=LR, weight_decay=0.0, **options)
    losses = trained(model, optimizer, sequences(4 * STEPS).split(4), history(trainer, "learning_rate"), parts)
    assert history(trainer, "loss") == losses and losses[-1] < losses[0]
    assert same_weights(trainer.model, model)


def test_the_defaults_train_and_resume_with_the_same_bits(tmp_path: Path) -> None:
    every = {"save_strategy": "steps", "save_steps": 3}
    whole = trainer_of(tmp_path / "whole", {"storage": "word"}, **every)
    whole.train()
    logged = ng.read_run(tmp_path / "whole")  # the folder with checkpoint-3 and checkpoint-6
    assert [row["loss"] for row in logged.steps] == history(whole, "loss") and logged.summary is not None
    assert ng.read_run(tmp_path / "whole" / "checkpoint-3" / "trainer_state.json").summary is None
    again = trainer_of(tmp_path / "again", {"storage": "word"}, **every)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert history(again, "loss") == history(whole, "loss") and same_weights(whole.model, again.model)


def test_the_callback_records_the_run_and_continues_it(tmp_path: Path) -> None:
    every = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "logging_steps": 500}
    options = {"storage": "word", "audit_every": 2}

    def made() -> Any:
        return trainer_of(tmp_path, options, callbacks=[NarrowgaugeCallback(gauges_every=3, audit_every=2)], **every)

    trainer = made()
    trainer.train()
    run = ng.read_run(tmp_path / "narrowgauge")
    assert [row["loss"] for row in run.steps] == history(trainer, "loss") and len(run.steps) == STEPS
    assert [row["lr"] for row in run.steps] == history(trainer, "learning_rate")
    assert len(history(trainer, "edq")) >= 3 and history(trainer, "num_skipped") == [0] * STEPS
    assert [row["step"] for row in run.evals] == [3, 6] and {row["step"] for row in run.gauges} == {3, 6}
    assert run.summary["steps"] == STEPS and (run.config["steps"], run.config["batch_size"]) == (STEPS, 4)
    assert not [event for event in run.events if event["kind"] == "warning"]
    made().train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    again = ng.read_run(tmp_path / "narrowgauge")
    assert [row["loss"] for row in again.steps] == [row["loss"] for row in run.steps]
    assert again.summary["weights_fingerprint"] == run.summary["weights_fingerprint"]


def test_a_loss_that_is_not_finite_is_recorded_as_it_is(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, {"storage": "word"}, callbacks=[NarrowgaugeCallback()], max_steps=1)
    with torch.no_grad():
        trainer.model.lm_head.weight.fill_(math.nan)
    trainer.train()
    assert math.isnan(ng.read_run(tmp_path / "narrowgauge").steps[0]["loss"])


def test_the_callback_warns_of_two_clippings(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, {"max_grad_norm": 1.0}, callbacks=[NarrowgaugeCallback()], max_steps=1)
    with pytest.warns(UserWarning, match="clipped twice"):
        trainer.train()
