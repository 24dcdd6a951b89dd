"""Elementwise sums in any order, against fractions."""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch

from narrowgauge.numerics.exact_sums import LARGEST, MOST_ADDENDS, ExactSums, sum_rows
from oracles.exact_sums import sum_on_grid
from text.refusals import refused

FORMATS = (torch.bfloat16, torch.float16, torch.float32)
EDGES = [
    sign * value
    for sign in (1, -1)
    for value in (
        0.0, 2.0**-149, 2.0**-126, 2.0**-76, 2.0**-75, 1.5 * 2.0**-75, 2.0**-74, 3 * 2.0**-75, 2.0**-51, 2.0**-50, 2.0**-24,
        3 * 2.0**-25, 2.0**-23, 1 - 2.0**-24, 1.0, 1 + 2.0**-23, math.pi, 2.0**17, LARGEST - 2.0**-6, LARGEST,
        LARGEST + 2.0**-5, 3 * 2.0**17, 2.0**59, 2.0**59 + 2.0**36, 3 * 2.0**58, 2.0**100, 2.0**127, 2.0**128 - 2.0**104,
    )
]  # fmt: skip


def summed(addends: Sequence[float], dtype: torch.dtype = torch.float32) -> list[float]:
    """The sum by each way there is: one call for all, one for each, and without words."""
    rows = torch.tensor(addends, dtype=dtype).view(-1, 1)
    at_once = ExactSums(1)
    row_by_row = ExactSums(1)
    at_once.add_(rows)
    for row in rows:
        row_by_row.add_(row)
    return [
        at_once.total().item(),
        row_by_row.total().item(),
        sum_rows(rows, torch.empty(1)).item(),
    ]


def check(addends: Sequence[float], dtype: torch.dtype = torch.float32) -> None:
    rounded_addends = torch.tensor(addends, dtype=dtype).tolist()
    expected = sum_on_grid(rounded_addends)
    assert summed(rounded_addends, dtype) == [expected] * 3, rounded_addends


@pytest.mark.parametrize("dtype", FORMATS)
def test_pairs_of_every_edge(dtype):
    largest = torch.finfo(dtype).max
    edges = [max(-largest, min(largest, edge)) for edge in EDGES]
    pairs = torch.tensor(list(itertools.product(edges, repeat=2)), dtype=dtype).T.contiguous()
    sums = sum_rows(pairs, torch.empty(pairs.shape[1]))
    assert sums.tolist() == [sum_on_grid(pair) for pair in pairs.T.tolist()]


def test_what_lies_between_two_floats_is_rounded_by_its_very_last_bit():
    """1 + 2^-24 is a tie of float32, 2^-74 more or less is none, and float64 sees neither."""
    for sign, less in itertools.product((1, -1), (1, -1)):
        for tie in (1 + 2.0**-24, 1 + 3 * 2.0**-24):
            upper = 1.0
            check([sign * upper, sign * (tie - upper), sign * less * 2.0**-74])
    check(
        [2.0**-24] * 59 + [2.0**-74] + [-(2.0**-24)] * 59
    )  # the lower word is carried before its last bit goes


def test_sums_of_as_many_as_there_may_be_do_not_overflow():
    for value in (
        LARGEST,
        LARGEST - 2.0**-6,
        -LARGEST,
        LARGEST + 2.0**-5,
        -(2.0**59 - 2.0**35),
        2.0**100 - 2.0**76,
        2.0**115,
        2.0**-24,
        3 * 2.0**-25,
        2.0**-24 - 2.0**-48,
    ):
        sums = ExactSums(1)
        rows = torch.full((MOST_ADDENDS, 1), value)
        sums.add_(rows)
        assert sums.total().item() == float(torch.tensor(float(Fraction(value) * MOST_ADDENDS)))
        with refused("too many addends"):
            sums.add_(rows[:1])
        sums.clear_()
        sums.add_(rows[:1])
        assert sums.total().item() == value
    wide = torch.ones(2, MOST_ADDENDS + 1)  # of elements there may be more
    assert torch.equal(sum_rows(wide, torch.empty(wide.shape[1])), wide.sum(0))


def test_no_order_no_grouping_and_no_chunk_changes_a_bit(monkeypatch):
    generator = torch.Generator().manual_seed(3)
    spread = torch.randint(-40, 12, (24, 301), generator=generator)
    rows = torch.randn(24, 301, generator=generator) * torch.exp2(spread)
    expected = sum_rows(rows, torch.empty(301))
    assert not torch.equal(rows.flip(0).sum(0), rows.sum(0))  # the test can fail
    for chunk in (1, 7, 64, 1 << 15):
        monkeypatch.setattr("narrowgauge.numerics.chunks.CHUNK", chunk)
        order = torch.randperm(24, generator=generator)
        sums = ExactSums(301)
        for part in rows[order].split(5):
            sums.add_(part)
        assert torch.equal(sums.total(), expected)
        assert torch.equal(sum_rows(rows[order], torch.empty(301)), expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_has_no_place_on_the_grid_makes_its_element_nan_in_any_order(bad):
    for place in range(4):
        rows = torch.ones(4, 2)
        rows[place, 1] = bad
        total = sum_rows(rows, torch.empty(2))
        assert total[0].item() == 4.0 and math.isnan(total[1].item())
    assert math.isnan(sum_rows(torch.tensor([[bad], [-bad], [1.0]]), torch.empty(1)).item())


def test_zeros_of_any_sign_sum_to_plus_zero():
    for addends in ([-0.0], [-0.0, -0.0], [0.0, -0.0], [1.0, -1.0]):
        assert [math.copysign(1, total) for total in summed(addends)] == [1.0] * 3


def test_the_total_is_divided_in_float32_and_rounded_to_the_output():
    rows = torch.tensor([[1.0], [2.0**-8]])
    assert (
        sum_rows(rows, torch.empty(1), divisor=3).item() == (torch.tensor(1 + 2.0**-8) / 3).item()
    )
    assert sum_rows(rows, torch.empty(1, dtype=torch.bfloat16)).item() == 1.0  # a tie, to even
