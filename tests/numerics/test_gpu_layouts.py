"""Layouts for a GPU's kernels: every scale and every code lies where the published formula says,
and comes back.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from narrowgauge.numerics.quantization import (
    four_bit_codes,
    four_bit_values,
    packed_pairs,
    tiled_scales,
    unpacked_pairs,
)
from oracles.cuda_matmuls import tiled_offset, up
from tables import exhaustive

# A part of a group of 32, groups, tiles, and one more of each.
ROWS = [1, 5, 31, 32, 33, 64, 65, 96, 127, 128, 129, 256, 257, 385]


@exhaustive("rows", ROWS)
def test_every_scale_lies_where_cublas_looks_for_it(rows: int) -> None:
    for blocks in (1, 3, 4, 5, 8, 13, 33):
        # Bytes that repeat late: a wrong place shows.
        row = torch.arange(rows)[:, None]
        block = torch.arange(blocks)
        scales = ((row * 37 + block * 101) % 251 + 1).to(torch.uint8)
        tiled = tiled_scales(scales)
        assert tiled.is_contiguous() and tiled.shape == (up(rows, 128) * up(blocks, 4),)
        places = tiled_offset(row, block, up(blocks, 4))
        assert torch.equal(tiled[places], scales)
        tiled[places] = 0
        assert not tiled.any(), "what fills the tiles up is zero"


def test_four_bits_are_those_of_ml_dtypes() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert torch.equal(four_bit_values(codes), torch.from_numpy(values))
    # A negative zero becomes the zero.
    assert torch.equal(four_bit_codes(four_bit_values(codes)), torch.where(codes == 8, 0, codes))


@exhaustive("dim", [0, 1])
def test_every_pair_of_codes_is_packed_with_the_first_in_the_low_half(dim: int) -> None:
    first = torch.arange(16).repeat_interleave(16)
    second = torch.arange(16).repeat(16)
    codes = torch.stack([first, second], 1).flatten().to(torch.uint8)[None, :]
    codes = codes if dim == 1 else codes.t()
    packed = packed_pairs(codes, dim)
    assert torch.equal(packed.flatten(), (first + 16 * second).to(torch.uint8))
    assert packed.shape == ((1, 256) if dim == 1 else (256, 1))
    assert torch.equal(unpacked_pairs(packed, dim), codes)
