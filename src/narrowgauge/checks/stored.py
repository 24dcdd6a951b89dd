"""Find the step that agrees with rounded stored values, by likelihood.

A stored value bounds the computed value: within 0.5 ulp for rounding to nearest, within 1 ulp for stochastic rounding.
With stochastic rounding, the distances give the probability of each neighbour. So every assumption on the computed values
gives a probability of the stored values. Assumptions are compared by the log-likelihood, summed over elements.
An assumption has one free number, such as the factor of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from narrowgauge.spec.storages import Code, Storage

_FLOOR = 1e-4
"""The probability of a stored value that an assumption excludes. A few such values decide nothing."""
_MOST_OUTSIDE = 2e-3
"""Fraction of values that a right assumption may exclude, because the arithmetic itself rounds near a tie."""
_DECIDES = 20.0
"""Least gain in log-likelihood of another assumption over the rule: a chance of e^-20."""


@dataclass(frozen=True)
class Rounding:
    """How the values of one tensor were rounded when they were stored.

    Args:
        code: of its storage.
        storage: the storage.
        ends: for a code scaled by row, each element's exponent of the power of two at which its row's window ends.
        unit: relative rounding error of an operation that made the values: 2^-24 in float32.
        carried: relative error of adding to the old stored value.
        read: relative error of reading the stored value. Kahan's order reads the visible weight.
        least: absolute error of an operation on values near zero.
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
        """Return the distance from stored values to the next larger magnitude, float64.

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
        # The low part of an expansion ends at the format's own subnormals, unless it has a finer scale.
        return spacing if code.scaled or code.parts == 1 else spacing.maximum(2.0 ** (lowest - code.mantissa_bits))

    def spacing_below(self, values: Tensor) -> Tensor:
        """Return the distance to the next smaller magnitude. It is half as large at a power of two."""
        mantissas, exponents = torch.frexp(values.abs())
        is_power = (mantissas == 0.5) & (exponents - 1 > self._lowest(values)) & (self.code.parts == 1)
        return self.spacing(values) * torch.where(is_power, 0.5, 1.0).double()

    def _lowest(self, values: Tensor) -> Tensor:
        lowest = torch.full_like(values, float(self.code.lowest))
        return lowest if self.ends is None else lowest + self.ends

    def is_bounded(self, values: Tensor) -> Tensor:
        """Mark values that a code does not simply round: near its smallest value, and beyond its largest."""
        code, lowest = self.code, self._lowest(values)
        below = (values.abs() < 2.0 ** (lowest - code.mantissa_bits + 1)) & code.hold
        return below | ((values.abs() >= 2.0 ** (lowest + code.highest - code.lowest)) & code.is_window)


@dataclass(frozen=True)
class Assumption:
    """Possible computed values: ``values + number × slope``, with a free number.

    Args:
        name: of the number.
        expected: the number under the rule itself.
    """

    name: str
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
        """Return the log-likelihood minus the cost of the free number, the log of its precision."""
        return self.likelihood - max(1.0, math.log(max(1.0, abs(self.number)) / max(self.error, 1e-12)))


class StoredValues:
    """Stored values, and their likelihood under an assumption.

    Args:
        stored: float64, 1-D.
        before: the same values before the step.
        expected: the rule's result.
        rounding: of their storage.
        slack: largest error of the arithmetic for each value.
    """

    def __init__(self, stored: Tensor, before: Tensor, expected: Tensor, rounding: Rounding, slack: Tensor) -> None:
        self.places = ~(rounding.is_bounded(expected) | rounding.is_bounded(stored))
        self.is_stochastic = rounding.code.rounding == "stochastic"
        self.reach = 1.0 if self.is_stochastic else 0.5
        self.stored, self.before, self.expected = stored[self.places], before[self.places], expected[self.places]
        self.above, self.below = rounding.spacing(stored)[self.places], rounding.spacing_below(stored)[self.places]
        self.slack = slack[self.places] + 2.0**-23 * self.expected.abs() + 4 * rounding.least

    @property
    def tolerance(self) -> float:
        """Return the length of the largest difference that rounding alone makes."""
        return float((self.reach * self.above + self.slack).norm())

    def likelihood(self, values: Tensor) -> tuple[float, float]:
        """Return the log-likelihood of the stored values, given computed values, and the fraction that is excluded."""
        spacing = torch.where(values.abs() < self.stored.abs(), self.below, self.above)
        excess = ((self.stored - values).abs() - self.slack).clamp_min(0.0) / spacing
        chance = 1.0 - excess if self.is_stochastic else (excess <= self.reach).double()
        return float(chance.clamp_min(_FLOOR).log().sum()), float((excess > self.reach).double().mean())

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
        """Fit by least squares, weighting each element by 1 / ulp. Return the number and a width that surely holds it."""
        target, weighed = (self.stored - values) / self.above, slope / self.above
        square = float(weighed @ weighed)
        return float(target @ weighed) / square, 4.0 / math.sqrt(square)

    def _in_most_intervals(self, values: Tensor, slope: Tensor) -> tuple[float, float]:
        """Find the interval of numbers that most elements allow. Return its middle and half its width."""
        moves = slope != 0
        middle = (self.stored - values)[moves] / slope[moves]
        half = ((0.5 * self.above + self.slack)[moves] / slope[moves]).abs()
        ends = torch.cat([middle - half, middle + half])
        order = ends.argsort()
        steps = torch.cat([torch.ones_like(middle), -torch.ones_like(middle)])[order]
        place = int(steps.cumsum(0).argmax())
        low, high = float(ends[order[place]]), float(ends[order[min(place + 1, len(order) - 1)]])
        return (low + high) / 2, max((high - low) / 2, 1e-12)


def agrees(stored: StoredValues, assumptions: Sequence[Assumption]) -> tuple[bool, bool, Fit | None]:
    """Compare the rule with other assumptions on the computed values.

    Returns:
        Whether the rule agrees; whether a missing step would show; and otherwise the likeliest assumption that agrees, if any.
    """
    if not len(stored.stored):
        return True, False, None
    likelihood, outside = stored.likelihood(stored.expected)
    # No probability exceeds 1. If the rule's likelihood is near 1, no assumption can be much likelier.
    if not stored.excludes(outside) and -likelihood <= _DECIDES:
        return True, likelihood - stored.likelihood(stored.before)[0] > _DECIDES, None
    fits = [fit for assumption in assumptions if (fit := stored.fit(assumption)) is not None]
    best = max((fit.likelihood for fit in fits), default=likelihood)
    if not stored.excludes(outside) and best - likelihood <= _DECIDES:
        return True, likelihood - stored.likelihood(stored.before)[0] > _DECIDES, None
    near = [fit for fit in fits if not stored.excludes(fit.outside) and fit.likelihood > best - _DECIDES]
    return False, True, max(near, key=lambda fit: fit.evidence, default=None)
