"""The console of a run: a progress bar with metrics on a terminal, plain lines in a pipe.

The bar shows from the first second: before there are steps to count, it pulses next to the name of the current stage. Which
format each metric has is in :mod:`narrowgauge.runs.schema`.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from types import TracebackType

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from narrowgauge.runs.schema import EVAL, STEP, SUMMARY, Row
from narrowgauge.spec.tables import Column, Table

MIN_WIDTH = 80
"""Width of a terminal below which metrics do not fit beside a bar, nor a table of runs."""
_BAR = ("loss", "tokens_per_second")
_LINE = (*_BAR, "lr", "edq", "communication_seconds", "wait_seconds")


class PipedConsole(RichConsole):
    """A console that leaves a pipe without a reader to the command line; rich would exit the process."""

    def on_broken_pipe(self) -> None:
        raise


class Console:
    """Prints the progress of one run to standard output; without a bar, a line every ``log_every`` steps."""

    def __init__(self, num_steps: int, log_every: int) -> None:
        self.num_steps, self.log_every = num_steps, log_every
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            # A character that the terminal cannot encode must not end a run; the command line has a handler of its own.
            sys.stdout.reconfigure(errors="replace")
        self.rich = PipedConsole(highlight=False)
        self.progress: Progress | None = None
        # A terminal that cannot move its cursor gets the same lines as a pipe.
        self.on_terminal = self.rich.file.isatty() and not self.rich.is_dumb_terminal
        if self.on_terminal:
            is_wide = self.rich.width >= MIN_WIDTH
            columns = (
                TextColumn("[bold]{task.description}"),
                BarColumn(40 if is_wide else 8),
                _Steps(),
                *([TextColumn("{task.fields[metrics]}")] if is_wide else []),
                _TimeLeft(),
            )
            self.progress = Progress(*columns, console=self.rich, transient=True)

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self.progress is not None:
            self.progress.stop()

    def stage(self, what: str) -> None:
        """Show a pulsing bar next to what happens before the first step."""
        self._bar(what, None, 0, "")

    def start(self, name: str, step: int) -> None:
        self._bar(name, self.num_steps, step, "the first step")

    def compiling(self, what: str, number: int) -> None:
        """Count on the bar what compiles; without a bar, one line for the first kernel."""
        if self.progress is not None and self.progress.task_ids:
            self.progress.update(self.progress.task_ids[0], metrics=compiling_text(what, number))
        elif (what, number) == ("kernel", 1):
            self.say(ONCE_COMPILED)

    def _bar(self, name: str, total: int | None, step: int, metrics: str) -> None:
        if self.progress is None:
            return
        if not self.progress.task_ids:
            self.progress.start()
            self.progress.add_task(name, total=None, metrics="")
        task = self.progress.task_ids[0]
        if total is not None:
            self.progress.reset(task, total=total, completed=step)
        self.progress.update(task, description=name, metrics=metrics)

    def say(self, line: str) -> None:
        """Print one line, above the bar."""
        (self.progress.console if self.progress is not None else self.rich).print(line, markup=False, soft_wrap=True)

    def step(self, row: Row) -> None:
        """Update the bar, or print a line every ``log_every`` steps."""
        if self.progress is not None:
            self.progress.update(self.progress.task_ids[0], completed=row["step"], metrics=_metrics(row, _BAR))
        elif row["step"] % self.log_every == 0 or row["step"] in (1, self.num_steps):
            self.say(f"step {row['step']:>6}/{self.num_steps}  {_metrics(row, _LINE)}")

    def evaluation(self, row: Row) -> None:
        self.say(f"step {row['step']:>6}/{self.num_steps}  {EVAL['val_loss'].text(row)}")

    def stopping(self, line: str) -> None:
        """Show a line in place of the bar's description, where there is a bar: printing would break it."""
        if self.progress is not None and self.progress.task_ids:
            self.progress.update(self.progress.task_ids[0], description=line)
        else:
            write_past_buffers(line)

    def summary(self, rows: list[Row]) -> None:
        """Print the table of finished runs: framed where the terminal is wide enough, else as aligned text that may wrap."""
        if self.progress is not None:
            self.progress.stop()
        table = summary_table(rows)
        # A table that does not fit would be cut to nothing; lines only wrap.
        widths = table.widths(self.rich.width) if self.on_terminal else []
        self.rich.print(table.rich(widths) if widths else table.plain().rstrip(), markup=False, soft_wrap=True)


ONCE_COMPILED = "Compiling the optimizer's kernels: some seconds, the first time on this machine only."


def compiling_text(what: str, number: int) -> str:
    """What compiles.

    Example:
        >>> compiling_text("graph", 2), compiling_text("kernel", 1)
        ('compiling graph 2', 'compiling kernel 1 of the optimizer')
    """
    return f"compiling {what} {number}" + (" of the optimizer" if what == "kernel" else "")


def write_past_buffers(line: str) -> None:
    """Write a line to standard error from a signal handler, which may have interrupted a print."""
    with contextlib.suppress(OSError):  # its reader has left
        os.write(2, f"{line}\n".encode("ascii", "replace"))


class _Steps(MofNCompleteColumn):
    """Steps done of all steps, once there are any to count."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.total is not None else Text()


class _TimeLeft(TimeRemainingColumn):
    """The estimated time left, once there are steps to estimate it from."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.total is not None else Text()


def _metrics(row: Row, names: tuple[str, ...]) -> str:
    return "  ".join(STEP[name].text(row) for name in names if row.get(name) is not None)


def summary_table(rows: list[Row]) -> Table:
    """The labelled metrics of finished runs."""
    labelled = [column for column in SUMMARY.values() if column.label]
    columns = [
        Column(column.label, column.cell, code=column.type == "recipe", right=column.type != "recipe")
        for column in labelled
    ]
    return Table(tuple(columns), rows)
