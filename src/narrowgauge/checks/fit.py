"""How far one tensor is from another, and from its nearest multiple."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 1 << 17
"""Elements that are compared at once: they stay in the cache."""


class Fit(NamedTuple):
    """A tensor beside another one, by sums over their elements in float64.

    Args:
        square: the first tensor's length, squared; ``other_square`` is the second one's.
        product: the scalar product of both.
        off: length of their difference, squared.
        differing: number of elements whose values differ.
        nonfinite: number of elements of the second one that are not finite.
    """

    square: float
    other_square: float
    product: float
    off: float
    differing: int
    nonfinite: int

    @property
    def factor(self) -> float:
        """Return the multiple of the first tensor that comes nearest; 0 if it is all zeros."""
        return self.product / self.square if self.square else 0.0

    @property
    def rest(self) -> float:
        """Return the length of what :attr:`factor` leaves of the second tensor."""
        if not self.square:
            return self.other_length
        return math.sqrt(max(0.0, self.other_square - self.factor * self.product))

    @property
    def distance(self) -> float:
        return math.sqrt(self.off)

    @property
    def length(self) -> float:
        return math.sqrt(self.square)

    @property
    def other_length(self) -> float:
        return math.sqrt(self.other_square)

    @property
    def relative(self) -> float:
        """Return the distance over the first tensor's length; infinite from zeros."""
        if not self.distance:
            return 0.0
        return self.distance / self.length if self.square else math.inf


def fit(x: Tensor, y: Tensor) -> Fit:
    """Compare ``y`` with ``x`` of as many elements, once ``x`` is rounded to the format of ``y``.

    Example:
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
    return Fit(square, other_square, product, off, differing, nonfinite)


def weights_of(columns: Tensor, target: Tensor) -> tuple[list[float], float]:
    """Return the weights of several tensors, as columns, whose sum is nearest to another one, and
    the relative length that they do not explain.
    """
    columns = columns.cpu()
    target = target.flatten().cpu()
    weights = torch.linalg.lstsq(columns, target[:, None], driver="gelsd").solution[:, 0]
    return weights.tolist(), fit(target, columns @ weights).relative
