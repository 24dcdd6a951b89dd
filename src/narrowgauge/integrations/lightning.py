"""Lightning's Trainer: a callback that records a fit, also in Lightning's own loggers.

Lightning needs nothing else than ``ng.AdamW`` from ``configure_optimizers``. Under
DistributedDataParallel, which Lightning wraps around the module before, also ``ng.cast_parameters``
in the module's ``__init__``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from narrowgauge.errors import RecipeError
from narrowgauge.integrations.recording import RecordedCallback
from narrowgauge.runs.schema import Row, numbers_of

# Its two packages have separate classes. Use the package that the program has imported.
_IS_OLD = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
Callback: Any = import_module("pytorch_lightning" if _IS_OLD else "lightning.pytorch").Callback
_SETTINGS = (
    "max_steps", "max_epochs", "accumulate_grad_batches", "gradient_clip_val", "world_size",
)  # fmt: skip


class NarrowgaugeMonitor(RecordedCallback, Callback):
    """Record a fit as ``narrowgauge train`` records its runs, and send the numbers to the Trainer's
    loggers.

    Losses and weights have the same bits with and without it. The folder is ``narrowgauge`` in the
    Trainer's ``default_root_dir`` if none is given.

    Args:
        folder, gauges_every: of every recorded callback.
        loss, val_loss: the names of the losses that the module logs. A loss that ``training_step``
            returns takes precedence.
        tokens: counts a batch's tokens; ``None`` records none.
    Raises:
        RecipeError: no loss is returned or logged.
    Example:
        >>> monitor = NarrowgaugeMonitor("runs/word", gauges_every=100)
        >>> str(monitor.folder)
        'runs/word'
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        gauges_every: int = 0,
        loss: str = "loss",
        val_loss: str = "val_loss",
        tokens: Callable[[Any], int] = lambda batch: 0,
    ) -> None:
        super().__init__(folder, gauges_every=gauges_every)
        self._loss_name = loss
        self._val_loss_name = val_loss
        self._count = tokens
        self._num_steps = 0
        self._losses: list[Tensor] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        count = len(trainer.optimizers)
        if count > 1:
            warnings.warn(
                f"Of {count} optimizers, the record shows the rate and the audit of the first.",
                stacklevel=2,
            )
        self._num_steps = trainer.global_step
        self._losses.clear()
        values = {name: getattr(trainer, name, None) for name in _SETTINGS}
        clips_norm = trainer.gradient_clip_algorithm in (None, "norm")
        self._open(
            trainer.default_root_dir,
            pl_module,
            trainer.optimizers[0],
            trainer.global_step // count,  # Lightning counts the steps of all
            settings={name: value for name, value in values.items() if value is not None},
            called=_called_model(pl_module),
            max_grad_norm=trainer.gradient_clip_val if clips_norm else None,
            on_row=partial(_log, trainer),
        )

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs
        if isinstance(outputs, dict):
            loss = outputs.get("loss")
        if isinstance(loss, Tensor):
            self._losses.append(loss.detach())
        self.tokens += self._count(batch)
        if trainer.global_step == self._num_steps:
            return
        self._num_steps = trainer.global_step
        loss = trainer.callback_metrics.get(self._loss_name)
        if self._losses:
            loss = sum(self._losses)
        if loss is None:
            raise RecipeError(
                "Cannot record a fit whose training_step returns no loss and logs no "
                f"'{self._loss_name}'.",
                "Return the loss, or log it: self.log('loss', loss).",
            )
        self._step(loss)
        self._losses.clear()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._evaluate(trainer.callback_metrics.get(self._val_loss_name))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close(finished=not trainer.interrupted)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close(finished=False)


def _log(trainer: Any, kind: str, row: Row) -> None:
    numbers = numbers_of(kind, row)
    for logger in trainer.loggers if numbers else ():
        logger.log_metrics(numbers, step=row["step"])


def _called_model(module: nn.Module) -> nn.Module:
    """Return the model that ``training_step`` calls: the only child if it has all parameters, else
    the module itself.
    """
    children = [child for child in module.children() if [*child.parameters()]]
    if len(children) != 1 or next(module.parameters(recurse=False), None) is not None:
        return module
    return children[0]
