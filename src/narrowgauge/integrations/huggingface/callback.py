"""A callback that gives a Hugging Face run an audit, gauges, alarms and a run folder."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from narrowgauge.errors import RecipeError
from narrowgauge.gauges.recording.run_recorder import RunRecorder, folder_for
from narrowgauge.optim.audit import audit, unwrapped
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.recompute.task import EACH_STEP, Task, task
from narrowgauge.spec.recipes import Recipe


class NarrowgaugeCallback(TrainerCallback):
    """A callback of ``transformers.Trainer`` that checks the set-up, logs what storage did to updates, and records runs.

    :class:`NarrowgaugeTrainer` adds one that records in ``output_dir/narrowgauge``; give it your own for other settings. In a
    plain ``Trainer`` it takes losses from the log, so a run folder needs ``logging_steps=1`` there.

    Args:
        folder: the run folder; ``None`` writes none. A new training never overwrites a record: it takes ``folder-2``,
            ``folder-3`` …; a resumed one continues in the last of them.
        gauges_every: steps between samples of the gauges; 0 for none. They need a folder.
        audit_every: steps between those that are computed again, piece by piece (:doc:`ideas/recompute`); the second step is one
            too. 0 for none. What departs becomes an event, so a folder is needed. The trainer's argument of this name is another:
            how often its optimizer compares updates with their exact values.
        task: what the training means to do, for that audit; ``None`` takes what the trainer and its arguments declare.
        loggers: where rows and events also go, such as ``"tensorboard"``.

    Raises:
        RecipeError: gauges, loggers or an audit of steps without a folder; when training begins, if the optimizer is not one of
            Narrowgauge's, steps at another rate than ``learning_rate``, or clips as the Trainer does.

    Example:
        >>> from transformers import Trainer
        >>> callback = NarrowgaugeCallback("runs/word", gauges_every=100, loggers="tensorboard")
        >>> trainer = MyTrainer(model, args, callbacks=[callback], recipe="bfloat16/word")  # doctest: +SKIP
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        gauges_every: int = 0,
        audit_every: int = 0,
        task: Task | None = None,
        loggers: str | Iterable[str] = (),
    ) -> None:
        if folder is None and (gauges_every or audit_every or loggers):
            raise RecipeError(
                "gauges, loggers or an audit of steps were requested of a callback without a run folder.",
                "Name a folder.",
            )
        self.folder = None if folder is None else Path(folder)
        self.recorder: RunRecorder | None = None
        self.recipe: Recipe | None = None
        """The recipe of the trainer that this callback belongs to; ``None`` in a plain one."""
        self.task = task
        self.declared: Task | None = None
        """What the trainer that this callback belongs to does itself; ``None`` in a plain one."""
        self._options: dict[str, Any] = {"gauges_every": gauges_every, "audit_every": audit_every, "loggers": loggers}
        self._loss: Tensor | None = None
        self._tokens: Any = 0

    def take_micro_batch(self, loss: Tensor, tokens: Any) -> None:
        """Add a micro-batch to the step that is recorded next: its share of the step's loss, and its number of tokens."""
        self._loss = loss if self._loss is None else self._loss + loss
        self._tokens = self._tokens + tokens

    def readings(self, optimizer: Optimizer) -> dict[str, float]:
        """What to log beside the loss: the audit's readings over its window, skipped steps, and any loss scale."""
        found: dict[str, float] = {}
        if whole := audit(optimizer).get(""):
            found = {"edq": whole.edq, "update_noise": whole.noise, "lost_fraction": whole.lost_fraction}
        found["num_skipped"] = optimizer.num_skipped
        if optimizer.loss_scaler is not None:
            found["loss_scale"] = float(optimizer.loss_scaler.scale_tensor)
        return found

    # ── what the Trainer calls ──────────────────────────────────────────────────────────────────────────────────────

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any
    ) -> None:
        """Check that the optimizer agrees with the arguments, and open the run folder."""
        optimizer = unwrapped(named.get("optimizer"))
        if not isinstance(optimizer, Optimizer):
            raise RecipeError(
                f"NarrowgaugeCallback was given to a Trainer whose optimizer is a {type(optimizer).__name__}.",
                "Mix in NarrowgaugeTrainer, or pass optimizer_cls_and_kwargs=optimizer_factory(args, recipe).",
            )
        if self.recipe is None:
            _require_what_was_asked(args, optimizer)
        self._loss, self._tokens = None, 0
        self._close(finished=False)  # of a training that was interrupted
        if self.folder is None:
            return
        if self.recipe is None and (args.logging_strategy != "steps" or args.logging_steps != 1):
            raise RecipeError(
                "a run folder was requested of a plain Trainer, whose callbacks get losses with log entries alone.",
                "Set logging_steps=1, or mix in NarrowgaugeTrainer.",
            )
        resume = state.global_step > 0
        self.recorder = RunRecorder(
            folder_for(self.folder, goes_on=resume),
            named["model"],
            optimizer,
            recipe=self.recipe,
            settings=_settings(args, state),
            resume=resume,
            task=self.task or self.declared or _declared_by(args, optimizer),
            **self._options,
        )
        if resume:
            self.recorder.go_back(state.global_step)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any
    ) -> None:
        """Record the step, at the rate that it was taken with."""
        loss, tokens = self._loss, self._tokens
        self._loss, self._tokens = None, 0
        if self.recorder is not None and loss is not None:
            self.recorder.step(loss, tokens=int(tokens) or None)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        """In a plain Trainer: add the readings to the log entry of a step, and record it."""
        logs = named.get("logs") or {}
        if self.recipe is not None or "loss" not in logs:
            return
        if self.recorder is not None:
            self.recorder.step(logs["loss"], lr=logs["learning_rate"], grad_norm=logs.get("grad_norm"))
        found = self.readings(unwrapped(named["optimizer"]))
        logs.update(found)
        state.log_history[-1].update(found)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        loss = (named.get("metrics") or {}).get("eval_loss")
        if self.recorder is not None and loss is not None:
            self.recorder.evaluate(loss)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        self._close(finished=state.global_step >= state.max_steps)

    def _close(self, finished: bool) -> None:
        if self.recorder is not None:
            self.recorder.close(finished)
            self.recorder = None


def _declared_by(args: TrainingArguments, optimizer: Optimizer) -> Task:
    """What a plain Trainer does by its arguments alone; the optimizer, the loss and the labels may be of one's own."""
    limit = args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else optimizer.max_grad_norm
    return task(max_grad_norm=limit, micro_batches=args.gradient_accumulation_steps, schedule=EACH_STEP)


def _settings(args: TrainingArguments, state: TrainerState) -> dict[str, Any]:
    """The settings of a training under the names that ``narrowgauge train`` uses, by which runs are compared."""
    parts = args.gradient_accumulation_steps
    return {
        "steps": state.max_steps,
        "batch_size": args.per_device_train_batch_size * parts * args.world_size,
        "gradient_accumulation_steps": parts,
        "lr": args.learning_rate,
        "schedule": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        "weight_decay": args.weight_decay,
        "beta1": args.adam_beta1,
        "beta2": args.adam_beta2,
        "eps": args.adam_epsilon,
        "max_grad_norm": args.max_grad_norm,
        "seed": args.seed,
    }


def _require_what_was_asked(args: TrainingArguments, optimizer: Optimizer) -> None:
    """Refuse an optimizer of a plain Trainer that was made without a rate, or clips as the Trainer does."""
    default = inspect.signature(type(optimizer)).parameters["lr"].default
    rates = {group.get("initial_lr", group["lr"]) / group.get("lr_factor", 1.0) for group in optimizer.param_groups}
    if rates == {default} and args.learning_rate != default:
        raise RecipeError(
            f"TrainingArguments(learning_rate={args.learning_rate:g}) was given, and {type(optimizer).__name__} was made "
            f"without lr: it would step at its default, {default:g}.",
            'Give optimizer_cls_and_kwargs an "lr", or pass optimizer_factory(args, recipe) there.',
        )
    if optimizer.max_grad_norm is not None and args.max_grad_norm and args.max_grad_norm > 0:
        raise RecipeError(
            f"gradients would be clipped twice: to {args.max_grad_norm:g} by the Trainer, in their own format, and to "
            f"{optimizer.max_grad_norm:g} by the optimizer, in float32.",
            "Set TrainingArguments(max_grad_norm=0).",
        )
