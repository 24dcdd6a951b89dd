"""The console of a run: a progress bar with metrics on a terminal, plain lines in a pipe."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from narrowgauge.runs.schema import EVAL, STEP, SUMMARY, Row
from narrowgauge.spec.tables import Column, Table

_BAR = ("loss", "tokens_per_second")
_LINE = (*_BAR, "lr", "edq")


class PipedConsole(RichConsole):
    """A console that is quiet once the reader of its lines has left, such as ``head``. rich would exit the process."""

    reader_left = False

    def on_broken_pipe(self) -> None:
        self.quiet = self.reader_left = True


class Console:
    """Print the progress of one run to standard output, or a stream. Without a bar, print a line every ``log_every`` steps.

    With ``log_every`` 0 print no lines, as for a run of a comparison. Messages appear above the bar. ``is_quiet`` shows
    nothing.
    """

    def __init__(
        self, num_steps: int, log_every: int, name: str = "", stream: TextIO | None = None, is_quiet: bool = False
    ) -> None:
        self.num_steps, self.log_every, self.name = num_steps, log_every, name
        self.rich = PipedConsole(file=stream, highlight=False, quiet=is_quiet)
        # A bar needs a terminal that can move its cursor.
        on_terminal = self.rich.file.isatty() and not self.rich.is_dumb_terminal and not is_quiet
        self.progress = Progress(
            TextColumn("{task.description}", style="bold", markup=False),  # a name may contain brackets
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}", markup=False),
            TimeRemainingColumn(),
            console=self.rich,
            transient=True,
            disable=not on_terminal,
        )
        self.task = self.progress.add_task(name, total=None, metrics="")

    def __enter__(self) -> Console:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def stage(self, text: str) -> None:
        """Show a pulsing bar with a stage before the first step."""
        self.progress.update(self.task, metrics=text)

    def start(self, name: str, step: int) -> None:
        """Begin to count steps; the first ones compile."""
        self.progress.reset(self.task, total=self.num_steps, completed=step)
        self.progress.update(self.task, description=self.name or name, metrics="the first steps compile")

    def say(self, line: str, always: bool = False) -> None:
        """Show a message."""
        if self.log_every or always:
            self.rich.print(line, markup=False, soft_wrap=True)
        else:
            self.stage(line)

    def event(self, kind: str, sentence: str) -> None:
        """Show an event. Notes say how a run differs from what was asked for: print them always."""
        self.say(f"{kind}: {sentence}.", always=kind == "note")

    def row(self, kind: str, row: Row) -> None:
        """Show a written row. Of steps, update the bar, or print a line every ``log_every`` steps."""
        if kind == "evals":
            self.say(f"step {row['step']:>6}/{self.num_steps}  {EVAL['val_loss'].text(row)}")
        elif kind != "steps":
            return
        elif not self.progress.disable:
            self.progress.update(self.task, completed=row["step"], metrics=_metrics(row, _BAR))
        elif self.log_every and (row["step"] % self.log_every == 0 or row["step"] in (1, self.num_steps)):
            self.say(f"step {row['step']:>6}/{self.num_steps}  {_metrics(row, _LINE)}")

    def summary(self, rows: list[Row]) -> None:
        """Print the table of finished runs."""
        self.progress.stop()
        columns = [
            Column(column.label, column.cell, code=column.type == "recipe", right=column.type != "recipe")
            for column in SUMMARY.values()
            if column.label
        ]
        self.say(Table(tuple(columns), rows).plain().rstrip())


def _metrics(row: Row, names: tuple[str, ...]) -> str:
    return "  ".join(STEP[name].text(row) for name in names if row.get(name) is not None)
