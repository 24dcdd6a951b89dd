"""How a GPU's matmul kernels want codes and scales to lie: pure functions of tensors, each with its inverse.

*Four-bit codes* travel two to a byte, the first of each pair in the low half: ``torch.float4_e2m1fn_x2``.

*Scales in tiles.* On Blackwell the scales of blocks of 16 or 32 values lie in tiles of 128 rows × 4 scales, 512 bytes each, in
which the four rows 32 apart are neighbours: the order in which the tensor cores load them. A matrix of scales is filled up with
zeros to whole tiles; the tiles follow each other row by row.

*Scales in columns.* On Hopper the float32 scales of blocks of 128 values lie one column after another.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TILE_ROWS, TILE_SCALES = 128, 4
_GROUP_ROWS = 32
SQUARE_ALIGNMENT = 4
"""Scales of square blocks: the length of a column is a multiple of this."""
# The magnitudes of e2m1, doubled, by code; the sign is the fourth bit.
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)


def four_bit_codes(values: Tensor) -> Tensor:
    """The codes 0 … 15 of float numbers that are e2m1's own: uint8 of the same shape. Zeros lose their sign."""
    doubled = (values.abs() * 2).to(torch.int32)
    index = doubled.clamp_max(4) + (doubled >= 6) + (doubled >= 8) + (doubled >= 12)
    return torch.where(values < 0, index + 8, index).to(torch.uint8)


def four_bit_values(codes: Tensor) -> Tensor:
    """The float32 numbers of e2m1 codes 0 … 15."""
    table = torch.tensor([*_DOUBLED, *(-doubled for doubled in _DOUBLED)], dtype=torch.float32, device=codes.device) / 2
    return table[codes.to(torch.int32)]


def packed_pairs(codes: Tensor, dim: int) -> Tensor:
    """Codes 0 … 15 packed two to a byte along ``dim``, which has an even length: that of the even place in the low half.

    Source: PyTorch, ``torch.float4_e2m1fn_x2``; cuBLAS, ``CUDA_R_4F_E2M1``.
    Example:
        >>> packed_pairs(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8), 1)
        tensor([[33, 15]], dtype=torch.uint8)
    """
    pairs: Tensor = codes.unflatten(dim, (-1, 2))
    return pairs.select(dim + 1, 0) | (pairs.select(dim + 1, 1) << 4)


def unpacked_pairs(packed: Tensor, dim: int) -> Tensor:
    """The inverse of :func:`packed_pairs`."""
    return torch.stack([packed & 15, packed >> 4], dim + 1).flatten(dim, dim + 1)


def tiled_scales(scales: Tensor) -> Tensor:
    """One-byte scales ``[rows, blocks]`` in tiles of 128 × 4, flat: what the matmuls of Blackwell read.

    The scale of row ``r`` and block ``b`` is at ``512 * tile + (r % 32) * 16 + (r % 128 // 32) * 4 + b % 4``, where the tile
    ``(r // 128, b // 4)`` is counted row by row. What fills the tiles up is zero.

    Source: cuBLAS, "1D Block Scaling Factors Layout": ``offset = (outer % 32) * 16 + (outer / 32) * 4 + inner`` within a tile;
    PyTorch, ``SwizzleType.SWIZZLE_32_4_4``.
    Example:
        >>> tiled_scales(torch.arange(1, 129, dtype=torch.uint8)[:, None])[:17:4]
        tensor([ 1, 33, 65, 97,  2], dtype=torch.uint8)
    """
    rows, blocks = scales.shape
    whole = F.pad(scales.view(torch.uint8), (0, -blocks % TILE_SCALES, 0, -rows % TILE_ROWS))
    tiles = whole.view(-1, TILE_ROWS // _GROUP_ROWS, _GROUP_ROWS, whole.shape[1] // TILE_SCALES, TILE_SCALES)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


def untiled_scales(tiled: Tensor, rows: int, blocks: int) -> Tensor:
    """The inverse of :func:`tiled_scales`: ``[rows, blocks]``."""
    across = -(-blocks // TILE_SCALES)
    tiles = tiled.view(torch.uint8).view(-1, across, _GROUP_ROWS, TILE_ROWS // _GROUP_ROWS, TILE_SCALES)
    whole = tiles.permute(0, 3, 2, 1, 4).reshape(-1, across * TILE_SCALES)
    return whole[:rows, :blocks].contiguous().view(tiled.dtype)


def scales_in_columns(scales: Tensor) -> Tensor:
    """Scales ``[rows, blocks]``, stored column by column.

    Source: cuBLAS, "Scaling factors layouts" of 128-element blocks: M-major for A, N-major for B.
    """
    return scales.t().contiguous().t()


def square_scales_in_columns(scales: Tensor) -> Tensor:
    """The scales ``[row blocks, blocks]`` of square blocks as ``[blocks, row blocks]``, stored column by column; the length of a
    column is filled up with zeros to a multiple of 4.

    Source: as of :func:`scales_in_columns`: K-major, "the stride between the consecutive columns must be a multiple of 4".
    """
    return F.pad(scales, (0, -scales.shape[1] % SQUARE_ALIGNMENT)).contiguous().t()
