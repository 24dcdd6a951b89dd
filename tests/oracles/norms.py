"""Norms of many tensors from the pieces of ``narrowgauge.numerics.summation``, eagerly, on one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowgauge.numerics.summation import (
    chunks_of,
    from_grid,
    grid_scales,
    grid_sum_of_squares,
    largest_magnitude,
    root,
)


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements of all tensors, in no order: float64, 0-d.

    With ``n`` elements, off by at most ``n · 2^(-2w)`` times the largest square, ``w = 63 - n.bit_length()``, and two
    float64 roundings. No elements: 0. Any NaN: NaN; else any infinity: infinity.
    """
    filled = [tensor.detach() for tensor in tensors if tensor.numel() > 0]
    if not filled:
        return torch.zeros((), dtype=torch.float64)
    largest = torch.stack([largest_magnitude(chunk) for chunk in chunks_of(filled)]).amax()
    scales = grid_scales(largest, sum(x.numel() for x in filled))
    steps = torch.stack([grid_sum_of_squares(chunk, scales) for chunk in chunks_of(filled)]).sum(0)
    return from_grid(steps, scales, largest)


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all tensors taken as one vector: float32, 0-d; infinite beyond float32."""
    return root(sum_of_squares(tensors))
