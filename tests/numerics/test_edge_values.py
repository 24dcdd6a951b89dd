"""Edge values hold what they promise, in every format, and the NaN of a float is compared as NaN."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.edge_values import edge_values

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
