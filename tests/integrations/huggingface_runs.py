"""The own trainer's reference run, in ``transformers.Trainer``: the same batches, rates and initial weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from integrations.own_trainer import OwnRun
from narrowgauge.integrations.huggingface import NarrowgaugeTrainer


class MyTrainer(NarrowgaugeTrainer, Trainer):
    """What a user writes."""


class Rates(TrainerCallback):
    """Sets the learning rates of a reference run."""

    def __init__(self, rates: list[float]) -> None:
        self.rates = rates

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        for group in named["optimizer"].param_groups:
            group["lr"] = self.rates[state.global_step]


def rows_of(run: OwnRun) -> list[dict[str, Tensor]]:
    """The run's sequences, in order, as a data set; targets are given shifted, as the own trainer has them."""
    rows = [row for batch in run.batches for row in batch]
    return [{"input_ids": row[:-1], "labels": row[:-1], "shift_labels": row[1:]} for row in rows]


def arguments(folder: Path, run: OwnRun, **changes: Any) -> TrainingArguments:
    """The arguments that mean the run's settings."""
    c = run.settings
    parts = c.gradient_accumulation_steps
    given: dict[str, Any] = {
        "per_device_train_batch_size": c.batch_size // parts, "gradient_accumulation_steps": parts,
        "max_steps": len(run.rates), "learning_rate": c.lr, "adam_beta1": c.betas[0], "adam_beta2": c.betas[1],
        "adam_epsilon": c.eps, "weight_decay": c.weight_decay, "max_grad_norm": c.max_grad_norm, "seed": c.seed,
        "remove_unused_columns": False, "train_sampling_strategy": "sequential",
    }  # fmt: skip
    return plain_arguments(folder, **{**given, **changes})


def plain_arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Quiet arguments for the CPU, which log every step and save none."""
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "logging_steps": 1, "save_strategy": "no"}
    return TrainingArguments(str(folder), **{**quiet, **changes})


def trainer_of(
    folder: Path, run: OwnRun, made: type[Trainer] = MyTrainer, *, mixin: Any = None, **changes: Any
) -> Trainer:
    """A trainer that repeats a reference run.

    Args:
        folder: its output folder.
        run: the reference.
        made: the class.
        mixin: arguments of the trainer; ``None`` gives the recipe, and audits as often as the reference does.
        changes: to the training arguments.
    """
    given = {"recipe": run.recipe, "audit_every": run.settings.audit_every} if mixin is None else mixin
    args = given.pop("args", None) or arguments(folder, run, **changes)
    callbacks = [Rates(run.rates), *given.pop("callbacks", [])]
    return made(run.model(), args, train_dataset=rows_of(run), callbacks=callbacks, **given)


def history(trainer: Trainer, name: str) -> list[float]:
    """What the Trainer logged under a name, in order."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def same_bits(trainer: Any, run: OwnRun) -> bool:
    """Whether weights and what is stored of them are the reference's."""
    found = trainer.model.state_dict()
    visible = all(torch.equal(found[name], weight) for name, weight in run.state.items())
    named = dict(trainer.model.named_parameters())
    return visible and all(torch.equal(trainer.recipe_optimizer.stored(named[n]), w) for n, w in run.stored.items())
