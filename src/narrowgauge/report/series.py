"""Series of a run as lines on a page: taken from rows, smoothed, joined across seeds, thinned without losing extremes.

A screen is about a thousand dots wide and a run has ten thousand steps, so most points must go; which ones go decides
what a reader can still find. Each stretch of a line is replaced by its lowest and its highest point, in their order, so
a spike of one step stays as tall as it was. A value that is not finite is a gap, never a bridge: the line stops and
begins again. Seeds of one recipe become a mean and the span from the lowest to the highest; where a seed ends or
breaks off the mean's line is broken too, since before and after it are means of different runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge.runs.schema import Row


@dataclass(frozen=True)
class Series:
    """Points of one line, ``x`` ascending; ``None`` in ``y`` is a gap."""

    x: list[float]
    y: list[float | None]

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Band:
    """Several runs as one: their mean and span at each ``x``, and how many there were; ``None`` is a gap."""

    x: list[float]
    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]
    count: list[int]


def number(value: Any) -> float | None:
    """A finite float of a row's entry, or ``None``.

    Example:
        >>> number(True), number(float("nan")), number("fast")
        (1.0, None, None)
    """
    if type(value) is float:
        return value if math.isfinite(value) else None
    if not isinstance(value, (int, float)):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


def rounded(value: float | None, digits: int = 6) -> float | None:
    """A number with that many significant digits, since a page need not carry sixteen.

    Example:
        >>> rounded(2.123456789), rounded(None)
        (2.12346, None)
    """
    return None if value is None else float(f"{value:.{digits}g}")


def column(rows: Iterable[Row], y: str, x: str = "step") -> Series:
    """One column of a run's rows over another.

    Law: a row that lacks either entry adds nothing; a value that is not finite adds a gap.

    Args:
        rows: of ``steps`` or ``evals``.
        y, x: the columns.

    Returns:
        The line, in the order of the rows.

    Example:
        >>> column([{"step": 1, "loss": 2.0}, {"step": 2}, {"step": 3, "loss": float("inf")}], "loss")
        Series(x=[1.0, 3.0], y=[2.0, None])
    """
    places: list[float] = []
    values: list[float | None] = []
    for row in rows:
        place = number(row.get(x))
        if place is not None and row.get(y) is not None:
            places.append(place)
            values.append(number(row[y]))
    return Series(places, values)


def gaps(series: Series) -> list[float]:
    """Where a line has no finite value.

    Example:
        >>> gaps(Series([1, 2], [0.5, None]))
        [2]
    """
    return [x for x, y in zip(series.x, series.y, strict=True) if y is None]


def smooth(series: Series, half_life: float) -> Series:
    """The exponential mean of a line: a point's weight halves with every ``half_life`` points after it.

    Law: a constant line stays as it is; a gap stays a gap and enters no mean.

    Args:
        series: the line.
        half_life: in points, above 0.

    Returns:
        A line over the same ``x``.

    Example:
        >>> smooth(Series([0, 1, 2], [1.0, None, 1.0]), 5).y
        [1.0, None, 1.0]
    """
    keep = 0.5 ** (1 / half_life)
    total = weight = 0.0
    result: list[float | None] = []
    for value in series.y:
        if value is None:
            result.append(None)
            continue
        total = total * keep + value
        weight = weight * keep + 1.0
        result.append(total / weight)
    return Series(list(series.x), result)


def accumulate(series: Series) -> Series:
    """Running sums; a gap adds nothing.

    Example:
        >>> accumulate(Series([1, 2, 3], [1.0, 0.0, 2.0])).y
        [1.0, 1.0, 3.0]
    """
    total = 0.0
    sums: list[float | None] = []
    for value in series.y:
        total += value or 0.0
        sums.append(total)
    return Series(list(series.x), sums)


def decimate(series: Series, num_buckets: int = 400) -> Series:
    """At most three points per bucket: the lowest, the highest, and a gap where there is one.

    Law: the lowest and the highest value of every bucket, the first and the last point, and every bucket's gap remain;
    no point is made up.

    Args:
        series: the line.
        num_buckets: equal shares of its points.

    Returns:
        The line itself where it is short enough already.

    Cost: linear.

    Example:
        >>> decimate(Series(list(range(9)), [0, 0, 9, 0, 0, 0, 0, -9, 0]), 1)
        Series(x=[0, 2, 7, 8], y=[0, 9, -9, 0])
    """
    length = len(series)
    if length <= 2 * num_buckets:
        return series
    kept = {0, length - 1}
    for first, last in _buckets(length, num_buckets):
        kept |= _telling(series.y, first, last)
    places = sorted(kept)
    return Series([series.x[place] for place in places], [series.y[place] for place in places])


def band(lines: Sequence[Series]) -> Band:
    """Several runs as their mean and span.

    Law: with one line the mean, low and high are that line. A point counts the runs that have a finite value there; where
    the set of those runs changes, a gap stands between.

    Args:
        lines: one per seed. A step is kept if every run that was under way has a row for it.

    Returns:
        The band over the steps kept.

    Example:
        >>> joined = band([Series([1, 2], [1.0, 2.0]), Series([1, 2], [3.0, 6.0])])
        >>> joined.mean, joined.low, joined.high
        ([2.0, 4.0], [1.0, 2.0], [3.0, 6.0])
    """
    if len(lines) == 1:
        (line,) = lines
        return Band(line.x, line.y, line.y, line.y, [int(y is not None) for y in line.y])
    tables = [dict(zip(line.x, line.y, strict=True)) for line in lines if line.x]
    ends = [(min(table), max(table)) for table in tables]
    result = Band([], [], [], [], [])
    before: frozenset[int] | None = None
    for x in sorted(set().union(*tables)) if tables else []:
        if any(first <= x <= last and x not in table for table, (first, last) in zip(tables, ends, strict=True)):
            continue
        found = {seed: y for seed, table in enumerate(tables) if (y := table.get(x)) is not None}
        present = frozenset(found)
        if before and present and present != before:
            _add(result, x, [])
        _add(result, x, list(found.values()))
        before = present
    return result


def outline(joined: Band, num_buckets: int = 200) -> Series:
    """The span of a band as closed shapes, one per stretch without a gap, with gaps between them.

    Law: every point of the span lies inside; where it is thinned it only widens.

    Args:
        joined: the band.
        num_buckets: how many corners a side may have.

    Returns:
        Corners along the upper side and back along the lower.

    Example:
        >>> outline(Band([1, 2], [1.0, 1.0], [0.0, 0.5], [2.0, 1.5], [2, 2]))
        Series(x=[1, 2, 2, 1], y=[2.0, 1.5, 0.5, 0.0])
    """
    shape = Series([], [])
    share = max(1, math.ceil(len(joined.x) / num_buckets))
    for first, last in _stretches(joined.mean):
        if last - first < 2:
            continue
        corners = sorted({*range(first, last, share), last - 1})
        # A corner speaks for the shares on both of its sides, or a point between two corners could lie outside.
        reach = 0 if share == 1 else share
        spans = [(max(first, corner - reach), min(last, corner + share)) for corner in corners]
        high = [max(_finite(joined.high[start:stop])) for start, stop in spans]
        low = [min(_finite(joined.low[start:stop])) for start, stop in spans]
        x = [joined.x[corner] for corner in corners]
        if shape.x:
            shape.x.append(x[0])
            shape.y.append(None)
        shape.x.extend([*x, *reversed(x)])
        shape.y.extend([*high, *reversed(low)])
    return shape


def thin_places(length: int, most: int) -> list[tuple[int, int]]:
    """Ranges of indices that cut a list into at most ``most`` shares.

    Example:
        >>> thin_places(5, 2), thin_places(2, 9)
        ([(0, 2), (2, 5)], [(0, 1), (1, 2)])
    """
    return list(_buckets(length, min(length, most)))


def is_wide(values: Iterable[float | None], ratio: float = 20.0) -> bool:
    """Whether values span so much that an even axis would hide the small ones: log scale is needed, and possible.

    Example:
        >>> is_wide([1.0, 50.0]), is_wide([1.0, 2.0, None]), is_wide([0.0, 99.0])
        (True, False, False)
    """
    found = [value for value in values if value is not None]
    return bool(found) and min(found) > 0 and max(found) / min(found) > ratio


def _add(joined: Band, x: float, values: list[float]) -> None:
    joined.x.append(x)
    joined.mean.append(math.fsum(values) / len(values) if values else None)
    joined.low.append(min(values) if values else None)
    joined.high.append(max(values) if values else None)
    joined.count.append(len(values))


def _buckets(length: int, num_buckets: int) -> Iterator[tuple[int, int]]:
    for bucket in range(num_buckets):
        first, last = length * bucket // num_buckets, length * (bucket + 1) // num_buckets
        if first < last:
            yield first, last


def _telling(values: Sequence[float | None], first: int, last: int) -> set[int]:
    """The places of a bucket's lowest and highest value and of its first gap."""
    kept: set[int] = set()
    low = high = None
    for place in range(first, last):
        value = values[place]
        if value is None:
            if not any(values[other] is None for other in kept):
                kept.add(place)
            continue
        if low is None or value < low[0]:
            low = (value, place)
        if high is None or value > high[0]:
            high = (value, place)
    return kept | {found[1] for found in (low, high) if found is not None}


def _stretches(values: Sequence[float | None]) -> Iterator[tuple[int, int]]:
    first = None
    for place, value in enumerate([*values, None]):
        if value is not None and first is None:
            first = place
        elif value is None and first is not None:
            yield first, place
            first = None


def _finite(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]
