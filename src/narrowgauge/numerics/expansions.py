"""Numbers as exact sums of two low-precision parts: multi-component floats.

Two bfloat16 hold 17 bits together if the second is the rounding error of the first. The rounding
error of a sum or a product is a number of the format. :func:`two_sum` and :func:`two_prod` compute
these errors exactly. Everything else is built from these two. A *pair* is an expansion of two
parts, the larger first. The second is at most half an ulp of the first. The pair is their exact
sum.

A part is a float32 tensor with values of a format of precision p. An operation is the float32
operation, then one rounding to the format, as PyTorch's eager operations on 16-bit tensors do.
Rounding to 24 bits and then to p equals rounding once for sums, products, quotients and square
roots of p-bit numbers, since 24 >= 2p + 2 (p <= 11).

Errors are relative, with u = 2^-p. They hold if nothing overflows and no part underflows. The
sources prove them.

Source: Dekker 1971; Knuth, TAOCP 2; Figueroa 1995 (rounding twice); Shewchuk 1997; Joldes, Muller &
Popescu 2017 (pairs); Yu et al. 2024 (Collage), whose Grow, Scaling and Mul are :func:`grow` and
:func:`mul` here.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.numerics.rounding import bits_of, float_of, round_bits_to_even

Pair = tuple[Tensor, Tensor]


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

    def __call__(self, x: Tensor) -> Tensor:
        # Use integers. A compiler would drop `.to(bfloat16).float()`, and fuse a product with its
        # sum. It cannot fuse across integers.
        rounded = float_of(round_bits_to_even(bits_of(x), self.dropped))
        # A GPU makes NaNs whose payload would carry into the sign.
        return rounded if x.device.type == "cpu" else torch.where(x == x, rounded, math.nan)


def two_sum(a: Tensor, b: Tensor, rn: NearestEven) -> Pair:
    """Return ``(s, e)``, the rounded sum and its error: ``s + e == a + b`` exactly, for all parts a
    and b.

    Only s needs rounding. Either ``s - a`` is exact in float32, or b is so much larger than a that
    ``s == b``. In both cases the rest is exact, since e is a number of the format.
    """
    s = rn(a + b)
    of_b = s - a
    return s, (a - (s - of_b)) + (b - of_b)


def fast_two_sum(a: Tensor, b: Tensor, rn: NearestEven) -> Pair:
    """Return :func:`two_sum` in 3 operations, if a is 0 or its exponent is at least b's."""
    s = rn(a + b)
    return s, b - (s - a)


def two_prod(a: Tensor, b: Tensor, rn: NearestEven) -> Pair:
    """Return ``(p, e)``, the rounded product and its error: ``p + e == a * b`` exactly, unless e
    underflows.

    The product of two parts has at most 22 bits, so float32 holds it.
    """
    product = a * b
    p = rn(product)
    return p, rn(product - p)


def grow(x: Pair, a: Tensor, rn: NearestEven) -> Pair:
    """Add a part to a pair: Collage's Grow, the update of a weight. Error 2u^2.

    The first line is :func:`two_sum`, since an update may be larger than the weight.
    """
    total, error = two_sum(x[0], a, rn)
    return fast_two_sum(total, rn(x[1] + error), rn)


def mul(x: Pair, y: Pair, rn: NearestEven) -> Pair:
    """Multiply pairs: Collage's Mul, corrected. Error 5u^2.

    The second product of parts is added unrounded, like PyTorch's 16-bit multiply-add.
    """
    product, error = two_prod(x[0], y[0], rn)
    crossed = rn(rn(x[1] * y[0]) + x[0] * y[1])
    return fast_two_sum(product, rn(crossed + error), rn)


def pair_of(value: Tensor, rn: NearestEven) -> Pair:
    """Split a float32 or float64 value into the nearest part and the nearest to the rest. Error u^2.

    Example:
        >>> pair_of(torch.tensor(0.999), NearestEven(16))
        (tensor(1.), tensor(-0.0010))
    """
    high = rn(value.float())
    return high, rn((value - high).float())
