"""Expansions: roundings against torch's casts, sums and products against exact rationals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from narrowgauge.numerics.expansions import NearestEven, two_prod, two_sum
from narrowgauge.numerics.rounding import float_of
from narrowgauge.spec.formats import get_format
from tensors import same_bits

DROPPED = {"bfloat16": 16, "float16": 13, "float8_e4m3fn": 20, "float8_e5m2": 21}


def exact(parts: Sequence[Tensor]) -> list[Fraction]:
    """The number that each expansion stands for."""
    high, low = (part.tolist() for part in parts)
    return [Fraction(x) + Fraction(y) for x, y in zip(high, low, strict=True)]


@pytest.mark.parametrize("name", DROPPED)
def test_nearest_even_is_torchs_cast_wherever_the_format_reaches(name: str) -> None:
    """Of a million float32 a prime stride apart, and ties."""
    rn = NearestEven(DROPPED[name])
    row = get_format(name)
    bits = torch.cat([torch.arange(0, 2**31, 4093), torch.arange(0, 2**31, 1 << 11)])
    x = float_of(bits.to(torch.int32))
    x = torch.cat([x, -x])
    normal = x[(x.abs() >= 2.0**row.min_exponent) & (x.abs() <= row.max)]
    assert len(normal) > 20_000
    assert same_bits(rn(normal), normal.to(getattr(torch, name)).float())
    special = torch.tensor([math.inf, -math.inf, torch.finfo(torch.float32).max])
    assert rn(special).tolist() == [math.inf, -math.inf, math.inf]
    assert rn(torch.tensor([math.nan])).isnan()
    assert same_bits(rn(torch.tensor([-0.0])), torch.tensor([-0.0]))


@pytest.mark.parametrize("dropped", [13, 16, 20, 21])
def test_two_sum_and_two_prod_at_any_distance(dropped: int) -> None:
    rn = NearestEven(dropped)
    generator = torch.Generator().manual_seed(dropped)
    a = rn(torch.randn(20_000, generator=generator))
    b = rn(
        torch.randn(20_000, generator=generator)
        * 2.0 ** torch.randint(-45, 46, (20_000,), generator=generator)
    )
    assert exact(two_sum(a, b, rn)) == exact((a, b)) == exact(two_sum(b, a, rn))
    p, e = two_prod(a, b, rn)
    assert exact((p, e)) == [
        Fraction(x) * Fraction(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]
    assert torch.equal(rn(p), p) and torch.equal(rn(e), e)
