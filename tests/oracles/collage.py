"""Collage in ordinary narrow tensors, as published.

Every operation is one of eager PyTorch on bfloat16 tensors, which rounds once; ``addcmul`` is the
fused multiply-add.

Source: arXiv:2405.03637, in our own words and code.
"""

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


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


def grow(x: Pair, a: Tensor) -> Pair:
    """A pair plus a word."""
    s, e = two_sum(x[0], a)
    return fast_two_sum(s, x[1] + e)


def mul(x: Pair, y: Pair) -> Pair:
    """A pair times a pair."""
    p = x[0] * y[0]
    e = torch.addcmul(-p, x[0], y[0])
    return fast_two_sum(p, torch.addcmul(x[1] * y[0], x[0], y[1]) + e)


def split(value: float, dtype: torch.dtype = torch.bfloat16) -> Pair:
    """A number as two words."""
    high = torch.tensor(value, dtype=torch.float32).to(dtype)
    return high, (torch.tensor(value, dtype=torch.float64) - high.double()).to(dtype)
