"""The probability of stored values: compare a rule with other numbers through the rounding of a format or storage.

A stored value bounds the computed value: within 0.5 ulp for rounding to nearest, within 1 ulp for stochastic rounding.
With stochastic rounding, the distances give the probability of each neighbour. So every assumption on the computed values
has a likelihood: the product of the probabilities over the elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.spec.storages import Code

_FLOOR = 1e-4
"""The probability of a stored value that an assumption excludes. A few such values decide nothing."""
_MOST_OUTSIDE = 2e-3
"""Fraction of values that a right assumption may exclude, because the arithmetic itself rounds near a tie."""
_FEWER = 0.2
"""Numbers explain values if they exclude less than this fraction of the values that the rule excludes."""
DECIDES = 20.0
"""Least gain in log-likelihood of another assumption over the rule: a chance of e^-20."""


@dataclass(frozen=True)
class Rounding:
    """How the values of one tensor were rounded when they were stored.

    Args:
        code: of its storage, with one part.
        ends: for a code scaled by row, each element's exponent of the power of two at which its row's window ends.
    """

    code: Code
    ends: Tensor | None = None

    def spacings(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distances from stored values to the next larger and the next smaller magnitude, float64."""
        lowest = self._lowest(values)
        mantissas, exponents = torch.frexp(values.abs())
        exponents = torch.where(values == 0, lowest, exponents.double() - 1)
        above = 2.0 ** (exponents.maximum(lowest) - self.code.mantissa_bits)
        is_power = (mantissas == 0.5) & (exponents > lowest)
        return above, above * torch.where(is_power, 0.5, 1.0).double()

    def is_bounded(self, values: Tensor) -> Tensor:
        """Mark values that a code does not simply round: near its smallest value, and beyond its largest."""
        code, lowest = self.code, self._lowest(values)
        below = (values.abs() < 2.0 ** (lowest - code.mantissa_bits + 1)) & code.hold
        return below | ((values.abs() >= 2.0 ** (lowest + code.highest - code.lowest)) & code.is_window)

    def _lowest(self, values: Tensor) -> Tensor:
        lowest = torch.full_like(values, float(self.code.lowest))
        return lowest if self.ends is None else lowest + self.ends


class Difference(NamedTuple):
    """How a tensor differs from its rule: the distance, its bound, and the numbers that explain it, each with its error."""

    distance: float
    bound: float
    numbers: dict[str, float]
    errors: dict[str, float]


class Written:
    """A tensor after a step: its rule computes ``fixed + Σ number × term``, and its storage rounds the sum.

    Args:
        after: the stored values, float64, 1-D.
        terms: by name, the term and the rule's number.
        slack: largest error of the arithmetic for each value; infinite where it is unknown.
    """

    def __init__(
        self, after: Tensor, fixed: Tensor, terms: dict[str, tuple[Tensor, float]], rounding: Rounding, slack: Tensor
    ) -> None:
        self.after, self.fixed, self.terms, self.slack = after, fixed, terms, slack
        self.rule = {name: number for name, (_, number) in terms.items()}
        self.expected = self.value(self.rule)
        is_known = ~(rounding.is_bounded(after) | rounding.is_bounded(self.expected)) & slack.isfinite()
        # An infinite spacing takes an element out of fits and likelihoods.
        self.above, self.below = (spacing.where(is_known, math.inf) for spacing in rounding.spacings(after))
        self.count = int(is_known.sum())
        self.is_stochastic = rounding.code.rounding == "stochastic"
        self.reach = 1.0 if self.is_stochastic else 0.5

    def value(self, numbers: Mapping[str, float]) -> Tensor:
        """Return what the rule computes with other numbers."""
        return self.fixed + torch.stack([numbers[name] * term for name, (term, _) in self.terms.items()]).sum(0)

    def likelihood(self, computed: Tensor) -> tuple[float, float]:
        """Return the log-likelihood of the stored values, given computed values, and the fraction that is excluded."""
        spacing = torch.where(computed.abs() < self.after.abs(), self.below, self.above)
        excess = ((self.after - computed).abs() - self.slack).clamp_min(0.0) / spacing
        chance = 1.0 - excess if self.is_stochastic else (excess <= self.reach).double()
        return float(chance.clamp_min(_FLOOR).log().sum()), int((excess > self.reach).sum()) / max(1, self.count)

    def difference(self, share: float = 0.0) -> Difference | None:
        """Compare the stored values with the rule; ``None`` if they agree.

        Args:
            share: a fit of each number that leaves at most this length explains the values too.
        """
        likelihood, outside = self.likelihood(self.expected)
        differs = self._excludes(outside)
        # No probability exceeds 1. If the rule's likelihood is near 1, no other numbers can be much likelier.
        if not differs and -likelihood <= DECIDES:
            return None
        largest = self.reach * self.above + self.slack
        bound, distance = float(largest[largest.isfinite()].norm()), self._distance(self.expected)
        for (numbers, errors), fraction in ((self._times_one_factor(), 0.0), (self._fitted(), share)):
            computed = self.value(numbers)
            other, left_outside = self.likelihood(computed)
            differs = differs or other - likelihood > DECIDES
            is_rare = not self._excludes(left_outside) or left_outside < _FEWER * outside
            if differs and (is_rare or self._distance(computed) <= fraction):
                return Difference(distance, bound, numbers, errors)
        return Difference(distance, bound, {}, {}) if differs else None

    def _times_one_factor(self) -> tuple[dict[str, float], dict[str, float]]:
        """Fit all that the rule adds by one factor. Return its numbers and four of their standard errors."""
        ((factor, error),) = self._solved([self.expected - self.fixed])
        numbers = {name: factor * number for name, number in self.rule.items()}
        return numbers, {name: error * abs(number) for name, number in self.rule.items()}

    def _fitted(self) -> tuple[dict[str, float], dict[str, float]]:
        """Fit each number. Return them and four of their standard errors. A zero term keeps its number."""
        columns = {name: term for name, (term, _) in self.terms.items() if bool(term.any())}
        fits = dict(zip(columns, self._solved(list(columns.values())), strict=True)) if columns else {}
        numbers = {name: fits[name][0] if name in fits else number for name, number in self.rule.items()}
        return numbers, {name: fits[name][1] if name in fits else math.inf for name in self.rule}

    def _solved(self, terms: Sequence[Tensor]) -> list[tuple[float, float]]:
        inverse = torch.linalg.pinv(torch.stack(list(terms), 1) / self.above[:, None], rtol=1e-14)
        solution = inverse @ ((self.after - self.fixed) / self.above)
        return list(zip(solution.tolist(), (4 * inverse.norm(dim=1)).tolist(), strict=True))

    def _distance(self, computed: Tensor) -> float:
        """Return the length of the difference, without elements that say nothing."""
        return float((self.after - computed)[self.above.isfinite()].norm())

    def _excludes(self, outside: float) -> bool:
        return outside > _MOST_OUTSIDE and outside * self.count > 2
