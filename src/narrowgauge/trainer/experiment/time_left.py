"""How long the runs of a comparison take: estimated before the first of them, and measured as they go.

The time of a run is that of its steps plus what happens once: tokenization, building the model, a model's compilation, the last
validation and checkpoint. Both parts are measured during each run. A later run is assumed to take as long as earlier runs of its
recipe. A recipe that has not run yet takes its estimate, scaled by how far the estimates of the others were off.

The estimate is the fastest of a few forward and backward passes on arbitrary tokens, after a short one that loads what the first
needs. Validations are counted by their share of a step; the compilation of a model by what it usually takes. The optimizer is
left out, and so are its kernels, which the first run of a recipe compiles on a new machine.
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
    from narrowgauge.gauges.recording.run_reporter import Screen
    from narrowgauge.trainer.config import TrainConfig
    from narrowgauge.trainer.session import Session

MAX_SECONDS = 10.0
"""No further recipe is measured after that time, and no further step of one; the warm-up does not count."""
MEASURED_STEPS = 4
FORWARD_SHARE = 1 / 3
"""Of a micro-batch's time, the forward pass, which is all that validation does: two of the six operations per weight."""
MODEL_COMPILE_SECONDS = 30.0
"""Of a model that is compiled for the first time on a machine (llama-8m, measured; docs/log/runs.md)."""


@dataclass(frozen=True)
class RunEstimate:
    """The expected time of a run.

    Args:
        step_seconds: of a step, with its share of the validations.
        once_seconds: outside the steps.
        compile_seconds: of the first run of its recipe, besides.
    """

    step_seconds: float
    once_seconds: float = 0.0
    compile_seconds: float = 0.0


# ── before the first run ────────────────────────────────────────────────────────────────────────────────────────────


def estimate_runs(configs: Sequence[TrainConfig], screen: Screen) -> dict[str, RunEstimate]:
    """Measure steps of each recipe, given the settings of one run of each; as many as fit into ``MAX_SECONDS``.

    ``screen`` shows what is compiled. The result is empty where a model cannot be built or does not fit: its run will report
    that.
    """
    # Imported here: PyTorch takes seconds to load, and the progress display shows before.
    from narrowgauge.trainer.loop import compiling_shown

    found: dict[str, RunEstimate] = {}
    spent = 0.0
    for config in configs:
        if spent < MAX_SECONDS:
            try:
                with compiling_shown(screen):
                    found[config.recipe.title], seconds = estimate_run(config)
            except (NarrowgaugeError, RuntimeError):  # RuntimeError: a device's memory is full
                return {}
            spent += seconds
    return found


def estimate_run(config: TrainConfig) -> tuple[RunEstimate, float]:
    """Measure uncompiled steps of a run; the estimate, and how long it took without the warm-up, in seconds."""
    import numpy as np

    from narrowgauge.trainer.data.dataset import Dataset
    from narrowgauge.trainer.language_model import vocabulary_size
    from narrowgauge.trainer.session import build

    vocab_size = vocabulary_size(config.model) or 1
    tokens = np.arange(config.sequence_length * config.batch_size + 1) % vocab_size
    data = Dataset(Path(), tokens, tokens, {"vocab_size": vocab_size, "request": {"held_out": 0.0}})
    began = time.monotonic()
    session = build(dataclasses.replace(config, compile=False), Path(), data)
    building, whole = time.monotonic() - began, session.config
    # What a process does once (imports, kernels, buffers) takes seconds on a busy machine; one sequence does all of it.
    session.config = dataclasses.replace(whole, batch_size=1, gradient_accumulation_steps=1)
    _step_seconds(session)
    session.config = whole
    times = [_step_seconds(session)]
    while len(times) < MEASURED_STEPS and sum(times) < MAX_SECONDS:
        times.append(_step_seconds(session))
    step = min(times)
    validation = config.eval_batches * FORWARD_SHARE * step / config.gradient_accumulation_steps
    num_validations = (config.steps - 1) // config.eval_every if config.eval_every else 0
    compiling = MODEL_COMPILE_SECONDS if config.compile else 0.0
    estimate = RunEstimate(step + num_validations * validation / config.steps, building + validation, compiling)
    return estimate, building + sum(times)


def _step_seconds(session: Session) -> float:
    """Differentiate a batch, and measure it; reading the loss waits for the device."""
    from narrowgauge.optim.accumulation import backward_in_parts
    from narrowgauge.trainer.step import losses

    began, optimizer = time.monotonic(), session.optimizer
    accumulator = session.accumulator if len(session.micro_batches) > 1 else None
    float(backward_in_parts(losses(session), accumulator, optimizer.loss_scaler))
    optimizer.zero_grad(set_to_none=True)
    return time.monotonic() - began


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
            return self._once_seconds(run) + run.num_steps * step
        if run.latest is None:
            before_the_second = self._once_seconds(run) + step - (self._clock() - run.began)
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

    def _once_seconds(self, run: _Run) -> float:
        """What happens once in a run that has no step yet; only the first run of a recipe compiles."""
        once = ((one.recipe == run.recipe, one.once_seconds(self._step_seconds(one) or 0.0)) for one in self._runs)
        measured = [(same, seconds) for same, seconds in once if seconds is not None]
        if any(same for same, _ in measured):
            return min(seconds for _, seconds in measured)
        estimated = self._estimates.get(run.recipe, RunEstimate(0.0))
        is_first = next(one for one in self._runs if one.recipe == run.recipe and not one.is_done) is run
        expected = estimated.once_seconds + estimated.compile_seconds * is_first
        return max([*(seconds for _, seconds in measured), expected])
