"""Cutting float32 values to fewer bits, on their integer bits.

A float32 read as an int32 is sign and magnitude, and magnitudes are ordered like integers: adding half of what will be
dropped and clearing the rest rounds to the nearest, ties away from zero; adding a uniform random integer instead rounds
stochastically, without bias. A carry runs into the exponent by itself. All rounding here is done on the integers, never
by ``.to(bfloat16)``: compilers remove such casts inside fused kernels, and then nothing is rounded at all.

What happens to special values, in every function of this file: a zero keeps its sign; a subnormal is cut like any other
value; an infinity stays one; a finite value that rounds past the largest becomes infinite, as IEEE 754 asks; a NaN
stays a NaN (see :func:`quiet`).
"""

from __future__ import annotations

import torch
from torch import Tensor

QUIET_NAN = 0x7FC00000
MAGNITUDE = 0x7FFFFFFF
# The exponent bits of a float32: what is left of a number when its mantissa is cleared.
_EXPONENT = 0x7F800000


def bits_of(x: Tensor) -> Tensor:
    """The int32 bits of a float32 tensor (a view)."""
    return x.view(torch.int32)


def float_of(bits: Tensor) -> Tensor:
    """The float32 value of int32 bits (a view)."""
    return bits.view(torch.float32)


def power_below(x: Tensor) -> Tensor:
    """The largest power of two not above each of these positive float32 numbers; 0 for subnormals.

    Example:
        >>> power_below(torch.tensor([1.0, 5.0, 0.3]))
        tensor([1.0000, 4.0000, 0.2500])
    """
    return float_of(bits_of(x) & _EXPONENT)


def random_bits(key: Tensor, seed: Tensor) -> Tensor:
    """32 hashed bits per element of ``key``.

    A pure function of key and seed, so shards, chunks and flattenings of a tensor get the same bits and there is no
    generator to save. Right shifts are masked, since those of an int32 copy the sign.

    Args:
        key: int32 tensor, what is particular to each element.
        seed: 0-d int32 tensor, what is particular to this step.
    Returns:
        int32 tensor shaped like ``key``.
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
    """A random addend for :func:`cut`, from ``count`` bits of ``random`` beginning at bit ``start``.

    Fewer random bits than dropped ones would round down on average: the mean of the addend must be half of the dropped
    range. The missing low bits are therefore set to their middle (without that, 12 bits for 20 lose 1 % of a second
    moment, 8 bits 14 %).

    Args:
        random: int32 tensor of hashed bits.
        start, count: which of them to use.
        dropped: how many bits the cut removes.
    Returns:
        int32 tensor in ``[0, 2**dropped)``.
    """
    used = min(count, dropped)
    missing = dropped - used
    left = missing - start
    moved = random << left if left > 0 else random >> -left if left < 0 else random
    value = moved & (((1 << used) - 1) << missing)
    return value + half(missing) if missing else value


def quiet(x: Tensor) -> Tensor:
    """``x`` with every NaN replaced by the one quiet NaN; everything else, signed zeros included, is unchanged.

    The payload of a NaN may be all ones, and would then carry into the sign when it is cut. Values enter a storage
    through here; afterwards no CPU's arithmetic makes such a payload out of quiet NaNs and 16-bit gradients. CUDA's does.
    """
    return torch.where(x.isnan(), float_of(torch.tensor(QUIET_NAN, dtype=torch.int32, device=x.device)), x)


def cut(x: Tensor, dropped: int, addend: Tensor | int) -> Tensor:
    """The bits of ``x`` with their ``dropped`` lowest ones rounded off to zero.

    Args:
        x: float32 tensor; its NaNs are :func:`quiet` ones.
        dropped: number of low bits to round off, 0 to 22; with 23 no mantissa is left, and a NaN becomes infinite.
        addend: :func:`half` rounds to the nearest, ties away from zero; a :func:`dither` rounds stochastically.
    Returns:
        int32 tensor, the bits of a float32 with at most ``23 - dropped`` mantissa bits.
    """
    if x.is_cuda:
        x = quiet(x)  # whose own NaN is all ones
    return (bits_of(x) + addend) & -(1 << dropped) if dropped else bits_of(x)


def half(dropped: int) -> int:
    """The addend that rounds to the nearest when ``dropped`` bits are cut."""
    return 1 << dropped >> 1


def sqrt(x: Tensor) -> Tensor:
    """The correctly rounded float32 square root.

    Eager ``torch.sqrt`` on a CPU is one ulp off for a fifth of all values, compiled it is right; a detour through float64
    is right everywhere, but costs a compiled optimizer step a fifth of its time.
    """
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return x.sqrt()
    return x.double().sqrt().float()


def round_to_bfloat16(x: Tensor) -> Tensor:
    """The nearest bfloat16 of each value, ties away from zero (``Tensor.to`` rounds ties to even).

    Args:
        x: float32 tensor.
    Returns:
        bfloat16 tensor of the same shape.
    """
    return float_of(cut(quiet(x.contiguous()), 16, half(16))).to(torch.bfloat16)


def round_to_float16(x: Tensor) -> Tensor:
    """The nearest float16 of each value, ties away from zero; below 2^-14 within 2^-14 of a spacing.

    Args:
        x: float32 tensor.
    Returns:
        float16 tensor of the same shape.
    """
    # Scaled by 2^-112 a float32 has float16's own exponents, subnormals included.
    scaled = float_of(cut(quiet(x.contiguous()) * 2.0**-112, 13, half(13)))
    return (scaled * 2.0**112).to(torch.float16)
