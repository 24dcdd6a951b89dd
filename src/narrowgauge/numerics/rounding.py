"""Rounding a tensor to the values of any number format, on the integer bits.

A float32 read as an int32 is sign and magnitude, and magnitudes are ordered like integers. Adding half of the bits to drop and
clearing them rounds to nearest, ties away from zero; adding a uniform random integer rounds stochastically, without bias; adding
nothing rounds toward zero. A carry runs into the exponent. Optimizers drop a fixed number of bits in this way: :func:`cut`.

:func:`round_to` serves every format, floats, integers and scales, in float64, where each operation is exact.
:func:`round_nearest` and :func:`round_stochastic` are its fast variants for casts of matmul operands: floats only, since reading
bits is slow beside bfloat16 loads on a CPU. They add and subtract a number so large that only the format's bits survive.

Nothing here is rounded by ``.to(bfloat16)``: compilers remove such casts inside fused kernels. They neither remove, flush nor
fuse integer operations, so eager and compiled code give the same bits.

Special values, unless a function says otherwise: a zero keeps its sign; a subnormal is rounded like any other value; an infinity
stays one; a finite value that rounds past the largest becomes infinite (IEEE 754); a NaN becomes the one quiet NaN of its format,
without a sign: x86 makes negative NaNs, CUDA positive ones of other bits, and both would be stored (:func:`canonical_bits`).
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from narrowgauge.errors import FormatError
from narrowgauge.spec.formats import Format, get_format

QUIET_NAN = 0x7FC00000
MAGNITUDE = 0x7FFFFFFF
QUIET_NANS = {torch.float32: QUIET_NAN, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
QUIET_NAN64 = 0x7FF8 << 48
# The exponent bits of a float32.
EXPONENT = 0x7F800000


def bits_of(x: Tensor) -> Tensor:
    """View a float32 tensor as int32 bits."""
    return x.view(torch.int32)


def float_of(bits: Tensor) -> Tensor:
    """View int32 bits as a float32 tensor."""
    return bits.view(torch.float32)


def canonical_bits(x: Tensor) -> Tensor:
    """Return the int32 bits of a float32 tensor with every NaN as the one quiet NaN, positive and without a payload.

    IEEE 754 leaves open which NaN an operation makes: on x86 it is negative or that of an operand, on CUDA positive and all ones.
    Stored values must not depend on that. All ones would also carry into the sign when they are rounded.
    """
    # Compiled loops of a CPU are not vectorized with `isnan`, and on CUDA it takes fewer instructions. `where` would copy the
    # number from the host there, and wait.
    return bits_of(x).masked_fill(x.isnan() if x.is_cuda else x != x, QUIET_NAN)


def canonical_bits64(x: Tensor) -> Tensor:
    """Return :func:`canonical_bits` of a float64 tensor, int64."""
    return x.view(torch.int64).masked_fill(x != x, QUIET_NAN64)


def rounded_to_odd(x: Tensor) -> Tensor:
    """Convert float64 to float32 so that rounding the result to fewer bits gives what rounding ``x`` itself would give.

    A value between two float32 becomes the one whose last bit is odd. That lies between the values and the ties of every format
    with two mantissa bits less. Rounded to nearest, a value just beside such a tie would become the tie.

    Example:
        >>> near_a_tie = torch.tensor([1 + 2**-8 + 2**-40], dtype=torch.float64)
        >>> round_to_bfloat16(-rounded_to_odd(near_a_tie)), round_to_bfloat16(rounded_to_odd(near_a_tie - 2**-39))
        (tensor([-1.0078], dtype=torch.bfloat16), tensor([1.], dtype=torch.bfloat16))

    Source: Boldo and Melquiond 2008, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd".
    """
    near = x.float()
    back = near.double()
    # Toward zero where it was rounded away from it; then odd where anything was lost.
    bits = bits_of(near) - (back.abs() > x.abs()).int()
    return float_of(bits | (back != x).int()).masked_fill(x != x, torch.nan)


def power_below(x: Tensor) -> Tensor:
    """Return the largest power of two not above each of these positive float32 numbers; 0 for subnormals.

    Example:
        >>> power_below(torch.tensor([1.0, 5.0, 0.3]))
        tensor([1.0000, 4.0000, 0.2500])
    """
    return float_of(bits_of(x) & EXPONENT)


def random_bits(key: Tensor, seed: Tensor) -> Tensor:
    """Return 32 hashed bits per element of ``key`` (int32, particular to each element) under ``seed`` (0-d int32).

    A pure function of key and seed, so shards, chunks and flattenings of a tensor get the same bits and there is no
    generator to save. Right shifts are masked, since those of an int32 copy the sign.

    Source:
        Two of the three rounds of ``lowbias32`` of Chris Wellons' hash prospector; the seed is itself well mixed.
    """
    h = (key ^ seed) * 0x7FEB352D
    h = (h ^ ((h >> 15) & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return h ^ ((h >> 16) & 0xFFFF)


def dither(random: Tensor, start: int, count: int, dropped: int) -> Tensor:
    """Return a random addend for :func:`cut`, int32 in ``[0, 2**dropped)``, from ``count`` bits of ``random`` at bit ``start``.

    Fewer random bits than dropped ones would round down on average: the mean of the addend must be half of the dropped
    range. The missing low bits are therefore set to their middle (without that, 12 bits for 20 lose 1 % of a second
    moment, 8 bits 14 %).
    """
    used = min(count, dropped)
    missing = dropped - used
    shift = missing - start
    moved = random << shift if shift > 0 else random >> -shift if shift < 0 else random
    value = moved & (((1 << used) - 1) << missing)
    return value + half(missing) if missing else value


def quiet(x: Tensor) -> Tensor:
    """Replace every NaN by the one quiet NaN; everything else, signed zeros included, is unchanged."""
    return float_of(canonical_bits(x))


def cut(x: Tensor, dropped: int, addend: Tensor | int) -> Tensor:
    """Return the :func:`canonical_bits` of ``x`` with their ``dropped`` lowest ones rounded off to zero.

    Args:
        dropped: 0 to 22; with 23 no mantissa is left, and a NaN becomes infinite.
        addend: :func:`half` rounds to nearest, ties away from zero; a :func:`dither` rounds stochastically.
    """
    bits = canonical_bits(x)
    return (bits + addend) & -(1 << dropped) if dropped else bits


def half(dropped: int) -> int:
    """Return the addend that rounds to nearest when ``dropped`` bits are cut."""
    return 1 << dropped >> 1


def cut_to_even(bits: Tensor, dropped: int) -> Tensor:
    """Round off the ``dropped`` lowest int32 bits, one or more, to nearest, ties to even."""
    return (bits + (half(dropped) - 1 + ((bits >> dropped) & 1))) & -(1 << dropped)


def sqrt(x: Tensor) -> Tensor:
    """Return the correctly rounded square root of float32 or float64 values.

    Eager ``torch.sqrt`` on a CPU is one ulp off for a fifth of all float32 values and 1 % of float64 ones, compiled it is right;
    a detour through float64 is right everywhere, but costs a compiled optimizer step a fifth of its time. NumPy's is right.
    """
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return x.sqrt()
    if x.dtype is torch.float64:
        with np.errstate(invalid="ignore"):
            return torch.from_numpy(np.sqrt(x.numpy(), out=np.empty(x.shape)))
    return x.double().sqrt().float()


def round_to_bfloat16(x: Tensor) -> Tensor:
    """Round float32 or float64 to the nearest bfloat16, ties away from zero (``Tensor.to`` rounds ties to even)."""
    if x.dtype is torch.float64:
        x = rounded_to_odd(x)
    return narrowed(float_of(cut(x.contiguous(), 16, half(16))), torch.bfloat16)


def round_to_float16(x: Tensor) -> Tensor:
    """Round float32 or float64 to the nearest float16, ties away from zero; below 2^-14 within 2^-14 of an ulp."""
    if x.dtype is torch.float64:
        x = rounded_to_odd(x)
    # Scaled by 2^-112 a float32 has float16's own exponents, subnormals included.
    scaled = float_of(cut(x.contiguous() * 2.0**-112, 13, half(13)))
    return narrowed(scaled * 2.0**112, torch.float16)


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert float32 values to a float format that holds them, with every NaN as the quiet one.

    PyTorch's conversion gives a NaN other bits on CUDA than on a CPU, and there others in vector instructions than elsewhere.
    """
    if dtype is torch.float32:
        return quiet(x)
    if dtype is torch.float64:
        return canonical_bits64(x).view(dtype)
    return x.to(dtype).view(torch.int16).masked_fill(x != x, QUIET_NANS[dtype]).view(dtype)


def at_least_float32(x: Tensor) -> Tensor:
    """Convert to float32, and leave float64 as it is."""
    return x if x.dtype is torch.float64 else x.float()


# ── fast, in floats ─────────────────────────────────────────────────────────────────────────────────────────────────────


def round_nearest(v: Tensor, row: Format) -> Tensor:
    """Round float32 values to a format, ties to even; past its end they become its end (from 16 bits up: infinity).

    Invariant: equals ``round_to``, saturated for formats of fewer than 16 bits, except for the sign of zero. NaN stays NaN even
    in formats without one. Integers end at -max, so that there are as many on both sides.
    """
    if row.name in ("float32", "float64"):
        return v
    if row.name in ("bfloat16", "tfloat32"):
        # Not by conversion: a compiler drops one that is undone at once.
        return torch.where(v.isfinite(), float_of(cut_to_even(bits_of(v), 23 - row.mantissa_bits)), v)
    if row.kind == "int":
        return torch.round(v.clamp(-row.max, row.max))
    if row.name == "float16":
        near = _nearest(v.clamp(2 * row.min, 2 * row.max), row)
        return torch.where(near.abs() > row.max, near * torch.inf, near)
    return _nearest(v.clamp(row.min, row.max), row)


def _nearest(v: Tensor, row: Format) -> Tensor:
    """Round to nearest in a format whose largest value does not matter."""
    # 1.5 × 2^k added and subtracted leaves multiples of the smallest ulp.
    magic = 1.5 * 2.0 ** (23 + row.finest_exponent)
    subnormal = (v + magic) - magic
    return torch.where(v.abs() < 2.0**row.min_exponent, subnormal, _shortened(v, row))


def _shortened(v: Tensor, row: Format) -> Tensor:
    """Round to the format's significant bits, ties to even, as if its exponents had no end.

    Source: Dekker 1971, Veltkamp's splitting. It needs a product that is rounded before it is subtracted. A GPU's fused
    multiply-add does not round it, so there the binade is read from the bits.
    """
    if v.is_cuda:
        magic = binade(v, row) * (1.5 * 2.0 ** (23 - row.mantissa_bits))
        return (v + magic) - magic
    product = v * (2.0 ** (23 - row.mantissa_bits) + 1)
    return product - (product - v)


def binade(v: Tensor, row: Format) -> Tensor:
    """Return the power of two at or below each magnitude, at least the format's smallest normal number."""
    return power_below(v).clamp_min(2.0**row.min_exponent)


def round_stochastic(v: Tensor, row: Format, u: Tensor) -> Tensor:
    """Round float32 values to one of their two neighbours, without bias to 2^-16 of an ulp.

    The values lie within the format's range, the format has at most 8 bits, and ``u`` is uniform in [0, 1), of 16 bits.
    """
    if row.kind == "int":
        return torch.floor(v + u).clamp(-row.max, row.max)
    if row.exponent_bits >= 3:
        power = binade(v, row)
        inverse = power.reciprocal()
    else:
        # Few exponents are compared: bits are slow to read beside bfloat16 loads on a CPU.
        magnitude = v.abs()
        power, inverse = torch.full_like(v, 2.0**row.min_exponent), torch.full_like(v, 2.0**-row.min_exponent)
        for exponent in range(row.min_exponent + 1, row.max_exponent + 1):
            power = torch.where(magnitude < 2.0**exponent, power, 2.0**exponent)
            inverse = torch.where(magnitude < 2.0**exponent, inverse, 2.0**-exponent)
    steps = torch.floor(v * (inverse * 2.0**row.mantissa_bits) + u)
    return (steps * (power * 2.0**-row.mantissa_bits)).clamp(row.min, row.max)


# ── any format ────────────────────────────────────────────────────────────────────────────────────────────────────────

Rounding = Literal["nearest", "stochastic", "toward_zero"]


def round_to(
    x: Tensor,
    format: str | Format,
    rounding: Rounding = "nearest",
    *,
    seed: int | Tensor | None = None,
    saturate: bool = False,
    offset: int = 0,
) -> Tensor:
    """Round the values of ``x`` to a number format, in float32.

    Every result is a value of the format, and a value of the format is unchanged. For the rest:

    * ``nearest``: ties go to the even mantissa. Of a scale, which has none, ties go up, as do all values between its two
      smallest powers, as in PyTorch and ml_dtypes.
    * ``toward_zero``: the neighbour nearer to zero; finite values never leave the range.
    * ``stochastic``: one of the two neighbours, each more probable the nearer it is, so that the mean is the value, to
      2^-30 of a step. The random bits are a hash of the seed, the element's logical index and its bits: the same in any memory
      layout, in any chunking (give each chunk its ``offset``), eager and compiled.
    * Overflow, that is, a rounded value past the largest, or an infinity: infinity where the format has one, else NaN
      where it has that (``float8_e4m3fn``, the fnuz formats), else the end of the range (fp6, fp4, integers).
      ``saturate=True`` takes the end of the range in every format, for infinities too.
    * NaN: the quiet NaN; in a format without NaN, 0. A scale that multiplies such codes must carry the NaN.
    * A zero, or a value that rounds to zero, keeps its sign where the format has −0. Subnormals are values like others.
    * Below zero, an unsigned integer overflows to 0. A scale (``float8_e8m0fnu``) has nothing at or below zero: that
      overflows to NaN, or with ``saturate`` to its smallest power; a smaller positive value becomes the smallest power.

    Args:
        x: floating-point tensor of any shape; float64 is rounded once, not through float32.
        format: a format that float32 can hold, or its name.
        rounding: see above.
        seed: for ``stochastic``: an int (taken modulo 2^32) or a 0-d int32 or int64 tensor; a new int recompiles
            compiled code, a new tensor does not.
        saturate: see overflow.
        offset: for ``stochastic``: the logical index of the first element of ``x``, when it is a chunk of a tensor.
    Returns:
        float32 tensor shaped like ``x``, without gradient.
    Raises:
        FormatError: float32 cannot hold the format, ``x`` is not floating-point, or the rounding or seed is missing.
    Cost:
        One pass; about 20 integer operations an element, 40 if stochastic. Eager, each makes a temporary.
    Source:
        IEEE 754-2019, sections 4.3 and 7.4; OCP FP8 v1.0, section 5.2.2; stochastic rounding: Croci et al.,
        Royal Society Open Science 9 (2022) 211631.
    Example:
        >>> round_to(torch.tensor([0.1, 460.0, 1000.0]), "float8_e4m3fn")
        tensor([1.0156e-01, 4.4800e+02,        nan])
    """
    row = get_format(format)
    _check(x, row, rounding, seed)
    values = x.detach().double()
    magnitude, negative, is_nan = values.abs(), values.signbit(), values.isnan()
    # A magnitude is a whole number of steps: powers of two, which stop shrinking at the smallest normal value.
    floor = row.nearest_floor if rounding == "nearest" else row.finest_exponent
    exponent = (magnitude.view(torch.int64) >> 52) - 1023
    step = (exponent - row.mantissa_bits).clamp(floor, _LARGEST_STEP)
    steps = magnitude * _power(-step)
    if rounding == "nearest":
        count = steps.round()
    else:
        count = steps.floor()
        if rounding == "stochastic" and seed is not None:
            count = count + (steps - count >= 1 - _uniform(x, seed, offset))
    rounded = _fit(count * _power(step), magnitude, negative, row, saturate, finite_stays=rounding == "toward_zero")
    rounded = torch.where(is_nan, math.nan if row.nans else 0.0, rounded)
    if row.signed:
        has_sign = negative & ~is_nan & ~rounded.isnan() & ((rounded > 0) | row.negative_zero)
        rounded = torch.where(has_sign, -rounded, rounded)
    return quiet(rounded.float())


_LARGEST_STEP = 200
"""A larger value overflows in every format, and its power of two is still a float64."""


def _power(exponent: Tensor) -> Tensor:
    """Return 2^exponent, float64."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _fit(
    rounded: Tensor, magnitude: Tensor, negative: Tensor, row: Format, saturate: bool, *, finite_stays: bool
) -> Tensor:
    """Replace magnitudes outside the format's range."""
    limit = torch.where(negative, -row.min if row.signed else 0.0, row.max).double()
    outside = limit
    if not saturate and row.nans:
        outside = torch.full_like(rounded, math.inf if row.infinities else math.nan)
        outside = torch.where(magnitude < math.inf, limit, outside) if finite_stays else outside
    rounded = torch.where(rounded > limit, outside, rounded)
    if not row.zero:
        nothing_below = negative | (magnitude == 0)
        rounded = torch.where(nothing_below, row.min if saturate else math.nan, rounded.clamp(min=row.min))
    return rounded


def _uniform(x: Tensor, seed: int | Tensor, offset: int) -> Tensor:
    """Return a uniform number of 31 bits in [0, 1) for each element: a hash of the seed, its index and its bits."""
    if not isinstance(seed, Tensor):
        seed = torch.full((), seed & 0xFFFFFFFF, dtype=torch.int64, device=x.device)
    seed = _low_word(seed.to(x.device, torch.int64))
    index = torch.arange(x.numel(), dtype=torch.int64, device=x.device).view(x.shape) + offset
    place = random_bits(_low_word(index ^ ((index >> 32) * 0x9E3779B1)), seed)
    if x.dtype is torch.float64:
        bits = x.detach().contiguous().view(torch.int64)
        bits = _low_word(bits ^ (bits >> 32))
    else:
        bits = bits_of(x.detach().float())
    return (random_bits(place ^ bits, seed) & MAGNITUDE).double() * 2.0**-31


def _low_word(x: Tensor) -> Tensor:
    # Brought into int32's range first: what a conversion does with values outside differs between compilers.
    return (((x & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)


def _check(x: Tensor, row: Format, rounding: str, seed: int | Tensor | None) -> None:
    if rounding not in get_args(Rounding):
        raise FormatError(f"Cannot round by {rounding!r}.", f"Use one of {', '.join(get_args(Rounding))}.")
    if not x.is_floating_point():
        raise FormatError(f"Cannot round a tensor of {x.dtype}: it is not floating-point.", "Convert it first.")
    single = get_format("float32")
    if row.finest_exponent < single.finest_exponent or row.max > single.max:
        raise FormatError(
            f"Cannot round to {row.name}: the result is float32, which does not hold its values.", "Use x.double()."
        )
    if rounding == "stochastic" and seed is None:
        raise FormatError("Cannot round stochastically without a seed.", "Give seed=, new in each step.")
