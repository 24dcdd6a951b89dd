"""Tensors a chunk at a time, so that uncompiled code needs little memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK, CHUNK_ON_GPU = 1 << 15, 1 << 22
"""Elements in a chunk. On a CPU ten float64 temporaries fit the second-level cache. On a GPU a launch costs as much as some
hundred thousand elements, and the temporaries stay within 1 GiB."""


def chunk_size(device: torch.device) -> int:
    """Return how many elements uncompiled code takes at a time on a device."""
    return CHUNK if device.type == "cpu" else CHUNK_ON_GPU


def flat_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Go through tensors of one shape together, in row-major order, as 1-D chunks of at most :func:`chunk_size` elements.

    Concatenated, the chunks of each tensor are its ``reshape(-1)``. Chunks of contiguous tensors are views; of other layouts one
    chunk at a time is copied.

    Example:
        >>> [chunk.tolist() for (chunk,) in flat_chunks(torch.arange(6).reshape(3, 2).t())]
        [[0, 2, 4, 1, 3, 5]]
    """
    first = tensors[0]
    if first.numel() == 0:
        return
    most = chunk_size(first.device)
    if all(tensor.is_contiguous() for tensor in tensors):
        yield from zip(*(tensor.reshape(-1).split(most) for tensor in tensors), strict=True)
    elif first.numel() <= most:
        yield tuple(tensor.reshape(-1) for tensor in tensors)
    elif first.shape[0] == 1:
        yield from flat_chunks(*(tensor[0] for tensor in tensors))
    else:
        rows = max(1, most // (first.numel() // first.shape[0]))
        for parts in zip(*(tensor.split(rows) for tensor in tensors), strict=True):
            yield from flat_chunks(*parts)
