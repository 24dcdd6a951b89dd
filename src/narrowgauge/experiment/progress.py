"""What a person sees of a comparison while it runs: a bar and a table that move on a terminal, a line per finished run elsewhere.

Both say how long the rest takes. The bar is there from the first second; until there are steps to count it says what is done.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from narrowgauge.comparison.labels import counted
from narrowgauge.comparison.run_stats import divergence
from narrowgauge.experiment.pace import Forecast, Pace, duration
from narrowgauge.experiment.question import Question
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row
from narrowgauge.trainer.console import MIN_WIDTH, write_past_buffers

OTHER_LINES = 8
"""Lines of a terminal that the table of runs must leave to its own frame, the bar and what is said above."""


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
    """The progress of a comparison: a bar and a table that move on a terminal, a line per finished run elsewhere.

    Args:
        question: what is compared.
        out: the folder.
        stream: where it goes.
        clock: seconds that never go back.
    """

    def __init__(
        self, question: Question, out: Path, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.lines = [[recipe.title, str(seed), "", "", ""] for recipe, seed in question.pairs()]
        self.num_done = 0
        self.refused: OSError | None = None
        self.latest, self.notes = _Lines(self.told), _Lines(self.note)
        self.pace: Pace | None = None
        self.doing = ""
        self._seen: set[str] = set()
        self._running: int | None = None
        self._clock, self._began = clock, clock()
        self._out = out
        self._console = _Console(file=stream, highlight=False)
        self._live: Live | None = None
        width, height = self._console.size
        self._has_table = width >= MIN_WIDTH and height >= len(self.lines) + OTHER_LINES
        if stream.isatty() and not self._console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._view, console=self._console, redirect_stdout=False, redirect_stderr=False
            )

    def __enter__(self) -> Board:
        recipes, seeds = (", ".join(dict.fromkeys(line[k] for line in self.lines)) for k in (0, 1))
        self.say(f"{recipes} · seeds {seeds} · {self._out}")
        self.doing = "loading PyTorch"
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        # What moved is gone in the end; the table stays.
        self.doing = ""
        if self._live is not None:
            self._live.stop()

    def plan(self, runs: Sequence[tuple[str, int, bool]], forecast: Mapping[str, Forecast]) -> None:
        """Say how long it will take, and count from now on.

        Args:
            runs: of each, its recipe, its steps, and whether it is done.
            forecast: by recipe, measured beforehand; none where nothing could be.
        """
        self.pace = Pace([(recipe, steps) for recipe, steps, _ in runs], forecast, self._clock)
        for number, (*_, is_done) in enumerate(runs):
            if is_done:
                self.pace.end(number)
        seconds, left = self.pace.seconds_left(), sum(not is_done for *_, is_done in runs)
        if seconds is not None and left:
            ends = {f"{end(found.step_seconds for found in forecast.values()):.2g}" for end in (min, max)}
            steps = " to ".join(sorted(ends, key=float))
            self.say(f"about {duration(seconds)} for {counted(left, 'run')} (a step takes {steps} s here)")

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
        self._running, self._began = number, self._clock()
        if self.pace is not None:
            self.pace.begin(number)
        self.told("starting")

    def at(self, step: int) -> None:
        """The run has done a step."""
        if self.pace is not None and self._running is not None:
            self.pace.at(step)

    def end(self, number: int, run: Run) -> None:
        """A run has ended, now or in an earlier command."""
        recipe, seed, *_ = self.lines[number]
        diverged = divergence(run)
        loss = None if run.summary is None else run.summary.get("val_loss")
        took = f"{self._clock() - self._began:.1f} s" if number == self._running else "earlier"
        self.lines[number][2:] = [
            f"diverged {diverged}" if diverged else "done",
            "–" if loss is None else f"{loss:.4f}",
            took,
        ]
        self.num_done, self._running = self.num_done + 1, None
        if self.pace is not None:
            self.pace.end(number)
        if self._live is None or not self._has_table:
            how = f"diverged ({diverged})" if diverged else f"validation loss {self.lines[number][3]}"
            left = f"  {self._time_left()}" if self._time_left() else ""
            self.say(f"{self.num_done}/{len(self.lines)}  {recipe}, seed {seed}  {how}  {took}{left}")

    def told(self, line: str) -> None:
        """What is being done now: the run's own latest line."""
        if not line.strip():
            return
        # How to go on with this run alone is not how to go on with the comparison.
        self.doing = line.strip().partition(" Go on with: ")[0]
        if self._running is not None:
            self.lines[self._running][2] = self.doing

    def stopping(self, line: str) -> None:
        """One line, from within a signal: where the bar moves, as what is being done, since it would tear the table."""
        if self._live is not None:
            self.told(line)
        else:
            write_past_buffers(line)

    def _time_left(self) -> str:
        seconds = None if self.pace is None else self.pace.seconds_left()
        return f"about {duration(seconds)} left" if seconds else ""

    def _view(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self.doing:
            parts.append(self._bar())
            if not self._has_table or self._running is None:
                parts.append(Text(self._status(), no_wrap=True, overflow="ellipsis"))
        if self._has_table:
            parts.append(self._table())
        return Group(*parts)

    def _status(self) -> str:
        if self._running is None:
            return self.doing
        recipe, seed, *_ = self.lines[self._running]
        return f"{recipe}, seed {seed}: {self.doing}"

    def _bar(self) -> Table:
        """The share of all steps that are done, and how long the rest takes."""
        share = 0.0 if self.pace is None else self.pace.share_done
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True)
        told = " · ".join(filter(None, (f"{self.num_done}/{len(self.lines)} runs", self._time_left())))
        grid.add_row(ProgressBar(1.0, share, pulse=share == 0), told)
        return grid

    def _table(self) -> Table:
        table = Table("recipe", "seed", "progress", "val. loss", "time")
        for line in self.lines:
            table.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in line))
        return table


class RunOnBoard:
    """The screen of one run of a comparison: it tells the board.

    Args:
        board: of the comparison.
        num_steps: of the run.
    """

    def __init__(self, board: Board, num_steps: int) -> None:
        self.board, self.num_steps = board, num_steps

    def stage(self, what: str) -> None:
        """What is done before there are steps to count."""
        self.board.told(what)

    def start(self, name: str, step: int) -> None:
        """Steps begin, after ``step``."""
        self.board.told("the first step compiles")

    def say(self, line: str) -> None:
        """One line."""
        self.board.told(line)

    def step(self, row: Row) -> None:
        """One step's figures."""
        self.board.at(row["step"])
        self.board.told(f"step {row['step']}/{self.num_steps}  loss {row['loss']:.4f}")

    def evaluation(self, row: Row) -> None:
        """One validation."""
        self.board.told(f"step {row['step']}/{self.num_steps}  validation loss {row['val_loss']:.4f}")

    def stopping(self, line: str) -> None:
        """One line, from within a signal."""
        self.board.stopping(line)

    def summary(self, rows: list[dict[str, Any]]) -> None:
        """The board's own lines say it."""
