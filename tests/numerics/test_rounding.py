"""Cuts and hashed bits, against division with remainder and Python's integers."""

import numpy as np
import pytest
import torch
from torch import Tensor

from narrowgauge.numerics.rounding import float_of, narrowed, random_bits, round_bits
from oracles import codes as oracle
from tensors import unsigned

NANS = [0x7F800001, 0x7FBFFFFF, 0x7FC00001, 0x7FFF7FFF, 0x7FFFFFFF]


def float32_of(bits: oracle.Integers) -> Tensor:
    return float_of(torch.from_numpy(bits.astype(np.uint32).view(np.int32)))


@pytest.mark.parametrize("dropped", [0, 1, 7, 8, 15, 16, 18, 20, 22, 23])
def test_a_cut_is_division_with_remainder(dropped):
    """Of every bfloat16, its neighbours, and a million float32 a prime stride apart; to nearest, and
    up where the remainder and an addend fill a step.
    """
    every = np.arange(2**16, dtype=np.int64) * 2**16
    strided = np.arange(0, 2**32, 4093, dtype=np.int64)
    numbers = np.concatenate([every, every + 1, every + 0x8000, every + 0xFFFF, strided])
    numbers = numbers[~oracle.is_nan(numbers)]
    x = float32_of(numbers)
    for addend in (None, 0, 1, 2**dropped - 1)[: 4 if dropped else 1]:
        expected = oracle.cut(numbers, dropped, addend) if dropped else numbers
        assert np.array_equal(unsigned(round_bits(x, dropped, addend)), expected)
    if dropped == 16:
        stored = unsigned(narrowed(x, torch.bfloat16).float().view(torch.int32))
        assert np.array_equal(stored, oracle.cut(numbers, 16))


@pytest.mark.parametrize(
    ("dtype", "quiet_one"), [(torch.bfloat16, 0x7FC0), (torch.float16, 0x7E00)]
)
def test_every_nan_is_rounded_to_the_quiet_one_of_its_format(dtype, quiet_one):
    """In vectors and in what is left beside them, which PyTorch's conversion treats otherwise."""
    bits = np.array([*NANS, *(nan + oracle.SIGN for nan in NANS)] * 7, dtype=np.int64)
    x = float32_of(bits[:67])
    assert (narrowed(x, dtype).view(torch.int16) == quiet_one).all()
    assert (narrowed(x, torch.float32).view(torch.int32) == 0x7FC00000).all()


def test_random_bits_are_the_written_hash():
    keys = torch.tensor([0, -1, -(2**31), 2**31 - 1, *range(7, 2**31, 2**24 + 1)]).int()
    for seed in (0, 1, -1, 12345, -(2**31)):
        result = unsigned(random_bits(keys, torch.tensor(seed, dtype=torch.int32)))
        assert result.tolist() == [oracle.hashed(key, seed) for key in keys.tolist()]
