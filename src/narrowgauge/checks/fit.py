"""How far one tensor is from another, and from its nearest multiple."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Fit(NamedTuple):
    """A tensor as a multiple of another one.

    Args:
        factor: of the other tensor that comes nearest; 0 if that is all zeros.
        rest: length of what the factor leaves; ``distance`` of what a factor of 1 leaves.
        length: of the tensor.
    """

    factor: float
    rest: float
    distance: float
    length: float


def fit(x: Tensor, y: Tensor) -> Fit:
    """Return how ``y`` is a multiple of ``x``, in float64.

    Example:
        >>> import torch
        >>> fit(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0]))
        Fit(factor=2.0, rest=0.0, distance=2.23606797749979, length=4.47213595499958)
    """
    wide = x.double().flatten()
    target = y.double().flatten().to(wide.device)
    square = float(wide @ wide)
    factor = float(wide @ target) / square if square else 0.0
    rest = float((target - factor * wide).norm())
    return Fit(factor, rest, float((target - wide).norm()), float(target.norm()))
