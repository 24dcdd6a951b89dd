"""Slow, independent answers for sums, fingerprints and update measures: fractions and Python
integers, no tensors.

Values come in as Python floats (every float is a fraction exactly) and bits as unsigned integers.
"""

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction


def single(value: Fraction) -> Fraction | float:
    """The nearest float32, ties to even; infinity past its end."""
    if value == 0:
        return Fraction(0)
    spacing = Fraction(2) ** (max(exponent_of(value), -126) - 23)
    nearest = round(value / spacing) * spacing
    return nearest if nearest < Fraction(2) ** 128 else math.inf


def exponent_of(value: Fraction) -> int:
    """Of the power of two at or below a positive value."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1


def exact_sum_of_squares(values: Iterable[float]) -> Fraction:
    """The sum of squares of finite floats as a fraction."""
    return sum((Fraction(value) ** 2 for value in values), Fraction(0))


def nearest_float(value: Fraction) -> float:
    """The float64 nearest to a fraction, ties to even; an infinity beyond the range."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def splitmix_fingerprint(bits: Sequence[int], offset: int = 0) -> int:
    """The sum, modulo 2^64, of splitmix64's finalizer over every element's bits and place."""
    mask = 2**64 - 1
    total = 0
    for index, element in enumerate(bits):
        z = (element + (offset + index + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        total += z ^ (z >> 31)
    return total & mask


def update_sums(
    intended: Sequence[float], stored: Sequence[float], visible: Sequence[float]
) -> list[Fraction]:
    """The sums of an update, as fractions, in their order: dd, de, ee, nonzero, lost, unseen,
    elements, at_end.
    """
    rows = []
    for d, e, v in zip(intended, stored, visible, strict=True):
        rows.append((Fraction(d), Fraction(e), Fraction(v)))
    return [
        sum((d * d for d, _, _ in rows), Fraction(0)),
        sum((d * e for d, e, _ in rows), Fraction(0)),
        sum((e * e for _, e, _ in rows), Fraction(0)),
        Fraction(sum(d != 0 for d, _, _ in rows)),
        Fraction(sum(d != 0 and e == 0 for d, e, _ in rows)),
        Fraction(sum(d != 0 and v == 0 for d, _, v in rows)),
        Fraction(len(rows)),
        Fraction(0),
    ]


def sum_on_grid(values: Iterable[float], exponent: int = -74) -> float:
    """The float32 nearest to the exact sum of values, each rounded to a whole number of steps
    2^exponent; ties to even.
    """
    step = Fraction(2) ** exponent
    total = sum((round(Fraction(value) / step) for value in values), 0) * step
    return nearest_float32(total)


def nearest_float32(value: Fraction) -> float:
    """The float32 nearest to a fraction, ties to even; an infinity beyond the range."""
    return math.copysign(float(single(abs(value))), value)
