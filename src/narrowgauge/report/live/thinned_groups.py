"""The recipes of a live page: the same groups as a report's, whose lines over steps are already thin.

A report thins each line where it draws it, after means and bands over seeds were made of whole lines. That takes seconds for
a million rows, and a live page is drawn again each second. So here each whole line is first made into what is drawn
(smoothed, accumulated), which numpy does in a millisecond, and then keeps of each bucket its lowest and its highest point and
its first gap. Runs of a recipe keep the same steps, those that any of them needs, so that means and bands are over the same
seeds as in the report. A spike of one step therefore keeps its height, and a window of some hundred steps shows every row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from narrowgauge.report.figures.series import Array, Series, column, extremes
from narrowgauge.report.live.live_run import COLUMNS, LiveRun
from narrowgauge.report.recipe_groups import Group, Samples

LINE_POINTS = 480
"""Points of one line, when a page has at most eight; more lines share eight lines' points."""

Window = tuple[float, float]
"""The first and the last step that are shown."""


@dataclass(frozen=True)
class ThinnedGroup(Group):
    """The runs of one recipe as they are being written.

    Args:
        live: the runs, in the order of ``stats``.
        window: what is shown; ``None`` is everything.
        num_points: of one line.
    """

    live: tuple[LiveRun, ...] = ()
    window: Window | None = None
    num_points: int = LINE_POINTS

    @property
    def samples(self) -> tuple[Samples, ...]:
        """None: gauges are read with the whole record."""
        return tuple(Samples() for _ in self.live)

    def lines(self, table: str, y: str, of: Callable[[Series], Series] = lambda line: line) -> list[Series]:
        """One column of every run, thinned; ``of`` is applied to whole lines."""
        if table != "steps":
            return [of(_within(column(getattr(run, table), y), self.window)) for run in self.runs]
        if y not in COLUMNS:
            return [Series(np.empty(0), np.empty(0)) for _ in self.live]
        if self.window is None:
            whole = [run.sketch(y, of) for run in self.live]
        else:
            whole = [_within(of(run.line(y)), self.window) for run in self.live]
        return thinned(whole, max(1, self.num_points // 2))

    def longest(self, table: str, y: str) -> int:
        if table != "steps":
            return super().longest(table, y)
        return max((len(run.line(y)) for run in self.live), default=0)


def _within(line: Series, window: Window | None) -> Series:
    """The part of a line inside a window, and one point beyond each of its sides, so that lines go on to the edge."""
    if window is None:
        return line
    first = max(0, int(np.searchsorted(line.x, window[0])) - 1)
    last = int(np.searchsorted(line.x, window[1], side="right")) + 1
    return Series(line.x[first:last], line.y[first:last])


def thinned(lines: Sequence[Series], num_buckets: int) -> list[Series]:
    """Lines at the steps at which any of them is the lowest or the highest of its bucket, has its first gap, begins or ends.

    Invariant: no point is made up; lines that are short enough are returned as they are.

    Example:
        >>> line = Series(np.arange(9.0), np.array([0.0, 0, 9, 0, 0, 0, 0, -9, 0]))
        >>> thinned([line], 1)
        [Series(x=array([0., 2., 7., 8.]), y=array([ 0.,  9., -9.,  0.]))]
    """
    if max(map(len, lines), default=0) <= 2 * num_buckets:
        return list(lines)
    kept = [extremes(line.y, num_buckets) for line in lines]
    if len(lines) == 1:
        return [Series(lines[0].x[kept[0]], lines[0].y[kept[0]])]
    steps = np.unique(np.concatenate([line.x[places] for line, places in zip(lines, kept, strict=True)]))
    return [_at(line, steps) for line in lines]


def _at(line: Series, steps: Array) -> Series:
    places = np.searchsorted(line.x, steps)
    places = places[places < len(line)]
    places = places[line.x[places] == steps[: len(places)]]
    return Series(line.x[places], line.y[places])
