"""Collage in ordinary narrow tensors: as published, and as its authors' released code computes it.

Every operation is one of eager PyTorch on bfloat16 (or float16) tensors, which rounds once; ``addcmul`` is the fused
multiply-add. The released code has two faults, named in :data:`FAULTS`:

- ``product``: it multiplies the expansion (v, dv) by (B, dB), beta2 split into two words, in place: the tensor that holds v is
  overwritten by the rounded product, and every later line that means v reads the product. The error of the product,
  v*B - RN(v*B), becomes B*(B-1)*v, no small correction but a second decay; and the last line, which should leave in the low
  word only what the sum lost, compares the sum with itself: the low word is added to the high one and kept as well.
- ``split``: dB is beta2 minus its nearest *float32*, where minus its nearest bfloat16, B, is meant (its scripts set the
  default dtype to bfloat16, under which the two are one). dB is then about 1e-8, and beta2 is B alone: 0.949, 0.980, 0.988
  and, of 0.999, exactly 1, with which nothing decays.

The first alone keeps 0.33, 0.33, 0.31 and 0.50 of the second moment of stationary gradients at beta2 = 0.95, 0.98, 0.99 and
0.999; the authors' own functions, run so, gave 0.331, 0.335, 0.313 and 0.501. Both together keep what
``tests/optim/test_collage.py`` says, and with both mended it is the paper's.

Source: arXiv:2405.03637 for the method; what amazon-science/collage of July 2024 does, in our own words and code.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
FAULTS = ("product", "split")


def fast_two_sum(a: Tensor, b: Tensor) -> Pair:
    """Sum and error, where a is not the smaller."""
    s = a + b
    return s, b - (s - a)


def two_sum(a: Tensor, b: Tensor) -> Pair:
    """Sum and error."""
    s = a + b
    of_b = s - a
    of_a = s - of_b
    return s, (a - of_a) + (b - of_b)


def two_prod(a: Tensor, b: Tensor) -> Pair:
    """Product and error."""
    p = a * b
    return p, torch.addcmul(-p, a, b)


def grow(x: Pair, a: Tensor) -> Pair:
    """A pair plus a word."""
    s, e = two_sum(x[0], a)
    return fast_two_sum(s, x[1] + e)


def add(x: Pair, y: Pair) -> Pair:
    """The accurate sum of two pairs."""
    s, e = two_sum(x[0], y[0])
    t, f = two_sum(x[1], y[1])
    s, e = fast_two_sum(s, e + t)
    return fast_two_sum(s, e + f)


def mul(x: Pair, y: Pair, *, released: bool = False) -> Pair:
    """A pair times a pair, as published or as released."""
    p = x[0] * y[0]
    read = p if released else x[0]
    e = torch.addcmul(-p, read, y[0])
    t = torch.addcmul(x[1] * y[0], read, y[1]) + e
    return (p + t, t) if released else fast_two_sum(p, t)


def split(value: float, dtype: torch.dtype = torch.bfloat16, *, released: bool = False) -> Pair:
    """A number as two words, as published or as released."""
    high = torch.tensor(value, dtype=torch.float32).to(dtype)
    taken = torch.tensor(value, dtype=torch.float32) if released else high
    return high, (torch.tensor(value, dtype=torch.float64) - taken.double()).to(dtype)


def second_moment(gradients: Iterable[Tensor], beta: float, *, faults: Collection[str] = ()) -> Pair:
    """The second moment of gradients, one a step, from zero: ``(as kept, exact)``, float64.

    Args:
        gradients: bfloat16 values in float32, of equal shape.
        beta: beta2.
        faults: of :data:`FAULTS`, those to keep; none is as published.
    """
    v = (torch.zeros((), dtype=torch.bfloat16),) * 2
    exact = torch.zeros((), dtype=torch.float64)
    parts = split(beta, released="split" in faults)
    for g in gradients:
        v = mul(v, parts, released="product" in faults)
        v = grow(v, ((1 - beta) * g * g).bfloat16())
        exact = beta * exact + (1 - beta) * g.double() ** 2
    return v[0].double() + v[1].double(), exact
