"""Compare stored values with the sum that a rule computes, through the rounding of a format or
storage.

A stored value bounds the computed value: within 0.5 ulp for rounding to nearest, within 1 ulp for
stochastic rounding. Where too many values lie outside, a fit of the rule's numbers may explain
them. Stochastic rounding is unbiased, so there the fit itself is the test: it resolves far less
than an ulp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.spec.storages import Code

_MOST_OUTSIDE = 2e-3
"""Fraction of values that a right assumption may exclude, because the arithmetic itself rounds near
a tie.
"""
_FEWER = 0.2
"""Numbers explain values if they exclude less than this fraction of the values that the rule
excludes.
"""


@dataclass(frozen=True)
class Rounding:
    """How the values of one tensor were rounded when they were stored.

    Args:
        code: of its storage, with one part.
        ends: for a code scaled by row, each element's exponent of the power of two at which its
            row's window ends.
    """

    code: Code
    ends: Tensor | None = None

    def spacings(self, values: Tensor) -> Tensor:
        """Return the distance from each value to the next larger magnitude; infinite where a code
        does not simply round.
        """
        code = self.code
        lowest = torch.full_like(values, float(code.lowest))
        if self.ends is not None:
            lowest += self.ends
        exponents = torch.frexp(values.abs())[1].double() - 1
        above = 2.0 ** (exponents.where(values != 0, lowest).maximum(lowest) - code.mantissa_bits)
        is_held = (values.abs() < 2.0 ** (lowest - code.mantissa_bits + 1)) & code.hold
        most = 2.0 ** (lowest + code.highest - code.lowest)
        is_saturated = (values.abs() >= most) & code.is_window
        return above.masked_fill(is_held | is_saturated, math.inf)


class Difference(NamedTuple):
    """How a tensor differs from its rule: the distance, its bound, and the numbers that explain it,
    each with its error.
    """

    distance: float
    bound: float
    numbers: dict[str, float]
    errors: dict[str, float]


class Written:
    """A tensor after a step: its rule computes ``fixed + Σ number × term``, and its storage rounds
    the sum.

    Args:
        after: the stored values, float64, 1-D.
        terms: by name, the term and the rule's number.
        slack: largest error of the arithmetic for each value; infinite where it is unknown.
    """

    def __init__(
        self,
        after: Tensor,
        fixed: Tensor,
        terms: dict[str, tuple[Tensor, float]],
        rounding: Rounding,
        slack: Tensor,
    ) -> None:
        self.after = after
        self.fixed = fixed
        self.terms = terms
        self.slack = slack
        self.rule = {name: number for name, (_, number) in terms.items()}
        self.expected = self.value(self.rule)
        # An infinite spacing takes an element out of the comparison.
        unknown = ~slack.isfinite() | rounding.spacings(self.expected).isinf()
        self.spacing = rounding.spacings(after).masked_fill(unknown, math.inf)
        self.is_known = self.spacing.isfinite()
        self.is_stochastic = rounding.code.rounding == "stochastic"
        self.reach = (1.0 if self.is_stochastic else 0.5) * self.spacing + slack

    def value(self, numbers: Mapping[str, float]) -> Tensor:
        """Return what the rule computes with other numbers."""
        total = self.fixed
        for name, (term, _) in self.terms.items():
            total = total + numbers[name] * term
        return total

    def difference(self, share: float = 0.0) -> Difference | None:
        """Compare the stored values with the rule; ``None`` if they agree.

        Args:
            share: numbers that leave at most this length explain the values too.
        """
        outside = self._outside(self.expected)
        numbers, errors = self.fitted()
        is_off = False
        if self.is_stochastic:
            is_off = any(abs(x - self.rule[name]) > errors[name] for name, x in numbers.items())
        if not outside and not is_off:
            return None
        bound = float(self.reach[self.is_known].norm())
        distance = self._distance(self.expected)
        all_terms = {"all": self.expected - self.fixed}
        factors, factor_errors = self._fit(all_terms)
        scaled = {}
        scaled_errors = {}
        for name, number in self.rule.items():
            scaled[name] = factors["all"] * abs(number)
            scaled_errors[name] = factor_errors["all"] * abs(number)
        if self._explains(scaled, outside, 0.0):
            return Difference(distance, bound, scaled, scaled_errors)
        if self._explains(numbers, outside, share):
            return Difference(distance, bound, numbers, errors)
        return Difference(distance, bound, {}, {})

    def _explains(self, numbers: Mapping[str, float], outside: float, max_distance: float) -> bool:
        computed = self.value(numbers)
        return (
            self._outside(computed) <= _FEWER * outside or self._distance(computed) <= max_distance
        )

    def fitted(self) -> tuple[dict[str, float], dict[str, float]]:
        """Fit each number.

        Return the numbers and four of their standard errors. A zero term keeps its number.
        """
        terms = {name: term for name, (term, _) in self.terms.items() if bool(term.any())}
        fit, errors = self._fit(terms)
        return self.rule | fit, dict.fromkeys(self.rule, math.inf) | errors

    def _fit(self, terms: Mapping[str, Tensor]) -> tuple[dict[str, float], dict[str, float]]:
        if not terms:
            return {}, {}
        columns = torch.stack(list(terms.values()), 1) / self.spacing[:, None]
        inverse = torch.linalg.pinv(columns, rtol=1e-14)
        solution = inverse @ ((self.after - self.fixed) / self.spacing)
        errors = 4 * inverse.norm(dim=1)
        numbers = dict(zip(terms, solution.tolist(), strict=True))
        return numbers, dict(zip(terms, errors.tolist(), strict=True))

    def _distance(self, computed: Tensor) -> float:
        return float((self.after - computed)[self.is_known].norm())

    def _outside(self, computed: Tensor) -> float:
        """Return the fraction of known values that a sum excludes; 0 for as few as rounding near a
        tie explains.
        """
        number = int(((self.after - computed).abs() > self.reach).sum())
        count = int(self.is_known.sum())
        if number > max(2, _MOST_OUTSIDE * count):
            return number / count
        return 0.0
