"""What other frameworks call the metrics of a run: the names under which a log is searched for each of our columns.

A log has no column that says what a number is, only the name that a framework or a user gave it. So the usual names are listed
here, the best first, and nothing is guessed from values: a metric under another name is not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from narrowgauge.runs.schema import EVAL, STEP, Row, is_whole, short, wrong_value

NAMES: dict[str, tuple[str, ...]] = {
    "loss": (
        "loss", "train_loss", "train/loss", "train_loss_step", "train/loss_step", "training_loss", "loss/train", "Loss/train",
        "loss_metrics/global_avg_loss", "train_loss_epoch",
    ),
    "lr": ("lr", "learning_rate", "train/lr", "train/learning_rate", "lr-*", "lr/*", "*/lr"),
    "grad_norm": ("grad_norm", "train/grad_norm", "gradient_norm", "grad_norm/total", "grad_2.0_norm_total"),
    "val_loss": (
        "val_loss", "eval_loss", "eval/loss", "validation/loss", "validation_loss", "val/loss", "valid_loss", "valid/loss",
        "loss/val", "Loss/val", "Loss/validation", "loss/validation", "val_loss_epoch", "validation_metrics/loss",
    ),
}  # fmt: skip
"""The names of each column, the best first, with shell wildcards. Ours, and those of Hugging Face's Trainer, Lightning's
tutorials and ``LearningRateMonitor``, torchtitan, and PyTorch's TensorBoard tutorial."""


@dataclass
class Log:
    """What one log of another framework says.

    Attributes:
        values: for each name in the log, step to value, in the order logged; the last of one step counts.
        config: settings that the log states, under our names; most state none.
        is_finished: whether the run had ended; ``None`` where the log does not say.
    """

    values: dict[str, dict[int, Any]] = field(default_factory=dict)
    config: Row = field(default_factory=dict)
    is_finished: bool | None = None

    def add(self, name: str, step: Any, value: Any) -> None:
        """Take one value.

        Raises:
            ValueError: the step is not a whole number.
        """
        if not is_whole(step):
            raise ValueError(f"{name} has step {short(step)}, which is not a whole number")
        self.values.setdefault(name, {})[int(step)] = value

    def rows(self, table: str) -> list[Row]:
        """The rows of ``"steps"`` or ``"evals"``, ascending; a column that was not logged at a step is absent.

        Raises:
            ValueError: a value is not a number.
        """
        columns = [name for name in NAMES if name in (STEP if table == "steps" else EVAL)]
        found: dict[int, Row] = {}
        for column in columns:
            for step, value in self._series(column).items():
                found.setdefault(step, {"step": step})[column] = value
        rows = [found[step] for step in sorted(found)]
        for row in rows:
            if wrong := wrong_value(table, row):
                raise ValueError(f"step {row['step']} has {wrong}")
        return rows

    def _series(self, column: str) -> Mapping[int, Any]:
        name = named(self.values, column)
        return {} if name is None else self.values[name]


def named(names: Iterable[str], column: str) -> str | None:
    """The best name of a column among those of a log.

    Example:
        >>> named(["epoch", "eval_loss", "lr-AdamW"], "val_loss"), named(["epoch", "lr-AdamW"], "lr"), named(["acc"], "loss")
        ('eval_loss', 'lr-AdamW', None)
    """
    given = list(names)
    return next((name for pattern in NAMES[column] for name in given if fnmatchcase(name, pattern)), None)
