"""Expansions: sums and products against exact rationals."""

from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from narrowgauge.numerics.expansions import NearestEven, two_prod, two_sum


def exact(parts: Sequence[Tensor]) -> list[Fraction]:
    """The number that each expansion stands for."""
    high, low = (part.tolist() for part in parts)
    return [Fraction(x) + Fraction(y) for x, y in zip(high, low, strict=True)]


@pytest.mark.parametrize("dropped", [13, 16, 20, 21])
def test_two_sum_and_two_prod_at_any_distance(dropped):
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
