"""How long the rest of several runs takes: arithmetic over what was measured, with the clock as an argument.

A run costs its steps, and beside them what comes once: tokens, the model, kernels that are compiled in its first step, the last
checkpoint. Both are measured of every run as it goes. A run that is still to come costs what its recipe's runs did; a recipe
that has not run yet costs what was forecast for it, corrected by how far the forecasts of the others were off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Forecast:
    """What a run is thought to take before any has run.

    Args:
        step_seconds: of a step.
        once_seconds: of what comes once beside the steps.
    """

    step_seconds: float
    once_seconds: float = 0.0


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
        """Of a step, with the validations and checkpoints between steps; the first is left out, since it compiles."""
        if self.first is None or self.latest is None or self.latest[1] <= self.first[1]:
            return None
        return (self.latest[0] - self.first[0]) / (self.latest[1] - self.first[1])

    def once_seconds(self, step: float) -> float | None:
        """What came before the first step, with what that took beyond a usual one, and after the last; so far."""
        if self.began is None or self.first is None or self.latest is None:
            return None
        after = 0.0 if self.ended is None else self.ended - self.latest[0]
        return max(0.0, self.first[0] - self.began - step) + after


class Pace:
    """Measures runs as they go, and says how long the rest takes.

    Laws: at a steady pace the time left falls by just the time that passes, and it is never negative. More steps or runs
    left never make it less.

    Args:
        runs: of each, its recipe and number of steps, in the order in which they run.
        forecast: by recipe, as far as measured beforehand.
        clock: seconds that never go back.
    Example:
        >>> now = 0.0
        >>> pace = Pace([("bfloat16/word", 10), ("bfloat16/word", 10)], clock=lambda: now)
        >>> pace.seconds_left() is None
        True
        >>> pace.begin(0)
        >>> for step in range(1, 4):
        ...     now += 2.0
        ...     pace.at(step)
        >>> pace.seconds_left()  # seventeen steps
        34.0
    """

    def __init__(
        self,
        runs: Sequence[tuple[str, int]],
        forecast: Mapping[str, Forecast] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runs = [_Run(*run) for run in runs]
        self._forecast = dict(forecast or {})
        self._clock = clock
        self._running: _Run | None = None

    def begin(self, number: int) -> None:
        """A run begins, or goes on."""
        self._running = self._runs[number]
        self._running.began = self._clock()

    def at(self, step: int) -> None:
        """The run has done a step."""
        if self._running is not None:
            self._running.latest = (self._clock(), step)
            self._running.first = self._running.first or self._running.latest

    def end(self, number: int) -> None:
        """A run is done, now or by an earlier command."""
        self._runs[number].ended, self._runs[number].is_done = self._clock(), True
        self._running = None

    @property
    def share_done(self) -> float:
        """Of all steps, from 0 to 1."""
        done = sum(run.num_steps if run.is_done else (run.latest or (0.0, 0))[1] for run in self._runs)
        return min(1.0, done / max(1, sum(run.num_steps for run in self._runs)))

    def seconds_left(self) -> float | None:
        """Of all runs together; ``None`` while nothing says how long a step takes."""
        left = [self._left(run) for run in self._runs if not run.is_done]
        known = [seconds for seconds in left if seconds is not None]
        return sum(known) if len(known) == len(left) else None

    def _left(self, run: _Run) -> float | None:
        step = self._step_seconds(run)
        if step is None:
            return None
        if run is not self._running or run.began is None:
            return self._once_seconds(run.recipe) + run.num_steps * step
        if run.latest is None:
            before_the_second = self._once_seconds(run.recipe) + step - (self._clock() - run.began)
            return max(0.0, before_the_second) + (run.num_steps - 1) * step
        # What the present step has taken already is no longer to come.
        since, done = run.latest
        return max(0, run.num_steps - done) * step - min(self._clock() - since, step) * (done < run.num_steps)

    def _step_seconds(self, run: _Run) -> float | None:
        if run.step_seconds is not None:
            return run.step_seconds
        measured = self._measured()
        if run.recipe in measured:
            return measured[run.recipe]
        forecast = {name: found.step_seconds for name, found in self._forecast.items()}
        both = [(seconds, forecast[name]) for name, seconds in measured.items() if name in forecast]
        if run.recipe in forecast:
            off = sum(seconds for seconds, _ in both) / sum(thought for _, thought in both) if both else 1.0
            return forecast[run.recipe] * off
        others = measured or forecast
        return fmean(others.values()) if others else None

    def _measured(self) -> dict[str, float]:
        """Seconds of a step by recipe, of its latest run."""
        return {run.recipe: seconds for run in self._runs if (seconds := run.step_seconds) is not None}

    def _once_seconds(self, recipe: str) -> float:
        """What a run to come costs beside its steps: kernels are compiled for a recipe's first run only."""
        once = ((run.recipe == recipe, run.once_seconds(self._step_seconds(run) or 0.0)) for run in self._runs)
        seen = [(same, seconds) for same, seconds in once if seconds is not None]
        if any(same for same, _ in seen):
            return min(seconds for _, seconds in seen)
        thought = [self._forecast[recipe].once_seconds] if recipe in self._forecast else []
        return max([*(seconds for _, seconds in seen), *thought], default=0.0)


def duration(seconds: float) -> str:
    """A time to wait, no finer than anybody needs it.

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
