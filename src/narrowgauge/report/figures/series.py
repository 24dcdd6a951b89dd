"""Lines of a page as numpy arrays: joined across seeds, and drawn in columns that hide no extreme.

Each column joins its steps: a line through their means, and a band from the lowest to the highest,
where a spike of one step keeps its height. A non-finite value is NaN: a gap in the line. Seeds of
one recipe become a mean and a band too. If a seed ends, the line breaks, because the means before
and after cover different runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from narrowgauge.analysis.columns import Array, Series

NUM_COLUMNS = 150
"""Maximum number of columns of a line."""


@dataclass(frozen=True, eq=False)
class Band:
    """Hold the mean, lowest and highest value of several runs at each ``x``; NaN is a gap."""

    x: Array
    mean: Array
    low: Array
    high: Array


def rounded(value: float, digits: int = 6) -> float:
    """Round a number to ``digits`` significant digits, to keep pages small."""
    return float(f"{value:.{digits}g}")


def json_list(values: npt.ArrayLike, digits: int = 6) -> list[float | None]:
    """Return rounded numbers for JSON, a gap as ``None``."""
    result: list[float | None] = []
    for value in np.asarray(values, float).tolist():
        result.append(None if math.isnan(value) else rounded(value, digits))
    return result


def band(lines: Sequence[Series]) -> Band:
    """Join several runs into their mean and span.

    Keep a step if every active run has a row for it. Insert a gap where the set of runs with a
    finite value changes.
    """
    x = np.unique(np.concatenate([[], *(line.x for line in lines)]))
    values = np.full((len(lines), len(x)), np.nan)
    lacks = np.zeros((len(lines), len(x)), bool)
    for seed, line in enumerate(lines):
        if len(line):
            at = np.searchsorted(x, line.x)
            lacks[seed, at.min() : at.max() + 1] = True
            lacks[seed, at] = False
            values[seed, at] = line.y
    is_kept = ~lacks.any(axis=0)
    x = x[is_kept]
    values = values[:, is_kept]
    has_value = ~np.isnan(values)
    count = has_value.sum(axis=0)
    mean = np.where(has_value, values, 0.0).sum(axis=0) / np.where(count, count, np.nan)
    low = np.fmin.reduce(values, axis=0, initial=np.nan)
    high = np.fmax.reduce(values, axis=0, initial=np.nan)
    # A change of runs is a gap. Next to a step without any run, a gap exists already.
    changes = (
        (has_value[:, 1:] != has_value[:, :-1]).any(axis=0) & (count[1:] > 0) & (count[:-1] > 0)
    )
    at = np.flatnonzero(changes) + 1
    return _with_gaps(Band(x, mean, low, high), at, x[at])


def in_columns(joined: Band, num_columns: int = NUM_COLUMNS) -> Band:
    """Join neighbouring steps into at most ``num_columns`` columns, each at its last step.

    Invariant: a column holds the mean of its finite values, their lowest and their highest. A gap
    follows it if it has one.

    Example:
        >>> y = np.array([1.0, 9.0, np.nan, 3.0])
        >>> joined = in_columns(Band(np.arange(4.0), y, y, y), 2)
        >>> joined.x, joined.mean, joined.high
        (array([1., 3., 3.]), array([ 5.,  3., nan]), array([ 9.,  3., nan]))
    """
    length = len(joined.x)
    if length <= num_columns:
        return joined
    starts = np.arange(0, length, math.ceil(length / num_columns))
    ends = np.append(starts[1:], length)
    is_gap = np.isnan(joined.mean)
    count = np.add.reduceat(~is_gap, starts, dtype=int)
    mean = np.add.reduceat(np.where(is_gap, 0.0, joined.mean), starts) / np.where(
        count, count, np.nan
    )
    low = np.fmin.reduceat(joined.low, starts)
    high = np.fmax.reduceat(joined.high, starts)
    x = joined.x[ends - 1]
    at = np.flatnonzero((count > 0) & (count < ends - starts)) + 1
    return _with_gaps(Band(x, mean, low, high), at, x[at - 1])


def _with_gaps(joined: Band, at: npt.NDArray[np.intp], x: Array) -> Band:
    """Return a band with gaps before some places."""
    return Band(
        np.insert(joined.x, at, x),
        np.insert(joined.mean, at, np.nan),
        np.insert(joined.low, at, np.nan),
        np.insert(joined.high, at, np.nan),
    )


def outline(joined: Band) -> Series:
    """Return the span of a band as closed shapes, one for each stretch without a gap, with gaps
    between them.
    """
    x: list[float] = []
    y: list[float] = []
    is_known = np.concatenate([[False], ~np.isnan(joined.mean), [False]])
    for first, end in np.flatnonzero(np.diff(is_known)).reshape(-1, 2).tolist():
        x += [*joined.x[first:end], *joined.x[first:end][::-1], math.nan]
        y += [*joined.high[first:end], *joined.low[first:end][::-1], math.nan]
    return Series(np.array(x[:-1]), np.array(y[:-1]))
