"""Expansions: roundings against torch's casts, sums and products against exact rationals, bounds
asserted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from narrowgauge.numerics.expansions import (
    NearestEven,
    Parts,
    expansion_of,
    grow,
    mul,
    renormalise,
    two_prod,
    two_sum,
)
from narrowgauge.numerics.rounding import float_of
from narrowgauge.spec.formats import get_format
from oracles import rational_expansions as oracle
from tensors import same_bits

DROPPED = {"bfloat16": 16, "float16": 13, "float8_e4m3fn": 20, "float8_e5m2": 21}
BFLOAT16 = NearestEven(16)


def lists(parts: Sequence[Tensor]) -> list[list[float]]:
    return [part.tolist() for part in parts]


def exact(parts: Sequence[Tensor]) -> list[Fraction]:
    return oracle.values(lists(parts))


def every_prefix_and_its_ties() -> Tensor:
    """A million float32 a prime stride apart; every 16-bit prefix with its tie and the values
    beside the tie.
    """
    strided = np.arange(0, 2**32, 4093, dtype=np.int64)
    prefixes = np.arange(2**16, dtype=np.int64)[:, None] * 2**16
    ties = (
        prefixes + np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    ).ravel()
    return float_of(
        torch.from_numpy(np.concatenate([strided, ties]).astype(np.uint32).view(np.int32))
    )


@pytest.mark.parametrize("name", DROPPED)
def test_nearest_even_is_torchs_cast_wherever_the_format_reaches(name: str) -> None:
    rn = NearestEven(DROPPED[name])
    row = get_format(name)
    x = every_prefix_and_its_ties()
    normal = x[(x.abs() >= 2.0**row.min_exponent) & (x.abs() <= row.max)]
    cast = normal.to(getattr(torch, name)).float()
    assert len(normal) > 20_000
    assert same_bits(rn(normal), cast)
    assert same_bits(rn(rn(normal)), rn(normal))
    near_one = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    for power in (-100, -20, 20, 100):
        assert same_bits(rn(near_one * 2.0**power), rn(near_one) * 2.0**power)
    infinity = torch.tensor([math.inf, -math.inf, torch.finfo(torch.float32).max])
    assert rn(infinity).tolist() == [math.inf, -math.inf, math.inf]
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


PRECISIONS = {"bfloat16": 16, "float8_e4m3fn": 20}


def samples(rn: NearestEven, length: int, seed: int, count: int = 1200) -> Parts:
    """Expansions of all kinds: near powers of two, with largest, zero or far smaller later parts."""
    generator = torch.Generator().manual_seed(seed)
    u = 2.0 ** -(24 - rn.dropped)
    power = 2.0 ** torch.randint(-6, 7, (count,), generator=generator)
    x = torch.randn(count, dtype=torch.float64, generator=generator) * power
    near = power * (1 + (torch.rand(count, dtype=torch.float64, generator=generator) - 0.5) * 4 * u)
    x = torch.where(torch.rand(count, generator=generator) < 0.3, x.sign() * near, x)
    parts = list(expansion_of(x, length, rn))
    for i in range(1, length):
        half = (
            parts[i - 1].frexp().exponent.float().exp2()
            * u
            / 2
            * torch.randn(count, generator=generator).sign()
        )
        kind = torch.randint(0, 10, (count,), generator=generator)
        for case, value in enumerate((half, rn(half * (1 - 2 * u)), 0 * half, rn(half * 2.0**-9))):
            parts[i] = torch.where(kind == case, value, parts[i])
    return renormalise(parts, length, rn) if length > 1 else tuple(parts)


def cancelling(x: Parts, rn: NearestEven, seed: int) -> Parts:
    """Nearly -x: one part some spacings off, those after it unlike."""
    generator = torch.Generator().manual_seed(seed)
    count = len(x[0])
    place = torch.randint(0, len(x), (count,), generator=generator)
    parts = []
    for i, part in enumerate(-part for part in x):
        spacing = part.frexp().exponent.float().exp2() * 2.0 ** -(24 - rn.dropped)
        off = rn(part + spacing * torch.randint(-2, 3, (count,), generator=generator))
        unlike = rn(part * torch.randn(count, generator=generator))
        parts.append(torch.where(place == i, off, torch.where(place < i, unlike, part)))
    return renormalise(parts, len(x), rn) if len(x) > 1 else tuple(parts)


Case = Callable[[Parts, Parts, Parts, NearestEven], tuple[Parts, list[Fraction]]]


def _pairwise(
    operation: Callable[[Fraction, Fraction], Fraction], x: Parts, y: Parts
) -> list[Fraction]:
    return [operation(a, b) for a, b in zip(exact(x), exact(y), strict=True)]


# name: (what is computed and what it should be, from x, y and one near -x; bound for pairs, for
# triples, in u^length).
CASES: dict[str, tuple[Case, float, float]] = {
    "grow": (lambda x, y, z, rn: (grow(x, y[0], rn), _pairwise(Fraction.__add__, x, y[:1])), 2, 4),
    "grow, cancelling": (
        lambda x, y, z, rn: (grow(x, z[0], rn), _pairwise(Fraction.__add__, x, z[:1])),
        2,
        4,
    ),
    "mul": (lambda x, y, z, rn: (mul(x, y, rn), _pairwise(Fraction.__mul__, x, y)), 5, 8),
}


def nonzero(x: Parts) -> Parts:
    """The expansions that are not zero: coarse ones near a power of two may cancel."""
    return tuple(torch.where(x[0] == 0, float(i == 0), part) for i, part in enumerate(x))


@pytest.mark.parametrize("length", [2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CASES)
def test_error_is_within_the_stated_bound(name: str, precision: str, length: int) -> None:
    rn = NearestEven(PRECISIONS[precision])
    p = 24 - rn.dropped
    x = nonzero(samples(rn, length, 1))
    y = nonzero(samples(rn, length, 2))
    case, *bounds = CASES[name]
    result, expected = case(x, y, cancelling(x, rn, 3), rn)
    assert len(result) == length
    bound = bounds[length - 2]
    error = oracle.worst(exact(result), expected)
    assert error <= bound * Fraction(1, 2 ** (p * length)), float(error * 2 ** (p * length))
    assert oracle.separated(lists(result), p)
    assert all(torch.equal(rn(part), part) for part in result)
    # The bound is not so wide that a result of one part less would pass, but where 24u is more than
    # 1.
    assert p < 8 or oracle.worst(exact(result[:-1]), expected) > bound * Fraction(
        1, 2 ** (p * length)
    )


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_expansion_of_is_exact_where_it_can_be(length: int) -> None:
    rn = BFLOAT16
    x = torch.randn(3000, generator=torch.Generator().manual_seed(10))
    parts = expansion_of(x, length, rn)
    error = oracle.worst(exact(parts), exact((x,)))
    assert error <= Fraction(1, 2 ** (8 * length)) and (error == 0 or length < 4)
    assert oracle.separated(lists(parts), 8)
    short = rn(x)
    assert torch.equal(expansion_of(short, length, rn)[0], short)
    number = expansion_of(torch.tensor(0.999, dtype=torch.float64), length, rn)
    assert abs(sum(Fraction(part.item()) for part in number) - Fraction(0.999)) <= Fraction(
        1, 2 ** (8 * length)
    )
    assert [part.item() for part in number[:1]] == [1.0]
