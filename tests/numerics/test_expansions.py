"""Expansions: roundings against torch's casts, sums and products against exact rationals, bounds
asserted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from narrowgauge.numerics.expansions import (
    NearestEven,
    Pair,
    fast_two_sum,
    grow,
    mul,
    pair_of,
    two_prod,
    two_sum,
)
from narrowgauge.numerics.rounding import float_of
from narrowgauge.spec.formats import get_format
from oracles import rational_expansions as oracle
from tensors import same_bits

DROPPED = {"bfloat16": 16, "float16": 13, "float8_e4m3fn": 20, "float8_e5m2": 21}
BFLOAT16 = NearestEven(16)
U = 2.0**-8


def lists(parts: Sequence[Tensor]) -> list[list[float]]:
    return [part.tolist() for part in parts]


def exact(parts: Sequence[Tensor]) -> list[Fraction]:
    return oracle.values(lists(parts))


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


def samples(seed: int, count: int = 1200) -> Pair:
    """Pairs of all kinds: near powers of two, with largest, zero or far smaller second parts."""
    generator = torch.Generator().manual_seed(seed)
    power = 2.0 ** torch.randint(-6, 7, (count,), generator=generator)
    x = torch.randn(count, dtype=torch.float64, generator=generator) * power
    near = power * (1 + (torch.rand(count, dtype=torch.float64, generator=generator) - 0.5) * 4 * U)
    x = torch.where(torch.rand(count, generator=generator) < 0.3, x.sign() * near, x)
    high, low = pair_of(x, BFLOAT16)
    half = high.frexp().exponent.float().exp2() * U / 2
    half = half * torch.randn(count, generator=generator).sign()
    kind = torch.randint(0, 10, (count,), generator=generator)
    rounded = BFLOAT16(half * (1 - 2 * U))
    for case, value in enumerate((half, rounded, 0 * half, BFLOAT16(half * 2.0**-9))):
        low = torch.where(kind == case, value, low)
    return fast_two_sum(high, low, BFLOAT16)


def cancelling(x: Pair, seed: int) -> Tensor:
    """Nearly the first part of -x, some spacings off."""
    generator = torch.Generator().manual_seed(seed)
    spacing = x[0].frexp().exponent.float().exp2() * U
    return BFLOAT16(spacing * torch.randint(-2, 3, (len(x[0]),), generator=generator) - x[0])


def products(x: Pair, y: Pair) -> list[Fraction]:
    return [a * b for a, b in zip(exact(x), exact(y), strict=True)]


def sums(x: Pair, y: Tensor) -> list[Fraction]:
    return [a + b for a, b in zip(exact(x), exact((y,)), strict=True)]


def test_errors_are_within_the_stated_bounds() -> None:
    x = samples(1)
    y = samples(2)
    near = cancelling(x, 3)
    for result, expected, bound in (
        (grow(x, y[0], BFLOAT16), sums(x, y[0]), 2),
        (grow(x, near, BFLOAT16), sums(x, near), 2),
        (mul(x, y, BFLOAT16), products(x, y), 5),
    ):
        most = bound * Fraction(U) ** 2
        assert oracle.worst(exact(result), expected) <= most
        assert oracle.separated(lists(result), 8)
        assert all(torch.equal(BFLOAT16(part), part) for part in result)
        # The bound is not so wide that a result of one part would pass.
        assert oracle.worst(exact(result[:1]), expected) > most


def test_a_pair_is_as_near_as_it_can_be() -> None:
    x = torch.randn(3000, generator=torch.Generator().manual_seed(10))
    parts = pair_of(x, BFLOAT16)
    assert oracle.worst(exact(parts), exact((x,))) <= Fraction(U) ** 2
    assert oracle.separated(lists(parts), 8)
