"""What a run shows while it trains: a progress bar in a terminal, else a line now and then; and the
same numbers for TensorBoard or Weights & Biases.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TextIO

from narrowgauge.errors import MissingPackageError
from narrowgauge.runs.finding import sentences
from narrowgauge.runs.schema import EVAL, STEP, Row, numbers_of
from narrowgauge.trainer.settings import Settings

_ROUTINE = {"start", "resume", "stop", "checkpoint", "finish", "skip", "unseen"}
_COLUMNS = ("loss", "tokens_per_second", "lr", "edq")


class Progress:
    """Show the rows of a run, on rank 0.

    No line follows one that could not be written: the loop ends then, with a checkpoint.

    Args:
        is_verbose: show steps and evaluations, not only notes.
    Attributes:
        failure: why nothing can be shown any more.
        alarms: the kinds of alarms so far, and the last step of each.
    """

    def __init__(
        self, settings: Settings, stream: TextIO | None = None, is_verbose: bool = True
    ) -> None:
        self.settings = settings
        self.stream = stream
        self.is_verbose = is_verbose
        self.failure: OSError | None = None
        self.alarms: dict[str, int] = {}
        self._bar: Any = None
        if is_verbose and stream is None:
            self._bar = self._new_bar()
        self._task: Any = None
        self._listen = listener(settings)
        self._every = max(1, min(100, settings.steps // 10))

    def _new_bar(self) -> Any:
        """Return a progress bar, where the output is a terminal and ``rich`` is installed."""
        if not sys.stdout.isatty():
            return None
        try:
            from rich import progress
        except ImportError:
            return None
        columns = (
            progress.TextColumn("{task.description}"), progress.BarColumn(),
            progress.MofNCompleteColumn(), progress.TimeRemainingColumn(),
        )  # fmt: skip
        bar = progress.Progress(*columns)
        bar.start()
        return bar

    def say(self, line: str) -> None:
        if self.is_verbose:
            self.note(line)

    def note(self, line: str) -> None:
        if self.failure is not None:
            return
        try:
            if self._bar is not None:
                self._bar.console.print(line, markup=False, highlight=False)
            else:
                print(line, file=self.stream or sys.stdout, flush=True)
        except OSError as error:
            self.failure = error

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
            words = [STEP[name].text(row) for name in _COLUMNS if row.get(name) is not None]
            if self._bar is not None:
                self._advance(step, "  ".join(words))
            elif step % self._every == 0 or step in (1, self.settings.steps):
                self.say("  ".join([place, *words]))

    def _advance(self, step: int, words: str) -> None:
        if self._task is None:
            self._task = self._bar.add_task(words, total=self.settings.steps)
        self._bar.update(self._task, completed=step, description=words)

    def _event(self, row: Row) -> None:
        """Show an event that needs attention. Of the alarms of a step show one tensor's."""
        what = row["what"].replace("-", " ")
        tensor = f"{row['tensor']}: " if row.get("tensor") else ""
        line = f"{what}: {tensor}{sentences(row['text'])}"
        if row["what"] in _ROUTINE:
            return
        if what.startswith(("note", "changed")):
            self.note(line)
        elif row.get("severity") == "note":
            self.say(line)
        elif self.alarms.get(what) != row["step"]:
            self.alarms[what] = row["step"]
            self.say(line)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = None


# ── trackers ──────────────────────────────────────────────────────────────────────────────────────


def listener(settings: Settings) -> Callable[[str, Row], object]:
    """Return what takes each row of a run for ``report_to``."""
    if settings.report_to == "none":
        return lambda kind, row: None
    try:
        if settings.report_to == "tensorboard":
            return _tensorboard(settings)
        return _wandb(settings)
    except ImportError as error:
        package = settings.report_to
        raise MissingPackageError(
            f"--report-to {package} needs the package {package}, which is not installed.",
            f"pip install {package}",
        ) from error


def _tensorboard(settings: Settings) -> Callable[[str, Row], object]:
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(str(settings.folder / "tensorboard"))

    def listen(kind: str, row: Row) -> None:
        for tag, value in numbers_of(kind, row).items():
            board.add_scalar(tag, value, row["step"])
        board.flush()

    return listen


def _wandb(settings: Settings) -> Callable[[str, Row], object]:
    import wandb

    run = wandb.init(
        project="narrowgauge", name=settings.folder.name, id=settings.folder.name, resume="allow",
        config=settings.to_dict(),
    )  # fmt: skip

    def listen(kind: str, row: Row) -> None:
        run.log(numbers_of(kind, row), step=row["step"])

    return listen
