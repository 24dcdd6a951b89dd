"""Numbers as exact sums of narrow parts: multi-component floats.

Two bfloat16 hold 17 bits together if the second is the rounding error of the first. The rounding error of a sum is
itself a number of the format, and so is that of a product; :func:`two_sum` and :func:`two_prod` find them exactly, and
everything else here is built from these two. An *expansion* is a tuple of parts, largest first, each at most half a
spacing of the one before it; it stands for their exact sum.

A part is a float32 tensor that holds values of a narrow format of precision p, and an operation is the float32
operation followed by one rounding to the format, as in PyTorch's eager operations on narrow tensors. That rounding
twice does no harm: sums, products, quotients and square roots of p-bit numbers rounded to 24 bits and then to p are
those rounded once, since 24 >= 2p + 2 (p <= 11: every format of at most 16 bits). Where an exact result is a number of
the format, as errors are, the rounding is left out: it would change nothing.

Roundings work on integer bits: a compiler would drop ``.to(bfloat16).float()``, and may fuse a multiplication with the
addition it feeds, but not through integers. Errors are relative, with u = 2^-p, and hold while nothing overflows and no
part underflows. Those of pairs are proved in the sources; those of triples and of square roots were measured.

Source: Dekker 1971; Knuth, TAOCP 2; Figueroa 1995 (rounding twice); Shewchuk 1997; Joldes, Muller & Popescu 2017 (pairs);
Yu et al. 2024 (Collage), whose Grow, Scaling and Mul are :func:`grow`, :func:`scale` and :func:`mul` here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, overload

import torch
from torch import Tensor

from narrowgauge.errors import FormatError
from narrowgauge.numerics import rounding as float32
from narrowgauge.numerics.rounding import MAGNITUDE, bits_of, float_of
from narrowgauge.spec.formats import get_format

Rounding = Callable[[Tensor], Tensor]
Parts = tuple[Tensor, ...]
Operand: TypeAlias = "Expansion | Tensor | float"


@dataclass(frozen=True)
class NearestEven:
    """Rounding of float32 to a narrower format, ties to even; made by :func:`nearest_even` and :func:`nearest_even_bits`."""

    dropped: int  # how many mantissa bits fewer than float32's
    quiet: bool = False
    lowest: int = -126  # exponent of the smallest normal value
    largest: int = 0x7F7FFFFF  # bits of the largest finite magnitude
    beyond: int = 0x7F800000  # bits of what overflow becomes

    def __call__(self, x: Tensor) -> Tensor:
        if self.dropped == 0:
            return x
        shares_exponent = self.lowest == -126
        rounded = float_of(self._cut(bits_of(x)) if shares_exponent else self._window(bits_of(x)))
        if self.quiet and shares_exponent and x.device.type == "cpu":
            return rounded
        return torch.where(x == x, rounded, math.nan)

    def _cut(self, bits: Tensor) -> Tensor:
        odd = (bits >> self.dropped) & 1
        return (bits + odd + ((1 << self.dropped >> 1) - 1)) & -(1 << self.dropped)

    def _window(self, bits: Tensor) -> Tensor:
        magnitude = bits & MAGNITUDE
        # Beside the anchor, float32's neighbours are as far apart as the subnormals, and adding rounds to even.
        anchor = math.ldexp(1.0, self.lowest + self.dropped)
        subnormal = bits_of((float_of(magnitude) + anchor) - anchor)
        rounded = torch.where(magnitude < (self.lowest + 127) << 23, subnormal, self._cut(magnitude))
        return torch.where(rounded > self.largest, self.beyond, rounded) | (bits & ~MAGNITUDE)


def nearest_even(format_name: str, *, quiet: bool = False) -> NearestEven:
    """The rounding of float32 to a float format's values, ties to even: bit for bit torch's cast, and ``round_to``.

    Subnormals are values like others; what rounds past the largest becomes infinite, or NaN in ``float8_e4m3fn`` (where
    torch's cast came to hold it at 448); a NaN becomes the quiet NaN; zeros keep their sign.

    Args:
        format_name: ``"float32"`` (nothing is rounded) or a float format of at most 11 significant bits.
        quiet: promises that NaNs come from narrow tensors or from arithmetic: on a CPU these need no care, which is
            a third of the cost. (A cut carries the longest NaN payloads into the sign; a GPU makes such NaNs.)
    Raises:
        FormatError: the format has more bits (float32's operations would round twice), or no infinity and NaN.
    Example:
        >>> nearest_even("bfloat16")(torch.tensor([0.1, 1.00390625]))
        tensor([0.1001, 1.0000])
    """
    row, single = get_format(format_name), get_format("float32")
    if row.name != "float32" and (
        row.kind != "float" or row.specials not in ("ieee", "all_ones") or row.mantissa_bits > 10
    ):
        raise FormatError(
            f"the parts of an expansion were requested as {row.name}.",
            "Use bfloat16, float16, float8_e4m3fn, float8_e5m2 or float32.",
        )
    dropped = single.mantissa_bits - row.mantissa_bits
    beyond = single.encode(math.inf if row.infinities else math.nan)
    return NearestEven(dropped, quiet, row.min_exponent, single.encode(row.max), beyond)


def nearest_even_bits(dropped: int, *, quiet: bool = False) -> NearestEven:
    """As :func:`nearest_even`, but only the precision is cut, to 24 - ``dropped`` bits: the exponent stays float32's.

    ``dropped`` is 13 to 21, or 0 for no rounding: with 1 to 12, float32's operations would round twice.

    Example:
        >>> nearest_even_bits(20)(torch.tensor([0.3, 1e-30]))
        tensor([3.1250e-01, 9.8608e-31])
    """
    if dropped and not 13 <= dropped <= 21:
        raise FormatError(f"parts {dropped} bits shorter than float32 were requested.", "Drop 13 to 21 bits, or none.")
    return NearestEven(dropped, quiet)


def two_sum(a: Tensor, b: Tensor, rn: Rounding) -> tuple[Tensor, Tensor]:
    """``(s, e)``: the rounded sum and its error; ``s + e == a + b`` exactly, for all parts a and b.

    Only s needs rounding: either ``s - a`` is exact in float32, or b outweighs a by so much that ``s == b``, and in both
    cases what follows is exact, since e is a number of the format.

    Cost: 1 rounding and 6 operations.
    """
    s = rn(a + b)
    of_b = s - a
    return s, (a - (s - of_b)) + (b - of_b)


def fast_two_sum(a: Tensor, b: Tensor, rn: Rounding) -> tuple[Tensor, Tensor]:
    """As :func:`two_sum` in 3 operations, where a is 0 or its exponent is at least b's."""
    s = rn(a + b)
    return s, b - (s - a)


def two_prod(a: Tensor, b: Tensor, rn: Rounding) -> tuple[Tensor, Tensor]:
    """``(p, e)``: the rounded product and its error; ``p + e == a * b`` exactly, unless e underflows.

    The product of two parts has at most 22 bits, so float32 holds it; that of two float32 goes through float64.
    """
    if isinstance(rn, NearestEven) and rn.dropped == 0:
        exact = a.double() * b.double()
        return exact.float(), (exact - exact.float()).float()
    product = a * b
    p = rn(product)
    return p, rn(product - p)


def renormalise(terms: Sequence[Tensor], length: int, rn: Rounding) -> Parts:
    """Terms as an expansion of ``length`` parts: exact if the terms are not more than its parts, else within u^length.

    There are at least ``length`` terms, largest first: none but a zero has a smaller exponent than the next. They may overlap.
    """
    parts = list(terms)
    if len(parts) == length == 2:
        return fast_two_sum(parts[0], parts[1], rn)
    # Up more than once, since larger terms may cancel and leave zeros; then down, which separates the parts.
    upward = list(reversed(range(len(parts) - 1)))
    for i in upward * len(upward) + upward[-2::-1]:
        parts[i], parts[i + 1] = two_sum(parts[i], parts[i + 1], rn)
    while len(parts) > length:
        rest = parts.pop()
        parts[-1] = rn(parts[-1] + rest)
    return tuple(parts)


def _cascade(levels: list[list[Tensor]], rn: Rounding) -> list[Tensor]:
    """The sum of each level of magnitude: errors join the next level, and only the last level's are lost."""
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


def grow(x: Parts, a: Tensor, rn: Rounding) -> Parts:
    """Expansion plus a part: Collage's Grow, by which a weight takes its update.

    The first line is :func:`two_sum`: an update may outweigh the weight. Error for pairs 2u^2, for triples 4u^3.

    Cost: for a pair 3 roundings and 10 operations.
    """
    levels = [[part] for part in x]
    levels[0].append(a)
    return renormalise(_cascade(levels, rn), len(x), rn)


def add(x: Parts, y: Parts, rn: Rounding) -> Parts:
    """Sum of expansions, as long as the longer.

    Error for pairs 3u^2 / (1 - 4u), also under cancellation; for triples u^3 of ``abs(x) + abs(y)``.

    Cost: for two pairs 6 roundings and 20 operations.
    """
    x, y = (x, y) if len(x) >= len(y) else (y, x)
    if len(y) == 1:
        return grow(x, y[0], rn)
    if len(x) == 2:
        s, e = two_sum(x[0], y[0], rn)
        t, f = two_sum(x[1], y[1], rn)
        s, e = fast_two_sum(s, rn(e + t), rn)
        return fast_two_sum(s, rn(e + f), rn)
    # One level more for the errors of the last: they count where the larger parts cancel.
    levels = [*([part, *y[i : i + 1]] for i, part in enumerate(x)), []]
    return renormalise(_cascade(levels, rn), len(x), rn)


def scale(x: Parts, c: Tensor, rn: Rounding) -> Parts:
    """Expansion times a part: Collage's Scaling; error for pairs 3u^2, for triples 4u^3."""
    return mul(x, (c,), rn)


def mul(x: Parts, y: Parts, rn: Rounding, length: int = 0) -> Parts:
    """Product of expansions: Collage's Mul, correct.

    Partial products are exact except for the least of those that count, which are rounded. Error for pairs 5u^2, for
    triples 8u^3. The product has ``length`` parts, at most as many as both have together; 0 stands for those of the longer.

    Cost: for two pairs 6 roundings and 9 operations.
    """
    n = min(length or max(len(x), len(y)), len(x) + len(y))
    if n == 1:
        return (rn(x[0] * y[0]),)
    levels: list[list[Tensor]] = [[] for _ in range(n)]
    least: list[Tensor] = []
    for i in reversed(range(len(x))):
        for j in range(min(len(y), n - i)):
            if i + j == n - 1:
                # All but the first are added unrounded, like PyTorch's narrow multiply-add.
                least.append(x[i] * y[j])
            else:
                p, e = two_prod(x[i], y[j], rn)
                levels[i + j].append(p)
                levels[i + j + 1].append(e)
    if len(least) > 1:
        least[0] = rn(least[0])
    levels[-1] = least + levels[-1]
    return renormalise(_cascade(levels, rn), n, rn)


def div(x: Parts, y: Parts, rn: Rounding) -> Parts:
    """Quotient of expansions by long division, as long as the longer; error for pairs 15u^2, for triples 24u^3."""
    n, rest = max(len(x), len(y)), x
    quotients = [rn(x[0] / y[0])]
    while len(quotients) < n:
        rest = _remainder(rest, mul(y, (quotients[-1],), rn, n), rn)
        quotients.append(rn(rest[0] / y[0]))
    return renormalise(quotients, n, rn)


def square_root(x: Parts, rn: Rounding) -> Parts:
    """Square root of an expansion, part by part; error for pairs 6u^2, for triples 12u^3."""
    root: Parts = (rn(float32.sqrt(x[0])),)
    while len(root) < len(x):
        rest = _remainder(x, mul(root, root, rn, len(x)), rn)
        part = torch.where(root[0] > 0, rn(rest[0] / (root[0] + root[0])), 0.0)
        root = renormalise([*root, part], len(root) + 1, rn)
    return root


def _remainder(x: Parts, product: Parts, rn: Rounding) -> Parts:
    """x less a product whose leading part is nearly x's; of pairs only the leading part."""
    if max(len(x), len(product)) > 2:
        return add(x, negative(product), rn)
    low = x[1] - product[1] if len(x) == 2 else -product[1]
    return (rn((x[0] - product[0]) + rn(low)),)


def negative(x: Parts) -> Parts:
    return tuple(-part for part in x)


def expansion_of(value: Tensor | float, length: int, rn: Rounding) -> Parts:
    """A float32 or float64 value split into parts, each the nearest to what the ones before leave; error u^length.

    The parts of a Python float are 0-d.

    Example:
        >>> expansion_of(0.999, 2, nearest_even("bfloat16"))
        (tensor(1.), tensor(-0.0010))
    """
    rest = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    parts = []
    for _ in range(length):
        parts.append(rn(rest.float()))
        rest = rest - parts[-1]
    return tuple(parts)


@dataclass(frozen=True)
class Expansion:
    """An expansion, largest part first, with operators, so that arithmetic written for tensors runs on it unchanged.

    A result has as many parts as the longer operand. A float32 tensor or Python float combined with a single part is used as
    it is, with one rounding of the float32 result, as in torch's narrow kernels; with more parts it is first split.

    Example:
        >>> x = Expansion(expansion_of(torch.tensor([1.0, 2.0]), 2, rn := nearest_even("bfloat16")), rn)
        >>> (1.001 * x - x).value
        tensor([0.0010, 0.0020])
    """

    parts: Parts
    rounding: Rounding

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def value(self) -> Tensor:
        """The float32 sum of the parts, smallest first."""
        total = self.parts[-1]
        for part in reversed(self.parts[:-1]):
            total = part + total
        return total

    def sign(self) -> Expansion:
        """-1, 0 or 1, as one part."""
        return Expansion((self.parts[0].sign(),), self.rounding)

    def __neg__(self) -> Expansion:
        return Expansion(negative(self.parts), self.rounding)

    def __abs__(self) -> Expansion:
        below = (torch.where(self.parts[0] < 0, -part, part) for part in self.parts[1:])
        return Expansion((self.parts[0].abs(), *below), self.rounding)

    def __add__(self, other: Operand) -> Expansion:
        return Expansion(add(self.parts, self._parts_of(other), self.rounding), self.rounding)

    def __sub__(self, other: Operand) -> Expansion:
        return Expansion(add(self.parts, negative(self._parts_of(other)), self.rounding), self.rounding)

    def __rsub__(self, other: Tensor | float) -> Expansion:
        return -self + other

    def __mul__(self, other: Operand) -> Expansion:
        return Expansion(mul(self.parts, self._parts_of(other), self.rounding), self.rounding)

    def __truediv__(self, other: Operand) -> Expansion:
        return Expansion(div(self.parts, self._parts_of(other), self.rounding), self.rounding)

    def __rtruediv__(self, other: Tensor | float) -> Expansion:
        return Expansion(div(self._parts_of(other), self.parts, self.rounding), self.rounding)

    __radd__, __rmul__ = __add__, __mul__

    def _parts_of(self, other: Operand) -> Parts:
        if isinstance(other, Expansion):
            return other.parts
        if not isinstance(other, Tensor):
            # As a tensor, since torch divides a number by a tensor through its reciprocal, which rounds twice.
            other = torch.full((), other, dtype=torch.float64, device=self.parts[0].device)
        return expansion_of(other, len(self), self.rounding) if len(self) > 1 else (other.float(),)


@overload
def sqrt(x: Tensor) -> Tensor: ...
@overload
def sqrt(x: Expansion) -> Expansion: ...
def sqrt(x: Tensor | Expansion) -> Tensor | Expansion:
    """The square root: correctly rounded of a float32 or float64 tensor, :func:`square_root` of an :class:`Expansion`."""
    if isinstance(x, Expansion):
        return Expansion(square_root(x.parts, x.rounding), x.rounding)
    return float32.sqrt(x)
