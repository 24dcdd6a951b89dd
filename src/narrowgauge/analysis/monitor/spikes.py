"""Spikes: a loss or a gradient norm far above its own recent values.

A bad batch or a developing fault shows as a jump. How large a jump is unusual depends on the run: noise moves the loss of
a batch of two million tokens by a hundredth, and that of a thousand tokens by half. So a step is compared with robust
statistics of the steps before it: the median of the last ``recent`` steps is the level, and the median difference between
consecutive steps, over a longer window, is the noise. (Deviations from the median would count the fall of the loss as noise and
miss spikes while it falls.) Losses are compared directly, gradient norms by their logarithms, since they vary by
factors. Two floors prevent false alarms after very quiet stretches: the deviation of losses is at least one hundredth (of
the loss, and of a nat), and a norm has to be ten times the median.

A spike does not enter the statistics, or the next one would be missed. After ``patience`` spikes in a row they are the new
level, and all of them enter.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

from narrowgauge.analysis.monitor.sorted_window import SortedWindow

DISTANCE_TO_DEVIATION = 1.4826 / math.sqrt(2)
"""Standard deviation of normal noise over the median difference of two of its values."""
_FEWEST_EARLY = 3


@dataclass(frozen=True, slots=True)
class Spike:
    """One value far above the recent ones.

    Args:
        what: ``loss`` or ``gradient``, for the norm of all gradients before clipping.
        value: the value.
        threshold: the largest value that is not a spike.
        z: robust standard deviations above the median (of logarithms, for a gradient norm).
    """

    what: Literal["loss", "gradient"]
    value: float
    threshold: float
    z: float

    @property
    def message(self) -> str:
        """One sentence without a full stop: value, threshold and z."""
        name = "the loss" if self.what == "loss" else "the gradient norm"
        return f"{name} jumped to {self.value:.4g} (threshold {self.threshold:.4g}, z = {self.z:.0f})"


class _Past:
    """Values of the last steps, with what a judge asks of them."""

    def __init__(self, window: int, recent: int) -> None:
        self.values: deque[float] = deque(maxlen=window)
        self.recent, self.distances = SortedWindow(min(recent, window)), SortedWindow(max(1, window - 1))

    def __len__(self) -> int:
        return len(self.values)

    def add(self, value: float) -> None:
        if self.values:
            self.distances.add(abs(value - self.values[-1]))
        self.values.append(value)
        self.recent.add(value)

    def clear(self) -> None:
        for part in (self.values, self.recent, self.distances):
            part.clear()


class SpikeJudge:
    """Decides whether a loss or a gradient norm is a spike compared with the steps before it.

    Invariant: the decision is a function of the sequence of :meth:`add` calls; asking changes nothing. A value is a spike when
    it lies more than ``z`` robust standard deviations above the median of the last ``recent`` steps that were not spikes. A
    value that is not finite is never a spike (it is an event of its own kind). The first ``fewest`` steps fall too fast for
    a median: there a loss is a spike when it exceeds the largest of at least three by a fifth and by a nat, and a gradient
    norm never is.

    Args:
        window: steps from which the noise is estimated.
        recent: the last of them, from which the median is taken.
        fewest: steps before medians are used.
        z: threshold in robust standard deviations; healthy runs used for calibration reach 5 for the loss.
        loss_floor: least standard deviation of the loss, as a share of its median and in nats.
        norm_factor: least factor over the median that makes a gradient norm a spike; healthy runs with small batches reach 6.6.
        patience: spikes in a row that become the new level.

    Cost: about 5 µs per step.

    Example:
        >>> judge = SpikeJudge()
        >>> for step in range(40):
        ...     judge.add(3.0 + 0.01 * (step % 5), 0.5 + 0.01 * (step % 3), spiked=False)
        >>> judge.loss(3.1), judge.loss(9.0).message
        (None, 'the loss jumped to 9 (threshold 3.262, z = 198)')
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
        self._losses, self._norms = _Past(window, recent), _Past(window, recent)
        self._rejected: list[tuple[float, float | None]] = []
        self._scales: dict[str, tuple[float, float]] = {}

    def loss(self, value: float) -> Spike | None:
        """Whether this loss is a spike; does not record it.

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
        """Whether this gradient norm is a spike; does not record it.

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
        """The gradient norm above which a step is a spike; infinite while too few steps are known."""
        if len(self._norms) < self.fewest:
            return math.inf
        middle, scale = self._scale("gradient")
        return math.exp(min(middle + self.z * scale, 700.0))

    def add(self, loss: float, grad_norm: float | None, *, spiked: bool) -> None:
        """Record a step.

        Args:
            loss: its loss.
            grad_norm: its gradient norm, or ``None``.
            spiked: it was a spike, and enters the statistics only after ``patience`` spikes in a row.
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
            self._losses.add(loss)
        if grad_norm is not None and math.isfinite(grad_norm) and grad_norm > 0:
            self._norms.add(math.log(grad_norm))

    def _scale(self, what: Literal["loss", "gradient"]) -> tuple[float, float]:
        """The median of the recent values and their robust standard deviation."""
        if what not in self._scales:
            past = self._losses if what == "loss" else self._norms
            if len(past) < self.fewest:
                highest = max(past.values)
                return highest, max(1.0, 0.2 * abs(highest)) / self.z
            middle, deviation = past.recent.median, DISTANCE_TO_DEVIATION * past.distances.median
            floor = self.loss_floor * max(1.0, abs(middle)) if what == "loss" else self.norm_floor
            self._scales[what] = middle, max(deviation, floor)
        return self._scales[what]


class StepJudgement:
    """Whether one step is a spike: decided once, then read by the optimizer, the record, the recovery and the detectors.

    The loss is known before the update and the gradient norm after it, so the two are judged one after the other.

    Args:
        judge: with the steps before this one.

    Attributes:
        loss, gradient: the spikes, ``None`` where there is none or it was not judged yet.

    Example:
        >>> judge = SpikeJudge()
        >>> for step in range(40):
        ...     judge.add(3.0 + 0.01 * (step % 5), 0.5, spiked=False)
        >>> judgement = StepJudgement(judge)
        >>> round(judgement.judge_loss(3.0), 2), judgement.judge_loss(9.0)  # a limit of the gradient norm
        (5.0, -1.0)
    """

    def __init__(self, judge: SpikeJudge) -> None:
        self._judge = judge
        self.loss: Spike | None = None
        self.gradient: Spike | None = None

    def judge_loss(self, value: float) -> float:
        """Judge the loss.

        Args:
            value: the mean loss of the step, in nats.
        Returns:
            The gradient norm above which the update must not be applied; -1 where the loss is a spike.
        """
        self.loss = self._judge.loss(value)
        return self._judge.norm_limit() if self.loss is None else -1.0

    def judge_norm(self, value: float | None) -> Spike | None:
        """Judge the gradient norm, after the loss.

        Args:
            value: the norm before clipping; ``None`` where it was not computed.
        Returns:
            The spike of the step: the loss's before the gradient norm's, or ``None``.
        """
        self.gradient = self._judge.norm(value)
        return self.loss or self.gradient
