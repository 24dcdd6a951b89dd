"""The progress of a comparison: a bar and a table on a terminal, elsewhere a line per run.

The bar shows from the first second; until there are steps to count, it names the current stage. How long the rest takes comes
from :mod:`~narrowgauge.trainer.experiment.time_left`.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from narrowgauge.analysis.comparison.run_stats import divergence
from narrowgauge.runs.finding import counted, duration
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row
from narrowgauge.trainer.console import MIN_WIDTH, ONCE_COMPILED, PipedConsole, compiling_text, write_past_buffers
from narrowgauge.trainer.experiment.planned_runs import PlannedRun
from narrowgauge.trainer.experiment.time_left import RunEstimate, TimeLeft

OTHER_LINES = 8
"""Lines of a terminal that the table of runs leaves to its frame, the bar and the lines printed above."""


class _Lines(io.StringIO):
    """A stream that passes whole lines to a function."""

    def __init__(self, write_line: Callable[[str], None]) -> None:
        super().__init__()
        self._write_line, self._rest = write_line, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._write_line(line)
        return len(text)


class Progress:
    """The progress of a comparison; ``clock`` gives monotonic seconds."""

    def __init__(
        self, runs: Sequence[PlannedRun], out: Path, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.lines = [[run.label, str(run.seed), "", "", ""] for run in runs]
        self.num_done = 0
        self.print_error: OSError | None = None
        self.stdout, self.stderr = _Lines(self.status), _Lines(self.print_once)
        self.time_left: TimeLeft | None = None
        self.stage = ""
        self._printed: set[str] = set()
        self._running: int | None = None
        self._clock, self._began = clock, clock()
        self._out = out
        self._console = PipedConsole(file=stream, highlight=False)
        self._live: Live | None = None
        width, height = self._console.size
        self._has_table = width >= MIN_WIDTH and height >= len(self.lines) + OTHER_LINES
        if stream.isatty() and not self._console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._view, console=self._console, redirect_stdout=False, redirect_stderr=False
            )

    @property
    def on_terminal(self) -> bool:
        """Whether a bar shows the current stage."""
        return self._live is not None

    def __enter__(self) -> Progress:
        recipes, seeds = (", ".join(dict.fromkeys(line[k] for line in self.lines)) for k in (0, 1))
        self.print(f"{recipes} · seeds {seeds} · {self._out}")
        self.stage = "loading PyTorch"
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        # The bar disappears at the end; the table stays.
        self.stage = ""
        if self._live is not None:
            self._live.stop()

    def plan(self, runs: Sequence[tuple[str, int, bool]], estimates: Mapping[str, RunEstimate]) -> None:
        """Print how long runs (recipe, number of steps, is done) will take, and begin to measure them."""
        self.time_left = TimeLeft([(recipe, steps) for recipe, steps, _ in runs], estimates, self._clock)
        for index, (*_, is_done) in enumerate(runs):
            if is_done:
                self.time_left.end(index)
        seconds, left = self.time_left.seconds(), sum(not is_done for *_, is_done in runs)
        if seconds is not None and left:
            ends = {f"{end(found.step_seconds for found in estimates.values()):.2g}" for end in (min, max)}
            steps = " to ".join(sorted(ends, key=float))
            self.print(f"about {duration(seconds)} for {counted(left, 'run')} (a step takes {steps} s here)")

    def print(self, line: str) -> None:
        """Print one line above the table; an error of the stream is kept in ``print_error``."""
        try:
            self._console.print(line, markup=False, soft_wrap=True)
        except OSError as error:
            self.print_error = error
            raise

    def print_once(self, line: str) -> None:
        """Print one line, once however many runs print it."""
        if line.strip() and line not in self._printed:
            self._printed.add(line)
            self.print(line)

    def begin(self, index: int) -> None:
        """A run begins or is resumed."""
        self._running, self._began = index, self._clock()
        if self.time_left is not None:
            self.time_left.begin(index)
        self.status("starting")

    def step(self, step: int) -> None:
        """The run has finished a step."""
        if self.time_left is not None and self._running is not None:
            self.time_left.step(step)

    def end(self, index: int, run: Run) -> None:
        """A run has ended, now or in an earlier command."""
        recipe, seed, *_ = self.lines[index]
        diverged = divergence(run)
        loss = None if run.summary is None else run.summary.get("val_loss")
        took = f"{self._clock() - self._began:.1f} s" if index == self._running else "earlier"
        self.lines[index][2:] = [
            f"diverged {diverged}" if diverged else "done",
            "–" if loss is None else f"{loss:.4f}",
            took,
        ]
        self.num_done, self._running = self.num_done + 1, None
        if self.time_left is not None:
            self.time_left.end(index)
        if self._live is None or not self._has_table:
            ended = f"diverged ({diverged})" if diverged else f"validation loss {self.lines[index][3]}"
            left = f"  {self._left()}" if self._left() else ""
            self.print(f"{self.num_done}/{len(self.lines)}  {recipe}, seed {seed}  {ended}  {took}{left}")

    def status(self, line: str) -> None:
        """Show the latest line of the run as the current stage."""
        if not line.strip():
            return
        # The run's own command would resume this run alone.
        self.stage = line.strip().partition(" Go on with: ")[0]
        if self._running is not None:
            self.lines[self._running][2] = self.stage

    def stopping(self, line: str) -> None:
        """Show a line from within a signal handler: where there is a bar, as the current stage, since printing breaks it."""
        if self._live is not None:
            self.status(line)
        else:
            write_past_buffers(line)

    def _left(self) -> str:
        seconds = None if self.time_left is None else self.time_left.seconds()
        return f"about {duration(seconds)} left" if seconds else ""

    def _view(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self.stage:
            parts.append(self._bar())
            if not self._has_table or self._running is None:
                prefix = ""
                if self._running is not None:
                    recipe, seed, *_ = self.lines[self._running]
                    prefix = f"{recipe}, seed {seed}: "
                parts.append(Text(prefix + self.stage, no_wrap=True, overflow="ellipsis"))
        if self._has_table:
            parts.append(self._table())
        return Group(*parts)

    def _bar(self) -> Table:
        """The share of all steps that are done, and how long the rest takes."""
        share = 0.0 if self.time_left is None else self.time_left.share_done
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True)
        text = " · ".join(filter(None, (f"{self.num_done}/{len(self.lines)} runs", self._left())))
        grid.add_row(ProgressBar(1.0, share, pulse=share == 0), text)
        return grid

    def _table(self) -> Table:
        table = Table("recipe", "seed", "progress", "val. loss", "time")
        for line in self.lines:
            table.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in line))
        return table


class RunProgress:
    """The screen of one run of a comparison, which updates the comparison's display."""

    def __init__(self, progress: Progress, num_steps: int) -> None:
        self.progress, self.num_steps = progress, num_steps

    def stage(self, what: str) -> None:
        self.progress.status(what)

    def start(self, name: str, step: int) -> None:
        self.progress.status("the first step")

    def compiling(self, what: str, number: int) -> None:
        self.progress.status(compiling_text(what, number))
        if what == "kernel" and not self.progress.on_terminal:
            self.progress.print_once(ONCE_COMPILED)

    def say(self, line: str) -> None:
        self.progress.status(line)

    def step(self, row: Row) -> None:
        self.progress.step(row["step"])
        self.progress.status(f"step {row['step']}/{self.num_steps}  loss {row['loss']:.4f}")

    def evaluation(self, row: Row) -> None:
        self.progress.status(f"step {row['step']}/{self.num_steps}  validation loss {row['val_loss']:.4f}")

    def stopping(self, line: str) -> None:
        self.progress.stopping(line)

    def summary(self, rows: list[dict[str, Any]]) -> None:
        """Nothing: the comparison prints a line or a table of its own."""
