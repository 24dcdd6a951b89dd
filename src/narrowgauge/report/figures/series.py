"""Lines of a page as numpy arrays: read from rows, smoothed, joined across seeds, thinned without losing extremes.

A screen is about a thousand pixels wide and a run has ten thousand steps, so most points must go. Each bucket of a line
keeps its lowest and its highest point, so a spike of one step keeps its height. A non-finite value is NaN: a gap in the
line, never a bridge over it. Seeds of one recipe become a mean and a band from the lowest to the highest. If a seed ends,
the mean's line breaks too, because the means before and after cover different runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from narrowgauge.analysis.columns import Array, Series
from narrowgauge.runs.schema import finite_number


@dataclass(frozen=True, eq=False)
class Band:
    """Join several runs: mean, lowest, highest and number of finite values at each ``x``; NaN is a gap."""

    x: Array
    mean: Array
    low: Array
    high: Array
    count: npt.NDArray[np.int64]


def rounded(value: float, digits: int = 6) -> float:
    """Round a number to ``digits`` significant digits, to keep pages small.

    Example:
        >>> rounded(2.123456789)
        2.12346
    """
    return float(f"{value:.{digits}g}")


def json_list(values: npt.ArrayLike, digits: int = 6) -> list[float | None]:
    """Return rounded numbers for JSON, a gap as ``None``.

    Example:
        >>> json_list(np.array([2.123456789, np.nan]))
        [2.12346, None]
    """
    return [None if value != value else rounded(value, digits) for value in np.asarray(values, float).tolist()]


def series_of(points: Iterable[tuple[float, Any]]) -> Series:
    """Return a line through pairs of x and y. A non-finite y is a gap.

    Example:
        >>> series_of([(1, 2.0), (3, float("inf"))])
        Series(x=array([1., 3.]), y=array([ 2., nan]))
    """
    points = list(points)
    return Series(np.array([x for x, _ in points], float), np.array([finite_number(y) for _, y in points], float))


def smooth(series: Series, half_life: float) -> Series:
    """Return the exponential mean of a line: a point's weight halves with every ``half_life`` points after it.

    A constant line stays constant. A gap stays a gap and does not enter the mean.

    Example:
        >>> smooth(series_of([(0, 1.0), (1, None), (2, 1.0)]), 5).y
        array([ 1., nan,  1.])
    """
    at = np.flatnonzero(~np.isnan(series.y))
    y, means = series.y[at], np.full(len(series), np.nan)
    # Within a block, sums run over growing weights. Weights stay below 2 ** 20, so a mean loses at most 1e-9.
    length = max(1, int(_HALVINGS * half_life))
    growth = 2.0 ** (np.arange(min(length, len(y))) / half_life)
    summed = np.cumsum(growth)
    total = weight = 0.0
    for first in range(0, len(y), length):
        part = y[first : first + length]
        totals, weights = total + np.cumsum(part * growth[: len(part)]), weight + summed[: len(part)]
        means[at[first : first + length]] = totals / weights
        # The next block's first weight is 1 again.
        shrink = 2.0 ** (-len(part) / half_life)
        total, weight = totals[-1] * shrink, weights[-1] * shrink
    return Series(series.x, means)


_HALVINGS = 20
"""Half-lives per block in :func:`smooth`."""


def decimate(series: Series, num_buckets: int = 400) -> Series:
    """Return at most three points per bucket: the lowest, the highest, and a gap if there is one.

    Invariant: the first and the last point remain, and each bucket's lowest, highest and first gap. No point is invented. A
    short line stays unchanged.

    Example:
        >>> decimate(series_of(enumerate([0, 0, 9, 0, 0, 0, 0, -9, 0])), 1)
        Series(x=array([0., 2., 7., 8.]), y=array([ 0.,  9., -9.,  0.]))
    """
    length = len(series)
    if length <= 2 * num_buckets:
        return series
    size = math.ceil(length / num_buckets)
    buckets = np.full((math.ceil(length / size), size), np.nan)
    buckets.flat[:length] = series.y
    is_gap = np.isnan(buckets)
    lowest, highest = (
        np.where(is_gap, np.inf, buckets).argmin(axis=1),
        np.where(is_gap, -np.inf, buckets).argmax(axis=1),
    )
    starts = size * np.arange(len(buckets))
    has_gap, has_value = is_gap.any(axis=1), ~is_gap.all(axis=1)
    gaps = (starts + is_gap.argmax(axis=1))[has_gap]
    places = [(starts + lowest)[has_value], (starts + highest)[has_value], gaps[gaps < length], [0, length - 1]]
    chosen = np.unique(np.concatenate(places))
    return Series(series.x[chosen], series.y[chosen])


def band(lines: Sequence[Series]) -> Band:
    """Join several runs into their mean and span.

    Keep a step if every active run has a row for it. Insert a gap where the set of runs with a finite value changes.

    Example:
        >>> joined = band([series_of([(1, 1.0), (2, 2.0)]), series_of([(1, 3.0), (2, 6.0)])])
        >>> joined.mean, joined.low, joined.high
        (array([2., 4.]), array([1., 2.]), array([3., 6.]))
    """
    if len(lines) == 1:
        (line,) = lines
        return Band(line.x, line.y, line.y, line.y, (~np.isnan(line.y)).astype(int))
    x = np.unique(np.concatenate([np.empty(0), *(line.x for line in lines)]))
    values, lacks = np.full((len(lines), len(x)), np.nan), np.zeros((len(lines), len(x)), bool)
    for seed, line in enumerate(lines):
        if len(line):
            at = np.searchsorted(x, line.x)
            lacks[seed, at.min() : at.max() + 1] = True
            lacks[seed, at], values[seed, at] = False, line.y
    is_kept = ~lacks.any(axis=0)
    x, values = x[is_kept], values[:, is_kept]
    has_value = ~np.isnan(values)
    count = has_value.sum(axis=0)
    mean = np.where(has_value, values, 0.0).sum(axis=0) / np.where(count, count, np.nan)
    low, high = (reduce(values, axis=0, initial=np.nan) for reduce in (np.fmin.reduce, np.fmax.reduce))
    # A change of runs is a gap. Next to a step without any run, a gap exists already.
    changes = (has_value[:, 1:] != has_value[:, :-1]).any(axis=0) & (count[1:] > 0) & (count[:-1] > 0)
    at = np.flatnonzero(changes) + 1
    mean, low, high = (np.insert(side, at, np.nan) for side in (mean, low, high))
    return Band(np.insert(x, at, x[at]), mean, low, high, np.insert(count, at, 0))


def outline(joined: Band, num_buckets: int = 200) -> Series:
    """Return the span of a band as closed shapes with at most ``num_buckets`` corners per side, with gaps between them.

    Each stretch without a gap is one shape: along the upper side and back along the lower.

    Invariant: every point of the span lies inside. Thinning only widens the shape.
    """
    share = max(1, math.ceil(len(joined.x) / num_buckets))
    # A corner covers the points on both sides. Else a point between two corners could lie outside.
    reach = 0 if share == 1 else share
    x: list[float] = []
    y: list[float] = []
    is_known = np.concatenate([[False], ~np.isnan(joined.mean), [False]])
    for first, last in np.flatnonzero(np.diff(is_known)).reshape(-1, 2).tolist():
        if last - first < 2:
            continue
        corners = sorted({*range(first, last, share), last - 1})
        spans = [slice(max(first, corner - reach), min(last, corner + share)) for corner in corners]
        if x:
            x, y = [*x, joined.x[first]], [*y, math.nan]
        x += [*joined.x[corners], *joined.x[corners[::-1]]]
        y += [*(joined.high[span].max() for span in spans), *(joined.low[span].min() for span in reversed(spans))]
    return Series(np.array(x), np.array(y))


def is_wide(values: npt.ArrayLike, ratio: float = 20.0) -> bool:
    """Tell whether a linear axis would hide small values and a log axis can show all values.

    Example:
        >>> is_wide([1.0, 50.0]), is_wide([1.0, 2.0, np.nan]), is_wide([0.0, 99.0])
        (True, False, False)
    """
    numbers = np.asarray(values, float)
    numbers = numbers[~np.isnan(numbers)]
    return bool(numbers.size and numbers.min() > 0 and numbers.max() / numbers.min() > ratio)
