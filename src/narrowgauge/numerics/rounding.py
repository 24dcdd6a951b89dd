"""Round a tensor to the values of any number format, on the integer bits.

A float32 read as an int32 is sign and magnitude, and magnitudes are ordered like integers. Adding
half of the dropped bits and clearing them rounds to nearest. To send ties to the even neighbour,
add one less where the lowest kept bit is 0. Adding a uniform random integer rounds stochastically,
without bias. Adding nothing rounds toward zero. A carry goes into the exponent. Optimizers drop a
fixed number of bits this way: :func:`round_bits`.

:func:`round_to` supports every format of values (floats, integers) in float64. There each operation
is exact. :func:`round_nearest` and :func:`round_stochastic` are fast variants for casts of matmul
operands. They use floats only, since on a CPU reading bits is slow beside bfloat16 loads. They add
and subtract a large number, so that only the format's bits survive.

Nothing here rounds by ``.to(bfloat16)``, since compilers remove such casts inside fused kernels.
They do not remove, flush or fuse integer operations. So eager and compiled code give the same bits.

Special values, unless a function says otherwise: A zero keeps its sign. A subnormal is rounded like
any other value. An infinity stays one. A finite value that rounds past the largest becomes infinite
(IEEE 754). A NaN becomes the one quiet NaN of its format, without a sign (:func:`canonical_bits`).
"""

import math

import numpy as np
import torch
from torch import Tensor

from narrowgauge.errors import FormatError
from narrowgauge.spec.formats import Format, get_format
from narrowgauge.torch_support.torch_names import is_traced

QUIET_NAN = 0x7FC00000
MAGNITUDE = 0x7FFFFFFF
QUIET_NANS = {torch.float32: QUIET_NAN, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
# The exponent bits of a float32.
EXPONENT = 0x7F800000


def bits_of(x: Tensor) -> Tensor:
    """View a float32 tensor as int32 bits."""
    return x.view(torch.int32)


def float_of(bits: Tensor) -> Tensor:
    """View int32 bits as a float32 tensor."""
    return bits.view(torch.float32)


def canonical_bits(x: Tensor) -> Tensor:
    """Return the int32 bits of a float32 tensor.

    Every NaN becomes the one quiet NaN, positive and without a payload.

    The NaN of an operation is negative or an operand's on x86, positive and all ones on CUDA, which
    would carry into the sign.
    """
    # `isnan` prevents vectorized CPU loops. On CUDA this takes fewer instructions. There `where`
    # would copy the number from the host, and wait.
    return bits_of(x).masked_fill(x.isnan() if x.is_cuda else x != x, QUIET_NAN)


def power_below(x: Tensor) -> Tensor:
    """Return the largest power of two not above each of these positive float32 numbers; 0 for
    subnormals.

    Example:
        >>> power_below(torch.tensor([1.0, 5.0, 0.3]))
        tensor([1.0000, 4.0000, 0.2500])
    """
    return float_of(bits_of(x) & EXPONENT)


def random_bits(key: Tensor, seed: Tensor | int) -> Tensor:
    """Return 32 hashed bits per element of ``key`` (int32, specific to each element) under a well
    mixed ``seed`` (0-d int32, or an int).

    Right shifts are masked, since int32 shifts copy the sign.

    Source: two of the three rounds of ``lowbias32`` of Chris Wellons' hash prospector.
    """
    h = (key ^ seed) * 0x7FEB352D
    h = (h ^ ((h >> 15) & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return h ^ ((h >> 16) & 0xFFFF)


def canonical_nan(x: Tensor) -> Tensor:
    """Replace every NaN by the one quiet NaN. All else stays unchanged, signed zeros included."""
    return float_of(canonical_bits(x))


Addend = Tensor | int | None
"""Bits to add before low bits are dropped: random ones round stochastically, 0 toward zero,
``None`` to nearest, ties to even.
"""


def round_bits(x: Tensor, dropped: int, addend: Addend) -> Tensor:
    """Return the :func:`canonical_bits` of ``x`` with the lowest ``dropped`` bits rounded off to
    zero.

    ``dropped`` is 0 to 22. With 23 no mantissa is left, and a NaN becomes infinite.
    """
    bits = canonical_bits(x)
    if not dropped:
        return bits
    return (bits + addend_of(bits, dropped, addend)) & -(1 << dropped)


def half(dropped: int) -> int:
    """Return half of the step between values that lack ``dropped`` bits."""
    return 1 << dropped >> 1


def addend_of(bits: Tensor, dropped: int, addend: Addend) -> Tensor | int:
    """Return an addend for ``bits``.

    For ``None`` it is just under half a step, and half where the lowest kept bit is 1.
    """
    if addend is not None:
        return addend
    return half(dropped) - 1 + ((bits >> dropped) & 1)


def round_bits_to_even(bits: Tensor, dropped: int) -> Tensor:
    """Round off the ``dropped`` lowest int32 bits, one or more, to nearest, ties to even."""
    return (bits + addend_of(bits, dropped, None)) & -(1 << dropped)


def sqrt(x: Tensor) -> Tensor:
    """Return the correctly rounded square root of float32 or float64 values.

    Eager ``torch.sqrt`` on a CPU is one ulp off for a fifth of all float32 values and 1 % of
    float64 ones. Compiled it is right. A detour through float64 costs a compiled optimizer step a
    fifth of its time. NumPy's float64 root is right.
    """
    if is_traced() or x.device.type != "cpu":
        return x.sqrt()
    if x.dtype is torch.float64:
        with np.errstate(invalid="ignore"):
            return torch.from_numpy(np.sqrt(x.numpy(), out=np.empty(x.shape)))
    return x.double().sqrt().float()


def reciprocal(x: Tensor) -> Tensor:
    """Return the correctly rounded 1 / x.

    PyTorch 2.11 compiles ``Tensor.reciprocal`` for GPUs to an approximation.
    """
    return torch.ones_like(x) / x


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 values to a float format, ties to even.

    Every NaN becomes the quiet NaN, on every device.
    """
    if dtype is torch.float32:
        return canonical_nan(x)
    return x.to(dtype).view(torch.int16).masked_fill(x != x, QUIET_NANS[dtype]).view(dtype)


def at_least_float32(x: Tensor) -> Tensor:
    """Convert to float32, but keep float64."""
    return x if x.dtype is torch.float64 else x.float()


# ── fast, in floats ───────────────────────────────────────────────────────────────────────────────


def round_nearest(v: Tensor, row: Format) -> Tensor:
    """Round float32 values to a format of at most 8 bits, ties to even, and past its end to its end.

    Invariant: equals a saturated ``round_to``, except for the sign of zero. NaN stays NaN even in
    formats without one. Integers end at -max, so both sides have the same number of values.
    """
    if row.kind == "int":
        return torch.round(v.clamp(-row.max, row.max))
    clamped = v.clamp(row.min, row.max)
    # 1.5 × 2^k added and subtracted leaves multiples of the smallest ulp.
    magic = 1.5 * 2.0 ** (23 + row.finest_exponent)
    subnormal = (clamped + magic) - magic
    return torch.where(v.abs() < 2.0**row.min_exponent, subnormal, _shortened(clamped, row))


def _shortened(v: Tensor, row: Format) -> Tensor:
    """Round to the format's significant bits, ties to even, with unlimited exponents.

    Source: Dekker 1971, Veltkamp's splitting. The product must be rounded before it is subtracted.
    A GPU's fused multiply-add does not round it, so there the binade is read from the bits.
    """
    if v.is_cuda:
        magic = binade(v, row) * (1.5 * 2.0 ** (23 - row.mantissa_bits))
        return (v + magic) - magic
    product = v * (2.0 ** (23 - row.mantissa_bits) + 1)
    return product - (product - v)


def binade(v: Tensor, row: Format) -> Tensor:
    """Return the power of two at or below each magnitude, at least the format's smallest normal
    number.
    """
    return power_below(v).clamp_min(2.0**row.min_exponent)


def round_stochastic(v: Tensor, row: Format, u: Tensor) -> Tensor:
    """Round float32 values to one of their two neighbours, with a bias under 2^-16 of an ulp.

    The values are within the format's range. The format has at most 8 bits. ``u`` is uniform in [0,
    1), of 16 bits.
    """
    if row.kind == "int":
        return torch.floor(v + u).clamp(-row.max, row.max)
    power = binade(v, row)
    inverse = reciprocal(power)
    steps = torch.floor(v * (inverse * 2.0**row.mantissa_bits) + u)
    return (steps * (power * 2.0**-row.mantissa_bits)).clamp(row.min, row.max)


# ── any format ────────────────────────────────────────────────────────────────────────────────────


def round_to(x: Tensor, format: str | Format, *, saturate: bool = False) -> Tensor:
    """Round the values of ``x`` to the nearest of a number format, in float32 and without gradient.

    * Ties go to the even mantissa.
    * A value past the largest becomes infinity if the format has one, else NaN if it has that, else
      the end of the range. ``saturate=True`` gives the end of the range in every format.
    * NaN becomes the quiet NaN, or 0 in a format without NaN. A zero keeps its sign.

    Raises:
        FormatError: an unknown format, a scale, or float64.
    Source: IEEE 754-2019, sections 4.3 and 7.4; OCP FP8 v1.0, section 5.2.2.
    Example:
        >>> round_to(torch.tensor([0.1, 460.0, 1000.0]), "float8_e4m3fn")
        tensor([1.0156e-01, 4.4800e+02,        nan])
    """
    row = get_format(format)
    if row.name == "float64" or row.kind == "scale":
        raise FormatError(
            f"Cannot round to {row.name} because the result is float32, with signs and zero.",
            "Take a format that float32 holds.",
        )
    values = x.detach().double()
    magnitude = values.abs()
    negative = values.signbit()
    # A magnitude is a whole number of steps. Steps are powers of two, constant below the smallest
    # normal value.
    exponent = magnitude.view(torch.int64) >> 52
    step = (exponent - 1023 - row.mantissa_bits).clamp(row.finest_exponent, _LARGEST_STEP)
    rounded = (magnitude * _power(-step)).round() * _power(step)
    limit = torch.where(negative, -row.min, row.max)
    outside = limit
    if not saturate and row.nans:
        outside = torch.full_like(limit, math.inf if row.infinities else math.nan)
    rounded = torch.where(rounded > limit, outside, rounded)
    rounded = torch.where(negative & ((rounded > 0) | (row.kind == "float")), -rounded, rounded)
    rounded = rounded.where(~values.isnan(), math.nan if row.nans else 0.0)
    return canonical_nan(rounded.float())


_LARGEST_STEP = 200
"""A larger value overflows in every format. Its power of two is still a float64."""


def _power(exponent: Tensor) -> Tensor:
    return ((exponent + 1023) << 52).view(torch.float64)
