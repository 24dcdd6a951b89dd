"""What a person sees of a comparison while it runs: a table that moves on a terminal, a line per finished run elsewhere."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.table import Table
from rich.text import Text

from narrowgauge.runs.comparing.names import recipe_name
from narrowgauge.runs.comparing.trials import divergence
from narrowgauge.runs.record import Run
from narrowgauge.trainer.question import Question

MIN_WIDTH = 80
"""Columns of a terminal below which the table would be cut to nothing."""


class _Lines(io.StringIO):
    """A stream that hands whole lines on."""

    def __init__(self, hand_on: Callable[[str], None]) -> None:
        super().__init__()
        self._hand_on, self._rest = hand_on, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._hand_on(line)
        return len(text)


class _Console(RichConsole):
    def on_broken_pipe(self) -> None:
        """Let the error through: rich's own answer is to leave the process without a word."""
        raise


class Board:
    """The progress of a comparison: a table that moves on a terminal, a line per finished run elsewhere.

    Args:
        question: what is compared.
        out: the folder.
        stream: where it goes.
    """

    def __init__(self, question: Question, out: Path, stream: TextIO) -> None:
        self.lines = [[recipe_name(recipe), str(seed), "", "", ""] for recipe, seed in question.pairs()]
        self.num_done = 0
        self.refused: OSError | None = None
        self.latest, self.notes = _Lines(self._told), _Lines(self.note)
        self._seen: set[str] = set()
        self._running: int | None = None
        self._began = time.perf_counter()
        self._out = out
        self._console = _Console(file=stream, highlight=False)
        self._live: Live | None = None
        if stream.isatty() and not self._console.is_dumb_terminal and self._console.width >= MIN_WIDTH:
            self._live = Live(
                get_renderable=self._table, console=self._console, redirect_stdout=False, redirect_stderr=False
            )

    def __enter__(self) -> Board:
        recipes, seeds = (", ".join(dict.fromkeys(line[k] for line in self.lines)) for k in (0, 1))
        self.say(f"{recipes} · seeds {seeds} · {self._out}")
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, line: str) -> None:
        """One line, above the table; an error of whoever should take it is kept as ``refused``."""
        try:
            self._console.print(line, markup=False, soft_wrap=True)
        except OSError as error:
            self.refused = error
            raise

    def note(self, line: str) -> None:
        """One line, said once however many runs say it."""
        if line.strip() and line not in self._seen:
            self._seen.add(line)
            self.say(line)

    def begin(self, number: int) -> None:
        """A run begins or goes on."""
        self._running, self._began = number, time.perf_counter()
        self.lines[number][2] = "starting"

    def end(self, number: int, run: Run) -> None:
        """A run has ended, now or in an earlier command."""
        recipe, seed, *_ = self.lines[number]
        diverged = divergence(run)
        loss = None if run.summary is None else run.summary.get("val_loss")
        took = f"{time.perf_counter() - self._began:.1f} s" if number == self._running else "earlier"
        self.lines[number][2:] = [
            f"diverged {diverged}" if diverged else "done",
            "–" if loss is None else f"{loss:.4f}",
            took,
        ]
        self.num_done, self._running = self.num_done + 1, None
        if self._live is None:
            how = f"diverged ({diverged})" if diverged else f"validation loss {self.lines[number][3]}"
            self.say(f"{self.num_done}/{len(self.lines)}  {recipe}, seed {seed}  {how}  {took}")

    def _told(self, line: str) -> None:
        """The run's own latest line."""
        if self._running is not None and line.strip():
            # How to go on with this run alone is not how to go on with the comparison.
            self.lines[self._running][2] = line.strip().partition(" Go on with: ")[0]

    def _table(self) -> Table:
        table = Table("recipe", "seed", "progress", "val. loss", "time")
        for line in self.lines:
            table.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in line))
        return table
