"""Sums that ignore order: the laws, against fractions and Python integers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from covering import whole
from narrowgauge.errors import FormatError
from narrowgauge.numerics import summation
from narrowgauge.numerics.summation import (
    flat_chunks,
    from_grid,
    grid_scales,
    grid_sum_of_squares,
    grid_sums_words,
    largest_magnitude,
    largest_magnitude_words,
    root,
)
from oracles.exact_sums import exact_sum, exact_sum_of_squares, nearest_float, squares_bound
from oracles.norms import global_norm, sum_of_squares
from tensors import scalar_bits

NARROW = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set the chunk length, so that small tensors have many chunks."""
    return lambda size: monkeypatch.setattr(summation, "CHUNK", size)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def wild(count: int, seed: int, dtype: torch.dtype = torch.float32, binades: float = 8.0) -> Tensor:
    """Values of both signs whose magnitudes spread over many binades, so float sums of them do depend on order."""
    g = generator(seed)
    exponents = torch.randn(count, generator=g, dtype=torch.float64) * binades
    return (torch.randn(count, generator=g, dtype=torch.float64) * exponents.exp2()).to(dtype)


def cut(x: Tensor, seed: int) -> list[Tensor]:
    """``x`` in a random order, cut at random places into tensors (empty ones among them)."""
    g = generator(seed)
    x = x[torch.randperm(x.numel(), generator=g)]
    marks = torch.randint(0, x.numel() + 1, (5,), generator=g).sort().values.tolist()
    return [x[a:b] for a, b in zip([0, *marks], [*marks, x.numel()], strict=True)]


def layouts() -> Iterator[Tensor]:
    base = torch.arange(2 * 3 * 5 * 7)
    yield base
    yield base.reshape(2, 3, 5, 7).permute(3, 1, 0, 2)
    yield base.reshape(10, 21)[::3, 1::2]
    yield base[:7].expand(1, 4, 7)
    yield base[3]
    yield base[:0].reshape(0, 3)


@pytest.mark.parametrize("size", [1, 2, 9, 64, 1000])
def test_chunks_are_the_tensors_in_row_major_order(size: int, small_chunks: Callable[[int], None]) -> None:
    small_chunks(size)
    for x in layouts():
        chunks = list(flat_chunks(x, x.contiguous() + 1))
        assert all(1 <= chunk.numel() <= size and chunk.ndim == 1 for chunk, _ in chunks)
        assert all(torch.equal(chunk + 1, other) for chunk, other in chunks)
        assert torch.equal(torch.cat([x.new_empty(0), *(chunk for chunk, _ in chunks)]), x.reshape(-1))


@pytest.mark.parametrize("dtype", NARROW)
def test_sum_of_squares_has_the_same_bits_in_every_order_cut_and_chunking(
    dtype: torch.dtype, small_chunks: Callable[[int], None]
) -> None:
    x = wild(3000, 1, dtype, binades=2.0 if dtype == torch.float16 else 12.0)
    expected, norm = scalar_bits(sum_of_squares([x])), global_norm([x])
    assert norm.dtype == torch.float32 and norm.shape == ()
    for seed in range(24):
        small_chunks(seed % 5 * 300 + 17)
        parts = cut(x, seed)
        assert scalar_bits(sum_of_squares(parts)) == expected
        assert torch.equal(global_norm(parts), norm)


@pytest.mark.parametrize("dtype", NARROW)
def test_sum_of_squares_keeps_its_bound_against_fractions(dtype: torch.dtype) -> None:
    for seed in range(6):
        x = wild(400, seed, dtype, binades=2.0 if dtype == torch.float16 else 5.0 * (seed + 1))
        x = x[torch.isfinite(x)]
        values = x.double().tolist()
        got = exact_sum([sum_of_squares([x]).item()])
        assert abs(got - exact_sum_of_squares(values)) <= squares_bound(values)


def test_sum_of_squares_is_exact_where_the_law_says_so() -> None:
    integers = torch.arange(-1000.0, 1000.0)
    assert sum_of_squares([integers]).item() == sum(k * k for k in range(-1000, 1000))
    # 4,096 addends: 50 bits a grid, so 2^-60 lies on the second grid and would have vanished from the first.
    ones = torch.cat((torch.ones(1), torch.full((4095,), 2.0**-30)))
    assert sum_of_squares([ones]).item() == nearest_float(1 + exact_sum([4095 * 2.0**-60]))


def test_small_squares_are_not_swallowed_by_one_large_one() -> None:
    # 42 bits on the coarse grid for 2^21 - 1 addends: the small squares lie just below half a step of it, and it alone
    # would drop all of them, 2^-22 of the sum together. The grids together are off by 2^-64 for each.
    count = (1 << 21) - 1
    x = torch.full((count,), 0.99 * 2.0**-21.5)
    x[0] = 1.0
    small = exact_sum([x[1].item()]) ** 2 * (count - 1)
    largest = largest_magnitude(x)
    scales = grid_scales(largest, count)
    steps = grid_sum_of_squares(x, scales)
    assert (steps[0].double() / scales[0]).item() == 1.0
    assert from_grid(steps, scales, largest).item() == pytest.approx(float(1 + small), rel=2.0**-51)
    assert float(1 + small) - 1 > 2.0**-23


@pytest.mark.parametrize("scale", [2.0**-149, 2.0**-130, 2.0**-75, 1.0, 2.0**126])
def test_sum_of_squares_over_the_whole_range_of_float32(scale: float) -> None:
    x = torch.tensor([1.0, 1.0, 0.0, -1.0, 1.0], dtype=torch.float64).mul(scale).float()
    assert sum_of_squares([x]).item() == 4 * scale * scale
    assert global_norm([x]).item() == (2 * scale if scale < 2.0**127 else math.inf)


def test_a_norm_beyond_float32_is_infinite_though_its_square_is_finite() -> None:
    x = torch.full((4,), torch.finfo(torch.float32).max)
    assert math.isfinite(sum_of_squares([x]).item())
    assert global_norm([x]).item() == math.inf


@pytest.mark.parametrize("dtype", NARROW)
def test_nan_wins_over_infinity_and_infinity_over_numbers(dtype: torch.dtype) -> None:
    big = torch.ones(3000, dtype=dtype)
    inf, nan = big.clone(), big.clone()
    inf[7], nan[2900] = -math.inf, math.nan
    assert global_norm([big, inf]).item() == math.inf
    assert sum_of_squares([inf, big]).item() == math.inf
    for tensors in ([nan, inf], [inf, nan], [big, nan]):
        assert math.isnan(global_norm(tensors).item())
        assert math.isnan(sum_of_squares(tensors).item())


def test_nothing_and_zeros_have_norm_zero() -> None:
    for tensors in ([], [torch.empty(0)], [torch.zeros(9)], [torch.empty(0, 4), torch.zeros(2, 2)]):
        assert global_norm(tensors).item() == 0.0
        assert sum_of_squares(tensors).dtype == torch.float64


def test_dtypes_and_layouts_may_be_mixed() -> None:
    x = torch.randint(-9, 9, (30, 20), generator=generator(0)).float()
    mixed = [x.t()[::2], x.t()[1::2].bfloat16(), x[:0].half(), torch.tensor(3.0)]
    assert sum_of_squares(mixed).item() == x.square().sum().item() + 9


def test_scales_are_powers_of_two_that_leave_no_room_for_overflow() -> None:
    for count in (1, 2, 3, 255, 256, 2**31, 2**40):
        for largest in (2.0**-149, 1e-30, 1.0, 1.5, 3.4e38):
            coarse, fine = grid_scales(torch.tensor(largest), count).tolist()
            assert math.frexp(coarse)[0] == math.frexp(fine)[0] == 0.5
            top = exact_sum([torch.tensor(largest).item()]) ** 2 * exact_sum([coarse])
            assert count * math.ceil(top) < 2**63 and count * exact_sum([fine]) / 2 < 2**63
            assert 8 * count * top > 2**62, "the grid wastes bits"


@pytest.mark.parametrize("count", [0, -1, 2**40 + 1])
def test_scales_refuse_an_impossible_count(count: int) -> None:
    with pytest.raises(FormatError, match="elements"):
        grid_scales(torch.tensor(1.0), count)


def test_the_fullest_grid_does_not_overflow() -> None:
    x = torch.full((4096,), 1 - 2.0**-24)
    expected = exact_sum_of_squares(x.tolist())
    assert sum_of_squares([x]).item() == nearest_float(expected)


def test_steps_of_parts_add_up_to_those_of_the_whole() -> None:
    x = wild(2000, 3)
    largest = torch.stack([largest_magnitude(part) for part in x.split(77)]).amax()
    scales = grid_scales(largest, x.numel())
    parts = torch.stack([grid_sum_of_squares(part, scales) for part in cut(x, 4)])
    assert torch.equal(parts.sum(0), grid_sum_of_squares(x, scales))
    assert scalar_bits(from_grid(parts.sum(0), scales, largest)) == scalar_bits(sum_of_squares([x]))


@pytest.mark.parametrize("value", [0.0, 2.0, 1e-45, 3e300, math.inf])
def test_root_is_correctly_rounded(value: float) -> None:
    got = root(torch.tensor(value, dtype=torch.float64))
    assert got.dtype == torch.float32 and got.item() == torch.tensor(math.sqrt(value)).item()
    assert math.isnan(root(torch.tensor(math.nan, dtype=torch.float64)).item())


def every_bfloat16() -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def test_words_answer_as_their_values_do() -> None:
    finite = every_bfloat16()
    finite = finite[torch.isfinite(finite)]
    for x in (finite, finite.flip(0)[2:], torch.zeros(8, dtype=torch.bfloat16), wild(64, 0, torch.bfloat16)):
        x = x.contiguous()
        words, largest = x.view(torch.int32), largest_magnitude(x)
        scales = grid_scales(largest, x.numel())
        assert torch.equal(largest_magnitude_words(words), largest)
        assert torch.equal(torch.stack(grid_sums_words(words, scales)), grid_sum_of_squares(x, scales))
    assert torch.isnan(largest_magnitude_words(every_bfloat16().view(torch.int32)))
    inf = torch.tensor([1.0, -math.inf, 2.0, 3.0], dtype=torch.bfloat16)
    for x in (inf, inf.roll(1)):
        assert largest_magnitude_words(x.view(torch.int32)).item() == math.inf


@whole
def test_compiled_pieces_equal_eager_at_every_length() -> None:
    def both(x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        return largest_magnitude(x), grid_sum_of_squares(x, scales)

    def both_words(words: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        return largest_magnitude_words(words), torch.stack(grid_sums_words(words, scales))

    compiled = torch.compile(both, dynamic=True, fullgraph=True)
    compiled_words = torch.compile(both_words, dynamic=True, fullgraph=True)
    for length in (2, 18, 1000, 70_002):
        for dtype in (torch.bfloat16, torch.float32):
            x = wild(length, length, dtype)
            for poison in (None, math.inf, math.nan):
                if poison is not None:
                    x[length // 2] = poison
                scales = grid_scales(largest_magnitude(x).nan_to_num(posinf=1.0), length)
                pairs = [(both(x, scales), compiled(x, scales))]
                if dtype == torch.bfloat16:
                    words = x.view(torch.int32)
                    pairs.append((both_words(words, scales), compiled_words(words, scales)))
                for eager, fused in pairs:
                    assert torch.equal(eager[0].nan_to_num(nan=-1.0), fused[0].nan_to_num(nan=-1.0))
                    assert poison is not None or torch.equal(eager[1], fused[1])
