"""Quantization: convert a matrix to codes of a low-precision format and their scales.

Values with one scale form a *group*: a tensor, a row, a column, a block. The scale maps the group's
largest magnitude to the end of the format. Each value divided by the scale is rounded, and value ≈
code × scale. This code is the definition and, compiled, the kernel. Each operation is exact or
correctly rounded, so eager and compiled, CPU and GPU give the same bits. A code is computed as the
float32 of its value.

A group with a NaN or an infinity gets the scale NaN: all of it becomes NaN. Magnitudes below 2^-100
count as 2^-100 for a scale. Zeros may lose their sign.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.numerics.rounding import (
    EXPONENT,
    binade,
    bits_of,
    float_of,
    random_bits,
    reciprocal,
    round_nearest,
    round_stochastic,
)
from narrowgauge.spec.computes import ROTATION_SIZE, Cast
from narrowgauge.spec.formats import Format, get_format

TINY = 2.0**-100
_E4M3 = get_format("float8_e4m3fn")
_COLUMNS = 0x2545F491


def quantize_whole(
    x: Tensor,
    cast: Cast,
    dim: int,
    words: tuple[Tensor, Tensor] | None,
    fold: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Quantize a rotated matrix with a scale for all of it, or for each row or column.

    Args:
        dim: the dimension that the matmul contracts. ``row`` means one scale for all of it.
        words: for stochastic rounding, from :func:`random_words`.
        fold: multiplied into ``x`` first.
    Returns:
        Codes and, if there is one, the scale to apply after the matmul: ``[rows, 1]``, ``[1,
        columns]`` or ``[1, 1]``.
    """
    values = x.float()
    if fold is not None:
        values = values * fold
    if cast.granularity == "none":
        values = values.where(values.isfinite(), torch.nan)  # a code would hide infinities
        return _codes(values, None, cast, words), None
    along = {"tensor": (0, 1), "row": (dim,), "column": (1 - dim,)}[cast.granularity]
    outer = _one_level_scale(values.abs().amax(along, keepdim=True), cast)
    return _codes(values, reciprocal(outer), cast, words), outer


def quantize_blocks(
    blocks: Tensor, cast: Cast, words: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Quantize a rotated matrix ``[row blocks, rows, column blocks, columns]``, see
    :func:`blocked`.

    Return codes shaped like ``blocks``, inner scales ``[row blocks, 1, column blocks, 1]``, the
    multiplier of the values, and the outer scale or ``None``. A compiler computes returned scales
    once, not at each value: four times faster.
    """
    values = blocks.float()
    inverse, inner, outer = _block_scales(values, cast)
    return _codes(values, inverse, cast, words), inner, inverse, outer


def sides_of(cast: Cast, dim: int) -> tuple[int, int]:
    """Return rows and columns of a block of a matrix contracted along ``dim``."""
    sides = cast.block or (1, 1)
    if dim == 1:
        return sides
    return sides[::-1]


def _block_scales(blocks: Tensor, cast: Cast) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the multiplier of ``[row blocks, rows, column blocks, columns]``, and the scales of
    both levels.
    """
    largest = blocks.abs().amax((1, 3), keepdim=True)
    if cast.scale != "float8_e4m3fn":
        inner = _one_level_scale(largest, cast)
        return reciprocal(inner), inner, None
    peak = largest.amax((0, 2), keepdim=True)
    outer = _or_nan(peak.clamp_min(TINY) * (1 / (_E4M3.max * cast.element.max)), peak)
    ratio = largest * (1 / cast.element.max) * reciprocal(outer)
    inner = _e4m3_scale(ratio, up=cast.needs_bits)
    return reciprocal(inner * outer), inner, outer.view(1, 1)


def _one_level_scale(largest: Tensor, cast: Cast) -> Tensor:
    """Return the scale of groups whose largest magnitudes are ``largest``."""
    if cast.scale == "float32":
        return _or_nan(largest.clamp_min(TINY) * (1 / cast.element.max), largest)
    return power_of_two_scale(largest, cast.element, up=cast.scale_rounding == "up")


def _codes(
    values: Tensor, inverse: Tensor | None, cast: Cast, words: tuple[Tensor, Tensor] | None
) -> Tensor:
    if inverse is not None:
        values = values * inverse
    if cast.rounding == "nearest":
        return round_nearest(values, cast.element)
    assert words is not None
    return round_stochastic(values, cast.element, uniform(words))


def random_words(rows: int, columns: int, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return random words for rows and columns, see :func:`uniform`: float32 in [0, 1), ``[rows,
    1]`` and ``[1, columns]``.

    They depend only on the logical indices and on ``key``: 0-d int32, specific to the seed, the
    layer, the operand and its content, and well mixed. Keys that differ only in low bits give the same
    words in another order.
    """
    sides = [rows, columns]
    index = [torch.arange(side, dtype=torch.int32, device=key.device) for side in sides]
    seeds = [key.expand(rows), random_bits(key, _COLUMNS).expand(columns)]
    words = (random_bits(torch.cat(index), torch.cat(seeds)) >> 16) & 0xFFFF
    by_row, by_column = (words.float() * 2.0**-16).split(sides)
    return by_row[:, None], by_column[None, :] + 2.0**-17


def uniform(words: tuple[Tensor, Tensor]) -> Tensor:
    """Return a uniform number in [0, 1) for each element: the sum of its row's and its column's
    word, modulo 1.

    It is one of the 65,536 middles of equal parts. Each plus a whole number up to 127 is exact in
    float32, so values of the format never move. Numbers of any two elements are independent, so a
    dot product's rounding error has the variance of independent roundings. (Four at the corners of
    a rectangle are not. A hash per element costs three times the cast.)
    """
    total = words[0] + words[1]
    return total - total.floor()


def power_of_two_scale(amax: Tensor, row: Format, *, up: bool) -> Tensor:
    """Return the scale of a group: with ``up`` the smallest power of two at which nothing
    saturates, else the OCP rule.

    The OCP rule is the exponent of ``amax`` minus that of the largest value of format ``row``.
    """
    mantissa = int(math.frexp(row.max)[0] * (1 << 24)) - (1 << 23)
    bits = bits_of(amax.clamp_min(TINY))
    if up:
        bits = bits + (0x7FFFFF - mantissa)
    return _or_nan(float_of((bits & EXPONENT) - (row.max_exponent << 23)), amax)


def _e4m3_scale(ratio: Tensor, *, up: bool) -> Tensor:
    """Return the e4m3 number nearest to ``ratio``, or with ``up`` the smallest not below it.

    It is never zero.
    """
    smallest = 2.0**_E4M3.finest_exponent
    scale = round_nearest(ratio, _E4M3)
    if up:
        spacing = binade(ratio, _E4M3) * 2.0**-_E4M3.mantissa_bits
        scale = torch.where(scale < ratio, scale + spacing, scale).clamp_max(_E4M3.max)
    return scale.clamp_min(smallest)


def _or_nan(scale: Tensor, amax: Tensor) -> Tensor:
    return scale + (amax - amax)  # 0, or NaN of infinity and NaN


def rotate(x: Tensor, dim: int) -> Tensor:
    """Mix each 16 consecutive elements along ``dim`` by a Hadamard matrix: ``H(signs · x) / 4``,
    orthogonal.

    The 16 signs never change. The product of two rotated operands is unchanged. Pad the dimension
    to a multiple of 16.

    Source: NVIDIA 2025 (2509.25149), section 4.2; Ashkboos et al. 2024 (2404.00456).
    """
    blocks = x.float().unflatten(dim, (-1, ROTATION_SIZE))
    # Negate, do not multiply by -1. A compiler turns listed numbers into arguments: 16 float64
    # scalars in each GPU launch.
    places = list(blocks.unbind(dim + 1))
    for place, sign in enumerate(_SIGNS):
        if sign < 0:
            places[place] = -places[place]
    # Sixteen tensors, not one of sixteen rows. Compiled, each is loaded once, and 64 additions make
    # all results.
    for size in (2, 4, 8, 16):
        half = size // 2
        for start in range(0, ROTATION_SIZE, size):
            for place in range(start, start + half):
                low = places[place]
                high = places[place + half]
                places[place] = low + high
                places[place + half] = low - high
    return torch.stack([place * 0.25 for place in places], dim + 1).flatten(dim, dim + 1)


# By the bits of 0x9E37 (golden ratio).
_SIGNS = [2.0 * (0x9E37 >> place & 1) - 1.0 for place in range(ROTATION_SIZE)]


def padded(x: Tensor, cast: Cast, dim: int) -> Tensor:
    """Pad ``x`` with zeros to whole blocks, and to whole rotations."""
    sides = list(sides_of(cast, dim))
    if cast.rotation != "none":
        sides[dim] = math.lcm(sides[dim], ROTATION_SIZE)
    extra = [-size % side for size, side in zip(x.shape, sides, strict=True)]
    # A compiler's symbol is padded without a question: an answer would make it a constant.
    is_symbolic = any(isinstance(number, torch.SymInt) for number in extra)
    if not is_symbolic and not any(extra):
        return x
    return F.pad(x, (0, extra[1], 0, extra[0]))


def blocked(x: Tensor, sides: tuple[int, int]) -> Tensor:
    """View a matrix as ``[row blocks, rows, column blocks, columns]``."""
    return x.view(x.shape[0] // sides[0], sides[0], x.shape[1] // sides[1], sides[1])
