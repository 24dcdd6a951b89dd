"""A callback of Lightning's Trainer: a run folder, gauges, the audit and alarms, also in Lightning's own loggers.

:class:`narrowgauge.RunRecorder` writes the run folder. The ``Trainer``'s loggers get the same numbers, under the tags that all
loggers share, and each event as a count of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.gauges.recording.run_recorder import RunRecorder, folder_for
from narrowgauge.integrations.lightning.fit_audit import called_model, declared_by
from narrowgauge.integrations.lightning.packages import joined_when_asked
from narrowgauge.integrations.lightning.precision import RecipePrecision
from narrowgauge.recompute.task import Task
from narrowgauge.runs.events import Event
from narrowgauge.runs.loggers.logger import gauge_numbers, numbers_of
from narrowgauge.runs.schema import EVAL, STEP, Row

_Base: Any = object


class RunMonitor(_Base):
    """Record a fit of Lightning's ``Trainer`` as ``narrowgauge train`` records its runs, and send it to the Trainer's loggers.

    Losses and weights have the same bits with and without it. A fit that is resumed from a checkpoint goes on in its folder.

    Args:
        folder: the run folder; ``None`` takes ``narrowgauge`` in the Trainer's ``default_root_dir``. A new fit never overwrites
            a record: it takes ``folder-2``, ``folder-3`` …
        gauges_every: steps between samples of the gauges; 0 for none.
        audit_every: steps between those that are computed again, piece by piece (:doc:`ideas/recompute`); the second step is one
            too. 0 for none. What departs becomes an event.
        task: what the fit means to do, for that audit; ``None`` takes the Trainer's own settings.
        loggers: names of Narrowgauge's loggers that get the rows too.
        loss, val_loss: the names under which the module logs its losses; a loss that ``training_step`` returns is preferred.
        tokens: from a batch to the number of its tokens; ``None`` records none.

    Raises:
        RecipeError: at the first step, where no loss is returned or logged; at the start, several optimizers.

    Example:
        >>> monitor = RunMonitor("runs/word", gauges_every=100)
        >>> str(monitor.folder)
        'runs/word'
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        gauges_every: int = 0,
        audit_every: int = 0,
        task: Task | None = None,
        loggers: str | Iterable[str] = (),
        loss: str = "loss",
        val_loss: str = "val_loss",
        tokens: Callable[[Any], int] | None = None,
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.recorder: RunRecorder | None = None
        self.task = task
        self._options: dict[str, Any] = {"gauges_every": gauges_every, "audit_every": audit_every, "loggers": loggers}
        self._names, self._count = (loss, val_loss), tokens
        self._step, self._tokens = 0, 0
        self._loss: Tensor | None = None
        self._rate: float | None = None

    # ── what the Trainer calls ──────────────────────────────────────────────────────────────────────────────────────

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the run folder; a resumed fit goes back to its checkpoint's step."""
        if len(trainer.optimizers) != 1:
            raise RecipeError(
                f"a record was requested of a fit with {len(trainer.optimizers)} optimizers.",
                "Give each its own ng.RunRecorder, in your training_step.",
            )
        plugin = trainer.precision_plugin
        recipe = plugin.recipe if isinstance(plugin, RecipePrecision) else None
        model = plugin.trained_part(pl_module) if isinstance(plugin, RecipePrecision) else pl_module
        self._step, self._loss, self._tokens = trainer.global_step, None, 0
        goes_on = trainer.global_step > 0
        self.recorder = RunRecorder(
            folder_for(self.folder or Path(trainer.default_root_dir) / "narrowgauge", goes_on=goes_on),
            model,
            trainer.optimizers[0],
            recipe=recipe,
            settings=_settings(trainer),
            resume=goes_on,
            called=called_model(trainer, pl_module),
            task=self.task or (declared_by(trainer, pl_module) if self._options["audit_every"] else None),
            **self._options,
        )
        if trainer.is_global_zero:
            self.recorder.reporter.add(_ToLoggers(trainer))  # type: ignore[arg-type]
        if goes_on:
            self.recorder.go_back(trainer.global_step)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Note the learning rate: Lightning's schedules step before the batch ends."""
        group = optimizer.param_groups[0]
        self._rate = float(group["lr"]) / float(group.get("lr_factor", 1.0))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Take in a micro-batch, and record the step that it ended."""
        if self.recorder is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        self._tokens += 0 if self._count is None else self._count(batch)
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        loss = trainer.callback_metrics.get(self._names[0]) if self._loss is None else self._loss
        if loss is None:
            raise RecipeError(
                f"a record was requested of a fit whose training_step returns no loss and logs no '{self._names[0]}'.",
                "Return the loss, or log it: self.log('loss', loss).",
            )
        self.recorder.step(loss, lr=self._rate, tokens=None if self._count is None else self._tokens)
        self._loss, self._tokens = None, 0

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the validation loss, if one was logged."""
        value = trainer.callback_metrics.get(self._names[1])
        if self.recorder is not None and value is not None and not trainer.sanity_checking:
            self.recorder.evaluate(value)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close(finished=not trainer.interrupted)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the record as that of a run that may go on."""
        self._close(finished=False)

    def _close(self, finished: bool) -> None:
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.close(finished)


class _ToLoggers:
    """Hands rows to a Trainer's loggers, in place of a delivery to one of Narrowgauge's."""

    title, failure = "Lightning's loggers", ""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def send(self, method: str, *arguments: Any) -> None:
        if method not in _NUMBERS:
            return
        step, numbers = _NUMBERS[method](arguments[0])
        for logger in self._trainer.loggers if numbers else ():
            logger.log_metrics(numbers, step=step)

    def close(self) -> None:
        """The Trainer closes its loggers itself."""


def _step(row: Row) -> tuple[int, dict[str, float]]:
    return row["step"], numbers_of(STEP, row)


def _evaluation(row: Row) -> tuple[int, dict[str, float]]:
    return row["step"], numbers_of(EVAL, row)


def _gauge(row: Row) -> tuple[int, dict[str, float]]:
    return row["step"], gauge_numbers(row)


def _event(event: Event) -> tuple[int, dict[str, float]]:
    value = 1.0 if event.value is None else float(event.value)
    return event.step, {f"events/{event.kind}": value}


_NUMBERS: dict[str, Callable[[Any], tuple[int, dict[str, float]]]] = {
    "step": _step,
    "evaluation": _evaluation,
    "gauge": _gauge,
    "event": _event,
}
"""Each method of our loggers that has numbers for Lightning's: the step, and the numbers by their tags."""


def _settings(trainer: Any) -> dict[str, Any]:
    """The Trainer's settings by which runs are compared."""
    names = ("max_steps", "max_epochs", "accumulate_grad_batches", "gradient_clip_val", "world_size")
    return {name: value for name in names if (value := getattr(trainer, name, None)) is not None}


if TYPE_CHECKING:
    NarrowgaugeMonitor = RunMonitor

__getattr__ = joined_when_asked(RunMonitor, "NarrowgaugeMonitor", "callbacks", "Callback")
