"""Read tensors chunk by chunk, so that uncompiled code needs little memory."""

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK = 1 << 15
CHUNK_ON_GPU = 1 << 22
"""Elements in a chunk.

On a CPU ten float64 temporaries fit the second-level cache. On a GPU they stay within 1 GiB.
"""
PIECE = 1 << 16
"""Elements of a matrix that are processed at a time, where a whole copy can be avoided; at least a
64th of the matrix.
"""


def chunk_size(device: torch.device) -> int:
    """Return the number of elements that uncompiled code processes at a time on a device."""
    return CHUNK if device.type == "cpu" else CHUNK_ON_GPU


def flat_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield 1-D chunks of at most :func:`chunk_size` elements from tensors of one shape, in
    row-major order.

    Chunks of contiguous tensors are views. Another layout is copied.

    Example:
        >>> [chunk.tolist() for (chunk,) in flat_chunks(torch.arange(6).reshape(3, 2).t())]
        [[0, 2, 4, 1, 3, 5]]
    """
    if tensors[0].numel():
        most = chunk_size(tensors[0].device)
        yield from zip(*[tensor.reshape(-1).split(most) for tensor in tensors], strict=True)


def row_pieces(matrix: Tensor) -> tuple[Tensor, ...]:
    """Split a matrix into views of some rows each."""
    rows, cols = matrix.shape
    return matrix.split(max(PIECE // max(cols, 1), -(-rows // 64), 1))
