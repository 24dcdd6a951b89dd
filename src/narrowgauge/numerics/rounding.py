"""Rounding a tensor to the values of any number format, on the integer bits.

A float32 read as an int32 is sign and magnitude, and magnitudes are ordered like integers: adding half of what will be
dropped and clearing the rest rounds to the nearest, ties away from zero; adding a uniform random integer instead rounds
stochastically, without bias; adding nothing rounds toward zero. A carry runs into the exponent by itself. Optimizers drop a
fixed number of bits in this way: :func:`round_to_bfloat16`, :func:`round_to_float16`.

:func:`round_to` serves every format, floats, integers and scales, with the same few operations. A float is a whole number of
steps: its 24 significant bits times a power of two. A narrower format has longer steps, so rounding drops low bits of that
whole number. The format gives how many: the difference of the mantissas, and more below the smallest normal value, where the
steps stop shrinking.

Nothing here is rounded by ``.to(bfloat16)``: compilers remove such casts inside fused kernels, and then nothing is rounded at
all. Integer operations are not removed, flushed or fused, so eager and compiled code give the same bits.

Special values, unless a function says otherwise: a zero keeps its sign; a subnormal is cut like any other value; an infinity
stays one; a finite value that rounds past the largest becomes infinite, as IEEE 754 asks; a NaN becomes the one quiet NaN of
its format. It has no sign: x86 makes negative NaNs, CUDA positive ones of other bits, and both would be stored (see
:func:`canonical_bits`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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
# The exponent bits of a float32: what is left of a number when its mantissa is cleared.
EXPONENT = 0x7F800000


def bits_of(x: Tensor) -> Tensor:
    """The int32 bits of a float32 tensor (a view)."""
    return x.view(torch.int32)


def float_of(bits: Tensor) -> Tensor:
    """The float32 value of int32 bits (a view)."""
    return bits.view(torch.float32)


def canonical_bits(x: Tensor) -> Tensor:
    """The int32 bits of a float32 tensor, in which every NaN is the one quiet NaN, positive and without a payload.

    IEEE 754 leaves open which NaN an operation makes: on x86 it is negative or that of an operand, on CUDA positive and all ones.
    What is kept of a value must not depend on that. All ones would also carry into the sign when they are cut.
    """
    # Compiled loops of a CPU are not vectorized with `isnan`, and on CUDA it takes fewer instructions. `where` would copy the
    # number from the host there, and wait.
    return bits_of(x).masked_fill(x.isnan() if x.is_cuda else x != x, QUIET_NAN)


def canonical_bits64(x: Tensor) -> Tensor:
    """:func:`canonical_bits` of a float64 tensor, int64."""
    return x.view(torch.int64).masked_fill(x != x, QUIET_NAN64)


def rounded_to_odd(x: Tensor) -> Tensor:
    """Float64 values in float32, so that rounding these to fewer bits gives what rounding ``x`` itself would give.

    A value between two float32 becomes the one whose last bit is odd, which lies between the values and the ties of every format
    that has two mantissa bits less. Rounded to the nearest, a value just beside such a tie would become the tie.

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
    """The largest power of two not above each of these positive float32 numbers; 0 for subnormals.

    Example:
        >>> power_below(torch.tensor([1.0, 5.0, 0.3]))
        tensor([1.0000, 4.0000, 0.2500])
    """
    return float_of(bits_of(x) & EXPONENT)


def random_bits(key: Tensor, seed: Tensor) -> Tensor:
    """32 hashed bits per element of ``key`` (int32, particular to each element) under ``seed`` (0-d int32, particular to a step).

    A pure function of key and seed, so shards, chunks and flattenings of a tensor get the same bits and there is no
    generator to save. Right shifts are masked, since those of an int32 copy the sign.

    Source:
        Two of the three rounds of ``lowbias32`` of Chris Wellons' hash prospector; the seed is itself well mixed.
    """
    h = (key ^ seed) * 0x7FEB352D
    h = (h ^ ((h >> 15) & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return h ^ ((h >> 16) & 0xFFFF)


def step_seed(seed: int, step: int) -> int:
    """32 well mixed bits of (seed, step), as a signed number: the first word of splitmix64's stream."""
    z = (seed * 0xD1342543DE82EF95 + step * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    word = (z ^ (z >> 31)) & 0xFFFFFFFF
    return word - 2**32 if word >= 2**31 else word


def dither(random: Tensor, start: int, count: int, dropped: int) -> Tensor:
    """A random addend for :func:`cut`, int32 in ``[0, 2**dropped)``, from ``count`` bits of ``random`` at bit ``start``.

    Fewer random bits than dropped ones would round down on average: the mean of the addend must be half of the dropped
    range. The missing low bits are therefore set to their middle (without that, 12 bits for 20 lose 1 % of a second
    moment, 8 bits 14 %).
    """
    used = min(count, dropped)
    missing = dropped - used
    left = missing - start
    moved = random << left if left > 0 else random >> -left if left < 0 else random
    value = moved & (((1 << used) - 1) << missing)
    return value + half(missing) if missing else value


def quiet(x: Tensor) -> Tensor:
    """``x`` with every NaN replaced by the one quiet NaN; everything else, signed zeros included, is unchanged."""
    return float_of(canonical_bits(x))


def cut(x: Tensor, dropped: int, addend: Tensor | int) -> Tensor:
    """The :func:`canonical_bits` of ``x`` with their ``dropped`` lowest ones rounded off to zero.

    Args:
        dropped: 0 to 22; with 23 no mantissa is left, and a NaN becomes infinite.
        addend: :func:`half` rounds to the nearest, ties away from zero; a :func:`dither` rounds stochastically.
    """
    bits = canonical_bits(x)
    return (bits + addend) & -(1 << dropped) if dropped else bits


def half(dropped: int) -> int:
    """The addend that rounds to the nearest when ``dropped`` bits are cut."""
    return 1 << dropped >> 1


def sqrt(x: Tensor) -> Tensor:
    """The correctly rounded square root of float32 or float64 values.

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
    """The nearest bfloat16 of each float32 or float64, ties away from zero (``Tensor.to`` rounds ties to even)."""
    if x.dtype is torch.float64:
        x = rounded_to_odd(x)
    return narrowed(float_of(cut(x.contiguous(), 16, half(16))), torch.bfloat16)


def round_to_float16(x: Tensor) -> Tensor:
    """The nearest float16 of each float32 or float64, ties away from zero; below 2^-14 within 2^-14 of a spacing."""
    if x.dtype is torch.float64:
        x = rounded_to_odd(x)
    # Scaled by 2^-112 a float32 has float16's own exponents, subnormals included.
    scaled = float_of(cut(x.contiguous() * 2.0**-112, 13, half(13)))
    return narrowed(scaled * 2.0**112, torch.float16)


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 values that a float format holds, in that format, and every NaN as its quiet one.

    PyTorch's conversion gives a NaN other bits on CUDA than on a CPU, and there others in vector instructions than elsewhere.
    """
    if dtype is torch.float32:
        return quiet(x)
    if dtype is torch.float64:
        return canonical_bits64(x).view(dtype)
    return x.to(dtype).view(torch.int16).masked_fill(x != x, QUIET_NANS[dtype]).view(dtype)


Rounding = Literal["nearest", "stochastic", "toward_zero"]


@dataclass(frozen=True)
class _Carrier:
    """The IEEE type whose bits are worked on: at least as wide as the input, so nothing is rounded twice."""

    format: Format
    floating: torch.dtype
    integer: torch.dtype
    # The most bits ever dropped: more than a significand has, and yet a sum with such a step fits the integer.
    most_dropped: int

    @property
    def mantissa_bits(self) -> int:
        return self.format.mantissa_bits

    @property
    def infinity(self) -> int:
        return self.format.encode(math.inf)

    @property
    def quiet_nan(self) -> int:
        return self.format.encode(math.nan)

    @property
    def sign_bit(self) -> int:
        """The top bit alone, as a signed integer of this type."""
        return -(1 << (self.format.bits - 1))

    def bits(self, value: float) -> int:
        """The bits of a nonnegative value that this type holds exactly."""
        return self.format.encode(value)


_SINGLE = _Carrier(get_format("float32"), torch.float32, torch.int32, most_dropped=30)
_DOUBLE = _Carrier(get_format("float64"), torch.float64, torch.int64, most_dropped=61)


def at_least_float32(x: Tensor) -> Tensor:
    """The same values in float32, or in float64 where they are.

    Example:
        >>> [at_least_float32(torch.ones(1, dtype=d)).dtype for d in (torch.bfloat16, torch.float64)]
        [torch.float32, torch.float64]
    """
    return x if x.dtype is torch.float64 else x.float()


def round_to(
    x: Tensor,
    format: str | Format,
    rounding: Rounding = "nearest",
    *,
    seed: int | Tensor | None = None,
    saturate: bool = False,
    offset: int = 0,
) -> Tensor:
    """The values of ``x`` rounded to a number format, in float32.

    Every result is a value of the format, and a value of the format is left as it is. What happens to the rest:

    * ``nearest``: ties go to the even mantissa (for a scale, which has none, up, and so does all that lies between its
      two smallest powers, as in PyTorch and ml_dtypes).
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
        seed: for ``stochastic``: an int (taken modulo 2^32) or a 0-d int32 or int64 tensor; compiled code is compiled
            again for a new int, and not for a new tensor.
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
    carrier = _DOUBLE if x.dtype == torch.float64 else _SINGLE
    bits = x.detach().to(carrier.floating).view(carrier.integer)
    magnitude = bits & ~carrier.sign_bit
    floor = row.nearest_floor if rounding == "nearest" else row.finest_exponent
    dropped, significand = _steps(magnitude, row.mantissa_bits, floor, carrier)
    if rounding == "nearest":
        # One less than half a step, and one more where the count of steps is odd: so a tie ends on the even one.
        mask = (1 << dropped) - 1
        addend = (mask >> 1) + ((significand >> dropped) & mask & 1)
    elif seed is not None and rounding == "stochastic":
        addend = _random_addend(bits, dropped, seed, offset)
    else:
        addend = torch.zeros_like(magnitude)
    rounded = _drop(magnitude, significand, dropped, addend, floor, carrier)
    finite_stays = rounding == "toward_zero"
    rounded = _fit(rounded, magnitude, bits < 0, row, carrier, saturate=saturate, finite_stays=finite_stays)
    return _with_sign(rounded, magnitude, bits < 0, row, carrier).view(carrier.floating).float()


def _check(x: Tensor, row: Format, rounding: str, seed: int | Tensor | None) -> None:
    known = ", ".join(get_args(Rounding))
    if rounding not in get_args(Rounding):
        raise FormatError(f"rounding {rounding!r} was requested of round_to.", f"Use one of {known}.")
    if not x.is_floating_point():
        raise FormatError(
            f"round_to was given a tensor of {x.dtype}, which is not floating-point.", "Convert it first."
        )
    if row.finest_exponent < _SINGLE.format.finest_exponent or row.max > _SINGLE.format.max:
        raise FormatError(
            f"round_to was requested for {row.name}; its result is float32, which cannot hold those values.",
            "Use x.double().",
        )
    if rounding == "stochastic" and seed is None:
        raise FormatError(
            "stochastic rounding was requested of round_to without a seed.", "Give seed=, new in each step."
        )


def _steps(magnitude: Tensor, mantissa_bits: int, floor: int, carrier: _Carrier) -> tuple[Tensor, Tensor]:
    """How many low bits of each significand the format lacks, and the significand as a whole number."""
    bias, width = carrier.format.bias, carrier.mantissa_bits
    field = magnitude >> width
    normal = (field > 0).to(carrier.integer)
    significand = (magnitude & ((1 << width) - 1)) | (normal << width)
    # The significand counts units of 2^(max(field, 1) - bias - width); the format's neighbours are 2^step apart.
    step = (field - (bias + mantissa_bits)).clamp(min=floor)
    dropped = step - (field + (1 - normal)) + (bias + width)
    # Past this many, a value is so far below one step that only its size matters, so the rest may be shifted out.
    excess = (dropped - carrier.most_dropped).clamp(min=0, max=width + 1)
    return dropped.clamp(min=0, max=carrier.most_dropped), significand >> excess


def _random_addend(bits: Tensor, dropped: Tensor, seed: int | Tensor, offset: int) -> Tensor:
    """A uniform integer in [0, 2^dropped), of which 31 bits are random: the upper ones, where more are dropped."""
    if not isinstance(seed, Tensor):
        seed = torch.full((), seed & 0xFFFFFFFF, dtype=torch.int64, device=bits.device)
    seed = _low_word(seed.to(bits.device, torch.int64))
    index = torch.arange(bits.numel(), dtype=torch.int64, device=bits.device).view(bits.shape) + offset
    place = random_bits(_low_word(index ^ ((index >> 32) * 0x9E3779B1)), seed)
    own = _low_word(bits ^ (bits >> 32)) if bits.dtype == torch.int64 else bits
    word = (random_bits(place ^ own, seed) & MAGNITUDE).to(bits.dtype)
    return (word << (dropped - 31).clamp(min=0)) >> (31 - dropped).clamp(min=0)


def _low_word(x: Tensor) -> Tensor:
    # Brought into int32's range first: what a conversion does with values outside differs between compilers.
    return (((x & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)


def _drop(
    magnitude: Tensor, significand: Tensor, dropped: Tensor, addend: Tensor, floor: int, carrier: _Carrier
) -> Tensor:
    """The magnitude's bits after adding and dropping, still unbounded above."""
    mantissa = (1 << carrier.mantissa_bits) - 1
    # In the packed bits a carry runs into the exponent by itself. The bounds only keep NaNs and the lanes not taken
    # from overflowing, which compiled C++ leaves undefined.
    packed = (magnitude.clamp(max=carrier.infinity) + (addend & mantissa)) & (-1 << dropped)
    # Where even the leading bit is dropped, what is left is one smallest step or nothing.
    one_step = carrier.bits(math.ldexp(1.0, floor))
    below = ((significand + addend) >> dropped) * one_step
    return torch.where(dropped > carrier.mantissa_bits, below, packed)


def _fit(
    rounded: Tensor,
    magnitude: Tensor,
    negative: Tensor,
    row: Format,
    carrier: _Carrier,
    *,
    saturate: bool,
    finite_stays: bool,
) -> Tensor:
    """What overflow and NaN become."""
    largest = carrier.bits(row.max)
    least = carrier.bits(-row.min) if row.signed else 0
    limit = torch.where(negative, least, largest).to(carrier.integer)
    outside = rounded > limit
    beyond = carrier.infinity if row.infinities else carrier.quiet_nan
    if saturate or not row.nans:
        rounded = torch.where(outside, limit, rounded)
    elif finite_stays:
        rounded = torch.where(outside, torch.where(magnitude < carrier.infinity, limit, beyond), rounded)
    else:
        rounded = torch.where(outside, beyond, rounded)
    if not row.zero:
        smallest = carrier.bits(row.min)
        nothing_there = negative | (magnitude == 0)
        rounded = torch.where(nothing_there, smallest if saturate else carrier.quiet_nan, rounded.clamp(min=smallest))
    return torch.where(magnitude > carrier.infinity, carrier.quiet_nan if row.nans else 0, rounded)


def _with_sign(rounded: Tensor, magnitude: Tensor, negative: Tensor, row: Format, carrier: _Carrier) -> Tensor:
    if not row.signed:
        return rounded
    keeps = negative & (magnitude <= carrier.infinity) & (rounded <= carrier.infinity)
    if not row.negative_zero:
        keeps = keeps & (rounded > 0)
    return torch.where(keeps, rounded | carrier.sign_bit, rounded)
