"""One run, as a comparison reads it: how it ended, how it diverged, its loss by the clock, and its late readings.

A loss does not say everything. A recipe that loses its updates falls behind late, when the learning rate is small, so the
audit's last readings count, not the run's sums, which its first large steps rule. Seconds are those of training steps
alone: validations, and the first steps, which compile, are not what is compared.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

from narrowgauge.runs.record import Run

FAR_ABOVE = 0.2
"""A run whose loss ends higher than it began, by more than this share, has diverged."""

UNSTEADY = 1.1
"""A machine is unquiet where one recipe's time over another's varies by more than this from seed to seed."""


@dataclass(frozen=True)
class Curve:
    """The validation losses of a run by the seconds of training before them.

    Args:
        points: seconds and loss of each validation, in the order of time.
        step_seconds: the median step's, where steps are timed.
    """

    points: tuple[tuple[float, float], ...]
    step_seconds: float | None = None

    @classmethod
    def of(cls, run: Run) -> Curve:
        """The curve of a run: seconds of its steps alone, or what its validations say where steps have no times.

        Steps that compile, the first of every sitting among them, are not what is compared: those of five times the
        median and more count as a median one.
        """
        known = [row for row in run.evals if row.get("val_loss") is not None]
        timed = [row for row in run.steps if row.get("seconds") is not None]
        if not timed:
            told = [(float(row["seconds"]), float(row["val_loss"])) for row in known if row.get("seconds") is not None]
            return cls(tuple(sorted(told, key=itemgetter(0))))
        seconds = [float(row["seconds"]) for row in timed]
        median = statistics.median(seconds)
        totals = list(itertools.accumulate(s if s < 5 * median else median for s in seconds))
        steps = [int(row["step"]) for row in timed]
        points = []
        for row in known:
            place = bisect.bisect_right(steps, int(row["step"]))
            points.append((totals[place - 1] if place else 0.0, float(row["val_loss"])))
        return cls(tuple(sorted(points, key=itemgetter(0))), median)

    @property
    def end(self) -> float:
        """Seconds up to the last validation."""
        return self.points[-1][0]

    def loss_at(self, seconds: float) -> float | None:
        """The loss at that time, on a line between two validations; ``None`` before the first and after the last."""
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


def on_one_clock(curves: Sequence[Curve]) -> list[tuple[float, list[float]]]:
    """Several runs at the same moments: seconds, and the loss of each then, read off its own line.

    Law: moments are those of every curve's validations that lie within all of them; at each of them a loss is exactly
    :meth:`Curve.loss_at`, as in the verdict. So between two moments each loss lies on a line, and their mean does.

    Args:
        curves: of any runs.
    Returns:
        Moments, ascending, each with a loss per curve; none where the curves share no time.
    Cost: curves times validations, times the logarithm of the latter.
    Example:
        >>> on_one_clock([Curve(((1.0, 4.0), (3.0, 2.0))), Curve(((2.0, 5.0), (4.0, 3.0)))])
        [(2.0, [3.0, 5.0]), (3.0, [2.0, 4.0])]
    """
    moments = sorted({at for curve in curves for at, _ in curve.points})
    losses = [(at, [curve.loss_at(at) for curve in curves]) for at in moments]
    return [(at, [loss for loss in found if loss is not None]) for at, found in losses if None not in found]


def divergence(run: Run) -> str:
    """How a run diverged, in words; empty where it did not."""
    for event in run.events:
        if event.get("kind") == "divergence":
            return f"at step {event.get('step')}: {event.get('message', '')}"
    losses = [float(row["loss"]) for row in run.steps if row.get("loss") is not None]
    if run.summary is None:
        ends = losses[-1:]
    else:
        ends = [float(run.summary["val_loss"])] if run.summary.get("val_loss") is not None else []
    if ends and not math.isfinite(ends[0]):
        return f"its {'loss' if run.summary is None else 'validation loss'} is {ends[0]}"
    if len(losses) >= 10:
        first, last = statistics.median(losses[:5]), statistics.median(losses[-5:])
        if last - first > FAR_ABOVE * abs(first):
            return f"its loss began at {first:.2f} and ended at {last:.2f}"
    return ""


@dataclass(frozen=True)
class Trial:
    """A run as one of its recipe's, with what is asked of it more than once.

    Args:
        recipe: its label.
        seed: its seed.
        run: the record.
        diverged: how, in words; empty where it did not.
    """

    recipe: str
    seed: int
    run: Run
    diverged: str

    @property
    def counts(self) -> bool:
        """Whether its figures may be averaged."""
        return self.run.summary is not None and not self.diverged and self.run.summary.get("val_loss") is not None

    @property
    def loss(self) -> float:
        """The last validation's; only a run that counts has one."""
        assert self.run.summary is not None
        return float(self.run.summary["val_loss"])

    @cached_property
    def curve(self) -> Curve:
        """Its losses by the clock."""
        return Curve.of(self.run)

    @property
    def has_curve(self) -> bool:
        """Whether there is more of it than an end, which says nothing of any other moment."""
        return len(self.curve.points) > 1

    def late(self, figure: str) -> float | None:
        """A figure's late reading; see :func:`late_figure`."""
        return late_figure(self.run, figure)


def late_figure(run: Run, figure: str) -> float | None:
    """The median of the audit's last readings (a tenth of them, three at least); else what the summary says."""
    read = [float(row[figure]) for row in run.steps if row.get(figure) is not None]
    if read:
        return statistics.median(read[-max(3, len(read) // 10) :])
    told = (run.summary or {}).get(figure)
    return None if told is None else float(told)


def late_figures(run: Run) -> dict[str, float | None]:
    """What the audit read last of a run, which the verdict judges by: ``edq`` and ``lost_fraction``.

    Example:
        >>> from pathlib import Path
        >>> late_figures(Run(Path("a"), {}, [{"step": 1, "edq": 0.5, "lost_fraction": 0.25}]))
        {'edq': 0.5, 'lost_fraction': 0.25}
    """
    return {figure: late_figure(run, figure) for figure in ("edq", "lost_fraction")}


def late_reading(trials: Iterable[Trial], figure: str) -> float | None:
    """The median over the runs that count of a figure's late reading."""
    known = [value for trial in trials if trial.counts and (value := trial.late(figure)) is not None]
    return statistics.median(known) if known else None
