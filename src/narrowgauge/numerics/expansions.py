"""Numbers as exact sums of low-precision parts: multi-component floats.

Two bfloat16 hold 17 bits together if the second is the rounding error of the first. The rounding
error of a sum or a product is a number of the format. :func:`two_sum` and :func:`two_prod` compute
these errors exactly. Everything else is built from these two. An *expansion* is a tuple of parts,
largest first. Each part is at most half an ulp of the one before it. The expansion is their exact
sum.

A part is a float32 tensor with values of a format of precision p. An operation is the float32
operation, then one rounding to the format, as PyTorch's eager operations on 16-bit tensors do.
Rounding to 24 bits and then to p equals rounding once for sums, products, quotients and square
roots of p-bit numbers, since 24 >= 2p + 2 (p <= 11).

Errors are relative, with u = 2^-p. They hold if nothing overflows and no part underflows. The
sources prove the errors of pairs. We measured the errors of triples and of square roots.

Source: Dekker 1971; Knuth, TAOCP 2; Figueroa 1995 (rounding twice); Shewchuk 1997; Joldes, Muller &
Popescu 2017 (pairs); Yu et al. 2024 (Collage), whose Grow, Scaling and Mul are :func:`grow` and
:func:`mul` here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.errors import FormatError
from narrowgauge.numerics.rounding import bits_of, cut_to_even, float_of

Parts = tuple[Tensor, ...]


@dataclass(frozen=True)
class NearestEven:
    """Round float32 to 24 - ``dropped`` significant bits, ties to even.

    The exponent stays float32's.

    ``dropped`` is 13 to 21. With fewer, float32's operations would round twice. NaNs must come from
    16-bit tensors or arithmetic.

    Example:
        >>> NearestEven(16)(torch.tensor([0.1, 1.00390625])), NearestEven(20)(torch.tensor([0.3]))
        (tensor([0.1001, 1.0000]), tensor([0.3125]))
    """

    dropped: int

    def __post_init__(self) -> None:
        if not 13 <= self.dropped <= 21:
            raise FormatError(
                f"Cannot compute in parts that are {self.dropped} bits shorter than float32.",
                "Drop 13 to 21 bits.",
            )

    def __call__(self, x: Tensor) -> Tensor:
        # Use integers. A compiler would drop `.to(bfloat16).float()`, and fuse a product with its
        # sum. It cannot fuse across integers.
        rounded = float_of(cut_to_even(bits_of(x), self.dropped))
        # A GPU makes NaNs whose payload would carry into the sign.
        return rounded if x.device.type == "cpu" else torch.where(x == x, rounded, math.nan)


def two_sum(a: Tensor, b: Tensor, rn: NearestEven) -> tuple[Tensor, Tensor]:
    """Return ``(s, e)``, the rounded sum and its error: ``s + e == a + b`` exactly, for all parts a
    and b.

    Only s needs rounding. Either ``s - a`` is exact in float32, or b is so much larger than a that
    ``s == b``. In both cases the rest is exact, since e is a number of the format.
    """
    s = rn(a + b)
    of_b = s - a
    return s, (a - (s - of_b)) + (b - of_b)


def fast_two_sum(a: Tensor, b: Tensor, rn: NearestEven) -> tuple[Tensor, Tensor]:
    """Return :func:`two_sum` in 3 operations, if a is 0 or its exponent is at least b's."""
    s = rn(a + b)
    return s, b - (s - a)


def two_prod(a: Tensor, b: Tensor, rn: NearestEven) -> tuple[Tensor, Tensor]:
    """Return ``(p, e)``, the rounded product and its error: ``p + e == a * b`` exactly, unless e
    underflows.

    The product of two parts has at most 22 bits, so float32 holds it.
    """
    product = a * b
    p = rn(product)
    return p, rn(product - p)


def renormalise(terms: Sequence[Tensor], length: int, rn: NearestEven) -> Parts:
    """Return terms as an expansion of ``length`` parts.

    It is exact if the terms fit that many parts, else within u^length.

    There are at least ``length`` terms, largest first: only a zero has a smaller exponent than the
    next. They may overlap.
    """
    parts = list(terms)
    if len(parts) == length == 2:
        return fast_two_sum(parts[0], parts[1], rn)
    # Go up more than once, since larger terms may cancel and leave zeros. Then go down, which
    # separates the parts.
    upward = list(reversed(range(len(parts) - 1)))
    for i in upward * len(upward) + upward[-2::-1]:
        parts[i], parts[i + 1] = two_sum(parts[i], parts[i + 1], rn)
    while len(parts) > length:
        last = parts.pop()
        parts[-1] = rn(parts[-1] + last)
    return tuple(parts)


def _cascade(levels: list[list[Tensor]], rn: NearestEven) -> list[Tensor]:
    """Sum each level of magnitude.

    Errors join the next level. Only the last level's errors are lost.
    """
    sums = []
    for place, (total, *terms) in enumerate(levels):
        for term in terms:
            if place == len(levels) - 1:
                total = rn(total + term)
            else:
                total, error = two_sum(total, term, rn)
                levels[place + 1].append(error)
        sums.append(total)
    return sums


def grow(x: Parts, a: Tensor, rn: NearestEven) -> Parts:
    """Add a part to an expansion: Collage's Grow, the update of a weight.

    Error for pairs 2u^2, for triples 4u^3.

    The first line is :func:`two_sum`, since an update may be larger than the weight.
    """
    levels = [[part] for part in x]
    levels[0].append(a)
    return renormalise(_cascade(levels, rn), len(x), rn)


def mul(x: Parts, y: Parts, rn: NearestEven) -> Parts:
    """Multiply expansions of one length above 1: Collage's Mul, corrected.

    Error for pairs 5u^2, triples 8u^3.

    Partial products are exact, but the smallest ones that count are rounded.
    """
    n = len(x)
    levels: list[list[Tensor]] = [[] for _ in range(n)]
    least: list[Tensor] = []
    for i in reversed(range(len(x))):
        for j in range(n - i):
            if i + j == n - 1:
                # All but the first are added unrounded, like PyTorch's 16-bit multiply-add.
                least.append(x[i] * y[j])
            else:
                p, e = two_prod(x[i], y[j], rn)
                levels[i + j].append(p)
                levels[i + j + 1].append(e)
    if len(least) > 1:
        least[0] = rn(least[0])
    levels[-1] = least + levels[-1]
    return renormalise(_cascade(levels, rn), n, rn)


def expansion_of(value: Tensor, length: int, rn: NearestEven) -> Parts:
    """Split a float32 or float64 value into parts, each nearest to the remainder of the parts
    before. Error u^length.

    Example:
        >>> expansion_of(torch.tensor(0.999), 2, NearestEven(16))
        (tensor(1.), tensor(-0.0010))
    """
    parts = []
    remainder = value
    for _ in range(length):
        parts.append(rn(remainder.float()))
        remainder = remainder - parts[-1]
    return tuple(parts)
