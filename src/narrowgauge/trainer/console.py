"""What a person sees of a run: a progress bar with figures on a terminal, plain lines in a pipe."""

from __future__ import annotations

import io
import sys
from types import TracebackType
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

Row = dict[str, Any]


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
            columns = (
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
            )
            self.progress = Progress(*columns, console=self.rich, transient=True)

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self.progress is not None:
            self.progress.stop()

    def start(self, name: str, step: int) -> None:
        """Begin at ``step``."""
        if self.progress is not None:
            self.progress.start()
            self.progress.add_task(name, total=self.num_steps, completed=step, figures="")

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

    def summary(self, rows: list[Row]) -> None:
        """The table at the end: a line per run."""
        if self.progress is not None:
            self.progress.stop()
        table = summary_table(rows)
        # A table that does not fit would be cut to nothing; lines only wrap. Only in plenty of room does it say what it takes.
        natural = self.rich.measure(table, options=self.rich.options.update(width=1000)).maximum
        fits = self.on_terminal and natural <= self.rich.width
        self.rich.print(table if fits else plain_table(rows), markup=False, soft_wrap=True)


_COLUMNS = (
    ("recipe", "recipe", str),
    ("val_loss", "val. loss", "{:.4f}".format),
    ("bytes_per_param", "bytes/param", "{:.2f}".format),
    ("update_lost", "update lost", "{:.1%}".format),
    ("tokens_per_second", "tokens/s", "{:,.0f}".format),
    ("wall_seconds", "seconds", "{:.0f}".format),
)


def _cells(row: Row) -> list[str]:
    # 1 - EDQ is the share of the update that is lost on average; it may read a little below 0 for stochastic storages.
    edq = row.get("edq")
    figures = {**row, "update_lost": None if edq is None else max(0.0, 1 - edq)}
    return [shown(figures[key]) if figures.get(key) is not None else "–" for key, _, shown in _COLUMNS]


def summary_table(rows: list[Row]) -> Table:
    """The figures of finished runs, for a terminal."""
    table = Table(*[title for _, title, _ in _COLUMNS])
    for row in rows:
        table.add_row(*_cells(row))
    return table


def plain_table(rows: list[Row]) -> str:
    """The figures of finished runs, as aligned text."""
    lines = [[title for _, title, _ in _COLUMNS], *(_cells(row) for row in rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(_COLUMNS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
