"""Cuts, dithers and hashed bits, against division with remainder and Python's integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from narrowgauge.numerics.rounding import (
    cut,
    dither,
    float_of,
    narrowed,
    random_bits,
)
from oracles import codes as oracle
from tensors import unsigned

DROPPED = (0, 1, 7, 8, 15, 16, 18, 20, 22, 23)
SPECIAL = [
    0x00000000, 0x00000001, 0x00000080, 0x00007FFF, 0x00008000, 0x00008001, 0x007FFFFF, 0x00800000, 0x00FFFFFF,
    0x3F800000, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000,
]  # fmt: skip
NANS = [
    0x7F800001,
    0x7F80FFFF,
    0x7FBFFFFF,
    0x7FC00000,
    0x7FC00001,
    0x7FFF0000,
    0x7FFF7FFF,
    0x7FFFFFFF,
]


def from_unsigned(bits: oracle.Integers) -> Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.int32))


def with_signs(bits: list[int]) -> oracle.Integers:
    return np.array([*bits, *(b + oracle.SIGN for b in bits)], dtype=np.int64)


@pytest.fixture(scope="module")
def numbers() -> oracle.Integers:
    """Every bfloat16, a million float32 a prime stride apart, and what is special; no NaN."""
    every = np.arange(2**16, dtype=np.int64) * 2**16
    strided = np.arange(0, 2**32, 4093, dtype=np.int64)
    patterns = np.concatenate([every, strided, with_signs(SPECIAL)])
    return patterns[~oracle.is_nan(patterns)]


@pytest.mark.parametrize("dropped", DROPPED)
def test_cut_to_the_nearest_is_division_with_remainder(
    numbers: oracle.Integers, dropped: int
) -> None:
    x = float_of(from_unsigned(numbers))
    result = unsigned(cut(x, dropped, None))
    expected = oracle.cut(numbers, dropped) if dropped else numbers
    assert np.array_equal(result, expected)
    if dropped == 16:
        assert np.array_equal(
            unsigned(narrowed(x, torch.bfloat16).float().view(torch.int32)), expected
        )
        crossed = x[:6].view(2, 3).t()
        assert torch.equal(narrowed(crossed, torch.bfloat16), crossed.bfloat16())


@pytest.mark.parametrize("dropped", [8, 16, 18, 20])
def test_cut_with_an_addend_rounds_up_where_the_remainder_fills_a_step(
    numbers: oracle.Integers, dropped: int
) -> None:
    some = numbers[::7]
    for addend in (0, 1, 2**dropped - 1):
        result = unsigned(cut(float_of(from_unsigned(some)), dropped, addend))
        assert np.array_equal(result, oracle.cut(some, dropped, addend))


@pytest.mark.parametrize(
    ("dtype", "quiet_one"), [(torch.bfloat16, 0x7FC0), (torch.float16, 0x7E00)]
)
def test_every_nan_is_rounded_to_the_quiet_one_of_its_format(
    dtype: torch.dtype, quiet_one: int
) -> None:
    """In vectors and in what is left beside them, which PyTorch's conversion treats otherwise."""
    x = float_of(from_unsigned(with_signs(NANS * 5)))[:71]
    assert (narrowed(x, dtype).view(torch.int16) == quiet_one).all()
    assert (narrowed(x, torch.float32).view(torch.int32) == 0x7FC00000).all()


def test_random_bits_are_the_written_hash() -> None:
    generator = torch.Generator().manual_seed(5)
    keys = torch.randint(-(2**31), 2**31, (500,), generator=generator).to(torch.int32)
    keys = torch.cat([keys, torch.tensor([0, -1, -(2**31), 2**31 - 1], dtype=torch.int32)])
    for seed in (0, 1, -1, 12345, -(2**31)):
        result = unsigned(random_bits(keys, torch.tensor(seed, dtype=torch.int32)))
        assert result.tolist() == [oracle.hashed(key, seed) for key in keys.tolist()]


@pytest.mark.parametrize(
    ("start", "count", "dropped"),
    [(0, 8, 8), (8, 12, 18), (20, 12, 20), (0, 16, 16), (16, 16, 16), (0, 12, 4), (24, 8, 20)],
)
def test_dither_is_the_named_bits_and_the_middle_of_the_rest(
    start: int, count: int, dropped: int
) -> None:
    words = torch.randint(-(2**31), 2**31, (2000,), generator=torch.Generator().manual_seed(2)).to(
        torch.int32
    )
    used = min(count, dropped)
    missing = 2 ** (dropped - used)
    expected = []
    for word in unsigned(words).tolist():
        expected.append(oracle.field(word, start, used) * missing + missing // 2)
    result = dither(words, start, count, dropped)
    assert result.tolist() == expected
    assert int(result.min()) >= 0 and int(result.max()) < 2**dropped
