"""Spikes: a loss or a gradient norm far above its own recent past.

One bad batch, or a fault on its way to becoming one, shows as a jump upward. How large a jump is large depends on the run:
a batch of two million tokens moves the loss by a hundredth, one of a thousand tokens by half. So a step is judged against
the steps before it, by figures that a few wild ones among them cannot move: the median of the last ``recent`` steps says
where the run is, and the median distance from one step to the next, over a longer window, how much it jitters. (Distances from
the median itself would count the fall of the loss as jitter and see nothing while it falls.) Losses are compared as they
are, gradient norms by their logarithms, since they vary by factors. Two floors keep a very even past from making a trifle
a spike: the deviation of losses is at least one hundredth (of the loss, and of a nat), and a norm has to be ten times the
median.

What was a spike does not become the past, or the next would go unseen. But if spikes follow one another for ``patience``
steps, that is no spike: it is where the run is now, and it becomes the past as a whole.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

DISTANCE_TO_DEVIATION = 1.4826 / math.sqrt(2)
"""Standard deviation of normal noise over the median distance of two of its values."""
_FEWEST_EARLY = 3


@dataclass(frozen=True, slots=True)
class Spike:
    """One value far above its past.

    Args:
        what: ``loss`` or ``gradient``, for the norm of all gradients before clipping.
        value: what was measured.
        threshold: the largest value that would have been no spike.
        z: how many robust standard deviations it lies above the median (of logarithms, for a gradient norm).
    """

    what: Literal["loss", "gradient"]
    value: float
    threshold: float
    z: float

    @property
    def message(self) -> str:
        """One sentence: what, how much, against what."""
        name = "the loss" if self.what == "loss" else "the gradient norm"
        return f"{name} is {self.value:.4g}; by its past it should not exceed {self.threshold:.4g} (z = {self.z:.0f})"


class SpikeJudge:
    """Says whether a loss or a gradient norm is a spike against the steps before it.

    Law: all it says is a function of the sequence of :meth:`add` calls; asking changes nothing. A value is a spike when it
    lies more than ``z`` robust standard deviations above the median of the last ``recent`` steps that were none. Only
    upward jumps are spikes. A value that is not finite is never one (it is an event of its own kind). While fewer than
    ``fewest`` steps are known, which fall too fast for a median, a loss is a spike when it exceeds the largest of at least
    three by a fifth and by a nat, and no gradient norm is one.

    Args:
        window: steps that the jitter is taken from.
        recent: the last of them, that the median is taken from.
        fewest: steps from which on medians are taken.
        z: robust standard deviations; the healthy runs this was calibrated on reach 5 for the loss.
        loss_floor: least standard deviation of the loss, as a share of its median and in nats.
        norm_factor: least factor over the median that makes a gradient norm a spike; healthy runs with small batches reach 6.6.
        patience: spikes in a row that become the new past.

    Cost: about 20 µs per step.

    Example:
        >>> judge = SpikeJudge()
        >>> for step in range(40):
        ...     judge.add(3.0 + 0.01 * (step % 5), 0.5 + 0.01 * (step % 3), spiked=False)
        >>> judge.loss(3.1), judge.loss(9.0).message
        (None, 'the loss is 9; by its past it should not exceed 3.262 (z = 198)')
        >>> round(judge.norm_limit(), 2)
        5.1

    Source:
        Von Neumann 1941 for jitter from successive differences; medians in place of means, as Leys et al. 2013 advise for
        outliers. Floors and z: 150 healthy runs of 1 M parameters, and the first loss spike of BLOOM-176B (chronicles of
        bigscience's tr11, 2022-04-12), caught three steps before the loss doubled.
    """

    def __init__(
        self,
        *,
        window: int = 100,
        recent: int = 30,
        fewest: int = 20,
        z: float = 8.0,
        loss_floor: float = 0.01,
        norm_factor: float = 10.0,
        patience: int = 50,
    ) -> None:
        self.z, self.recent, self.fewest, self.patience = z, recent, fewest, patience
        self.loss_floor, self.norm_floor = loss_floor, math.log(norm_factor) / z
        self._losses: deque[float] = deque(maxlen=window)
        self._norms: deque[float] = deque(maxlen=window)
        self._rejected: list[tuple[float, float | None]] = []
        self._scales: dict[str, tuple[float, float]] = {}

    def loss(self, value: float) -> Spike | None:
        """Whether this loss would be a spike; does not record it.

        Args:
            value: the mean loss of the step, in nats.
        Returns:
            The spike, or ``None``.
        """
        if len(self._losses) < _FEWEST_EARLY or not math.isfinite(value):
            return None
        middle, scale = self._scale("loss")
        z = (value - middle) / scale
        return Spike("loss", value, middle + self.z * scale, z) if z > self.z else None

    def norm(self, value: float | None) -> Spike | None:
        """Whether this gradient norm would be a spike; does not record it.

        Args:
            value: the norm of all gradients, before clipping; ``None`` where it was not measured.
        Returns:
            The spike, or ``None``.
        """
        limit = self.norm_limit()
        if value is None or not math.isfinite(value) or value <= limit:
            return None
        middle, scale = self._scale("gradient")
        return Spike("gradient", value, limit, (math.log(value) - middle) / scale)

    def norm_limit(self) -> float:
        """The gradient norm above which a step is a spike; infinite while too little is known."""
        if len(self._norms) < self.fewest:
            return math.inf
        middle, scale = self._scale("gradient")
        return math.exp(min(middle + self.z * scale, 700.0))

    def add(self, loss: float, grad_norm: float | None, *, spiked: bool) -> None:
        """Record a step.

        Args:
            loss: its loss.
            grad_norm: its gradient norm, or ``None``.
            spiked: whether it was judged a spike: then it does not become part of the past, unless ``patience`` in a row were.
        """
        if not spiked:
            self._rejected.clear()
            self._accept(loss, grad_norm)
            return
        self._rejected.append((loss, grad_norm))
        if len(self._rejected) >= self.patience:
            self._losses.clear()
            self._norms.clear()
            for step in self._rejected:
                self._accept(*step)
            self._rejected.clear()

    def _accept(self, loss: float, grad_norm: float | None) -> None:
        self._scales.clear()
        if math.isfinite(loss):
            self._losses.append(loss)
        if grad_norm is not None and math.isfinite(grad_norm) and grad_norm > 0:
            self._norms.append(math.log(grad_norm))

    def _scale(self, what: Literal["loss", "gradient"]) -> tuple[float, float]:
        """Where the past lies, and how far one of its standard deviations reaches."""
        if what not in self._scales:
            past = self._losses if what == "loss" else self._norms
            if len(past) < self.fewest:
                highest = max(past)
                return highest, max(1.0, 0.2 * abs(highest)) / self.z
            middle = median(list(past)[-self.recent :])
            deviation = DISTANCE_TO_DEVIATION * median(abs(b - a) for a, b in pairwise(past))
            floor = self.loss_floor * max(1.0, abs(middle)) if what == "loss" else self.norm_floor
            self._scales[what] = middle, max(deviation, floor)
        return self._scales[what]
