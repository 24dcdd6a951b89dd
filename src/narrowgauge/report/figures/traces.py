"""Plotly traces and layouts as plain data: the mean, band and marks of each recipe on a figure.

Every trace has its recipe's index in ``meta.group``. So one button hides a recipe in every figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from narrowgauge.analysis.columns import Array, Series
from narrowgauge.report.figures.palette import colour, dash_of, plain, symbol_of
from narrowgauge.report.figures.series import Band, band, decimate, is_wide, json_list, outline
from narrowgauge.report.recipe_groups import Group
from narrowgauge.runs.schema import Row

CROSS_GAP = 0.05
"""Vertical distance between the crosses of two recipes, as a fraction of the figure's height."""
POINTS_PER_LINE = 600
"""Maximum number of buckets for all lines of a figure, per eight lines."""


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
    not_finite: list[float] = field(default_factory=list)

    @property
    def low(self) -> Array:
        """Return the finite values along the lower side."""
        return self.joined.low[~np.isnan(self.joined.low)]

    @property
    def high(self) -> Array:
        """Return the finite values along the upper side."""
        return self.joined.high[~np.isnan(self.joined.high)]


def curve_of(group: Group, lines: Sequence[Series]) -> Curve:
    return Curve(group, band(lines), sorted({x for line in lines for x in line.gaps}))


def traces_of(
    curves: Iterable[Curve], *, name: str, markers: bool = False, shape: str = "linear", dash: str = ""
) -> list[Row]:
    """Return each curve's band, its crosses at non-finite values, and its mean. Bands lie lowest."""
    curves = [curve for curve in curves if curve.high.size or curve.not_finite]
    num_buckets = num_buckets_of(curves)
    spans = [_span(curve, num_buckets // 2) for curve in curves if max(curve.joined.count, default=0) > 1]
    crosses = [_crosses(curve, line) for line, curve in enumerate(c for c in curves if c.not_finite)]
    means = []
    for curve in curves:
        if len(curve.joined.x):
            trace = _mean(curve, num_buckets, name, markers)
            trace["line"] |= {"shape": shape, "dash": dash or dash_of(curve.group.index)}
            means.append(trace)
    return [*spans, *crosses, *means]


def num_buckets_of(curves: Sequence[Curve]) -> int:
    """Return the maximum number of buckets per line, given the other lines of its figure."""
    return max(60, POINTS_PER_LINE * 8 // max(8, len(curves)))


def faint(curves: Sequence[Curve]) -> list[Row]:
    """Return the mean of each curve as a thin background line without hover text."""
    return [
        _scatter(decimate(Series(curve.joined.x, curve.joined.mean), num_buckets_of(curves)), curve.group)
        | {"mode": "lines", "line": {"color": colour(curve.group.index, 0.3), "width": 1}, "hoverinfo": "skip"}
        for curve in curves
        if curve.high.size
    ]


def _span(curve: Curve, num_buckets: int) -> Row:
    return _scatter(outline(curve.joined, num_buckets), curve.group) | {
        "mode": "lines", "fill": "toself", "fillcolor": colour(curve.group.index, 0.18), "line": {"width": 0},
        "hoverinfo": "skip",
    }  # fmt: skip


def _mean(curve: Curve, num_buckets: int, name: str, markers: bool) -> Row:
    group, joined = curve.group, curve.joined
    line = decimate(Series(joined.x, joined.mean), num_buckets)
    trace, seeds = _scatter(line, group), ""
    if len(group.runs) > 1:
        trace["customdata"] = joined.count[np.searchsorted(joined.x, line.x, side="right") - 1].tolist()
        seeds = f", mean of %{{customdata}} of {len(group.runs)} seeds"
    has_markers = len(line) == 1 or (markers and len(line) <= 40)
    return trace | {
        "name": plain(group.label),
        "mode": "lines+markers" if has_markers else "lines",
        "line": {"color": colour(group.index), "width": 2},
        "marker": {"size": 6, "symbol": symbol_of(group.index)},
        "hovertemplate": f"{name} %{{y:.5~g}}{seeds}<extra>{plain(group.label)}</extra>",
    }


def _crosses(curve: Curve, line: int) -> Row:
    """Return crosses (about a hundred at most) along the top edge, one line per recipe. Only their x means anything."""
    x = np.array(curve.not_finite[:: max(1, len(curve.not_finite) // 200)])
    return _scatter(Series(x, np.full(len(x), 0.97 - CROSS_GAP * (line % 16))), curve.group) | {
        "yaxis": "y2", "mode": "markers",
        "marker": {"symbol": "x-thin", "size": 9, "line": {"width": 2, "color": colour(curve.group.index)}},
        "hovertemplate": f"not finite<extra>{plain(curve.group.label)}</extra>",
    }  # fmt: skip


def _scatter(line: Series, group: Group) -> Row:
    return {"type": "scatter", "x": json_list(line.x, 9), "y": json_list(line.y), "meta": {"group": group.index}}


def mark(step: int, group: int, colour: str, line: Row, hover: str) -> Row:
    """Return an upright line at a step. A triangle at its top shows ``hover``."""
    return {
        "type": "scatter", "mode": "lines+markers", "x": [step, step], "y": [0, 0.98], "yaxis": "y2",
        "meta": {"group": group}, "line": line,
        "marker": {"symbol": "triangle-down", "size": [0, 10], "color": colour, "opacity": 1}, "hovertemplate": hover,
    }  # fmt: skip


def layout_of(x: str, y: str, *, log_y: bool = False, can_log_x: bool = False, **yaxis: object) -> Row:
    """Return axes with titles. ``can_log_x`` adds a button that toggles a log scale on the horizontal axis."""
    layout: Row = {
        "xaxis": {"title": {"text": x}},
        "yaxis": {"title": {"text": plain(y)}, "type": "log" if log_y else "linear", **yaxis},
        # A second, hidden axis from 0 to 1, for marks without a value.
        "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
    }
    return layout | ({"updatemenus": [_LOG_X]} if can_log_x else {})


_LOG_X: Row = {
    "type": "buttons", "x": 1, "xanchor": "right", "y": 1.01, "yanchor": "bottom", "pad": {"b": 2, "r": 34},
    "bgcolor": "@card", "bordercolor": "@line", "showactive": False, "font": {"size": 12, "color": "@ink"},
    "buttons": [
        {
            "label": "log x", "method": "relayout", "args": [{"xaxis.type": "log", "xaxis.autorange": True, "xaxis.dtick": 1}],
            "args2": [{"xaxis.type": "linear", "xaxis.autorange": True, "xaxis.dtick": None}],
        }
    ],
}  # fmt: skip


def labelled_rows(labels: Sequence[str]) -> Row:
    """Return a vertical axis with one line per label, the first on top."""
    return {
        "tickvals": list(range(len(labels))), "ticktext": list(map(plain, labels)), "range": [len(labels) - 0.5, -0.5],
        "zeroline": False, "showgrid": False,
    }  # fmt: skip


def clip_diverged(curves: Sequence[Curve], layout: Row) -> str:
    """End the axis of losses where a diverged recipe would flatten all others.

    Return a sentence that names every recipe beyond the axis; empty if the ``yaxis`` of ``layout`` needs no range.
    """
    limit = 1.25 * max((curve.high[0] for curve in curves if curve.high.size), default=0.0)
    beyond = [curve.group.label for curve in curves if curve.high.max(initial=0.0) > 1.5 * limit]
    values = np.concatenate([curve.low for curve in curves] or [np.empty(0)])
    inside = values[values <= limit]
    if not beyond or not inside.size or limit <= 0:
        return ""
    low = inside.min()
    layout["yaxis"] |= {"type": "linear", "range": [float(low - 0.05 * (limit - low)), float(limit)]}
    return f" The axis ends a little above the first losses. Beyond it: {', '.join(beyond)}."


def any_wide(curves: Iterable[Curve]) -> bool:
    means = [curve.joined.mean for curve in curves]
    return is_wide(np.concatenate(means) if means else [])
