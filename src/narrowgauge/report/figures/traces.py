"""Plotly traces and layouts as plain data: the mean, band, single runs and marks of each recipe on a figure.

Every trace has its recipe's index in ``meta.group``, so that one button hides a recipe in every figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from narrowgauge.report.figures.palette import colour, dash_of, plain, symbol_of
from narrowgauge.report.figures.series import Array, Band, Series, band, decimate, gaps, is_wide, json_list, outline
from narrowgauge.report.recipe_groups import Group
from narrowgauge.runs.schema import Row

CROSS_GAP = 0.05
"""Vertical distance between the crosses of two recipes, as a share of the figure's height."""
POINTS_PER_LINE = 600
"""How many buckets the lines of one figure may have together, per eight lines."""
THICKNESS = 0.008
"""Of a line, as a share of the figure's height: lines that are closer than that cover each other."""
DASH = 7
"""Pixels of a dash where lines cover each other."""
OVERLAP = " Overlapping lines are drawn as alternating dashes."


@dataclass(frozen=True)
class Figure:
    """One figure of the page.

    Args:
        name: its id on the page.
        title: what it shows.
        how: how to read it, in a few sentences.
        layout: Plotly layout, without fonts and colours.
        views: names of alternatives and their labels; a trace whose ``meta.view`` is another is hidden.
        log_axes: axes that the reader can switch to a log scale and back.
        height: in pixels.
    """

    name: str
    title: str
    how: str
    data: list[Row]
    layout: Row
    views: tuple[tuple[str, str], ...] = ()
    log_axes: tuple[str, ...] = ()
    height: int = 340


@dataclass(frozen=True, eq=False)
class Curve:
    """The runs of a group on a figure over steps or seconds.

    Args:
        joined: mean and span of its runs.
        not_finite: where a run had a value that was not finite.
        alone: stretches of single runs, each with its seed, where ``joined`` has none.
    """

    group: Group
    joined: Band
    not_finite: list[float] = field(default_factory=list)
    alone: list[tuple[int, Series]] = field(default_factory=list)

    @property
    def low(self) -> Array:
        """The finite values along the lower side of all that is drawn."""
        return self._drawn(self.joined.low)

    @property
    def high(self) -> Array:
        """The finite values along the upper side of all that is drawn."""
        return self._drawn(self.joined.high)

    def _drawn(self, side: Array) -> Array:
        values: Array = np.concatenate([side, *(line.y for _, line in self.alone)])
        return values[~np.isnan(values)]


def curve_of(group: Group, lines: Sequence[Series]) -> Curve:
    return Curve(group, band(lines), sorted({x for line in lines for x in gaps(line)}))


def traces_of(
    curves: Iterable[Curve],
    *,
    name: str,
    view: str = "",
    markers: bool = False,
    shape: str = "linear",
    dash: str | None = None,
) -> list[Row]:
    """Per curve its band, crosses where a value was not finite, its single runs and its mean; bands lie lowest."""
    curves = [curve for curve in curves if curve.high.size or curve.not_finite]
    num_buckets = max(60, POINTS_PER_LINE * 8 // max(8, len(curves)))
    spans = [_span(curve, num_buckets // 2, view) for curve in curves if max(curve.joined.count, default=0) > 1]
    single = [_alone(curve, num_buckets, view, name) for curve in curves if curve.alone]
    means = [_mean(curve, num_buckets, view, name, markers, shape, dash) for curve in curves if len(curve.joined.x)]
    broken = [curve for curve in curves if curve.not_finite]
    top = [_crosses(curve, view, line) for line, curve in enumerate(broken)]
    return [*spans, *top, *single, *means]


def _span(curve: Curve, num_buckets: int, view: str) -> Row:
    return _scatter(outline(curve.joined, num_buckets), curve.group, view) | {
        "mode": "lines",
        "fill": "toself",
        "fillcolor": colour(curve.group.index, 0.18),
        "line": {"width": 0},
        "hoverinfo": "skip",
    }


def _mean(curve: Curve, num_buckets: int, view: str, name: str, markers: bool, shape: str, dash: str | None) -> Row:
    group, joined = curve.group, curve.joined
    line = decimate(Series(joined.x, joined.mean), num_buckets)
    trace = _scatter(line, group, view)
    seeds = ""
    if len(group.runs) > 1:
        counts = dict(zip(joined.x.tolist(), joined.count.tolist(), strict=True))
        trace["customdata"] = [counts[x] for x in line.x.tolist()]
        seeds = f", mean of %{{customdata}} of {len(group.runs)} seeds"
    has_markers = len(line) == 1 or (markers and len(line) <= 40)
    return trace | {
        "name": plain(group.label),
        "mode": "lines+markers" if has_markers else "lines",
        "line": {"color": colour(group.index), "width": 2, "shape": shape, "dash": dash or dash_of(group.index)},
        "marker": {"size": 6, "symbol": symbol_of(group.index)},
        "hovertemplate": f"{name} %{{y:.5~g}}{seeds}<extra>{plain(group.label)}</extra>",
    }


def _alone(curve: Curve, num_buckets: int, view: str, name: str) -> Row:
    """Stretches of single runs as one thin trace, with a gap after each."""
    pieces = [(seed, decimate(line, num_buckets)) for seed, line in curve.alone]
    x = np.concatenate([[*piece.x, piece.x[-1]] for _, piece in pieces])
    y = np.concatenate([[*piece.y, np.nan] for _, piece in pieces])
    index = curve.group.index
    return _scatter(Series(x, y), curve.group, view) | {
        # A stretch of one point is no line.
        "mode": "lines+markers" if min(len(line) for _, line in curve.alone) == 1 else "lines",
        "line": {"color": colour(index, 0.6), "width": 1},
        "marker": {"size": 6, "color": colour(index), "symbol": symbol_of(index)},
        "customdata": [seed for seed, piece in pieces for _ in range(len(piece) + 1)],
        "hovertemplate": f"{name} %{{y:.5~g}}, seed %{{customdata}} alone<extra>{plain(curve.group.label)}</extra>",
    }


def _crosses(curve: Curve, view: str, line: int) -> Row:
    """Crosses along the top edge, at most some hundred, on a line of the recipe's own: only their x means anything."""
    x = np.array(curve.not_finite[:: max(1, len(curve.not_finite) // 200)])
    return _scatter(Series(x, np.full(len(x), 0.97 - CROSS_GAP * (line % 16))), curve.group, view) | {
        "yaxis": "y2",
        "mode": "markers",
        "marker": {"symbol": "x-thin", "size": 9, "line": {"width": 2, "color": colour(curve.group.index)}},
        "hovertemplate": f"not finite<extra>{plain(curve.group.label)}</extra>",
    }


def _scatter(line: Series, group: Group, view: str) -> Row:
    meta: Row = {"group": group.index} | ({"view": view} if view else {})
    return {"type": "scatter", "x": json_list(line.x, 9), "y": json_list(line.y), "meta": meta}


def mark(step: int, group: int, colour: str, line: Row, hover: str) -> Row:
    """An upright line at a step, with a triangle at its top that shows ``hover``."""
    return {
        "type": "scatter", "mode": "lines+markers", "x": [step, step], "y": [0, 0.98], "yaxis": "y2",
        "meta": {"group": group}, "line": line,
        "marker": {"symbol": "triangle-down", "size": [0, 10], "color": colour, "opacity": 1}, "hovertemplate": hover,
    }  # fmt: skip


def layout_of(x: str, y: str, *, log_y: bool = False) -> Row:
    return {
        "xaxis": {"title": {"text": x}},
        "yaxis": {"title": {"text": plain(y)}, "type": "log" if log_y else "linear"},
        # A second, hidden axis from 0 to 1, for marks without a value.
        "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
    }


def clip_diverged(curves: Sequence[Curve], layout: Row) -> str:
    """End the axis of losses where a diverged recipe would flatten all others.

    Returns a sentence that names every recipe beyond the axis; empty where the ``yaxis`` of ``layout`` needs no range.
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
    lines = [line for curve in curves for line in (curve.joined.mean, *(found.y for _, found in curve.alone))]
    return is_wide(np.concatenate(lines) if lines else [])


def dash_overlapping(curves: Sequence[Curve], data: Sequence[Row], layout: Row) -> str:
    """Draw means that cover each other as alternating dashes, so that each can be seen.

    Two lines overlap where most of the points they share are no further apart than a line is thick. The first is drawn
    whole, and each later one leaves gaps for those below it. Changes the means among the traces in ``data``; returns a
    sentence for the reader, empty where no lines overlap.
    """
    axis = layout["yaxis"]
    is_log = axis.get("type") == "log"
    lines = {curve.group.index: _shown(curve.joined, is_log) for curve in curves if len(curve.joined.x) > 1}
    # A figure that sets a range or includes values has a linear axis.
    drawn = [axis.get("autorangeoptions", {}).get("include", []), *(line.y for line in lines.values())]
    shown = np.concatenate([axis["range"]] if "range" in axis else drawn)
    near = THICKNESS * float(np.ptp(shown)) if shown.size else 0.0
    clusters: dict[int, list[int]] = {}
    for index, line in lines.items():
        first = next((found for found in clusters if _overlap(lines[found], line, near)), index)
        clusters.setdefault(first, []).append(index)
    dashes = {
        index: f"{DASH * (len(cluster) - turn)}px,{DASH * turn}px"
        for cluster in clusters.values()
        for turn, index in enumerate(cluster)
        if turn
    }
    for trace in data:
        index = trace["meta"]["group"]
        # A recipe that repeats a colour keeps the dash that distinguishes it.
        if index in dashes and "name" in trace and trace["line"]["dash"] == "solid":
            trace["line"]["dash"] = dashes[index]
    return OVERLAP if dashes else ""


def _shown(joined: Band, is_log: bool) -> Series:
    """The finite points of a mean, on the figure's own scale."""
    is_shown = joined.mean > 0 if is_log else ~np.isnan(joined.mean)
    y = joined.mean[is_shown]
    return Series(joined.x[is_shown], np.log10(y) if is_log else y)


def _overlap(one: Series, other: Series, near: float) -> bool:
    _, mine, theirs = np.intersect1d(one.x, other.x, return_indices=True)
    is_near = np.abs(one.y[mine] - other.y[theirs]) <= near
    return len(is_near) > 1 and 2 * int(is_near.sum()) > len(is_near)
