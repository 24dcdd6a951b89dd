"""Lightning's Trainer: a callback that records a fit, also in Lightning's own loggers.

Lightning needs nothing else than ``ng.AdamW`` from ``configure_optimizers``. Under
DistributedDataParallel, which Lightning wraps around the module before, also ``ng.cast_parameters``
in the module's ``__init__``.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from narrowgauge.integrations.recording import RecordedCallback
from narrowgauge.runs.schema import numbers_of
from narrowgauge.spec.tables import Row

_SETTINGS = (
    "max_steps", "max_epochs", "accumulate_grad_batches", "gradient_clip_val", "world_size",
)  # fmt: skip


class NarrowgaugeMonitor(RecordedCallback, pl.Callback):
    """Record a fit as ``narrowgauge train`` records its runs, and send the numbers to the Trainer's
    loggers.

    Losses and weights have the same bits with and without it. The folder is ``narrowgauge`` in the
    Trainer's ``default_root_dir`` if none is given. A row has the sum of the losses that
    ``training_step`` returned since the last step.

    Args:
        folder: of every recorded callback.
        val_loss: the name of the validation loss that the module logs.
        tokens: counts a batch's tokens; by default none are recorded.
    Example:
        >>> monitor = NarrowgaugeMonitor("runs/word")
        >>> str(monitor.folder)
        'runs/word'
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        val_loss: str = "val_loss",
        tokens: Callable[[Any], int] = lambda batch: 0,
    ) -> None:
        super().__init__(folder)
        self._val_loss_name = val_loss
        self._count = tokens
        self._num_steps = 0
        self._loss: Tensor | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def log(kind: str, row: Row) -> None:
            numbers = numbers_of(kind, row)
            for logger in trainer.loggers if numbers else ():
                logger.log_metrics(numbers, step=row["step"])

        self._num_steps = trainer.global_step
        self._loss = None
        clips_norm = trainer.gradient_clip_algorithm in (None, "norm")
        self._open(
            trainer.default_root_dir,
            pl_module,
            trainer.optimizers,
            trainer.global_step // len(trainer.optimizers),  # Lightning counts the steps of all
            settings={name: getattr(trainer, name) or 0 for name in _SETTINGS},
            called=_called_model(pl_module),
            max_grad_norm=trainer.gradient_clip_val if clips_norm else None,
            on_row=log,
        )

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        if loss is not None:
            self._loss = loss.detach() + (0 if self._loss is None else self._loss)
        self.tokens += self._count(batch)
        if trainer.global_step > self._num_steps:
            self._num_steps = trainer.global_step
            self._step(self._loss)
            self._loss = None

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._evaluate(trainer.callback_metrics.get(self._val_loss_name))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close(finished=not trainer.interrupted)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close(finished=False)


def _called_model(module: nn.Module) -> nn.Module:
    """Return the model that ``training_step`` calls: the only child if it has all parameters, else
    the module itself.
    """
    children = [child for child in module.children() if [*child.parameters()]]
    if len(children) != 1 or next(module.parameters(recurse=False), None) is not None:
        return module
    return children[0]
