"""How long the remaining runs of a comparison take: an estimate before the first run, corrected by every run as it goes.

The time of a run is that of its steps plus what happens once: tokenization, building the model, kernels that the first step
compiles, the last checkpoint. Both parts are measured during each run. A later run is assumed to take as long as earlier runs
of its recipe. A recipe that has not run yet takes its estimate, scaled by how far the estimates of the others were off.

The estimate is the forward and backward pass of one batch of arbitrary tokens. It leaves out the optimizer and compilation,
which the first measured run corrects.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from narrowgauge.errors import NarrowgaugeError

if TYPE_CHECKING:
    from narrowgauge.trainer.config import TrainConfig

MAX_SECONDS = 10.0
"""No further recipe is measured after that time."""


@dataclass(frozen=True)
class RunEstimate:
    """The expected time of a run.

    Args:
        step_seconds: of a step.
        once_seconds: outside the steps.
    """

    step_seconds: float
    once_seconds: float = 0.0


# ── before the first run ────────────────────────────────────────────────────────────────────────────────────────────


def estimate_runs(configs: Sequence[TrainConfig]) -> dict[str, RunEstimate]:
    """Measure a step of each recipe.

    Args:
        configs: the settings of a run of each recipe.
    Returns:
        By recipe, as many as can be measured within ``MAX_SECONDS``; none where a model cannot be built or does not fit,
        which its run will report.
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

    Args:
        config: the settings of the run.
    Returns:
        The time of the second batch as that of a step; of the first batch where that alone took long.
    Raises:
        NarrowgaugeError: the model cannot be built.
    """
    # Here, since torch takes seconds to load and the progress display is up before.
    import numpy as np

    from narrowgauge.optim.accumulation import backward_in_parts
    from narrowgauge.trainer.data import Dataset
    from narrowgauge.trainer.loop import vocabulary_size
    from narrowgauge.trainer.session import build
    from narrowgauge.trainer.step import losses

    vocab_size = vocabulary_size(config) or 1
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
        estimates: by recipe, as far as they are known.
        clock: monotonic seconds.
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
