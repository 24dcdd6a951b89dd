"""Cutting, coding and hashing by definition: lists of values, whole quotients and remainders,
Python's own integers.

Slow and plain on purpose. A code is the ascending list of its magnitudes, and rounding looks for
the nearest in it; a cut is a division with remainder of a float32's magnitude; the hash wraps by
taking remainders modulo 2^32. Nothing is shifted and masked as the library does it.
"""

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

SIGN = 2**31
INFINITY = 255 * 2**23


def magnitudes(exponent_bits: int, mantissa_bits: int, lowest: int) -> list[Fraction]:
    """All finite magnitudes of a code, ascending; with 8 exponent bits the last binade is
    infinity's and NaN's.
    """
    values = []
    for field in range(2**exponent_bits - (exponent_bits == 8)):
        for mantissa in range(2**mantissa_bits):
            part = Fraction(mantissa, 2**mantissa_bits) + (1 if field else 0)
            values.append(part * Fraction(2) ** (lowest + max(field, 1) - 1))
    return values


def nearest_steps(values: Floats, x: Floats) -> Integers:
    """The place in ``values`` of the one nearest to each ``abs(x)``, ties to the even place; the
    last for all beyond.

    ``values`` are so short that their float64 midpoints are exact.
    """
    midpoints = (values[1:] + values[:-1]) / 2
    upper = np.searchsorted(midpoints, np.abs(x), side="right").astype(np.int64)
    lower = np.searchsorted(midpoints, np.abs(x), side="left").astype(np.int64)
    return np.where(lower % 2 == 0, lower, upper)


def cut(bits: Integers, dropped: int, addend: Integers | int | None = None) -> Integers:
    """The bits (0 … 2^32 - 1) of numbers or infinities with ``dropped`` low ones rounded off.

    Nearest with ties to the even multiple; or up where the remainder and ``addend`` together fill a
    step.
    """
    sign, magnitude = np.divmod(bits, SIGN)
    step = 2**dropped
    quotient, remainder = np.divmod(magnitude, step)
    if addend is None:
        up = (2 * remainder > step) | ((2 * remainder == step) & (quotient % 2 == 1))
    else:
        up = remainder + addend >= step
    return sign * SIGN + (quotient + (up & (remainder > 0))) * step


def is_nan(bits: Integers) -> NDArray[np.bool_]:
    """Which bits are NaNs."""
    return bits % SIGN > INFINITY


def hashed(key: int, seed: int) -> int:
    """The two-round hash of one key, 0 … 2^32 - 1."""
    h = (key ^ seed) % 2**32 * 0x7FEB352D % 2**32
    h = (h ^ h // 2**15) * 0x846CA68B % 2**32
    return h ^ h // 2**16
