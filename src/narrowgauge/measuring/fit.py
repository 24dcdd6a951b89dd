"""How far one tensor is from another, and from its nearest multiple."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

CHUNK = 1 << 17
"""Elements that are compared at once: they stay in the cache."""


class Fit(NamedTuple):
    """A tensor beside another one, in float64.

    Args:
        factor: multiple of the first tensor that comes nearest; 0 if that is all zeros.
        relative: the distance over the first tensor's length; infinite from zeros.
        differing: number of elements whose values differ.
        nonfinite: number of elements of the second one that are not finite.
    """

    factor: float
    relative: float
    differing: int
    nonfinite: int


def fit(x: Tensor, y: Tensor) -> Fit:
    """Compare ``y`` with ``x`` of as many elements.

    Example:
        >>> import torch
        >>> fit(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0]))
        Fit(factor=2.0, relative=1.0, differing=2, nonfinite=0)
    """
    square = product = off = 0.0
    differing = 0
    nonfinite = 0
    for first, second in zip(x.flatten().split(CHUNK), y.flatten().split(CHUNK), strict=True):
        a = first.to(second.device).double()  # which holds values of every format
        b = second.double()
        difference = b - a
        square += float(a @ a)
        product += float(a @ b)
        off += float(difference @ difference)
        differing += int((a != b).sum())
        bad = int((~b.isfinite()).sum())
        if bad:
            nonfinite += bad
            differing -= int((a.isnan() & b.isnan()).sum())
    factor = product / square if square else 0.0
    relative = 0.0
    if off:
        relative = math.sqrt(off / square) if square else math.inf
    return Fit(factor, relative, differing, nonfinite)
