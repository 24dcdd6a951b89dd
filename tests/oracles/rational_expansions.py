"""Expansions as rational numbers: what their parts add up to, and how far that is from what was
asked.

Nothing here rounds. Parts arrive as lists of Python floats, one list per part, largest part first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import pairwise

from oracles.casting import exponent_of

Lists = Sequence[Sequence[float]]


def values(parts: Lists) -> list[Fraction]:
    """The number that each expansion stands for."""
    return [sum(map(Fraction, words), Fraction(0)) for words in zip(*parts, strict=True)]


def worst(approximations: Iterable[Fraction], exact: Iterable[Fraction]) -> Fraction:
    """The largest error relative to the exact value; exact zeros must be found."""
    errors = [Fraction(0)]
    for f, e in zip(approximations, exact, strict=True):
        assert e or not f, "a zero was asked for and something else was found"
        errors.append(abs(f - e) / abs(e) if e else Fraction(0))
    return max(errors)


def half_spacing(value: Fraction, precision: int) -> Fraction:
    """Half the distance between neighbours of ``precision`` bits in the binade of a value; of 0, 0."""
    if value == 0:
        return Fraction(0)
    return Fraction(2) ** (exponent_of(abs(value)) - precision)


def separated(parts: Lists, precision: int) -> bool:
    """Whether each part is at most half a spacing of the one before it, and nothing follows a zero."""
    return all(
        abs(Fraction(below)) <= half_spacing(Fraction(above), precision)
        for upper, lower in pairwise(parts)
        for above, below in zip(upper, lower, strict=True)
    )
