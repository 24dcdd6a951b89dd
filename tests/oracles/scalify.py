"""The rules of scale propagation on plain numbers: fractions, lists and loops, nothing rounded.

A pair is a flat list of data and one scale, a power of two; it stands for ``data * scale``. Each
rule is written as its source has it, roots and all: a root is never taken, its largest power of two
is found by comparing squares.

Source: Balança et al., Scalify, arXiv 2407.17353; graphcore-research/jax-scalify, rounding scales
down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Pair:
    data: tuple[Fraction, ...]
    scale: Fraction

    @property
    def values(self) -> tuple[Fraction, ...]:
        return tuple(value * self.scale for value in self.data)


def pair(data: Sequence[float], scale: float) -> Pair:
    return Pair(tuple(Fraction(value) for value in data), Fraction(scale))


def root_below(square: Fraction | int) -> Fraction:
    """The largest power of two whose square is not above."""
    power = Fraction(1)
    while power * power > square:
        power /= 2
    while 4 * power * power <= square:
        power *= 2
    return power


def multiply(a: Pair, b: Pair) -> Pair:
    return Pair(tuple(x * y for x, y in zip(a.data, b.data, strict=True)), a.scale * b.scale)


def add(a: Pair, b: Pair, sign: int = 1) -> Pair:
    """To the root of the sum of the squared scales, rounded down."""
    scale = root_below(a.scale**2 + b.scale**2)
    terms = zip(a.values, b.values, strict=True)
    return Pair(tuple((x + sign * y) / scale for x, y in terms), scale)


def concatenate(a: Pair, b: Pair) -> Pair:
    scale = max(a.scale, b.scale)
    return Pair(tuple(value / scale for value in (*a.values, *b.values)), scale)


def total(a: Pair, groups: int) -> Pair:
    """Sums of as many equal runs of the data as there are groups."""
    length = len(a.data) // groups
    power = root_below(length)
    sums = (
        sum(a.data[start : start + length], Fraction(0)) for start in range(0, len(a.data), length)
    )
    return Pair(tuple(value / power for value in sums), a.scale * power)
