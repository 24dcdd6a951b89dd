"""What a person sees of a run: a progress bar with figures on a terminal, plain lines in a pipe.

The bar is there from the first second: before there are steps to count it moves to and fro beside what is being done.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from narrowgauge.spec.tables import Column, Table

Row = dict[str, Any]

MIN_WIDTH = 80
"""Columns of a terminal below which it has no room for figures beside a bar, nor for a table of runs."""


class Screen(Protocol):
    """Who is shown how a run goes."""

    def stage(self, what: str) -> None:
        """What is done before there are steps to count."""

    def start(self, name: str, step: int) -> None:
        """Steps begin, after ``step``."""

    def say(self, line: str) -> None:
        """One line."""

    def step(self, row: Row) -> None:
        """One step's figures."""

    def evaluation(self, row: Row) -> None:
        """One validation."""

    def stopping(self, line: str) -> None:
        """One line, from within a signal, which may have come in the middle of any other."""

    def summary(self, rows: list[Row]) -> None:
        """The figures of finished runs."""


class Console:
    """Reports of one run to standard output.

    Args:
        num_steps: steps of the whole run.
        log_every: steps between plain lines.
    """

    def __init__(self, num_steps: int, log_every: int) -> None:
        self.num_steps, self.log_every = num_steps, log_every
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A character that an old terminal lacks must not end a run.
            sys.stdout.reconfigure(errors="replace")
        self.rich = RichConsole(highlight=False)
        self.progress: Progress | None = None
        # A terminal that cannot move its cursor is served like a pipe.
        self.on_terminal = sys.stdout.isatty() and not self.rich.is_dumb_terminal
        if self.on_terminal:
            is_wide = self.rich.width >= MIN_WIDTH
            columns = (
                TextColumn("[bold]{task.description}"),
                BarColumn(40 if is_wide else 8),
                _Steps(),
                *([TextColumn("{task.fields[figures]}")] if is_wide else []),
                _TimeLeft(),
            )
            self.progress = Progress(*columns, console=self.rich, transient=True)

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self.progress is not None:
            self.progress.stop()

    def stage(self, what: str) -> None:
        """A bar that only moves to and fro, beside what is done before there are steps to count."""
        self._bar(what, None, 0, "")

    def start(self, name: str, step: int) -> None:
        """Begin at ``step``."""
        self._bar(name, self.num_steps, step, "the first step compiles")

    def _bar(self, name: str, total: int | None, step: int, figures: str) -> None:
        if self.progress is None:
            return
        if not self.progress.task_ids:
            self.progress.start()
            self.progress.add_task(name, total=None, figures="")
        task = self.progress.task_ids[0]
        if total is not None:
            self.progress.reset(task, total=total, completed=step)
        self.progress.update(task, description=name, figures=figures)

    def say(self, line: str) -> None:
        """One line, above the bar."""
        (self.progress.console if self.progress is not None else self.rich).print(line, markup=False, soft_wrap=True)

    def step(self, row: Row) -> None:
        """One step's figures."""
        figures = f"loss {row['loss']:.4f}  {row['tokens_per_second']:,.0f} tokens/s"
        if self.progress is not None:
            self.progress.update(self.progress.task_ids[0], completed=row["step"], figures=figures)
        elif row["step"] % self.log_every == 0 or row["step"] in (1, self.num_steps):
            audited = row.get("edq") is not None
            edq = f"  update lost {max(0.0, 1 - row['edq']):.1%}" if audited else ""
            self.say(f"step {row['step']:>6}/{self.num_steps}  {figures}  lr {row['lr']:.2e}{edq}")

    def evaluation(self, row: Row) -> None:
        """One validation."""
        self.say(f"step {row['step']:>6}/{self.num_steps}  validation loss {row['val_loss']:.4f}")

    def stopping(self, line: str) -> None:
        """Beside the bar, where there is one: a line of its own would tear it."""
        if self.progress is not None and self.progress.task_ids:
            self.progress.update(self.progress.task_ids[0], description=line)
        else:
            write_past_buffers(line)

    def summary(self, rows: list[Row]) -> None:
        """The table at the end: a line per run."""
        if self.progress is not None:
            self.progress.stop()
        table = summary_table(rows)
        # A table that does not fit would be cut to nothing; lines only wrap.
        widths = table.widths(self.rich.width) if self.on_terminal else []
        self.rich.print(table.rich(widths) if widths else table.plain().rstrip(), markup=False, soft_wrap=True)


def write_past_buffers(line: str) -> None:
    """A line to standard error, from within a signal that may have come in the middle of a print."""
    os.write(2, f"{line}\n".encode())


class _Steps(MofNCompleteColumn):
    """How many steps of how many, where there are any to count."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.total is not None else Text()


class _TimeLeft(TimeRemainingColumn):
    """How long the rest takes, where that can be said."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.total is not None else Text()


def _shown(key: str, form: str) -> Callable[[Row], str]:
    return lambda row: "–" if row.get(key) is None else form.format(row[key])


def _update_lost(row: Row) -> str:
    # 1 - EDQ is the share of the update that is lost on average; it may be a little below 0 for stochastic storages.
    return "–" if row.get("edq") is None else f"{max(0.0, 1 - row['edq']):.1%}"


_COLUMNS = (
    Column("recipe", "recipe", code=True),
    Column("val. loss", _shown("val_loss", "{:.4f}"), right=True),
    Column("bytes/param", _shown("bytes_per_param", "{:.2f}"), right=True),
    Column("update lost", _update_lost, right=True),
    Column("tokens/s", _shown("tokens_per_second", "{:,.0f}"), right=True),
    Column("seconds", _shown("wall_seconds", "{:.0f}"), right=True),
)


def summary_table(rows: list[Row]) -> Table:
    """The metrics of finished runs."""
    return Table(_COLUMNS, rows)
