"""Edge values hold what they promise, in every format, and the NaN of a float is compared as NaN."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.numerics.edge_values import edge_values, same_numbers, with_nan

FORMATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("finite", [False, True])
def test_edge_values_reach_both_ends_of_a_format_and_repeat(dtype: torch.dtype, finite: bool) -> None:
    values, info = edge_values(dtype, (64, 64), finite=finite), torch.finfo(dtype)
    assert values.dtype is dtype and not values.isnan().any() and bool(values.isinf().any()) is not finite
    assert torch.equal(values, edge_values(dtype, (64, 64), finite=finite))
    assert not torch.equal(values, edge_values(dtype, (64, 64), finite=finite, seed=1))
    magnitudes = values.abs().double()
    assert ((magnitudes > 0) & (magnitudes < info.tiny)).sum() > 10  # subnormals
    assert (magnitudes == 0).any() and (magnitudes == info.max).any()
    assert (values == 0).logical_and(values.signbit()).any() and (values == 0).logical_and(~values.signbit()).any()


@pytest.mark.parametrize("dtype", FORMATS)
def test_nan_of_every_kind_comes_in_between_and_nothing_else_changes(dtype: torch.dtype) -> None:
    values = edge_values(dtype, (4, 51))
    changed = with_nan(values)
    assert changed.isnan().sum() == 12 and not values.isnan().any()
    assert torch.equal(changed[~changed.isnan()], values[~changed.isnan()])
    kinds = changed[changed.isnan()].view(torch.int16 if dtype.itemsize == 2 else torch.int32)
    assert len(kinds.unique()) == 6 and (kinds < 0).sum() == 6
    assert not torch.equal(with_nan(values, seed=1).isnan(), changed.isnan())


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (0x3F800000, 0x3F800000, True),
        (0x3F800000, 0x3F800001, False),
        (0, -(1 << 31), False),  # zeros of both signs
        (0x7FC00000, -(1 << 22), True),  # two NaNs
        (0x7F800000, 0x7FC00000, False),  # an infinity
    ],
)
def test_numbers_are_the_same_but_for_the_kind_of_nan(one: int, other: int, same: bool) -> None:
    words = [torch.tensor([x], dtype=torch.int32) for x in (one, other)]
    floats = [word.view(torch.float32) for word in words]
    assert same_numbers(*floats) is same is same_numbers(*reversed(floats))
    assert same_numbers(*words) is (one == other)
    assert not same_numbers(words[0], floats[0])
