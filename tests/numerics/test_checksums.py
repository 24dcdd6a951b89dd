"""Fingerprints and checksums: equal for equal bits however they lie in memory, and different after any flipped bit."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from covering import exhaustive
from narrowgauge.errors import FormatError
from narrowgauge.numerics import summation
from narrowgauge.numerics.checksums import (
    CHUNK_BYTES,
    checksum,
    chunk_sums,
    combine,
    fingerprint,
    fingerprint_all,
    word_sum,
)
from oracles.exact_sums import splitmix_fingerprint

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


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def unsigned(x: Tensor) -> list[int]:
    size = x.element_size()
    raw = x.contiguous().view(-1).view(torch.uint8).tolist()
    return [int.from_bytes(raw[i : i + size], "little") for i in range(0, len(raw), size)]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float8_e4m3fn,
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.int64,
    ],
)
def test_fingerprint_is_the_stated_sum(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = (torch.randn(7, 9, generator=generator(5)) * 50).to(dtype)
    for offset in (0, 1, 2**40 + 3):
        assert fingerprint(x, offset=offset) == splitmix_fingerprint(unsigned(x), offset)
    monkeypatch.setattr(summation, "CHUNK", 8)
    assert fingerprint(x) == splitmix_fingerprint(unsigned(x))


def test_fingerprint_is_pinned() -> None:
    # splitmix64 seeded with 0 gives this as its first output: one zero element at place 0.
    assert fingerprint(torch.zeros(1)) == 0xE220A8397B1DCDAF
    assert fingerprint(torch.empty(0)) == 0


def test_shards_add_up() -> None:
    x = torch.randn(1000, generator=generator(6))
    for seed in range(20):
        marks = torch.randint(0, 1001, (4,), generator=generator(seed)).sort().values.tolist()
        edges = [0, *marks, 1000]
        shards = [fingerprint(x[a:b], offset=a) for a, b in pairwise(edges)]
        assert combine(shards) == combine(reversed(shards)) == fingerprint(x)


def test_fingerprint_ignores_strides() -> None:
    x = torch.randn(12, 10, generator=generator(7))
    assert fingerprint(x.t()) == fingerprint(x.t().contiguous()) != fingerprint(x)
    assert fingerprint(x[::2, 1:]) == fingerprint(x[::2, 1:].clone())
    assert fingerprint(x) == fingerprint(x.requires_grad_()) == fingerprint(x.reshape(-1))


def test_fingerprint_sees_every_small_change() -> None:
    x = torch.randn(500, generator=generator(8)).requires_grad_(False)
    x[3] = 0.0
    before = fingerprint(x)
    seen = {before}
    for index in range(500):
        for flip in (0x1, -(2**31)):
            y = x.clone()
            y.view(torch.int32)[index] ^= flip
            seen.add(fingerprint(y))
    swapped = x.clone()
    swapped[[10, 11]] = x[[11, 10]]
    seen |= {fingerprint(swapped), fingerprint(x.roll(1)), fingerprint(x[:-1]), fingerprint(-x)}
    assert len(seen) == 1 + 1000 + 4


def test_nan_has_a_fingerprint_of_its_own_bits() -> None:
    x = torch.tensor([1.0, math.nan])
    assert fingerprint(x) == fingerprint(x.clone()) != fingerprint(torch.tensor([math.nan, 1.0]))


def test_fingerprint_refuses_sixteen_byte_elements() -> None:
    with pytest.raises(FormatError, match="complex128"):
        fingerprint(torch.zeros(2, dtype=torch.complex128))


def test_named_fingerprints_depend_on_names_and_not_on_order() -> None:
    a, b = torch.randn(20, generator=generator(9)), torch.randn(20, generator=generator(10))
    whole = fingerprint_all({"a": a, "b": b})
    assert len(whole) == 16
    assert whole == fingerprint_all({"b": b, "a": a}) == fingerprint_all({"a": fingerprint(a), "b": b})
    others = [{"a": b, "b": a}, {"a": a}, {"a": a, "c": b}, {"a": a, "b": b, "c": a[:0]}, {}]
    assert len({whole, *map(fingerprint_all, others)}) == 1 + len(others)
    assert fingerprint_all({}) == "0" * 16
