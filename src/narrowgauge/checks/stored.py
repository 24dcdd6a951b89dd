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
        lowest = torch.full_like(values, float(code.lowest)) + (
            0.0 if self.ends is None else self.ends
        )
        exponents = torch.frexp(values.abs())[1].double() - 1
        above = 2.0 ** (exponents.where(values != 0, lowest).maximum(lowest) - code.mantissa_bits)
        is_held = (values.abs() < 2.0 ** (lowest - code.mantissa_bits + 1)) & code.hold
        is_saturated = (
            values.abs() >= 2.0 ** (lowest + code.highest - code.lowest)
        ) & code.is_window
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
        return self.fixed + torch.stack(
            [numbers[name] * term for name, (term, _) in self.terms.items()]
        ).sum(0)

    def difference(self, share: float = 0.0) -> Difference | None:
        """Compare the stored values with the rule; ``None`` if they agree.

        Args:
            share: numbers that leave at most this length explain the values too.
        """
        outside = self._outside(self.expected)
        fitted = self.fitted()
        is_off = self.is_stochastic and any(
            abs(x - self.rule[name]) > fitted[1][name] for name, x in fitted[0].items()
        )
        if not outside and not is_off:
            return None
        bound = float(self.reach[self.is_known].norm())
        distance = self._distance(self.expected)
        factor, error = (fit["all"] for fit in self._fit({"all": self.expected - self.fixed}))
        all_times = [
            {name: x * abs(number) for name, number in self.rule.items()} for x in (factor, error)
        ]
        for (numbers, errors), left in ((all_times, 0.0), (fitted, share)):
            computed = self.value(numbers)
            if self._outside(computed) <= _FEWER * outside or self._distance(computed) <= left:
                return Difference(distance, bound, numbers, errors)
        return Difference(distance, bound, {}, {})

    def fitted(self) -> tuple[dict[str, float], dict[str, float]]:
        """Fit each number.

        Return the numbers and four of their standard errors. A zero term keeps its number.
        """
        fit, errors = self._fit(
            {name: term for name, (term, _) in self.terms.items() if bool(term.any())}
        )
        return self.rule | fit, dict.fromkeys(self.rule, math.inf) | errors

    def _fit(self, terms: Mapping[str, Tensor]) -> tuple[dict[str, float], dict[str, float]]:
        if not terms:
            return {}, {}
        inverse = torch.linalg.pinv(
            torch.stack(list(terms.values()), 1) / self.spacing[:, None], rtol=1e-14
        )
        solution = inverse @ ((self.after - self.fixed) / self.spacing)
        errors = 4 * inverse.norm(dim=1)
        return dict(zip(terms, solution.tolist(), strict=True)), dict(
            zip(terms, errors.tolist(), strict=True)
        )

    def _distance(self, computed: Tensor) -> float:
        return float((self.after - computed)[self.is_known].norm())

    def _outside(self, computed: Tensor) -> float:
        """Return the fraction of known values that a sum excludes; 0 for as few as rounding near a
        tie explains.
        """
        number = int(((self.after - computed).abs() > self.reach).sum())
        count = int(self.is_known.sum())
        return number / count if number > max(2, _MOST_OUTSIDE * count) else 0.0
