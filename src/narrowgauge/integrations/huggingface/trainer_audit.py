"""Steps of a Hugging Face ``Trainer`` computed again, with its arguments as the declaration of what they mean to do."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from narrowgauge._torch import plain_name
from narrowgauge.integrations.audited_steps import AuditedSteps
from narrowgauge.recompute.task import EACH_STEP, Task, task

_RULES = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd"}
"""The rule behind a name of ``TrainingArguments(optim=…)``, for those that are computed again."""


def declared_by(trainer: Trainer) -> Task:
    """What a ``Trainer`` and its arguments say that its steps do, as :func:`narrowgauge.task` would.

    Only what the ``Trainer`` does itself is declared: with an optimizer of your own or a ``create_optimizer`` of your own, its
    rates, betas and groups are not; with a loss of your own, label smoothing is not.

    Args:
        trainer: before ``train()``.
    Returns:
        The limit of clipping, micro-batches, label smoothing, a schedule that moves once a step; of the
        optimizer its rule, settings and the names that it decays.
    """
    args = trainer.args
    declared: dict[str, Any] = {
        "max_grad_norm": args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else None,
        "micro_batches": args.gradient_accumulation_steps,
        "schedule": EACH_STEP,
    }
    if _is_own(trainer, "compute_loss") and trainer.compute_loss_func is None:
        declared["label_smoothing"] = args.label_smoothing_factor
    made = trainer.optimizer is None and trainer.optimizer_cls_and_kwargs is None
    if made and _is_own(trainer, "create_optimizer") and trainer.model is not None:
        declared |= _of_optimizer(trainer, trainer.model, args)
    return task(**declared)


def _of_optimizer(trainer: Trainer, model: nn.Module, args: TrainingArguments) -> dict[str, Any]:
    rule = _RULES.get(str(getattr(args.optim, "value", args.optim)), "")
    settings: dict[str, Any] = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    if rule == "adamw":
        settings |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    decayed = trainer.get_decay_parameter_names(model) if args.weight_decay else []
    return {"optimizer": rule, "settings": settings if rule else {}, "decay_groups": list(map(plain_name, decayed))}


def _is_own(trainer: Trainer, method: str) -> bool:
    """Whether a method is that of transformers' Trainer, or of ours."""
    return getattr(type(trainer), method).__module__.partition(".")[0] in ("transformers", "narrowgauge")


class StepAudit(TrainerCallback, AuditedSteps):
    """The callback of :func:`audit_steps`."""

    def __init__(self, declared: Task, every: int, task: Task | None) -> None:
        AuditedSteps.__init__(self, every, task)
        self.declared = declared

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any
    ) -> None:
        self.begin(named["model"], named["optimizer"], self.declared, state.global_step)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        self.end()


def audit_steps(trainer: Trainer, every: int = 100, task: Task | None = None) -> StepAudit:
    """Compute some steps of a ``Trainer`` again, piece by piece: :doc:`ideas/recompute`.

    Args:
        trainer: before ``train()``; of any optimizer.
        every: steps between audited ones; the second is one too.
        task: what the training means to do; ``None`` takes :func:`declared_by`.
    Returns:
        The callback that was added. After the training its ``findings`` say what departed, ``unchecked`` what was not checked.

    Cost: an audited step takes its forward and backward passes twice more, with a copy of the parameters.

    Example:
        >>> audited = audit_steps(trainer, every=1000)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
        >>> [finding.name for finding in audited.findings]  # doctest: +SKIP
        []
    """
    callback = StepAudit(declared_by(trainer), every, task)
    trainer.add_callback(callback)
    return callback
