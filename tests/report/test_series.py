"""Lines of a page: thinned they keep their extremes and gaps, smoothed they keep constants, joined they keep the span."""

from __future__ import annotations

import math

import numpy as np
import pytest

from narrowgauge.report.figures.series import (
    Band,
    Series,
    accumulate,
    band,
    column,
    decimate,
    equal_parts,
    gaps,
    is_wide,
    json_list,
    outline,
    rounded,
    series_of,
    smooth,
)
from narrowgauge.runs.schema import finite_number


def noisy(length: int, seed: int = 0) -> Series:
    return Series(np.arange(length, dtype=float), np.random.default_rng(seed).normal(size=length))


def line(x: list[float], y: list[float | None]) -> Series:
    return series_of(zip(x, y, strict=True))


def listed(joined: Band) -> list[list[float | None]]:
    """``x``, mean, lowest and highest, gaps as ``None``, and the counts."""
    return [*map(json_list, (joined.x, joined.mean, joined.low, joined.high)), joined.count.tolist()]


def test_numbers_are_finite_floats_or_nothing() -> None:
    assert [finite_number(value) for value in (1, True, 0.5)] == [1.0, 1.0, 0.5]
    assert [finite_number(value) for value in (None, "1", math.nan, math.inf, -math.inf, 10**400, [])] == [None] * 7


def test_rounding_keeps_digits_not_places() -> None:
    assert rounded(1.23456789e-12) == 1.23457e-12
    assert rounded(0.0) == 0.0
    assert json_list([1.23456789e-12, math.nan, 7]) == [1.23457e-12, None, 7.0]


def test_a_column_leaves_out_what_is_absent_and_gaps_what_is_not_finite() -> None:
    rows = [{"step": 1, "a": 1.0}, {"step": 2}, {"step": 3, "a": None}, {"step": 4, "a": math.nan}, {"a": 5.0}]
    found = column(rows, "a")
    assert (json_list(found.x), json_list(found.y)) == ([1.0, 4.0], [1.0, None])
    assert gaps(found) == [4.0]
    assert len(column([], "a")) == 0


def test_a_spike_survives_any_thinning() -> None:
    spiky = noisy(10_000)
    spiky.y[4321], spiky.y[8765] = 1e6, -1e6
    for buckets in (1, 7, 100, 400):
        thin = decimate(spiky, buckets)
        assert (thin.y.max(), thin.y.min()) == (1e6, -1e6)
        assert thin.x[thin.y.argmax()] == 4321


def test_every_bucket_keeps_its_lowest_and_highest_and_nothing_is_made_up() -> None:
    whole = noisy(1000)
    thin = decimate(whole, 10)
    kept = dict(zip(thin.x.astype(int), thin.y, strict=True))
    assert all(whole.y[x] == y for x, y in kept.items())
    assert (np.diff(thin.x) > 0).all()
    assert len(thin) <= 3 * 10 + 2
    for bucket in range(10):
        share = whole.y[100 * bucket : 100 * (bucket + 1)]
        assert {share.min(), share.max()} <= set(kept.values())
    assert (thin.x[0], thin.x[-1]) == (0, 999)


def test_a_gap_survives_thinning_in_its_place() -> None:
    broken = noisy(1000)
    broken.y[555] = math.nan
    assert gaps(decimate(broken, 10)) == [555]


def test_a_bucket_without_a_finite_value_is_one_gap() -> None:
    thin = decimate(Series(np.arange(100.0), np.full(100, math.nan)), 5)
    assert np.isnan(thin.y).all()
    assert len(thin) <= 7


def test_a_short_line_is_left_alone() -> None:
    short = noisy(20)
    assert decimate(short, 10) is short


def test_smoothing_weighs_by_half_lives_and_steps_over_gaps() -> None:
    # With a half-life of one point the weights are 1, 1/2, 1/4.
    smoothed = json_list(smooth(line([0, 1, 2, 3], [4.0, None, 2.0, 0.0]), 1).y, 12)
    assert smoothed[:2] == [4.0, None]
    assert smoothed[2:] == pytest.approx([(2 + 4 / 2) / 1.5, (0 + 2 / 2 + 4 / 4) / 1.75])


def test_sums_go_on_over_gaps() -> None:
    assert accumulate(line([1, 2, 3], [1.0, None, 2.0])).y.tolist() == [1.0, 1.0, 3.0]


def test_a_band_is_mean_and_span() -> None:
    joined = band([line([1, 2], [1.0, 5.0]), line([1, 2], [2.0, 5.0]), line([1, 2], [6.0, 5.0])])
    assert listed(joined) == [[1, 2], [3.0, 5.0], [1.0, 5.0], [6.0, 5.0], [3, 3]]


def test_the_mean_breaks_where_a_seed_ends_or_is_not_finite() -> None:
    ended = band([line([1, 2, 3], [1.0, 1.0, 1.0]), line([1, 2], [3.0, 3.0])])
    assert listed(ended)[:2] == [[1, 2, 3, 3], [2.0, 2.0, None, 1.0]] and ended.count.tolist() == [2, 2, 0, 1]
    broken = band([line([1, 2], [1.0, 1.0]), line([1, 2], [3.0, None])])
    assert listed(broken)[:2] == [[1, 2, 2], [2.0, None, 1.0]]
    # Where no seed has a value there is a gap already.
    both = band([line([1, 2, 3], [1.0, None, 1.0]), line([1, 2, 3], [3.0, None, None])])
    assert listed(both)[:2] == [[1, 2, 3], [2.0, None, 1.0]]


def test_seeds_on_two_grids_meet_only_where_both_are() -> None:
    joined = band([line([1, 2, 3, 4], [1.0] * 4), line([2, 4], [3.0, 3.0])])
    # Before its first row the second seed is not under way yet.
    assert listed(joined)[:2] == [[1, 2, 2, 4], [1.0, None, 2.0, 2.0]]


def test_a_band_of_one_or_none() -> None:
    assert listed(band([line([1, 2], [1.0, None])])) == [[1, 2], [1.0, None], [1.0, None], [1.0, None], [1, 0]]
    assert listed(band([])) == listed(band([line([], []), line([], [])])) == [[], [], [], [], []]


def test_an_outline_holds_every_point_of_the_span() -> None:
    joined = band([noisy(5000, seed) for seed in range(3)])
    shape = outline(joined, 50)
    half = len(shape) // 2
    assert half <= 52
    assert (np.interp(joined.x, shape.x[:half], shape.y[:half]) >= joined.high).all()
    assert (np.interp(joined.x, shape.x[:half], shape.y[half:][::-1]) <= joined.low).all()
    assert shape.x[half:].tolist() == shape.x[:half][::-1].tolist()


def test_an_outline_is_one_shape_per_stretch() -> None:
    flat = np.array([1.0, 1.0, math.nan, 1.0, 1.0])
    shape = outline(Band(np.arange(1.0, 6.0), flat, flat, flat, np.array([2, 2, 0, 2, 2])))
    assert shape.x.tolist() == [1, 2, 2, 1, 4, 4, 5, 5, 4]
    assert np.flatnonzero(np.isnan(shape.y)).tolist() == [4]


def test_shares_cover_a_list_once() -> None:
    for length, most in ((0, 5), (3, 5), (100, 7)):
        found = equal_parts(length, most)
        assert [place for first, last in found for place in range(first, last)] == list(range(length))
        assert len(found) == min(length, most)


def test_log_scale_is_for_positive_values_far_apart() -> None:
    assert is_wide([0.1, math.nan, 10.0])
    assert not is_wide([-1.0, 1000.0])
    assert not is_wide([])
