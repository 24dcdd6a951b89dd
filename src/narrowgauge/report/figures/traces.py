"""Plotly traces and layouts as plain data: the mean, band and marks of each recipe on a figure.

Every trace has its recipe's index in ``meta.group``. So one button hides a recipe in every figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from narrowgauge.analysis.columns import Array, Series
from narrowgauge.report.figures.palette import colour, dash_of, plain, symbol_of
from narrowgauge.report.figures.series import Band, band, in_columns, json_list, outline, rounded
from narrowgauge.report.recipe_groups import Group
from narrowgauge.runs.schema import Row

MOST_MARKERS = 40
"""A line of more points has no markers."""


@dataclass(frozen=True)
class Figure:
    """Describe one figure of the page.

    Args:
        name, title: its id on the page, and its heading.
        how: a caption of a few sentences that explains it.
        layout: Plotly layout, without fonts and colours.
        height: in pixels.
    """

    name: str
    title: str
    how: str
    data: list[Row]
    layout: Row
    height: int = 340


@dataclass(frozen=True, eq=False)
class Curve:
    """Hold the runs of a group on a figure: mean and span, and the places of non-finite values."""

    group: Group
    joined: Band
    not_finite: list[float]

    @property
    def means(self) -> Array:
        """Return the finite values of the line."""
        return self.joined.mean[~np.isnan(self.joined.mean)]


def curve_of(group: Group, lines: Sequence[Series]) -> Curve:
    gaps = set()
    for line in lines:
        gaps.update(line.gaps)
    return Curve(group, in_columns(band(lines)), sorted(gaps))


def traces_of(curves: Iterable[Curve], name: str) -> list[Row]:
    """Return each curve's band, its crosses at non-finite values, and its mean.

    Bands lie lowest.
    """
    spans = []
    crosses = []
    means = []
    for curve in curves:
        if (curve.joined.high > curve.joined.low).any():
            spans.append(_span(curve))
        if curve.not_finite:
            crosses.append(_crosses(curve))
        if curve.means.size or curve.not_finite:
            means.append(_mean(curve, name))
    return [*spans, *crosses, *means]


def _span(curve: Curve) -> Row:
    return _scatter(outline(curve.joined), curve.group) | {
        "mode": "lines", "fill": "toself", "fillcolor": colour(curve.group.index, 0.18), "line": {"width": 0},
        "hoverinfo": "skip",
    }  # fmt: skip


def _mean(curve: Curve, name: str) -> Row:
    group = curve.group
    joined = curve.joined
    return _scatter(Series(joined.x, joined.mean), group) | {
        "name": plain(group.label),
        "mode": "lines+markers" if len(joined.x) <= MOST_MARKERS else "lines",
        "line": {"color": colour(group.index), "width": 2, "dash": dash_of(group.index)},
        "marker": {"size": 6, "symbol": symbol_of(group.index)},
        "hovertemplate": f"{name} %{{y:.5~g}}<extra>{plain(group.label)}</extra>",
    }


def _crosses(curve: Curve) -> Row:
    """Return crosses (about a hundred at most) along the top edge. Only their x means anything."""
    x = np.array(curve.not_finite[:: max(1, len(curve.not_finite) // 200)])
    return _scatter(Series(x, np.full(len(x), 0.97)), curve.group) | {
        "yaxis": "y2", "mode": "markers",
        "marker": {"symbol": "x-thin", "size": 9, "line": {"width": 2, "color": colour(curve.group.index)}},
        "hovertemplate": f"not finite<extra>{plain(curve.group.label)}</extra>",
    }  # fmt: skip


def _scatter(line: Series, group: Group) -> Row:
    return {
        "type": "scatter",
        "x": json_list(line.x, 9),
        "y": json_list(line.y),
        "meta": {"group": group.index},
    }


def layout_of(x: str, y: str, *, log_y: bool = False, **yaxis: object) -> Row:
    """Return axes with titles."""
    return {
        "xaxis": {"title": {"text": x}},
        "yaxis": {"title": {"text": plain(y)}, "type": "log" if log_y else "linear", **yaxis},
        # A second, hidden axis from 0 to 1, for marks without a value.
        "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
    }


def fit_axis(curves: Sequence[Curve], layout: Row) -> str:
    """End the axis of losses at the lines, so that neither a spike nor a diverged recipe flattens
    the others.

    Return sentences on what may lie beyond; empty if the ``yaxis`` of ``layout`` needs no range.
    """
    lines = [curve.means for curve in curves if curve.means.size]
    if not lines:
        return ""
    limit = 1.25 * max(map(itemgetter(0), lines))
    values = np.concatenate(lines)
    inside = values[values <= limit]
    if not inside.size or inside.min() == inside.max():
        return ""
    low = inside.min()
    high = inside.max()
    margin = 0.15 * (high - low)
    layout["yaxis"] |= {"range": [rounded(float(low - margin)), rounded(float(high + margin))]}
    beyond = [curve.group.label for curve in curves if curve.means.max(initial=0.0) > 1.5 * limit]
    words = " Double-click to see spikes whole."
    if beyond:
        words += (
            f" Beyond the axis, which ends a little above the first losses: {', '.join(beyond)}."
        )
    return words
