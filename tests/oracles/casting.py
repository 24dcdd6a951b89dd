"""Casts by definition: each group of values by itself, each operation exact and then rounded once.

Slow and plain on purpose. A scale is worked out in fractions, and after each operation that the
definition rounds to float32 the fraction is rounded to float32 by looking for the nearest multiple
of a spacing. A value times a scale's inverse is exact in float64 and is then rounded to float32
once. Elements are rounded to the nearest by ml_dtypes and NumPy, and stochastically by looking for
the two neighbours in the list of all values. Powers of two come from exponents; no bits are
handled.

Always ``along=1``: the matrix is ``[rows, contraction]``; the other dimension is this one
transposed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

# The largest value, and the exponent of the power of two at or below it. OCP MX v1.0, table 1; OCP
# FP8 v1.0, table 1.
LARGEST = {
    "float8_e4m3fn": (448, 8),
    "float8_e5m2": (57344, 15),
    "float4_e2m1fn": (6, 2),
    "int8": (127, 6),
}
BLOCKS = {
    "1x16": (1, 16), "16x1": (16, 1), "16x16": (16, 16), "1x32": (1, 32), "32x1": (32, 1), "1x128": (1, 128),
    "128x1": (128, 1), "128x128": (128, 128),
}  # fmt: skip
SMALLEST_MAGNITUDE = Fraction(1, 2**100)
SIGNS = [1 if 0x9E37 // 2**place % 2 else -1 for place in range(16)]


class Result(NamedTuple):
    """Codes and, of the same shape, the scale of each value's block and of its tensor, row or
    column (1 without one).
    """

    codes: Floats
    inner: Floats
    outer: Floats


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


def quantize(
    x: Floats,
    *,
    format: str,
    granularity: str,
    scale: str = "float32",
    rounding: str = "nearest",
    scale_rounding: str = "up",
    scaling: str = "current",
    rotation: str = "none",
    uniform: Floats | None = None,
    amax: float | None = None,
    **_: object,
) -> Result:
    """A matrix cast as the table's words say; groups at the edge may be smaller than a block.

    Args:
        x: ``[rows, contraction]``.
        uniform: for stochastic rounding, a number in [0, 1) for each place.
        amax: the largest magnitude to make a tensor's scale from, in place of its own.
    """
    values = rotated(x) if rotation == "hadamard" else x
    codes = np.empty_like(values)
    inner = np.ones_like(values)
    outer = np.ones_like(values)
    tensor_scale = None
    if scale == "float8_e4m3fn":
        magnitude = largest(values) if amax is None else amax
        tensor_scale = whole_scale(magnitude, Fraction(LARGEST[format][0]) * 448)
        outer[:] = tensor_scale
    for group in groups(*values.shape, granularity):
        part = values[group]
        inverse: Fraction | float = Fraction(1)
        if granularity != "none" and scaling != "static":
            magnitude = largest(part) if amax is None or granularity != "tensor" else amax
            up = scale_rounding == "up"
            if scale == "float8_e4m3fn":
                is_up = rounding == "stochastic"
                inner[group] = e4m3_scale(magnitude, tensor_scale, format, up=is_up)
                inverse = reciprocal(rational(inner[group].flat[0]) * rational(tensor_scale))
            elif granularity in BLOCKS:
                inner[group] = one_level(magnitude, format, scale, up=up)
                inverse = reciprocal(rational(inner[group].flat[0]))
            else:
                outer[group] = one_level(magnitude, format, scale, up=up)
                inverse = reciprocal(rational(outer[group].flat[0]))
        scaled = product(part, np.float32(float(inverse)))
        if scaling == "static":  # a scale from the group's own amax would make it NaN
            scaled = np.where(np.isfinite(scaled), scaled, np.nan).astype(scaled.dtype)
        if rounding == "nearest":
            codes[group] = nearest(scaled, format)
        else:
            codes[group] = stochastic(scaled, format, uniform[group])
    return Result(codes, inner, outer)


def groups(rows: int, columns: int, granularity: str) -> Iterator[tuple[slice, slice]]:
    """The places of each group of values that share a scale."""
    high, wide = {
        "none": (rows, columns), "tensor": (rows, columns), "row": (1, columns), "column": (rows, 1), **BLOCKS,
    }[granularity]  # fmt: skip
    for row in range(0, rows, high):
        for column in range(0, columns, wide):
            yield slice(row, row + high), slice(column, column + wide)


# ── scales ────────────────────────────────────────────────────────────────────────────────────────


def largest(part: Floats) -> float:
    """The largest magnitude of a group; NaN or infinite where one of its values is."""
    return float(np.abs(part).max())


def rational(value: float) -> Fraction | float:
    """The fraction that a finite float is."""
    return Fraction(float(value)) if math.isfinite(value) else math.nan


def reciprocal(scale: Fraction | float) -> Fraction | float:
    """1 / scale, rounded to float32; the scale itself rounded to float32 first."""
    if not isinstance(scale, Fraction):
        return math.nan
    rounded = single(scale)
    return single(1 / rounded)


def whole_scale(magnitude: float, end: Fraction) -> float:
    """float32(magnitude × float32(1/end)), of at least 2^-100."""
    if not math.isfinite(magnitude):
        return math.nan
    factor = single(1 / end)
    return float(single(max(Fraction(magnitude), SMALLEST_MAGNITUDE) * factor))


def power_of_two(magnitude: float, format: str, *, up: bool) -> float:
    """OCP: 2^(exponent of the magnitude - exponent of the largest value); or the smallest at which
    nothing saturates.
    """
    if not math.isfinite(magnitude):
        return math.nan
    at_least = max(Fraction(magnitude), SMALLEST_MAGNITUDE)
    end, exponent = LARGEST[format]
    scale = Fraction(2) ** (exponent_of(at_least) - exponent)
    return float(scale * 2 if up and at_least > end * scale else scale)


def one_level(magnitude: float, format: str, scale: str, *, up: bool) -> float:
    """The scale of a group without a second level."""
    if scale == "float32":
        return whole_scale(magnitude, Fraction(LARGEST[format][0]))
    return power_of_two(magnitude, format, up=up)


def e4m3_scale(magnitude: float, tensor_scale: float, format: str, *, up: bool) -> float:
    """magnitude / format's largest / tensor_scale, as an e4m3 number above zero: the nearest, or the
    least not below it.
    """
    inverse = reciprocal(rational(tensor_scale))
    if not isinstance(inverse, Fraction):
        return math.nan
    factor = single(1 / Fraction(LARGEST[format][0]))
    ratio = single(single(Fraction(magnitude) * factor) * inverse)
    numbers = [value for value in values_of("float8_e4m3fn") if value > 0]
    if up:
        return next((value for value in numbers if value >= ratio), numbers[-1])
    return max(float(nearest(np.array([float(ratio)], np.float32), "float8_e4m3fn")[0]), numbers[0])


# ── elements ──────────────────────────────────────────────────────────────────────────────────────


def product(x: Floats, y: Floats | np.float32) -> Floats:
    """Of float32 values, exact in float64 and then rounded once."""
    with np.errstate(all="ignore"):
        return (x.astype(np.float64) * np.float64(y)).astype(np.float32)


def nearest(v: Floats, format: str) -> Floats:
    """Ties to even; narrow formats end at their largest value, of both signs."""
    with np.errstate(all="ignore"):
        if format in ("float32", "float64"):
            return v
        if format == "tfloat32":
            wide = v.astype(np.float64)
            spacing = np.ldexp(1.0, np.maximum(np.frexp(wide)[1] - 1, -126) - 10)
            return np.where(np.isfinite(v), np.rint(wide / spacing) * spacing, wide).astype(
                np.float32
            )
        if format in ("bfloat16", "float16"):
            return v.astype(ml_dtypes.bfloat16 if format == "bfloat16" else np.float16).astype(
                np.float32
            )
        end = float(LARGEST[format][0])
        clipped = np.clip(v, -end, end)
        rounded = (
            np.rint(clipped) if format == "int8" else clipped.astype(getattr(ml_dtypes, format))
        )
        return np.where(np.isnan(v), np.float32(np.nan), rounded.astype(np.float32))


@cache
def values_of(format: str) -> tuple[float, ...]:
    """Every finite value, ascending; of integers those of -127 … 127."""
    if format == "int8":
        end = int(LARGEST[format][0])
        return tuple(map(float, range(-end, end + 1)))
    dtype = getattr(ml_dtypes, format)
    codes = (
        np.arange(2 ** ml_dtypes.finfo(dtype).bits, dtype=np.uint8).view(dtype).astype(np.float64)
    )
    return tuple(sorted({float(value) for value in codes if math.isfinite(value)}))


def stochastic(v: Floats, format: str, uniform: Floats) -> Floats:
    """Counted in spacings from zero, rounded to float32 once ``uniform`` is added, and the part
    behind the point cut off.
    """
    numbers = np.array(values_of(format))
    clipped = np.clip(v.astype(np.float64), numbers[0], numbers[-1])
    place = np.clip(np.searchsorted(numbers, clipped, side="right") - 1, 0, len(numbers) - 2)
    spacing = numbers[place + 1] - numbers[place]
    with np.errstate(all="ignore"):
        # The sum of two float32 numbers, rounded to float64 and then to float32, is rounded as if
        # once: 53 >= 2 × 24 + 2.
        steps = np.floor(
            (v.astype(np.float64) / spacing + uniform.astype(np.float64)).astype(np.float32)
        )
        rounded = np.clip(steps * spacing, numbers[0], numbers[-1])
    return np.where(np.isnan(v), np.nan, rounded).astype(np.float32)


# ── rotation ──────────────────────────────────────────────────────────────────────────────────────


def rotated(x: Floats) -> Floats:
    """Each 16 columns times their signs, then Sylvester's Hadamard matrix by halves, then a quarter
    of it.
    """
    with np.errstate(all="ignore"):
        parts = []
        for k in range(0, x.shape[1], 16):
            parts.append(sylvester(x[:, k : k + 16] * np.array(SIGNS, np.float32)))
        return np.concatenate(parts, axis=1) * np.float32(0.25)


def sylvester(x: Floats) -> Floats:
    """[[H, H], [H, -H]] times a row, H the matrix of half the size: NumPy's float32 sums are
    rounded once each.
    """
    if x.shape[1] == 1:
        return x
    low, high = (sylvester(half) for half in np.split(x, 2, axis=1))
    return np.concatenate([low + high, low - high], axis=1)
