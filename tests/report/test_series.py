"""Lines of a page: thinned they keep their extremes and gaps, smoothed they keep constants, joined they keep the span."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from narrowgauge.report.series import (
    Band,
    Series,
    accumulate,
    band,
    column,
    decimate,
    gaps,
    is_wide,
    number,
    outline,
    rounded,
    smooth,
    thin_places,
)


def noisy(length: int, seed: int = 0) -> Series:
    draw = random.Random(seed)
    return Series(list(range(length)), [draw.gauss(0, 1) for _ in range(length)])


def test_numbers_are_finite_floats_or_nothing() -> None:
    assert [number(value) for value in (1, True, 0.5)] == [1.0, 1.0, 0.5]
    assert [number(value) for value in (None, "1", math.nan, math.inf, -math.inf, 10**400, [])] == [None] * 7


def test_rounding_keeps_digits_not_places() -> None:
    assert rounded(1.23456789e-12) == 1.23457e-12
    assert rounded(0.0) == 0.0


def test_a_column_leaves_out_what_is_absent_and_gaps_what_is_not_finite() -> None:
    rows = [{"step": 1, "a": 1.0}, {"step": 2}, {"step": 3, "a": None}, {"step": 4, "a": math.nan}, {"a": 5.0}]
    assert column(rows, "a") == Series([1.0, 4.0], [1.0, None])
    assert gaps(column(rows, "a")) == [4.0]


def test_a_spike_survives_any_thinning() -> None:
    line = noisy(10_000)
    line.y[4321], line.y[8765] = 1e6, -1e6
    for buckets in (1, 7, 100, 400):
        thin = decimate(line, buckets)
        assert (max(thin.y), min(thin.y)) == (1e6, -1e6)
        assert thin.x[thin.y.index(1e6)] == 4321


def test_every_bucket_keeps_its_lowest_and_highest_and_nothing_is_made_up() -> None:
    line = noisy(1000)
    thin = decimate(line, 10)
    kept = dict(zip(thin.x, thin.y, strict=True))
    assert all(line.y[x] == y for x, y in kept.items())
    assert thin.x == sorted(thin.x)
    assert len(thin) <= 3 * 10 + 2
    for bucket in range(10):
        share = line.y[100 * bucket : 100 * (bucket + 1)]
        assert {min(share), max(share)} <= set(kept.values())
    assert (thin.x[0], thin.x[-1]) == (0, 999)


def test_a_gap_survives_thinning_in_its_place() -> None:
    line = noisy(1000)
    line.y[555] = None
    thin = decimate(line, 10)
    assert [x for x, y in zip(thin.x, thin.y, strict=True) if y is None] == [555]


def test_a_bucket_without_a_finite_value_is_one_gap() -> None:
    thin = decimate(Series(list(range(100)), [None] * 100), 5)
    assert set(thin.y) == {None}
    assert len(thin) <= 7


def test_a_short_line_is_left_alone() -> None:
    line = noisy(20)
    assert decimate(line, 10) is line


def test_smoothing_weighs_by_half_lives_and_steps_over_gaps() -> None:
    # With a half-life of one point the weights are 1, 1/2, 1/4.
    smoothed = smooth(Series([0, 1, 2, 3], [4.0, None, 2.0, 0.0]), 1).y
    assert smoothed[0] == 4.0
    assert smoothed[1] is None
    assert smoothed[2] == pytest.approx((2 + 4 / 2) / 1.5)
    assert smoothed[3] == pytest.approx((0 + 2 / 2 + 4 / 4) / 1.75)


def test_sums_go_on_over_gaps() -> None:
    assert accumulate(Series([1, 2, 3], [1.0, None, 2.0])).y == [1.0, 1.0, 3.0]


def test_a_band_is_mean_and_span() -> None:
    joined = band([Series([1, 2], [1.0, 5.0]), Series([1, 2], [2.0, 5.0]), Series([1, 2], [6.0, 5.0])])
    assert joined == Band([1, 2], [3.0, 5.0], [1.0, 5.0], [6.0, 5.0], [3, 3])


def test_the_mean_breaks_where_a_seed_ends_or_is_not_finite() -> None:
    ended = band([Series([1, 2, 3], [1.0, 1.0, 1.0]), Series([1, 2], [3.0, 3.0])])
    assert (ended.x, ended.mean, ended.count) == ([1, 2, 3, 3], [2.0, 2.0, None, 1.0], [2, 2, 0, 1])
    broken = band([Series([1, 2], [1.0, 1.0]), Series([1, 2], [3.0, None])])
    assert (broken.x, broken.mean) == ([1, 2, 2], [2.0, None, 1.0])


def test_seeds_on_two_grids_meet_only_where_both_are() -> None:
    joined = band([Series([1, 2, 3, 4], [1.0] * 4), Series([2, 4], [3.0, 3.0])])
    # Before its first row the second seed is not under way yet.
    assert joined.x == [1, 2, 2, 4]
    assert joined.mean == [1.0, None, 2.0, 2.0]


def test_a_band_of_one_or_none() -> None:
    line = Series([1, 2], [1.0, None])
    assert band([line]) == Band([1, 2], [1.0, None], [1.0, None], [1.0, None], [1, 0])
    assert band([]) == band([Series([], []), Series([], [])]) == Band([], [], [], [], [])


def test_an_outline_holds_every_point_of_the_span() -> None:
    joined = band([noisy(5000, seed) for seed in range(3)])
    shape = outline(joined, 50)
    half = len(shape) // 2
    upper = list(zip(shape.x[:half], shape.y[:half], strict=True))
    lower = list(zip(shape.x[half:], shape.y[half:], strict=True))[::-1]
    assert half <= 52
    for x, low, high in zip(joined.x, joined.low, joined.high, strict=True):
        assert height(lower, x) <= low <= high <= height(upper, x)


def height(corners: list[tuple[float, float]], x: float) -> float:
    """Of a line through corners, at a place between the first and the last."""
    for (left, first), (right, second) in itertools.pairwise(corners):
        if left <= x <= right:
            return first + (second - first) * (x - left) / (right - left)
    raise AssertionError(f"{x} lies outside the outline")


def test_an_outline_is_one_shape_per_stretch() -> None:
    flat = [1.0, 1.0, None, 1.0, 1.0]
    shape = outline(Band([1, 2, 3, 4, 5], flat, flat, flat, [2, 2, 0, 2, 2]))
    assert shape.x == [1, 2, 2, 1, 4, 4, 5, 5, 4]
    assert [place for place, y in enumerate(shape.y) if y is None] == [4]


def test_shares_cover_a_list_once() -> None:
    for length, most in ((0, 5), (3, 5), (100, 7)):
        shares = thin_places(length, most)
        assert [place for first, last in shares for place in range(first, last)] == list(range(length))
        assert len(shares) == min(length, most)


def test_log_scale_is_for_positive_values_far_apart() -> None:
    assert is_wide([0.1, None, 10.0])
    assert not is_wide([-1.0, 1000.0])
    assert not is_wide([])
