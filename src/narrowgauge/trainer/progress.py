"""What a run shows while it trains: a progress bar in a terminal, else a line now and then; and the
same numbers for TensorBoard or Weights & Biases.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from rich.progress import Progress as Bar

from narrowgauge.runs.schema import EVAL, STEP, Row, numbers_of
from narrowgauge.trainer.settings import Settings

_COLUMNS = ("loss", "tokens_per_second", "lr", "edq")


class Progress:
    """Show the rows of a run, on rank 0, unless it is not ``is_verbose``."""

    def __init__(self, settings: Settings, is_verbose: bool) -> None:
        self.settings = settings
        self.is_verbose = is_verbose
        self.has_bar = is_verbose and sys.stdout.isatty()
        self.bar = Bar(disable=not self.has_bar)
        self.task = self.bar.add_task("", total=settings.steps)
        self.bar.start()

    @functools.cached_property
    def log(self) -> Any:
        return tracker(self.settings)

    def say(self, line: str) -> None:
        if self.is_verbose:
            print(line, flush=True)  # above the bar, if there is one

    def row(self, kind: str, row: Row) -> None:
        """Show a row that was written. What the record warns of are Python's warnings."""
        step = row["step"]
        steps = self.settings.steps
        self.log(numbers_of(kind, row), step)
        words = ""
        if kind == "evals":
            words = EVAL["val_loss"].text(row)
        elif kind == "steps":
            columns = "  ".join(STEP[name].text(row) for name in _COLUMNS if name in row)
            self.bar.update(self.task, completed=step, description=columns)
            is_due = step % max(1, min(100, steps // 10)) == 0 or step in (1, steps)
            if is_due and not self.has_bar:
                words = columns
        if words:
            self.say(f"step {step:>6}/{steps}  {words}")


def tracker(settings: Settings) -> Callable[[dict[str, float], int], object]:
    """Return what takes the numbers of each row, and its step, for ``report_to``."""
    if settings.report_to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(str(settings.folder / "tensorboard"))

        def log(numbers: dict[str, float], step: int) -> None:
            for tag, value in numbers.items():
                board.add_scalar(tag, value, step)
            board.flush()

        return log
    if settings.report_to == "wandb":
        import wandb

        name = settings.folder.name
        run = wandb.init(project="narrowgauge", id=name, resume="allow", config=vars(settings))
        return lambda numbers, step: run.log(numbers, step)
    return lambda numbers, step: None
