"""Sums that ignore order: the laws, against fractions and Python integers."""

import itertools
import math
from random import Random

import pytest
import torch
from torch import Tensor

from narrowgauge.numerics.exact_sums import (
    WORDS,
    _digits,
    _rounded_digits,
    exact_squares,
    rounded_total,
)
from narrowgauge.numerics.rounding import sqrt
from narrowgauge.optim.step.norm_kernel import SquaresTable, squares_by_kernel
from oracles.exact_sums import exact_sum_of_squares, nearest_float
from tensors import gaussian, scalar_bits

NARROW = (torch.bfloat16, torch.float16, torch.float32)


def exact_norm(tensors: list[Tensor]) -> Tensor:
    return sqrt(exact_squares(tensors)).float()


def hard_values(kind: int, size: int, seed: int) -> Tensor:
    """Float32 values: ordinary, subnormal, largest, of all exponents, of any bits, or one huge one
    among tiny ones.
    """
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=g)
    if kind == 1:
        x *= 1e-41
    elif kind == 2:
        x = torch.full((size,), torch.finfo(torch.float32).max)
    elif kind == 3:
        exponents = torch.randint(-149, 127, (size,), generator=g)
        x = (x.double() * exponents.double().exp2()).float()
    elif kind == 4:
        bits = torch.randint(-(2**31), 2**31 - 1, (size,), generator=g)
        x = bits.int().view(torch.float32)
    elif kind == 5:
        x *= 1e-41
        x[seed % size] = 3e38
    return x.nan_to_num(1.0, 2.0, -3.0)


def assert_exact(x: Tensor) -> None:
    """By the definition and by the kernel."""
    expected = nearest_float(exact_sum_of_squares(x.double().reshape(-1).tolist()))
    assert exact_squares([x]).item() == squares_by_kernel([x]).item() == expected


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("kind", range(6))
def test_the_sum_of_squares_is_the_fraction_rounded_once(kind, dtype):
    """Of pieces of the kernel and of their ends."""
    for size in (1, 65, 4096, 4099):
        x = hard_values(kind, size, seed=size).to(dtype).nan_to_num(1.0, 2.0, -3.0)
        assert_exact(x)
        parts = [part.clone() for part in x.flip(0).split(size // 2 + 1)]
        shifted = torch.cat([x[:1], x])[1:]
        assert squares_by_kernel(parts).item() == squares_by_kernel([shifted]).item()


@pytest.mark.parametrize("mantissa", [0x7FFFFF, 0x3504F3, 1])
def test_pieces_of_a_kernel_are_exact_at_the_ends_of_its_grids(mantissa):
    for top in (1, 127, 254):
        for span in (2, 22, 23, 24, 44, 45, 120):
            if span >= top:
                continue
            bits = torch.full((4096,), (top - span) << 23 | mantissa, dtype=torch.int32)
            for step in (4096, 2):
                bits[::step] = top << 23 | mantissa
                assert_exact(bits.view(torch.float32))


def test_ranks_add_the_words_of_their_parts():
    x = hard_values(3, 5000, seed=1)
    words = torch.zeros(WORDS, dtype=torch.int64)
    for part in x.split([0, 7, 4096, 897]):
        words += SquaresTable([part]).words_at(part.data_ptr())[0]
    assert rounded_total(words).item() == exact_squares([x]).item()


def test_a_device_rounds_as_integers_do():
    """Totals of all lengths, of long carries and of ties, as words that overlap."""
    random = Random(1)
    for _ in range(300):
        length = random.randrange(1, 560)
        tie = (random.getrandbits(53) | 1 << 52) * 2 + 1 << length
        choices = [random.getrandbits(length), (1 << length) - 1, 1 << length]
        choices += [tie + offset for offset in (-1, 0, 1)]
        total = random.choice(choices)
        words = torch.zeros(WORDS, dtype=torch.int64)
        left = total
        for place in range(WORDS - 2, -1, -13):
            count = left >> 2 * max(0, place)
            count = min(count, 2**60 - random.randrange(2))
            words[place] += count
            left -= count << 2 * place
        words[0] += left
        expected = total / 2**386
        assert rounded_total(words).item() == expected
        assert (_rounded_digits(_digits(words[:-1])).item() == expected) or total == 0


def test_nan_wins_over_infinity_and_infinity_over_numbers():
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
def test_neither_layout_nor_the_order_of_tensors_enters(dtypes, scale):
    draws = []
    for k, shape in enumerate(SHAPES):
        draws.append(gaussian(*shape, seed=k, scale=scale))
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
