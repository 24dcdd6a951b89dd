"""Sums that ignore order: the laws, against fractions and Python integers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from narrowgauge.numerics.exact_sums import exact_squares
from narrowgauge.numerics.rounding import sqrt
from oracles.exact_sums import exact_sum, exact_sum_of_squares, nearest_float, squares_bound
from tensors import scalar_bits

NARROW = (torch.bfloat16, torch.float16, torch.float32)


def exact_norm(tensors: list[Tensor]) -> Tensor:
    return sqrt(exact_squares(tensors)).float()


def wild(count: int, seed: int, dtype: torch.dtype = torch.float32, binades: float = 8.0) -> Tensor:
    """Values of both signs whose magnitudes spread over many binades, so float sums of them do
    depend on order.
    """
    g = torch.Generator().manual_seed(seed)
    exponents = torch.randn(count, generator=g, dtype=torch.float64) * binades
    return (torch.randn(count, generator=g, dtype=torch.float64) * exponents.exp2()).to(dtype)


@pytest.mark.parametrize("dtype", NARROW)
def test_sum_of_squares_keeps_its_bound_against_fractions(dtype: torch.dtype) -> None:
    for seed in range(6):
        x = wild(400, seed, dtype, binades=2.0 if dtype == torch.float16 else 5.0 * (seed + 1))
        x = x[torch.isfinite(x)]
        values = x.double().tolist()
        got = exact_sum([exact_squares([x]).item()])
        assert abs(got - exact_sum_of_squares(values)) <= squares_bound(values)


def test_sum_of_squares_is_exact_where_the_law_says_so() -> None:
    integers = torch.arange(-1000.0, 1000.0)
    assert exact_squares([integers]).item() == sum(k * k for k in range(-1000, 1000))
    # 4,096 addends: 50 bits a grid, so 2^-60 lies on the second grid and would have vanished from
    # the first.
    values = torch.cat((torch.ones(1), torch.full((4095,), 2.0**-30)))
    assert exact_squares([values]).item() == nearest_float(1 + exact_sum([4095 * 2.0**-60]))


@pytest.mark.parametrize("scale", [2.0**-149, 2.0**-130, 2.0**-75, 1.0, 2.0**126])
def test_sum_of_squares_over_the_whole_range_of_float32(scale: float) -> None:
    x = torch.tensor([1.0, 1.0, 0.0, -1.0, 1.0], dtype=torch.float64).mul(scale).float()
    assert exact_squares([x]).item() == 4 * scale * scale
    assert exact_norm([x]).item() == (2 * scale if scale < 2.0**127 else math.inf)


def test_nan_wins_over_infinity_and_infinity_over_numbers() -> None:
    largest = torch.full((4,), torch.finfo(torch.float32).max)
    assert math.isfinite(exact_squares([largest]).item())
    assert exact_norm([largest]).item() == math.inf  # beyond float32
    big = torch.ones(3000)
    inf = big.clone()
    inf[7] = -math.inf
    nan = big.clone()
    nan[2900] = math.nan
    assert exact_norm([big, inf]).item() == math.inf
    assert math.isnan(exact_norm([nan, inf]).item()) and math.isnan(exact_norm([inf, nan]).item())


SHAPES = [(3,), (0,), (), (64, 64), (4098,), (4097,), (71, 73), (190, 180)]


@pytest.mark.parametrize(("dtypes", "scale"), [(NARROW[:1], 1e-30), (NARROW, 1e-2)], ids=str)
def test_neither_layout_nor_the_order_of_tensors_enters(
    dtypes: tuple[torch.dtype, ...], scale: float
) -> None:
    draws = []
    for k, shape in enumerate(SHAPES):
        draws.append(torch.randn(shape, generator=torch.Generator().manual_seed(k)) * scale)
    tensors = []
    for x, dtype in zip(draws, itertools.cycle(dtypes), strict=False):
        tensors.append(x.to(dtype))
    expected = scalar_bits(exact_norm([torch.cat([x.reshape(-1).float() for x in tensors])]))
    shifted = []
    for x in tensors:
        shifted.append(torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[1:] if x.numel() else x)
    turned = [x.t() if x.ndim == 2 else x for x in tensors]
    for same in (tensors, tensors[::-1], shifted, turned):
        assert scalar_bits(exact_norm(same)) == expected
