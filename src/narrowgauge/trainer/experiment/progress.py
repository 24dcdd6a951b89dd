"""The progress of a comparison, and how long the rest takes: a bar and a table on a terminal, elsewhere a line per run.

The bar shows from the first second; until there are steps to count, it names the current stage.

The time of a run is that of its steps plus what happens once: tokenization, building the model, kernels that the first step
compiles, the last checkpoint. Both parts are measured during each run. A later run is assumed to take as long as earlier runs
of its recipe. A recipe that has not run yet takes its estimate, scaled by how far the estimates of the others were off. That
estimate, before the first run, is the forward and backward pass of one batch of arbitrary tokens; it leaves out the optimizer
and compilation.
"""

from __future__ import annotations

import dataclasses
import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from narrowgauge.analysis.comparison.run_stats import divergence
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.runs.finding import counted
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row
from narrowgauge.trainer.console import MIN_WIDTH, PipedConsole, write_past_buffers
from narrowgauge.trainer.experiment.planned_runs import PlannedRun

if TYPE_CHECKING:
    from narrowgauge.trainer.config import TrainConfig


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
        self.progress.status("the first step compiles")

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


# ── how long the runs take ──────────────────────────────────────────────────────────────────────────────────────────

MAX_SECONDS = 10.0
"""No further recipe is measured after that time."""


@dataclass(frozen=True)
class RunEstimate:
    """The expected time of a run; ``once_seconds`` are those outside its steps."""

    step_seconds: float
    once_seconds: float = 0.0


# ── before the first run ────────────────────────────────────────────────────────────────────────────────────────────


def estimate_runs(configs: Sequence[TrainConfig]) -> dict[str, RunEstimate]:
    """Measure a step of each recipe, given the settings of one run of each; as many as fit into ``MAX_SECONDS``.

    The result is empty where a model cannot be built or does not fit, which its run will report.
    """
    found: dict[str, RunEstimate] = {}
    began = time.monotonic()
    for config in configs:
        if time.monotonic() - began < MAX_SECONDS:
            try:
                found[config.recipe.title] = estimate_run(config)
            except (NarrowgaugeError, RuntimeError):  # RuntimeError: a device's memory is full
                return {}
    return found


def estimate_run(config: TrainConfig) -> RunEstimate:
    """Measure an uncompiled step of a run, and the time to build the model and to warm up.

    A step takes as long as the second batch; as the first, where that alone took long.
    """
    # Imported here: PyTorch takes seconds to load, and the progress display shows before.
    import numpy as np

    from narrowgauge.optim.accumulation import backward_in_parts
    from narrowgauge.trainer.data.dataset import Dataset
    from narrowgauge.trainer.language_model import vocabulary_size
    from narrowgauge.trainer.session import build
    from narrowgauge.trainer.step import losses

    vocab_size = vocabulary_size(config.model) or 1
    tokens = np.arange(config.sequence_length * config.batch_size + 1) % vocab_size
    data = Dataset(Path(), tokens, tokens, {"vocab_size": vocab_size, "request": {"held_out": 0.0}})
    times = [time.monotonic()]
    session = build(dataclasses.replace(config, compile=False), Path(), data)
    while len(times) < 3 and times[-1] - times[0] < MAX_SECONDS / 2:
        # Reading the loss waits for the device.
        float(backward_in_parts(losses(session), session.accumulator, session.optimizer.loss_scaler))
        session.optimizer.zero_grad(set_to_none=True)
        times.append(time.monotonic())
    step = times[-1] - times[-2]
    return RunEstimate(step, times[-1] - times[0] - step * (len(times) - 1))


# ── during the runs ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class _Run:
    recipe: str
    num_steps: int
    began: float | None = None
    first: tuple[float, int] | None = None
    latest: tuple[float, int] | None = None
    ended: float | None = None
    is_done: bool = False

    @property
    def step_seconds(self) -> float | None:
        """Of a step, with validations and checkpoints; without the first step, which compiles."""
        if self.first is None or self.latest is None or self.latest[1] <= self.first[1]:
            return None
        return (self.latest[0] - self.first[0]) / (self.latest[1] - self.first[1])

    def once_seconds(self, step: float) -> float | None:
        """So far: before the end of the first step, less a usual step, and after the last step."""
        if self.began is None or self.first is None or self.latest is None:
            return None
        after = 0.0 if self.ended is None else self.ended - self.latest[0]
        return max(0.0, self.first[0] - self.began - step) + after


class TimeLeft:
    """Measures runs as they go, and estimates how long the rest takes.

    Invariant: at constant speed the time left decreases by exactly the time that passes, and it is never negative. More steps
    or runs never make it less.

    Args:
        runs: of each, its recipe and number of steps, in the order in which they run.
    Example:
        >>> now = 0.0
        >>> time_left = TimeLeft([("bfloat16/word", 10), ("bfloat16/word", 10)], clock=lambda: now)
        >>> time_left.seconds() is None
        True
        >>> time_left.begin(0)
        >>> for step in range(1, 4):
        ...     now += 2.0
        ...     time_left.step(step)
        >>> time_left.seconds()  # seventeen steps
        34.0
    """

    def __init__(
        self,
        runs: Sequence[tuple[str, int]],
        estimates: Mapping[str, RunEstimate] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runs = [_Run(*run) for run in runs]
        self._estimates = dict(estimates or {})
        self._clock = clock
        self._running: _Run | None = None

    def begin(self, index: int) -> None:
        """A run begins, or is resumed."""
        self._running = self._runs[index]
        self._running.began = self._clock()

    def step(self, step: int) -> None:
        """The run has finished a step."""
        if self._running is not None:
            self._running.latest = (self._clock(), step)
            self._running.first = self._running.first or self._running.latest

    def end(self, index: int) -> None:
        """A run has ended, now or in an earlier command."""
        self._runs[index].ended, self._runs[index].is_done = self._clock(), True
        self._running = None

    @property
    def share_done(self) -> float:
        """Of all steps, from 0 to 1."""
        done = sum(run.num_steps if run.is_done else (run.latest or (0.0, 0))[1] for run in self._runs)
        return min(1.0, done / max(1, sum(run.num_steps for run in self._runs)))

    def seconds(self) -> float | None:
        """Of all runs together; ``None`` while the time of a step is unknown."""
        left = [self._seconds_of(run) for run in self._runs if not run.is_done]
        known = [seconds for seconds in left if seconds is not None]
        return sum(known) if len(known) == len(left) else None

    def _seconds_of(self, run: _Run) -> float | None:
        step = self._step_seconds(run)
        if step is None:
            return None
        if run is not self._running or run.began is None:
            return self._once_seconds(run.recipe) + run.num_steps * step
        if run.latest is None:
            before_the_second = self._once_seconds(run.recipe) + step - (self._clock() - run.began)
            return max(0.0, before_the_second) + (run.num_steps - 1) * step
        # The time of the present step so far has passed already.
        since, done = run.latest
        return max(0, run.num_steps - done) * step - min(self._clock() - since, step) * (done < run.num_steps)

    def _step_seconds(self, run: _Run) -> float | None:
        if run.step_seconds is not None:
            return run.step_seconds
        # By recipe, of its latest run.
        measured = {one.recipe: seconds for one in self._runs if (seconds := one.step_seconds) is not None}
        if run.recipe in measured:
            return measured[run.recipe]
        estimated = {name: found.step_seconds for name, found in self._estimates.items()}
        both = [(seconds, estimated[name]) for name, seconds in measured.items() if name in estimated]
        if run.recipe in estimated:
            ratio = sum(seconds for seconds, _ in both) / sum(seconds for _, seconds in both) if both else 1.0
            return estimated[run.recipe] * ratio
        others = measured or estimated
        return fmean(others.values()) if others else None

    def _once_seconds(self, recipe: str) -> float:
        """Of a later run; kernels are compiled only for the first run of a recipe."""
        once = ((run.recipe == recipe, run.once_seconds(self._step_seconds(run) or 0.0)) for run in self._runs)
        measured = [(same, seconds) for same, seconds in once if seconds is not None]
        if any(same for same, _ in measured):
            return min(seconds for _, seconds in measured)
        estimated = [self._estimates[recipe].once_seconds] if recipe in self._estimates else []
        return max([*(seconds for _, seconds in measured), *estimated], default=0.0)


def duration(seconds: float) -> str:
    """A waiting time, rounded.

    Example:
        >>> [duration(seconds) for seconds in (0.4, 42, 89, 200, 3599, 3600, 9000, 200_000)]
        ['1 s', '42 s', '1 min 29 s', '3 min 20 s', '1 h', '1 h', '2 h 30 min', '2 d 8 h']
    """
    least = max(1, round(seconds))
    for size, unit, below, part, most in (
        (86400, "d", 3600, "h", 24),
        (3600, "h", 60, "min", 60),
        (60, "min", 1, "s", 60),
    ):
        if least >= size - below / 2:
            whole, rest = divmod(round(least / below), most)
            return f"{whole} {unit}" + (f" {rest} {part}" if rest else "")
    return f"{least} s"
