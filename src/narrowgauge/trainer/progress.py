"""What a run shows while it trains: a progress bar in a terminal, else a line now and then; and the
same numbers for TensorBoard or Weights & Biases.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from narrowgauge.errors import require_package
from narrowgauge.runs.schema import EVAL, STEP, Row, numbers_of
from narrowgauge.trainer.settings import Settings

_ROUTINE = {"start", "resume", "stop", "checkpoint", "finish", "unseen"}
_COLUMNS = ("loss", "tokens_per_second", "lr", "edq")


class Progress:
    """Show the rows of a run, on rank 0, unless it is not ``is_verbose``."""

    def __init__(self, settings: Settings, is_verbose: bool) -> None:
        self.settings = settings
        self.is_verbose = is_verbose
        self._listen = listener(settings)
        self._every = max(1, min(100, settings.steps // 10))
        self._shown = ("", 0)
        self._bar: Any = None
        if is_verbose and sys.stdout.isatty():
            from rich import progress

            self._bar = progress.Progress(*progress.Progress.get_default_columns())
            self._bar.start()
            self._task = self._bar.add_task("", total=settings.steps)

    def say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        elif self.is_verbose:
            print(line, flush=True)

    def row(self, kind: str, row: Row) -> None:
        """Show a row that was written."""
        self._listen(kind, row)
        step = row["step"]
        place = f"step {step:>6}/{self.settings.steps}"
        if kind == "evals":
            self.say(f"{place}  {EVAL['val_loss'].text(row)}")
        elif kind == "events":
            self._event(row)
        elif kind == "steps":
            words = "  ".join(STEP[name].text(row) for name in _COLUMNS if name in row)
            if self._bar is not None:
                self._bar.update(self._task, completed=step, description=words)
            elif step % self._every == 0 or step in (1, self.settings.steps):
                self.say(f"{place}  {words}")

    def _event(self, row: Row) -> None:
        """Show an event that needs attention, of one tensor where many have it at a step."""
        tensor = row.get("tensor", "")
        this = (row["what"], row["step"])
        if row["what"] not in _ROUTINE and not (tensor and this == self._shown):
            prefix = f"{tensor}: " if tensor else ""
            self.say(f"{row['what'].replace('-', ' ')}: {prefix}{row['text']}")
        self._shown = this

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


# ── trackers ──────────────────────────────────────────────────────────────────────────────────────


def listener(settings: Settings) -> Callable[[str, Row], object]:
    """Return what takes each row of a run for ``report_to``."""
    if settings.report_to == "none":
        return lambda kind, row: None
    require_package(settings.report_to)
    if settings.report_to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(str(settings.folder / "tensorboard"))

        def listen(kind: str, row: Row) -> None:
            for tag, value in numbers_of(kind, row).items():
                board.add_scalar(tag, value, row["step"])
            board.flush()

        return listen
    import wandb

    name = settings.folder.name
    run = wandb.init(
        project="narrowgauge", name=name, id=name, resume="allow", config=vars(settings)
    )
    return lambda kind, row: run.log(numbers_of(kind, row), step=row["step"])
