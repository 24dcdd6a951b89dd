"""Checksums: equal for equal bits however they lie in memory, and another one after any flipped bit."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from covering import exhaustive
from narrowgauge.numerics.checksums import CHUNK_BYTES, checksum, chunk_sums, word_sum

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int16, torch.uint8]
LENGTHS = [1, 3, 8, 1001, CHUNK_BYTES // 4, CHUNK_BYTES // 4 + 1, 3 * CHUNK_BYTES // 4 + 5]


def example(dtype: torch.dtype, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    size = length * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype)


def slowly(x: Tensor) -> int:
    """The definition, in Python's integers."""
    data = bytes(x.contiguous().view(-1).view(torch.uint8).tolist())
    data += bytes(-len(data) % 8)
    total = 0
    for place in range(0, len(data), CHUNK_BYTES):
        chunk = data[place : place + CHUNK_BYTES]
        words = sum(int.from_bytes(chunk[k : k + 8], "little") for k in range(0, len(chunk), 8))
        total += words * (2 * (place // CHUNK_BYTES) + 1) * 0x9E3779B97F4A7C15
    return total % (1 << 64)


@exhaustive("length", LENGTHS)
@exhaustive("dtype", DTYPES)
def test_it_is_its_definition(dtype: torch.dtype, length: int) -> None:
    x = example(dtype, length)
    assert int(checksum(x)) % (1 << 64) == slowly(x)


@exhaustive("dtype", DTYPES)
def test_it_depends_on_neither_offset_nor_strides(dtype: torch.dtype) -> None:
    x = example(dtype, 24)
    shifted = torch.cat([x[:1], x])[1:]
    assert checksum(shifted) == checksum(x)
    assert checksum(x.view(4, 6).t().contiguous().t()) == checksum(x.view(4, 6))


@exhaustive("length", LENGTHS)
def test_any_flipped_bit_changes_it(length: int) -> None:
    x = example(torch.bfloat16, length)
    before, plain, raw, draw = checksum(x), word_sum(x), x.view(torch.uint8), random.Random(length)
    for _ in range(64):
        place, bit = draw.randrange(len(raw)), 1 << draw.randrange(8)
        raw[place] ^= bit
        assert checksum(x) != before and word_sum(x) != plain
        raw[place] ^= bit
    assert checksum(x) == before


def test_exchanged_chunks_change_it_and_the_sums_say_which() -> None:
    x = example(torch.int32, 4 * CHUNK_BYTES // 4)
    y = x.view(4, -1)[[0, 2, 1, 3]].reshape(-1)
    assert checksum(x) != checksum(y)
    assert (chunk_sums(x) != chunk_sums(y)).tolist() == [False, True, True, False]


def test_of_nothing_it_is_zero() -> None:
    assert int(checksum(torch.empty(0, 3))) == 0
