"""Hashes: equal for equal bits however they lie in memory, and different after any flipped bit."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from narrowgauge.numerics import chunks
from narrowgauge.numerics.hashing import combine, fingerprint, fingerprint_all
from oracles.exact_sums import splitmix_fingerprint


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def unsigned(x: Tensor) -> list[int]:
    size = x.element_size()
    raw = x.contiguous().view(-1).view(torch.uint8).tolist()
    return [int.from_bytes(raw[i : i + size], "little") for i in range(0, len(raw), size)]


DTYPES = [
    "float8_e4m3fn",
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "complex64",
    "bool",
    "uint8",
    "int16",
    "int64",
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_fingerprint_is_the_stated_sum(dtype, monkeypatch):
    x = (torch.randn(7, 9, generator=generator(5)) * 50).to(getattr(torch, dtype))
    for offset in (0, 1, 2**40 + 3):
        assert fingerprint(x, offset=offset) == splitmix_fingerprint(unsigned(x), offset)
    monkeypatch.setattr(chunks, "CHUNK", 8)
    assert fingerprint(x) == splitmix_fingerprint(unsigned(x))


def test_shards_add_up():
    x = torch.randn(1000, generator=generator(6))
    for seed in range(20):
        marks = torch.randint(0, 1001, (4,), generator=generator(seed)).sort().values.tolist()
        edges = [0, *marks, 1000]
        shards = [fingerprint(x[a:b], offset=a) for a, b in pairwise(edges)]
        assert combine(shards) == combine(reversed(shards)) == fingerprint(x)


def test_named_fingerprints_depend_on_names_and_not_on_order():
    a = torch.randn(20, generator=generator(9))
    b = torch.randn(20, generator=generator(10))
    reference = fingerprint_all({"a": a, "b": b})
    assert len(reference) == 16
    assert (
        reference
        == fingerprint_all({"b": b, "a": a})
        == fingerprint_all({"a": fingerprint(a), "b": b})
    )
    renamed = [{"a": b, "b": a}, {"a": a}, {"a": a, "c": b}, {"a": a, "b": b, "c": a[:0]}, {}]
    assert len({reference, *map(fingerprint_all, renamed)}) == 1 + len(renamed)
    assert fingerprint_all({}) == "0" * 16
