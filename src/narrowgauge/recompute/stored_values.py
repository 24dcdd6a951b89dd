"""Values that a storage rounded: with which computation of them they agree, by their likelihood.

A stored value tells between which two neighbours of its format the value lay that was meant. Rounded to the nearest, it lies
within half a spacing of that; stochastically, within one, and each neighbour has the probability that rounding gives it. So the
probability of what was stored is known exactly for every assumption on what was meant, and assumptions are compared by its
logarithm, summed over elements. Under the right one, another has a likelihood e^20 times as high with a probability of at
most e^-20 (Markov's inequality), however the spacings compare with the step.

An assumption may leave one number free, such as the learning rate. How far that number is determined is measured too: by
where the log-likelihood falls by 8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from narrowgauge.recompute.fitting import fitted
from narrowgauge.recompute.piece_results import Alternative
from narrowgauge.spec.significance import MIN_EDQ
from narrowgauge.spec.storages import Code, Storage

_FLOOR = 1e-4
"""The probability of a stored value that an assumption excludes: a few such values decide nothing."""
_MOST_OUTSIDE = 2e-3
"""Share of values that may be excluded where the assumption is right: the arithmetic's own rounding near a tie."""
_DECIDES, _TELLS_APART = 20.0, 7.0
"""Differences of log-likelihood: by which another assumption is better than the rule, and than its rivals."""
_WIDTH = 8.0
_CHANCE = 1e-2
"""Of no element moving: where it is smaller, the format holds them."""


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
        """That of some elements, of the same kind."""
        return self if self.ends is None else replace(self, ends=self.ends[places])

    def spacing(self, values: Tensor) -> Tensor:
        """The distance from stored values to the next larger in magnitude, float64.

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
        found = 2.0 ** (exponents.maximum(lowest) - math.log2(code.spacings))
        # The low part of an expansion ends at the format's own subnormals, unless it has a finer scale of its own.
        return found if code.scaled or code.parts == 1 else found.maximum(2.0 ** (lowest - code.mantissa_bits))

    def spacing_below(self, values: Tensor) -> Tensor:
        """The distance to the next smaller in magnitude: half as much from a power of two."""
        mantissas, exponents = torch.frexp(values.abs())
        is_power = (mantissas == 0.5) & (exponents - 1 > self._lowest(values)) & (self.code.parts == 1)
        return self.spacing(values) * torch.where(is_power, 0.5, 1.0).double()

    def _lowest(self, values: Tensor) -> Tensor:
        lowest = torch.full_like(values, float(self.code.lowest))
        return lowest if self.ends is None else lowest + self.ends

    def is_bounded(self, values: Tensor) -> Tensor:
        """Where a code does not simply round: at the smallest value that it holds, and beyond the largest."""
        code, lowest = self.code, self._lowest(values)
        below = (values.abs() < 2.0 ** (lowest - code.mantissa_bits + 1)) & code.hold
        return below | ((values.abs() >= 2.0 ** (lowest + code.highest - code.lowest)) & code.is_window)


@dataclass(frozen=True)
class Assumption:
    """What may have been meant: ``values``, or ``values + t × slope`` for a number t that is free.

    Args:
        cause: the id of a departure; empty for the rule itself.
        given: its values, by name.
        name: under which the free number is told.
        is_square: whether the free number is the square of what is told.
    """

    cause: str
    values: Tensor
    slope: Tensor | None = None
    given: tuple[tuple[str, object], ...] = ()
    name: str = ""
    is_square: bool = False


@dataclass(frozen=True)
class _Fit:
    assumption: Assumption
    likelihood: float
    outside: float
    number: float = 0.0
    error: float = 0.0

    @property
    def evidence(self) -> float:
        """The log-likelihood, less what a free number gains by being free: the logarithm of how sharply it was set."""
        if self.assumption.slope is None:
            return self.likelihood
        return self.likelihood - max(1.0, math.log(max(1.0, abs(self.number)) / max(self.error, 1e-12)))


class StoredValues:
    """What was stored, and how likely it is under an assumption.

    Args:
        stored: float64, 1-D.
        before: the same values before the step.
        own: what the rule makes of them.
        rounding: of their storage.
        slack: how far the arithmetic itself may take each value.
    """

    def __init__(self, stored: Tensor, before: Tensor, own: Tensor, rounding: Rounding, slack: Tensor) -> None:
        kept = ~(rounding.is_bounded(own) | rounding.is_bounded(stored))
        self.kept, self.rounding = kept, rounding
        self.is_stochastic = rounding.code.rounding == "stochastic"
        self.reach = 1.0 if self.is_stochastic else 0.5
        self.stored, self.before, self.own = stored[kept], before[kept], own[kept]
        self.above, self.below = rounding.spacing(stored)[kept], rounding.spacing_below(stored)[kept]
        self.slack = slack[kept] + 2.0**-23 * self.own.abs() + 4 * rounding.least

    def __len__(self) -> int:
        return self.stored.numel()

    @property
    def envelope(self) -> float:
        """The length of the largest difference that rounding alone makes."""
        return float((self.reach * self.above + self.slack).norm())

    def likelihood(self, values: Tensor) -> tuple[float, float]:
        """The log-likelihood of what was stored if some values were meant, and the share of elements that exclude it."""
        spacing = torch.where(values.abs() < self.stored.abs(), self.below, self.above)
        apart = ((self.stored - values).abs() - self.slack).clamp_min(0.0) / spacing
        chance = 1.0 - apart if self.is_stochastic else (apart <= self.reach).double()
        return float(chance.clamp_min(_FLOOR).log().sum()), float((apart > self.reach).double().mean())

    def is_exactly(self, values: Tensor) -> bool:
        """Whether what was stored is this, to the last bit."""
        return torch.equal(values[self.kept], self.stored)

    def fit(self, assumption: Assumption) -> _Fit:
        """The likelihood of an assumption, at the best value of its free number."""
        values = assumption.values[self.kept]
        if assumption.slope is None:
            return _Fit(assumption, *self.likelihood(values))
        slope = assumption.slope[self.kept]
        if not bool(slope.any()):
            return _Fit(assumption, -math.inf, 1.0)
        start, width = (self._weighted if self.is_stochastic else self._in_most_intervals)(values, slope)
        best, number = max(
            ((self.likelihood(values + t * slope)[0], t) for t in _around(start, width)),
            key=lambda found: (found[0], -abs(found[1] - start)),
        )
        return _Fit(assumption, best, self.likelihood(values + number * slope)[1], number, width)

    def with_error(self, fit: _Fit) -> _Fit:
        """A fit with how far its free number is determined: by where the likelihood falls on both sides."""
        assumption, error = fit.assumption, fit.error
        if assumption.slope is None:
            return fit
        values, slope = assumption.values[self.kept], assumption.slope[self.kept]

        def falls(distance: float) -> bool:
            return fit.likelihood - self.likelihood(values + (fit.number + distance) * slope)[0] > _WIDTH

        while error > 1e-12 and falls(error / 2) and falls(-error / 2):
            error /= 2
        return replace(fit, error=error)

    def _weighted(self, values: Tensor, slope: Tensor) -> tuple[float, float]:
        """By least squares, each element weighed by its spacing; and a width that holds the answer for sure."""
        target = (self.stored - values) / self.above
        weighed = slope / self.above
        (number,), _ = fitted(target, [weighed])
        return number, 4.0 / float(weighed.norm())

    def _in_most_intervals(self, values: Tensor, slope: Tensor) -> tuple[float, float]:
        """The middle of the numbers that most elements allow, and half of their range: each allows an interval."""
        moves = slope != 0
        middle = (self.stored - values)[moves] / slope[moves]
        half = ((0.5 * self.above + self.slack)[moves] / slope[moves]).abs()
        ends = torch.cat([middle - half, middle + half])
        order = ends.argsort()
        steps = torch.cat([torch.ones_like(middle), -torch.ones_like(middle)])[order]
        count = steps.cumsum(0)
        place = int(count.argmax())
        low = float(ends[order[place]])
        high = float(ends[order[min(place + 1, len(order) - 1)]])
        return (low + high) / 2, max((high - low) / 2, 1e-12)

    def lost(self) -> float:
        """The share of the change that was meant and did not arrive; stochastic rounding loses nothing on average."""
        return 0.0 if self.is_stochastic else lost_share(self.own - self.before, self.stored - self.before, self.above)


def lost_share(meant: Tensor, taken: Tensor, spacing: Tensor) -> float:
    """The share of a change that did not arrive, where that is beyond the chance of rounding; else 0.

    Args:
        meant, taken: the change before and after rounding to the nearest, float64.
        spacing: of the stored values.
    """
    length = float(meant.square().sum())
    if not length:
        return 0.0
    if (
        not taken.any()
    ):  # a tensor whose values are all alike, as gains of 1 are, is no sample of places between two values
        chance = (1 - (meant.abs() / spacing).nan_to_num(1.0)).clamp_min(1e-300).log().sum()
        return 1.0 if float(chance) < math.log(_CHANCE) else 0.0
    quality = float((meant * taken).sum()) / length
    error = float((meant * spacing).norm()) / 12**0.5 / length
    return 1.0 - quality if quality + 4 * error < MIN_EDQ else 0.0


def _around(start: float, width: float) -> list[float]:
    return [start + width * k / 8 for k in range(-8, 9)]


@dataclass(frozen=True)
class Verdict:
    """What stored values agree with.

    Args:
        is_equal: with the rule.
        is_telling: a step that was not taken would have been seen.
        alternatives: the causes that they agree with instead, the likeliest first.
        is_exact: each of these gives every stored bit.
    """

    is_equal: bool
    is_telling: bool
    alternatives: tuple[Alternative, ...] = ()
    is_exact: bool = False


def judged(stored: StoredValues, others: Sequence[Assumption]) -> Verdict:
    """Compare the rule with other assumptions on what was meant.

    Args:
        stored: with the rule's own values.
        others: a cause may have several.
    """
    if not len(stored):
        return Verdict(True, False)
    likelihood, outside = stored.likelihood(stored.own)
    # No assumption has a probability above 1: where nothing speaks against the rule, nothing is likelier.
    is_settled = not _excludes(outside, stored) and -likelihood <= _DECIDES
    fits = [] if is_settled else [stored.fit(each) for each in others]
    best = max((each.likelihood for each in fits), default=likelihood)
    if not _excludes(outside, stored) and best - likelihood <= _DECIDES:
        return Verdict(True, likelihood - stored.likelihood(stored.before)[0] > _DECIDES)
    # What gives every stored bit needs no probability.
    same = [each for each in fits if each.assumption.slope is None and stored.is_exactly(each.assumption.values)]
    agree = [each for each in fits if not _excludes(each.outside, stored) and each.likelihood > best - _DECIDES]
    agree = [stored.with_error(each) for each in agree]
    # A term with a factor of zero is the assumption without that term; a factor on all of the step is the plainer one.
    plain = {
        each.assumption.cause for each in agree if each.assumption.slope is None or each.assumption.cause == "rate"
    }
    if plain - {"rate"}:
        agree = [each for each in agree if not each.error >= abs(each.number) > 0]
    if "rate" in plain:
        agree = [each for each in agree if each.assumption.cause != "step-scaled"]
    agree.sort(key=lambda each: each.evidence, reverse=True)
    return Verdict(False, True, tuple(map(_alternative, same or agree)), is_exact=bool(same))


def _excludes(outside: float, stored: StoredValues) -> bool:
    return outside > _MOST_OUTSIDE and outside * len(stored) > 2


def _alternative(fit: _Fit) -> Alternative:
    assumption, values = fit.assumption, dict(fit.assumption.given)
    number, error = fit.number, fit.error
    if assumption.is_square:
        number = math.sqrt(abs(number))
        error = error / (2 * max(number, error, 1e-6))
    if assumption.name:
        values[assumption.name] = number
    return Alternative(assumption.cause, values, assumption.name, error, fit.evidence)


def told_apart(alternatives: Sequence[Alternative]) -> Alternative | None:
    """The alternative that is likelier than every other cause by a factor of e^7; ``None`` where none is.

    A rate that is known to a quarter is told in any case: it is so whatever made it.

    Args:
        alternatives: the likeliest first.
    """
    if not alternatives:
        return None
    near = [each for each in alternatives if each.evidence > alternatives[0].evidence - _TELLS_APART]
    if len({each.cause for each in near}) == 1:
        return near[0]
    plain = [each for each in near if each.cause == "rate" and each.error <= 0.25 * abs(each.values[each.free])]
    return plain[0] if plain else None


def shared(members: Sequence[Sequence[Alternative]]) -> list[Alternative] | None:
    """The one alternative with which several tensors agree, as each of them has it; ``None`` where there is none, or several.

    Args:
        members: the alternatives of each tensor.
    """
    by_kind = [{each.fixed: each for each in reversed(own)} for own in members]
    kinds = [kind for kind in by_kind[0] if all(kind in own for own in by_kind)]
    if not kinds:
        return None
    total = {kind: sum(own[kind].evidence for own in by_kind) for kind in kinds}
    first = max(kinds, key=lambda kind: total[kind])
    if any(total[kind] > total[first] - _TELLS_APART for kind in kinds if kind[0] != first[0]):
        return None
    found = [own[first] for own in by_kind]
    sharpest = min(found, key=lambda each: each.error)
    if not sharpest.free:
        return found
    value = sharpest.values[sharpest.free]
    return [
        sharpest if abs(each.values[each.free] - value) <= each.error + sharpest.error else each for each in found
    ]  # fmt: skip
