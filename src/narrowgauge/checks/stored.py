"""Values that a storage rounded: with which step they agree, by their likelihood.

A stored value tells between which two neighbours of its format the computed value lay. Rounded to the nearest, it lies within
half a spacing of it; stochastically, within one, and each neighbour has the probability that rounding gives it. So the
probability of what was stored is known for every assumption on what was computed, and assumptions are compared by its logarithm,
summed over elements. An assumption leaves one number free, such as the factor of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from narrowgauge.spec.storages import Code, Storage

_FLOOR = 1e-4
"""The probability of a stored value that an assumption excludes: a few such values decide nothing."""
_MOST_OUTSIDE = 2e-3
"""Share of values that may be excluded where the assumption is right: the arithmetic's own rounding near a tie."""
_DECIDES = 20.0
"""Difference of log-likelihood by which another assumption must be better than the rule: a chance of e^-20."""


@dataclass(frozen=True)
class Rounding:
    """How the values of one tensor were rounded when they were stored.

    Args:
        code: of its storage.
        storage: the storage.
        ends: of a code scaled by row, for each element the exponent of the power of two at which the window of its row ends.
        unit: relative rounding error of an operation that made the values: 2^-24 in float32.
        carried: the relative error with which the arithmetic adds to what was stored before.
        read: the relative error with which the rule reads what was stored; Kahan's order reads the visible weight.
        least: the absolute error of an operation on values near zero.
    """

    code: Code
    storage: Storage
    ends: Tensor | None = None
    unit: float = 2.0**-24
    carried: float = 2.0**-24
    read: float = 0.0
    least: float = 0.0

    def at(self, places: Tensor) -> Rounding:
        """Return the rounding of some elements, by bool ``[elements]``."""
        return self if self.ends is None else replace(self, ends=self.ends[places])

    def spacing(self, values: Tensor) -> Tensor:
        """Return the distance from stored values to the next larger in magnitude, float64.

        Example:
            >>> from narrowgauge.spec.storages import STORAGES
            >>> naive, word = (Rounding(STORAGES[name].weight, STORAGES[name]) for name in ("naive", "word"))
            >>> naive.spacing(torch.tensor([1.0, 1.5, 2.0], dtype=torch.float64)).tolist()
            [0.0078125, 0.0078125, 0.015625]
            >>> word.spacing(torch.ones(1, dtype=torch.float64)).item() == 2.0**-15
            True
        """
        code, lowest = self.code, self._lowest(values)
        exponents = torch.where(values == 0, lowest, torch.frexp(values.abs()).exponent.double() - 1)
        spacing = 2.0 ** (exponents.maximum(lowest) - math.log2(code.spacings))
        # The low part of an expansion ends at the format's own subnormals, unless it has a finer scale of its own.
        return spacing if code.scaled or code.parts == 1 else spacing.maximum(2.0 ** (lowest - code.mantissa_bits))

    def spacing_below(self, values: Tensor) -> Tensor:
        """Return the distance to the next smaller in magnitude: half as much from a power of two."""
        mantissas, exponents = torch.frexp(values.abs())
        is_power = (mantissas == 0.5) & (exponents - 1 > self._lowest(values)) & (self.code.parts == 1)
        return self.spacing(values) * torch.where(is_power, 0.5, 1.0).double()

    def _lowest(self, values: Tensor) -> Tensor:
        lowest = torch.full_like(values, float(self.code.lowest))
        return lowest if self.ends is None else lowest + self.ends

    def is_bounded(self, values: Tensor) -> Tensor:
        """Return where a code does not simply round: at the smallest value that it holds, and beyond the largest."""
        code, lowest = self.code, self._lowest(values)
        below = (values.abs() < 2.0 ** (lowest - code.mantissa_bits + 1)) & code.hold
        return below | ((values.abs() >= 2.0 ** (lowest + code.highest - code.lowest)) & code.is_window)


@dataclass(frozen=True)
class Assumption:
    """What may have been computed: ``values + number × slope``, with a number that is free.

    Args:
        what: the number's name.
        expected: the number under the rule itself.
    """

    what: str
    values: Tensor
    slope: Tensor
    expected: float = 1.0


@dataclass(frozen=True)
class Fit:
    """An assumption at its likeliest number, with the number's error."""

    assumption: Assumption
    likelihood: float
    outside: float
    number: float
    error: float

    @property
    def evidence(self) -> float:
        """Return the log-likelihood, less what a free number gains by being free: the logarithm of how sharply it was set."""
        return self.likelihood - max(1.0, math.log(max(1.0, abs(self.number)) / max(self.error, 1e-12)))


class StoredValues:
    """What was stored, and how likely it is under an assumption.

    Args:
        stored: float64, 1-D.
        before: the same values before the step.
        expected: what the rule makes of them.
        rounding: of their storage.
        slack: how far the arithmetic itself may take each value.
    """

    def __init__(self, stored: Tensor, before: Tensor, expected: Tensor, rounding: Rounding, slack: Tensor) -> None:
        self.places = ~(rounding.is_bounded(expected) | rounding.is_bounded(stored))
        self.is_stochastic = rounding.code.rounding == "stochastic"
        self.reach = 1.0 if self.is_stochastic else 0.5
        self.stored, self.before, self.expected = stored[self.places], before[self.places], expected[self.places]
        self.above, self.below = rounding.spacing(stored)[self.places], rounding.spacing_below(stored)[self.places]
        self.slack = slack[self.places] + 2.0**-23 * self.expected.abs() + 4 * rounding.least

    @property
    def envelope(self) -> float:
        """Return the length of the largest difference that rounding alone makes."""
        return float((self.reach * self.above + self.slack).norm())

    def likelihood(self, values: Tensor) -> tuple[float, float]:
        """Return the log-likelihood of what was stored if some values were computed, and the share that excludes it."""
        spacing = torch.where(values.abs() < self.stored.abs(), self.below, self.above)
        apart = ((self.stored - values).abs() - self.slack).clamp_min(0.0) / spacing
        chance = 1.0 - apart if self.is_stochastic else (apart <= self.reach).double()
        return float(chance.clamp_min(_FLOOR).log().sum()), float((apart > self.reach).double().mean())

    def excludes(self, outside: float) -> bool:
        return outside > _MOST_OUTSIDE and outside * len(self.stored) > 2

    def fit(self, assumption: Assumption) -> Fit | None:
        """Return an assumption at its likeliest number; ``None`` where the number changes nothing."""
        values, slope = assumption.values[self.places], assumption.slope[self.places]
        if not bool(slope.any()):
            return None
        start, width = (self._weighted if self.is_stochastic else self._in_most_intervals)(values, slope)
        numbers = [start + width * k / 8 for k in range(-8, 9)]
        best = max(numbers, key=lambda t: (self.likelihood(values + t * slope)[0], -abs(t - start)))
        likelihood, outside = self.likelihood(values + best * slope)
        return Fit(assumption, likelihood, outside, best, width)

    def _weighted(self, values: Tensor, slope: Tensor) -> tuple[float, float]:
        """Fit by least squares, each element weighed by its spacing; with a width that holds the answer for sure."""
        target, weighed = (self.stored - values) / self.above, slope / self.above
        square = float(weighed @ weighed)
        return float(target @ weighed) / square, 4.0 / math.sqrt(square)

    def _in_most_intervals(self, values: Tensor, slope: Tensor) -> tuple[float, float]:
        """Find the middle of the numbers that most elements allow, and half of their range: each allows an interval."""
        moves = slope != 0
        middle = (self.stored - values)[moves] / slope[moves]
        half = ((0.5 * self.above + self.slack)[moves] / slope[moves]).abs()
        ends = torch.cat([middle - half, middle + half])
        order = ends.argsort()
        steps = torch.cat([torch.ones_like(middle), -torch.ones_like(middle)])[order]
        place = int(steps.cumsum(0).argmax())
        low, high = float(ends[order[place]]), float(ends[order[min(place + 1, len(order) - 1)]])
        return (low + high) / 2, max((high - low) / 2, 1e-12)


def agrees(stored: StoredValues, others: Sequence[Assumption]) -> tuple[bool, bool, Fit | None]:
    """Compare the rule with other assumptions on what was computed.

    Returns:
        Whether the rule agrees; whether a step that was not taken would have been seen; and else the likeliest assumption that
        agrees, if there is one.
    """
    if not len(stored.stored):
        return True, False, None
    likelihood, outside = stored.likelihood(stored.expected)
    # No assumption has a probability above 1: where nothing speaks against the rule, nothing is likelier.
    if not stored.excludes(outside) and -likelihood <= _DECIDES:
        return True, likelihood - stored.likelihood(stored.before)[0] > _DECIDES, None
    fits = [fit for assumption in others if (fit := stored.fit(assumption)) is not None]
    best = max((fit.likelihood for fit in fits), default=likelihood)
    if not stored.excludes(outside) and best - likelihood <= _DECIDES:
        return True, likelihood - stored.likelihood(stored.before)[0] > _DECIDES, None
    near = [fit for fit in fits if not stored.excludes(fit.outside) and fit.likelihood > best - _DECIDES]
    return False, True, max(near, key=lambda fit: fit.evidence, default=None)
