"""Numbers as exact sums of low-precision parts: multi-component floats.

Two bfloat16 hold 17 bits together if the second is the rounding error of the first. The rounding error of a sum or a product is
a number of the format. :func:`two_sum` and :func:`two_prod` compute these errors exactly. Everything else is built from these
two. An *expansion* is a tuple of parts, largest first. Each part is at most half an ulp of the one before it. The expansion is
their exact sum.

A part is a float32 tensor with values of a format of precision p. An operation is the float32 operation, then one rounding to
the format. PyTorch's eager operations on 16-bit tensors do the same. Rounding twice does no harm: rounding to 24 bits and then
to p equals rounding once, since 24 >= 2p + 2 (p <= 11). This holds for sums, products, quotients and square roots of p-bit
numbers. An exact result that is a number of the format, such as an error, is not rounded.

Errors are relative, with u = 2^-p. They hold if nothing overflows and no part underflows. The sources prove the errors of
pairs. We measured the errors of triples and of square roots.

Source: Dekker 1971; Knuth, TAOCP 2; Figueroa 1995 (rounding twice); Shewchuk 1997; Joldes, Muller & Popescu 2017 (pairs);
Yu et al. 2024 (Collage), whose Grow, Scaling and Mul are :func:`grow` and :func:`mul` here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, overload

import torch
from torch import Tensor

from narrowgauge.errors import FormatError
from narrowgauge.numerics import rounding
from narrowgauge.numerics.rounding import bits_of, cut_to_even, float_of

Parts = tuple[Tensor, ...]
Operand: TypeAlias = "Expansion | Tensor | float"


@dataclass(frozen=True)
class NearestEven:
    """Round float32 to 24 - ``dropped`` significant bits, ties to even. The exponent stays float32's.

    ``dropped`` is 13 to 21. With fewer, float32's operations would round twice. NaNs must come from 16-bit tensors or from
    arithmetic. On a CPU these need no care, which would be a third of the cost.

    Example:
        >>> NearestEven(16)(torch.tensor([0.1, 1.00390625])), NearestEven(20)(torch.tensor([0.3]))
        (tensor([0.1001, 1.0000]), tensor([0.3125]))
    """

    dropped: int

    def __post_init__(self) -> None:
        if not 13 <= self.dropped <= 21:
            raise FormatError(
                f"Cannot compute in parts that are {self.dropped} bits shorter than float32.", "Drop 13 to 21 bits."
            )

    def __call__(self, x: Tensor) -> Tensor:
        # Use integers. A compiler would drop `.to(bfloat16).float()`, and fuse a product with its sum. It cannot fuse across
        # integers.
        rounded = float_of(cut_to_even(bits_of(x), self.dropped))
        # A GPU makes NaNs whose payload would carry into the sign.
        return rounded if x.device.type == "cpu" else torch.where(x == x, rounded, math.nan)


def two_sum(a: Tensor, b: Tensor, rn: NearestEven) -> tuple[Tensor, Tensor]:
    """Return ``(s, e)``, the rounded sum and its error: ``s + e == a + b`` exactly, for all parts a and b.

    Only s needs rounding. Either ``s - a`` is exact in float32, or b is so much larger than a that ``s == b``. In both cases
    the rest is exact, since e is a number of the format.
    """
    s = rn(a + b)
    of_b = s - a
    return s, (a - (s - of_b)) + (b - of_b)


def fast_two_sum(a: Tensor, b: Tensor, rn: NearestEven) -> tuple[Tensor, Tensor]:
    """Return :func:`two_sum` in 3 operations, if a is 0 or its exponent is at least b's."""
    s = rn(a + b)
    return s, b - (s - a)


def two_prod(a: Tensor, b: Tensor, rn: NearestEven) -> tuple[Tensor, Tensor]:
    """Return ``(p, e)``, the rounded product and its error: ``p + e == a * b`` exactly, unless e underflows.

    The product of two parts has at most 22 bits, so float32 holds it.
    """
    product = a * b
    p = rn(product)
    return p, rn(product - p)


def renormalise(terms: Sequence[Tensor], length: int, rn: NearestEven) -> Parts:
    """Return terms as an expansion of ``length`` parts. It is exact if the terms fit that many parts, else within u^length.

    There are at least ``length`` terms, largest first: only a zero has a smaller exponent than the next. They may overlap.
    """
    parts = list(terms)
    if len(parts) == length == 2:
        return fast_two_sum(parts[0], parts[1], rn)
    # Go up more than once, since larger terms may cancel and leave zeros. Then go down, which separates the parts.
    upward = list(reversed(range(len(parts) - 1)))
    for i in upward * len(upward) + upward[-2::-1]:
        parts[i], parts[i + 1] = two_sum(parts[i], parts[i + 1], rn)
    while len(parts) > length:
        last = parts.pop()
        parts[-1] = rn(parts[-1] + last)
    return tuple(parts)


def _cascade(levels: list[list[Tensor]], rn: NearestEven) -> list[Tensor]:
    """Sum each level of magnitude. Errors join the next level. Only the last level's errors are lost."""
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
    """Add a part to an expansion: Collage's Grow, the update of a weight. Error for pairs 2u^2, for triples 4u^3.

    The first line is :func:`two_sum`, since an update may be larger than the weight.
    """
    levels = [[part] for part in x]
    levels[0].append(a)
    return renormalise(_cascade(levels, rn), len(x), rn)


def add(x: Parts, y: Parts, rn: NearestEven) -> Parts:
    """Add expansions. The sum is as long as the longer one.

    Error for pairs 3u^2 / (1 - 4u), also under cancellation. Error for triples u^3 of ``abs(x) + abs(y)``.
    """
    x, y = (x, y) if len(x) >= len(y) else (y, x)
    if len(y) == 1:
        return grow(x, y[0], rn)
    if len(x) == 2:
        s, e = two_sum(x[0], y[0], rn)
        t, f = two_sum(x[1], y[1], rn)
        s, e = fast_two_sum(s, rn(e + t), rn)
        return fast_two_sum(s, rn(e + f), rn)
    # Add one level for the errors of the last: they matter if the larger parts cancel.
    levels = [*([part, *y[i : i + 1]] for i, part in enumerate(x)), []]
    return renormalise(_cascade(levels, rn), len(x), rn)


def mul(x: Parts, y: Parts, rn: NearestEven, length: int = 0) -> Parts:
    """Multiply expansions: Collage's Mul, corrected. If ``y`` is one part, it is Scaling. Error for pairs 5u^2, triples 8u^3.

    Partial products are exact, but the smallest ones that count are rounded. The product has ``length`` parts, at most as many
    as both operands together. 0 stands for the length of the longer.
    """
    n = min(length or max(len(x), len(y)), len(x) + len(y))
    if n == 1:
        return (rn(x[0] * y[0]),)
    levels: list[list[Tensor]] = [[] for _ in range(n)]
    least: list[Tensor] = []
    for i in reversed(range(len(x))):
        for j in range(min(len(y), n - i)):
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


def div(x: Parts, y: Parts, rn: NearestEven) -> Parts:
    """Divide expansions by long division; the result is as long as the longer. Error for pairs 15u^2, for triples 24u^3."""
    n, remainder = max(len(x), len(y)), x
    quotients = [rn(x[0] / y[0])]
    while len(quotients) < n:
        remainder = _subtract_near(remainder, mul(y, (quotients[-1],), rn, n), rn)
        quotients.append(rn(remainder[0] / y[0]))
    return renormalise(quotients, n, rn)


def square_root(x: Parts, rn: NearestEven) -> Parts:
    """Return the square root of an expansion, part by part. Error for pairs 6u^2, for triples 12u^3."""
    root: Parts = (rn(rounding.sqrt(x[0])),)
    while len(root) < len(x):
        remainder = _subtract_near(x, mul(root, root, rn, len(x)), rn)
        part = torch.where(root[0] > 0, rn(remainder[0] / (root[0] + root[0])), 0.0)
        root = renormalise([*root, part], len(root) + 1, rn)
    return root


def _subtract_near(x: Parts, product: Parts, rn: NearestEven) -> Parts:
    """Return x minus a product whose leading part is close to x's. For pairs return only the leading part."""
    if max(len(x), len(product)) > 2:
        return add(x, negative(product), rn)
    low = x[1] - product[1] if len(x) == 2 else -product[1]
    return (rn((x[0] - product[0]) + rn(low)),)


def negative(x: Parts) -> Parts:
    return tuple(-part for part in x)


def expansion_of(value: Tensor | float, length: int, rn: NearestEven) -> Parts:
    """Split a float32 or float64 value into parts, each nearest to the remainder of the parts before. Error u^length.

    The parts of a Python float are 0-d.

    Example:
        >>> expansion_of(0.999, 2, NearestEven(16))
        (tensor(1.), tensor(-0.0010))
    """
    remainder = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    parts = []
    for _ in range(length):
        parts.append(rn(remainder.float()))
        remainder = remainder - parts[-1]
    return tuple(parts)


@dataclass(frozen=True)
class Expansion:
    """Give an expansion operators, so that arithmetic written for tensors runs on it unchanged.

    A result has as many parts as the longer operand. With a single part, a float32 tensor or Python float is used unchanged.
    The float32 result is rounded once, as in torch's 16-bit kernels. With more parts it is split first.

    Example:
        >>> x = Expansion(expansion_of(torch.tensor([1.0, 2.0]), 2, rn := NearestEven(16)), rn)
        >>> (1.001 * x - x).value
        tensor([0.0010, 0.0020])
    """

    parts: Parts
    rounding: NearestEven

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def value(self) -> Tensor:
        """Return the float32 sum of the parts, smallest first."""
        total = self.parts[-1]
        for part in reversed(self.parts[:-1]):
            total = part + total
        return total

    def sign(self) -> Expansion:
        """Return -1, 0 or 1, as one part."""
        return Expansion((self.parts[0].sign(),), self.rounding)

    def __neg__(self) -> Expansion:
        return Expansion(negative(self.parts), self.rounding)

    def __abs__(self) -> Expansion:
        below = (torch.where(self.parts[0] < 0, -part, part) for part in self.parts[1:])
        return Expansion((self.parts[0].abs(), *below), self.rounding)

    def __add__(self, y: Operand) -> Expansion:
        return Expansion(add(self.parts, self._parts_of(y), self.rounding), self.rounding)

    def __sub__(self, y: Operand) -> Expansion:
        return Expansion(add(self.parts, negative(self._parts_of(y)), self.rounding), self.rounding)

    def __rsub__(self, y: Tensor | float) -> Expansion:
        return -self + y

    def __mul__(self, y: Operand) -> Expansion:
        return Expansion(mul(self.parts, self._parts_of(y), self.rounding), self.rounding)

    def __truediv__(self, y: Operand) -> Expansion:
        return Expansion(div(self.parts, self._parts_of(y), self.rounding), self.rounding)

    def __rtruediv__(self, y: Tensor | float) -> Expansion:
        return Expansion(div(self._parts_of(y), self.parts, self.rounding), self.rounding)

    __radd__, __rmul__ = __add__, __mul__

    def _parts_of(self, y: Operand) -> Parts:
        if isinstance(y, Expansion):
            return y.parts
        if not isinstance(y, Tensor):
            # Make it a tensor: torch divides a number by a tensor through its reciprocal, which rounds twice.
            y = torch.full((), y, dtype=torch.float64, device=self.parts[0].device)
        return expansion_of(y, len(self), self.rounding) if len(self) > 1 else (y.float(),)


@overload
def sqrt(x: Tensor) -> Tensor: ...
@overload
def sqrt(x: Expansion) -> Expansion: ...
def sqrt(x: Tensor | Expansion) -> Tensor | Expansion:
    """Return the square root: correctly rounded for a tensor, :func:`square_root` for an :class:`Expansion`."""
    if isinstance(x, Expansion):
        return Expansion(square_root(x.parts, x.rounding), x.rounding)
    return rounding.sqrt(x)
