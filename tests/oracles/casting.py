"""Casts by definition: each group of values by itself, each operation rounded to float32 once.

Slow and plain on purpose. A scale is worked out in NumPy's float32, one operation after another. Elements
are rounded to the nearest by ml_dtypes and NumPy, and stochastically by looking for the two neighbours in
the list of all values. Powers of two come from exponents; no bits are handled.

The matrix is ``[rows, contraction]``; the other dimension is this one transposed.
"""

import math
from functools import cache
from typing import Any, NamedTuple

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
SMALLEST_MAGNITUDE = np.float32(2.0**-100)
ONE = np.float32(1)
NAN = np.float32(math.nan)
SIGNS = [1 if 0x9E37 // 2**place % 2 else -1 for place in range(16)]


class Result(NamedTuple):
    """Codes and, of the same shape, the scale of each value's block and of its tensor, row or
    column (1 without one).
    """

    codes: Floats
    inner: Floats
    outer: Floats


def quantize(
    x: Floats,
    *,
    format: str,
    granularity: str,
    scale: str = "float32",
    rounding: str = "nearest",
    scale_rounding: str = "up",
    rotation: str = "none",
    uniform: Any = None,
    **_: object,
) -> Result:
    """A matrix cast as the table's words say; groups at the edge may be smaller than a block.

    Args:
        x: ``[rows, contraction]``.
        uniform: for stochastic rounding, a number in [0, 1) for each place.
    """
    with np.errstate(all="ignore"):
        values = rotated(x) if rotation == "hadamard" else x
        result = Result(np.empty_like(values), np.ones_like(values), np.ones_like(values))
        has_two_levels = scale == "float8_e4m3fn"
        if has_two_levels:
            result.outer[:] = whole_scale(np.abs(values).max(), LARGEST[format][0] * 448)
        for group in groups(*values.shape, granularity):
            part = values[group]
            magnitude = np.abs(part).max()
            if has_two_levels:
                outer = result.outer[0, 0]
                inner = e4m3_scale(magnitude, outer, format, up=rounding == "stochastic")
                result.inner[group] = inner
                part = part * (ONE / (inner * outer))
            elif granularity == "none":
                if format in LARGEST:  # a code would hide infinities
                    part = np.where(np.isfinite(part), part, NAN)
            else:
                whole = one_level(magnitude, format, scale, up=scale_rounding == "up")
                scales = result.inner if "x" in granularity else result.outer
                scales[group] = whole
                part = part * (ONE / whole)
            if rounding == "nearest":
                result.codes[group] = nearest(part, format)
            else:
                result.codes[group] = stochastic(part, format, uniform[group])
        return result


def groups(rows: int, columns: int, granularity: str):
    """The places of each group of values that share a scale."""
    sides = {"row": (1, columns), "column": (rows, 1)}
    high, wide = sides.get(granularity, (rows, columns))
    if "x" in granularity:
        high, wide = map(int, granularity.split("x"))
    for row in range(0, rows, high):
        for column in range(0, columns, wide):
            yield slice(row, row + high), slice(column, column + wide)


# ── scales ────────────────────────────────────────────────────────────────────────────────────────


def whole_scale(magnitude: np.float32, end: int) -> np.float32:
    """float32(magnitude × float32(1/end)), of at least 2^-100; NaN of infinity and NaN."""
    if not np.isfinite(magnitude):
        return NAN
    return max(magnitude, SMALLEST_MAGNITUDE) * (ONE / np.float32(end))


def one_level(magnitude: np.float32, format: str, scale: str, *, up: bool) -> np.float32:
    """The scale of a group without a second level.

    As a power of two, OCP: 2^(exponent of the magnitude - exponent of the largest value); or the
    smallest at which nothing saturates.
    """
    end, exponent = LARGEST[format]
    if scale == "float32" or not np.isfinite(magnitude):
        return whole_scale(magnitude, end)
    at_least = float(max(magnitude, SMALLEST_MAGNITUDE))
    power = 2.0 ** (math.frexp(at_least)[1] - 1 - exponent)
    return np.float32(power * 2 if up and at_least > end * power else power)


def e4m3_scale(
    magnitude: np.float32, tensor_scale: np.float32, format: str, *, up: bool
) -> np.float32:
    """magnitude / format's largest / tensor_scale, as an e4m3 number above zero: the nearest, or the
    least not below it.
    """
    ratio = magnitude * (ONE / np.float32(LARGEST[format][0])) * (ONE / tensor_scale)
    if np.isnan(ratio):
        return NAN
    numbers = values_of("float8_e4m3fn")
    numbers = numbers[numbers > 0]
    if up:
        return np.float32(next((value for value in numbers if value >= ratio), numbers[-1]))
    return np.float32(max(nearest(np.array([ratio]), "float8_e4m3fn")[0], numbers[0]))


# ── elements ──────────────────────────────────────────────────────────────────────────────────────


def nearest(v: Floats, format: str) -> Floats:
    """Ties to even; narrow formats end at their largest value, of both signs."""
    if format in ("float32", "float64"):
        return v
    if format == "tfloat32":
        wide = v.astype(np.float64)
        spacing = np.ldexp(1.0, np.maximum(np.frexp(wide)[1] - 1, -126) - 10)
        return np.where(np.isfinite(v), np.rint(wide / spacing) * spacing, wide).astype(np.float32)
    rounded = v
    if format in LARGEST:
        end = float(LARGEST[format][0])
        rounded = np.clip(v, -end, end)
    if format == "int8":
        rounded = np.rint(rounded)
    else:
        rounded = rounded.astype(getattr(ml_dtypes, format, np.float16)).astype(np.float32)
    return np.where(np.isnan(v), NAN, rounded)


@cache
def values_of(format: str) -> NDArray[np.float64]:
    """Every finite value, ascending; of integers those of -127 … 127."""
    if format == "int8":
        return np.arange(-127.0, 128.0)
    dtype = getattr(ml_dtypes, format)
    codes = np.arange(2 ** ml_dtypes.finfo(dtype).bits, dtype=np.uint8).view(dtype)
    values = codes.astype(np.float64)
    return np.unique(values[np.isfinite(values)])


def stochastic(v: Floats, format: str, uniform: Floats) -> Floats:
    """Counted in spacings from zero, rounded to float32 once ``uniform`` is added, and the part
    behind the point cut off.
    """
    numbers = values_of(format)
    clipped = np.clip(v.astype(np.float64), numbers[0], numbers[-1])
    place = np.clip(np.searchsorted(numbers, clipped, side="right") - 1, 0, len(numbers) - 2)
    spacing = numbers[place + 1] - numbers[place]
    # The sum of two float32 numbers, rounded to float64 and then to float32, is rounded as if
    # once: 53 >= 2 × 24 + 2.
    total = v.astype(np.float64) / spacing + uniform.astype(np.float64)
    rounded = np.clip(np.floor(total.astype(np.float32)) * spacing, numbers[0], numbers[-1])
    return np.where(np.isnan(v), np.nan, rounded).astype(np.float32)


# ── rotation ──────────────────────────────────────────────────────────────────────────────────────


def rotated(x: Floats) -> Floats:
    """Each 16 columns times their signs, then Sylvester's Hadamard matrix by halves, then a quarter
    of it.
    """
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
