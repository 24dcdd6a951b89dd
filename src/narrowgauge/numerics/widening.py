"""Widening: products of narrow operands by float32 matmuls, for a processor that does not multiply their format.

bfloat16, float16 and int8 numbers are float32 numbers, and the product of two bfloat16 or int8 numbers is one exactly. Widened,
multiplied and added up in float32 and rounded once, they give the values that a narrow matmul gives; only the order of the sum
differs. Of integers not even that: 1,024 products of two int8 codes add up within float32's 24 bits, and such sums are added
exactly. Only tiles of the operands are widened at a time, in memory that is kept for the next ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from narrowgauge.spec.processor import multiplies

EXACT_TERMS = 1 << 10
"""So many products of 128 × 128 add up within float32's 24 bits."""
INT32_TERMS = 1 << 16
"""So many add up within int32."""
# Elements of a widened operand: 32 MiB. Fewer make thin matmuls, and widen the other operand more often.
_TILE_ELEMENTS = 1 << 23
_LEAST_SIDE = 256

Tile = tuple[slice, slice]


def is_widened(dtype: torch.dtype, device_type: str) -> bool:
    """Whether products of operands in a dtype are computed as float32 there.

    Args:
        dtype: of both operands.
        device_type: ``"cpu"`` or another.
    """
    return device_type == "cpu" and not multiplies(str(dtype).removeprefix("torch."))


def float32_tiles(a: Tensor, b: Tensor) -> Iterator[tuple[Tile, Tensor]]:
    """The product of two matrices by tiles: rows and columns of the result, and its float32 values there.

    Args:
        a: ``[rows, contraction]`` in any layout.
        b: ``[contraction, columns]`` in any layout.
    Yields:
        Tiles that together are the result; the values lie in memory that the next tile writes over.
    """
    side = max(_TILE_ELEMENTS // max(a.shape[1], 1), _LEAST_SIDE)
    for top in range(0, a.shape[0], side):
        rows = slice(top, min(top + side, a.shape[0]))
        left = _widened("left", a[rows])
        for start in range(0, b.shape[1], side):
            columns = slice(start, min(start + side, b.shape[1]))
            values = SCRATCH.take("values", torch.float32, rows.stop - top, columns.stop - start)
            yield (rows, columns), torch.mm(left, _widened("right", b[:, columns]), out=values)


def sum_integers(a: Tensor, b: Tensor) -> Tensor:
    """The exact product of int8 matrices as float32 rounds it, in memory that the next call writes over."""
    values = SCRATCH.take("values", torch.float32, a.shape[0], b.shape[1])
    if a.shape[1] <= EXACT_TERMS:
        return torch.mm(_widened("left", a), _widened("right", b), out=values)
    # PyTorch adds tensors of two dtypes value by value, 30 times slower: the sums are converted first.
    wide = torch.int32 if a.shape[1] <= INT32_TERMS else torch.float64
    total = SCRATCH.take("total", wide, *values.shape).zero_()
    part = SCRATCH.take("part", wide, *values.shape)
    for left, right in zip(a.split(EXACT_TERMS, 1), b.split(EXACT_TERMS, 0), strict=True):
        total += part.copy_(torch.mm(_widened("left", left), _widened("right", right), out=values))
    return values.copy_(total)


def _widened(name: str, x: Tensor) -> Tensor:
    """The matrix in float32, lying as it lay."""
    if x.dtype == torch.float32:
        return x
    if x.stride(0) == 1 and x.stride(1) != 1:
        return _widened(name, x.t()).t()
    return SCRATCH.take(name, torch.float32, *x.shape).copy_(x)


class _Scratch(threading.local):
    """Memory that products go through, kept: fresh pages would cost as much as what is done to them."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
        """``[rows, columns]`` of it."""
        buffer = self.buffers.get((name, dtype))
        if buffer is None or buffer.numel() < rows * columns:
            # What is made in inference mode cannot be written outside of it.
            with torch.inference_mode(False):
                buffer = self.buffers[name, dtype] = torch.empty(rows * columns, dtype=dtype)
        return buffer[: rows * columns].view(rows, columns)


SCRATCH = _Scratch()
