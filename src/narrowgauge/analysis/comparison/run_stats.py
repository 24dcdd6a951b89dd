"""Statistics of one run for a comparison: final loss, divergence, loss over time, and late audit metrics.

The final loss is not enough. A recipe that loses its updates falls behind late, at small learning rates. The large first steps
dominate sums over a run, so we read the audit's last values instead. Seconds count training steps only, without validations. A
step that compiles counts as a median step.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import itemgetter
from typing import Any

import numpy as np

from narrowgauge.analysis.columns import column, numbers
from narrowgauge.analysis.comparison.labels import seed_of
from narrowgauge.analysis.settings import recipe_of
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import finite_number, number
from narrowgauge.spec.recipes import Recipe

MAX_LOSS_RISE = 0.2
"""A run has diverged if its loss rises by more than this fraction from start to end."""

TIMING_NOISE = 1.1
"""Times differ only beyond this ratio. On a busy machine timings vary as much from seed to seed."""


@dataclass(frozen=True)
class LossCurve:
    """Hold validation losses over seconds of training: ``points`` are pairs of seconds and loss, in order.

    ``step_seconds`` is the median duration of a step; ``None`` for untimed steps.
    """

    points: tuple[tuple[float, float], ...]
    step_seconds: float | None = None

    @classmethod
    def of(cls, run: Run) -> LossCurve:
        """Return the curve of a run over the seconds of its steps, or of its validations if steps are untimed.

        A step of five times the median or more counts as a median step: it compiles, perhaps after a resume.
        """
        timed, losses = column(run, "steps", "seconds"), column(run, "evals", "val_loss")
        if not len(timed):
            seconds = numbers(run, "evals", "seconds")
            pairs = [(at, row.get("val_loss")) for at, row in zip(seconds.tolist(), run.evals, strict=True)]
            return cls(tuple(sorted((at, float(loss)) for at, loss in pairs if at == at and loss is not None)))
        median = float(np.median(timed.y))
        totals = np.cumsum(np.where(timed.y < 5 * median, timed.y, median))
        places = np.searchsorted(timed.x, losses.x, side="right") - 1
        seconds = np.where(places < 0, 0.0, totals[places])
        return cls(tuple(sorted(zip(seconds.tolist(), losses.y.tolist(), strict=True), key=itemgetter(0))), median)

    def loss_at(self, seconds: float) -> float | None:
        """Interpolate the loss between two validations. Return ``None`` before the first and after the last."""
        place = bisect.bisect_left(self.points, seconds, key=itemgetter(0))
        if place == len(self.points):
            return None
        late, after = self.points[place]
        if late == seconds:
            return after
        if not place:
            return None
        early, before = self.points[place - 1]
        return before + (after - before) * (seconds - early) / (late - early)


def losses_at_common_times(curves: Sequence[LossCurve]) -> list[tuple[float, list[float]]]:
    """Return ascending times, each with the losses of all runs; none if the curves share no time.

    Invariant: the times are all validations that lie within every curve. Between two times every loss, and so their mean, is
    linear.
    """
    times = sorted({at for curve in curves for at, _ in curve.points})
    losses = [(at, [curve.loss_at(at) for curve in curves]) for at in times]
    return [(at, [loss for loss in row if loss is not None]) for at, row in losses if None not in row]


def divergence(run: Run) -> str:
    """Describe how a run diverged; empty if it did not."""
    for event in run.events:
        if event.get("kind") == "divergence":
            return f"at step {event.get('step')}: {event.get('message', '')}"
    first_losses, last_losses = (
        [float(row["loss"]) for row in islice((row for row in rows if row.get("loss") is not None), 5)]
        for rows in (run.steps, reversed(run.steps))
    )
    end = next(iter(last_losses), None) if run.summary is None else number(run.summary.get("val_loss"))
    if end is not None and not math.isfinite(end):
        return f"its {'loss' if run.summary is None else 'validation loss'} is {end}"
    if len(run.steps) >= 10 and first_losses:
        first, last = statistics.median(first_losses), statistics.median(last_losses)
        if last - first > MAX_LOSS_RISE * abs(first):
            return f"its loss began at {first:.2f} and ended at {last:.2f}"
    return ""


@dataclass(frozen=True)
class RunStats:
    """Hold a run of a comparison and its shared statistics.

    Args:
        label: label of its recipe, as printed.
        recipe: as recorded; ``None`` for an unknown name, as from your own loop.
        divergence: how the run diverged; empty if it did not.
    """

    label: str
    recipe: Recipe | None
    seed: int
    run: Run
    divergence: str

    @classmethod
    def of(cls, run: Run, label: str) -> RunStats:
        return cls(label, recipe_of(run), seed_of(run), run, divergence(run))

    @property
    def counts(self) -> bool:
        """Return whether averages may include this run."""
        return self.run.summary is not None and not self.divergence and self.run.summary.get("val_loss") is not None

    @property
    def loss(self) -> float:
        """Return the last validation loss. Only a run that counts has one."""
        assert self.run.summary is not None
        return float(self.run.summary["val_loss"])

    @cached_property
    def curve(self) -> LossCurve:
        return LossCurve.of(self.run)

    def late(self, metric: str) -> float | None:
        """Return the median of the last tenth of audited values (at least three), else the summary's value."""
        values = column(self.run, "steps", metric).finite
        if len(values):
            return float(np.median(values[-max(3, len(values) // 10) :]))
        return finite_number((self.run.summary or {}).get(metric))


def late_median(runs: Iterable[RunStats], metric: str) -> float | None:
    """Return the median of a late metric over the runs that count."""
    values = [value for run in runs if run.counts and (value := run.late(metric)) is not None]
    return statistics.median(values) if values else None


def requested_steps(groups: Mapping[str, Sequence[RunStats]]) -> dict[str, Any]:
    """Return the planned number of steps of each recipe."""
    return {label: group[-1].run.config.get("steps") for label, group in groups.items()}
