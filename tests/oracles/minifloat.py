"""Rounding to a narrow format by looking it up in the list of all its values, as fractions.

Slow and plain on purpose: a format is the sorted list of its magnitudes, written out from its
published definition, with one more value past the end (the next one if the exponents went on), from
which overflow is seen. No bits are handled.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from fractions import Fraction

from expectations import FLOATS
from narrowgauge.spec.formats import FORMATS


class Grid:
    """The magnitudes of a floating-point format, ascending, with one past the largest."""

    def __init__(self, name: str) -> None:
        exponent_bits, mantissa_bits, bias, reserved = FLOATS[name]
        self.magnitudes: list[Fraction] = []
        for field in range(2**exponent_bits + 1):
            for mantissa in range(2**mantissa_bits):
                part = Fraction(mantissa, 2**mantissa_bits) + (1 if field else 0)
                self.magnitudes.append(part * Fraction(2) ** (max(field, 1) - bias))
        self.num_finite = 2 ** (exponent_bits + mantissa_bits) - reserved
        del self.magnitudes[self.num_finite + 1 :]

    @property
    def max(self) -> Fraction:
        """The largest finite magnitude."""
        return self.magnitudes[self.num_finite - 1]

    def below(self, value: float) -> int:
        """Which magnitude lies just below or at a value; the largest for what is out of range."""
        return min(bisect_right(self.magnitudes, Fraction(abs(value))), self.num_finite) - 1

    def nearest(self, value: float) -> float | None:
        """The nearest value, ties to the even place in the list; None on overflow."""
        place = self.below(value)
        exact = Fraction(abs(value))
        down = exact - self.magnitudes[place]
        up = self.magnitudes[place + 1] - exact
        place += up < down or (up == down and place % 2 == 1)
        return (
            None
            if place == self.num_finite
            else math.copysign(float(self.magnitudes[place]), value)
        )


def values_of(name: str, step: int = 1) -> list[float]:
    """The finite values of a format, ascending; of a float, those of every ``step``th code."""
    row = FORMATS[name]
    if row.kind == "int":
        return [float(value) for value in range(int(row.min), int(row.max) + 1)]
    if row.kind == "scale":
        return [2.0 ** (field - row.bias) for field in range((1 << row.bits) - 1)]
    magnitudes = set()
    for code in range(0, 1 << (row.exponent_bits + row.mantissa_bits), step):
        field, mantissa = divmod(code, 1 << row.mantissa_bits)
        significand = mantissa + ((field > 0) << row.mantissa_bits)
        magnitudes.add(math.ldexp(significand, max(field, 1) - row.bias - row.mantissa_bits))
    finite = [value for value in magnitudes if value <= row.max]
    return sorted({sign * value for value in finite for sign in (-1, 1)})


def spacing(name: str, value: float) -> float:
    """The ulp at a value; at the end of the range for larger ones."""
    row = FORMATS[name]
    if row.kind == "int":
        return 1.0
    magnitude = min(abs(value), row.max)
    exponent = math.frexp(magnitude)[1] - 1 if magnitude else row.min_exponent
    return math.ldexp(1.0, max(exponent, row.min_exponent) - row.mantissa_bits)


def scale_nearest(value: float) -> float:
    """A positive value to the nearest power of two of E8M0, ties up; NaN past 2^127; up between
    2^-127 and 2^-126.
    """
    if value <= 2.0**-126:
        return 2.0**-127 if value <= 2.0**-127 else 2.0**-126
    exponent = math.frexp(value)[1] - 1
    exponent += Fraction(value) >= Fraction(3, 2) * Fraction(2) ** exponent
    return math.ldexp(1.0, exponent) if exponent <= 127 else math.nan
