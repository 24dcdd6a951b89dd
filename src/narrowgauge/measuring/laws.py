"""Laws of a run: generators that take its steps, and tell what is beyond a bound.

Each remembers what it must in its own variables. The same laws read a running loop and the rows of a
record. A count over the run tells its share in every step, and the newest reading counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from narrowgauge.measuring.gradient_laws import (
    clip_norm,
    gradients_kept,
    jump,
    nonfinite,
    ranks,
    zero_gradient,
    zero_gradients,
)
from narrowgauge.measuring.loss_laws import (
    failed,
    gradient_spikes,
    idle_device,
    loss_rise,
    loss_scale,
    loss_spikes,
    skipped,
    throughput,
)
from narrowgauge.measuring.reading import Reading, failure_of, measured
from narrowgauge.measuring.step import Law, Step, Tell
from narrowgauge.measuring.update_laws import drift, lost_updates, sampled

TWICE = 2.0
"""A fault is told again when it is so many times as far beyond its bound."""
LAWS: tuple[Callable[[Tell], Law], ...] = (
    nonfinite, lost_updates, drift, skipped, failed, loss_scale, zero_gradients, zero_gradient, gradients_kept, clip_norm,
    ranks, jump, loss_rise, loss_spikes, gradient_spikes, throughput, idle_device, sampled,
)  # fmt: skip
"""Every law of a run."""


class Laws:
    """Read the steps of a run by every law.

    Args:
        ignore: kinds of readings that are intended.
        steps: earlier steps of the same run.
        say: told of an error in a law, after which no law reads; without it the error is raised.

    Example:
        >>> laws = Laws()
        >>> [reading.what for reading in laws.read(Step(1, arrived=3.0, limit=1.0))]
        ['clip-norm']
        >>> [reading.what for reading in laws.fresh(laws.read(Step(2, arrived=3.0, limit=1.0)))]
        ['clip-norm']
        >>> [reading.what for reading in laws.fresh(laws.read(Step(3, arrived=3.0, limit=1.0)))]
        []
    """

    def __init__(
        self,
        ignore: Iterable[str] = (),
        steps: Iterable[Step] = (),
        say: Callable[[str], object] | None = None,
    ) -> None:
        self.ignore = frozenset(ignore)
        self._say = say
        self._step = 0
        self._readings: list[Reading] = []
        self._laws = [law(self._tell) for law in LAWS]
        self._told: dict[str, float] = {}
        for law in self._laws:
            next(law)
        for step in steps:
            self.fresh(self.read(step))

    def _tell(self, what: str, *numbers: Any, step: int = 0, stage: str = "") -> None:
        """Take a reading of a law, of the current step if no other is named."""
        if what not in self.ignore:
            reading = measured(what, *numbers, step=step or self._step, stage=stage)
            self._readings.append(reading)

    def read(self, step: Step) -> list[Reading]:
        """Return all readings of a step, which follows those before."""
        self._step = step.step
        self._readings = []
        try:
            for law in self._laws:
                law.send(step)
        except Exception as error:
            if self._say is None:
                raise
            self._laws = []
            self._say(failure_of("the laws", error))
        return self._readings

    def fresh(self, readings: Iterable[Reading]) -> list[Reading]:
        """Return what is new: the first reading of a kind, and one that is twice as far beyond its
        bound.
        """
        new = []
        for reading in readings:
            if reading.excess > TWICE * self._told.get(reading.what, -1.0):
                self._told[reading.what] = reading.excess
                new.append(reading)
        return new
