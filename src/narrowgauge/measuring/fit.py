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
        rest: length of what the factor leaves of the second one; ``distance`` of what 1 leaves.
        length: of the first tensor.
        other_length: of the second one.
        differing: number of elements whose values differ.
        nonfinite: number of elements of the second one that are not finite.
    """

    factor: float
    rest: float
    distance: float
    length: float
    other_length: float
    differing: int
    nonfinite: int

    @property
    def relative(self) -> float:
        """Return the distance over the first tensor's length; infinite from zeros."""
        if not self.distance:
            return 0.0
        return self.distance / self.length if self.length else math.inf


def fit(x: Tensor, y: Tensor) -> Fit:
    """Compare ``y`` with ``x`` of as many elements, once ``x`` is rounded to the format of ``y``.

    Example:
        >>> import torch
        >>> result = fit(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0]))
        >>> result.factor, result.rest, result.differing
        (2.0, 0.0, 2)
    """
    square = other_square = product = off = 0.0
    differing = 0
    nonfinite = 0
    for first, second in zip(x.flatten().split(CHUNK), y.flatten().split(CHUNK), strict=True):
        a = first.to(second.device, second.dtype).double()  # which holds values of every format
        b = second.double()
        difference = b - a
        square += float(a @ a)
        other_square += float(b @ b)
        product += float(a @ b)
        off += float(difference @ difference)
        differing += int((a != b).sum())
        bad = int((~b.isfinite()).sum())
        if bad:
            nonfinite += bad
            differing -= int((a.isnan() & b.isnan()).sum())
    factor = product / square if square else 0.0
    rest = math.sqrt(max(0.0, other_square - factor * product))
    distance = math.sqrt(off)
    lengths = math.sqrt(square), math.sqrt(other_square)
    return Fit(factor, rest, distance, *lengths, differing, nonfinite)
