"""Four-bit codes: their values are those of ml_dtypes, and packed pairs come back."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from narrowgauge.numerics.quantization import (
    four_bit_codes,
    four_bit_values,
    packed_pairs,
    unpacked_pairs,
)
from tables import exhaustive


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
