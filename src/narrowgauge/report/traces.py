"""How figures and their lines, bands and points are written down for Plotly: the plumbing under the figures.

A trace knows nothing of fonts, paper or screens. Colours are names (``@c2`` is the third of the palette, ``@c2/0.2`` the
same, thin), which the page turns into those of its light or dark dress. Every trace of a recipe carries the recipe's
place in ``meta``, so that one press hides it everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from narrowgauge.report.groups import Group
from narrowgauge.report.series import Band, Series, band, decimate, gaps, is_wide, outline, rounded
from narrowgauge.runs.schema import Row

NUM_COLOURS = 8
"""Colours of the palette; recipes beyond it get its colours again with another dash and another kind of marker."""

DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "pentagon", "star")
FILLS = ("", "-open", "-dot", "-open-dot")
CROSS_GAP = 0.05
"""How far apart the crosses of two recipes stand, as a share of the figure's height."""
DOTS_PER_LINE = 600
"""How many buckets the lines of one figure may have together, per eight lines."""


@dataclass(frozen=True)
class Figure:
    """One figure of the page.

    Args:
        name: its id on the page.
        title: what it shows.
        how: how to read it, in a sentence or two.
        data: Plotly's traces.
        layout: Plotly's layout, without anything about looks.
        views: names of alternatives and their labels; a trace whose ``meta.view`` is another is hidden.
        log_axes: axes that the reader may turn to log scale and back.
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


@dataclass(frozen=True)
class Curve:
    """What a group becomes on a figure over steps or seconds.

    Args:
        group: whose it is.
        joined: mean and span of its runs.
        not_finite: where a run had a value that was not.
        alone: stretches of single runs, each with its seed, where ``joined`` is not.
    """

    group: Group
    joined: Band
    not_finite: list[float] = field(default_factory=list)
    alone: list[tuple[int, Series]] = field(default_factory=list)

    @property
    def low(self) -> list[float]:
        """The lower side of all that is drawn."""
        return self._side(self.joined.low)

    @property
    def high(self) -> list[float]:
        """The upper side of all that is drawn."""
        return self._side(self.joined.high)

    def _side(self, values: Sequence[float | None]) -> list[float]:
        lines = [values, *(line.y for _, line in self.alone)]
        return [value for line in lines for value in line if value is not None]


def colour(place: int, opacity: float | None = None) -> str:
    """The name of a recipe's colour.

    Example:
        >>> colour(1), colour(9, 0.2)
        ('@c1', '@c1/0.2')
    """
    name = f"@c{place % NUM_COLOURS}"
    return name if opacity is None else f"{name}/{opacity}"


def dash_of(place: int) -> str:
    """The dash that tells a recipe from the one with the same colour."""
    return DASHES[place // NUM_COLOURS % len(DASHES)]


def symbol_of(place: int) -> str:
    """The marker of a recipe, which tells it from the one with the same colour.

    Example:
        >>> symbol_of(1), symbol_of(9)
        ('square', 'square-open')
    """
    return SYMBOLS[place % len(SYMBOLS)] + FILLS[place // len(SYMBOLS) % len(FILLS)]


def plain(text: str) -> str:
    """Text that Plotly shows as it is: it reads a small set of tags and entities in all its labels.

    Example:
        >>> plain("<b>a</b> & b")
        '&lt;b&gt;a&lt;/b&gt; &amp; b'
    """
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


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
    """Per curve its band, its mean and crosses where something was not finite, lines above all bands."""
    curves = [curve for curve in curves if curve.high or curve.not_finite]
    num_buckets = max(60, DOTS_PER_LINE * 8 // max(8, len(curves)))
    spans = [_span(curve, num_buckets // 2, view) for curve in curves if max(curve.joined.count, default=0) > 1]
    single = [_alone(curve, num_buckets, view, name) for curve in curves if curve.alone]
    means = [_mean(curve, num_buckets, view, name, markers, shape, dash) for curve in curves if curve.joined.x]
    broken = [curve for curve in curves if curve.not_finite]
    top = [_crosses(curve, view, line) for line, curve in enumerate(broken)]
    return [*spans, *top, *single, *means]


def _span(curve: Curve, num_buckets: int, view: str) -> Row:
    place = curve.group.place
    shape = outline(curve.joined, num_buckets)
    return scatter(shape, curve.group, view) | {
        "mode": "lines",
        "fill": "toself",
        "fillcolor": colour(place, 0.18),
        "line": {"width": 0},
        "hoverinfo": "skip",
    }


def _mean(curve: Curve, num_buckets: int, view: str, name: str, markers: bool, shape: str, dash: str | None) -> Row:
    group, joined = curve.group, curve.joined
    line = decimate(Series(joined.x, joined.mean), num_buckets)
    trace = scatter(line, group, view)
    seeds = ""
    if len(group.runs) > 1:
        counts = dict(zip(joined.x, joined.count, strict=True))
        trace["customdata"] = [counts[x] for x in line.x]
        seeds = f", mean of %{{customdata}} of {len(group.runs)} seeds"
    dotted = markers and len(line) <= 40
    return trace | {
        "name": plain(group.label),
        "mode": "lines+markers" if dotted or len(line) == 1 else "lines",
        "line": {"color": colour(group.place), "width": 2, "shape": shape, "dash": dash or dash_of(group.place)},
        "marker": {"size": 6, "symbol": symbol_of(group.place)},
        "hovertemplate": f"{name} %{{y:.5~g}}{seeds}<extra>{plain(group.label)}</extra>",
    }


def _alone(curve: Curve, num_buckets: int, view: str, name: str) -> Row:
    """Stretches of single runs as one thin trace, with gaps between them."""
    line, seeds = Series([], []), list[int]()
    for seed, found in curve.alone:
        piece = decimate(found, num_buckets)
        line.x.extend([*piece.x, piece.x[-1]])
        line.y.extend([*piece.y, None])
        seeds.extend([seed] * (len(piece) + 1))
    place, label = curve.group.place, plain(curve.group.label)
    return scatter(line, curve.group, view) | {
        # A stretch of one point is no line.
        "mode": "lines+markers" if min(len(found) for _, found in curve.alone) == 1 else "lines",
        "line": {"color": colour(place, 0.6), "width": 1},
        "marker": {"size": 6, "color": colour(place), "symbol": symbol_of(place)},
        "customdata": seeds,
        "hovertemplate": f"{name} %{{y:.5~g}}, seed %{{customdata}} alone<extra>{label}</extra>",
    }


def _crosses(curve: Curve, view: str, line: int) -> Row:
    """Marks along the top edge, at most some hundred: where is what matters. Each recipe has a line of its own."""
    spots = curve.not_finite
    spots = spots[:: max(1, len(spots) // 200)]
    trace = scatter(Series(spots, [0.97 - CROSS_GAP * (line % 16)] * len(spots)), curve.group, view)
    return trace | {
        "yaxis": "y2",
        "mode": "markers",
        "marker": {"symbol": "x-thin", "size": 9, "line": {"width": 2, "color": colour(curve.group.place)}},
        "hovertemplate": f"not finite<extra>{plain(curve.group.label)}</extra>",
    }


def scatter(line: Series, group: Group, view: str) -> Row:
    meta: Row = {"group": group.place} | ({"view": view} if view else {})
    y = [rounded(value) for value in line.y]
    return {"type": "scatter", "x": [rounded(x, 9) for x in line.x], "y": y, "meta": meta}


def layout_of(x: str, y: str, *, log_y: bool = False) -> Row:
    return {
        "xaxis": {"title": {"text": x}},
        "yaxis": {"title": {"text": plain(y)}, "type": "log" if log_y else "linear"},
        # A second, unseen axis from 0 to 1: the place of marks that have no value.
        "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
    }


def kept_in_view(curves: Sequence[Curve], layout: Row) -> str:
    """End the axis of losses where what diverged would flatten all that did not.

    Law: nothing is left out that is not named.

    Args:
        curves: of losses.
        layout: of the figure; its ``yaxis`` gets a range, if one is needed.

    Returns:
        A sentence for the reader, or nothing.
    """
    limit = 1.25 * max((curve.high[0] for curve in curves if curve.high), default=0.0)
    beyond = [curve.group.label for curve in curves if max(curve.high, default=0.0) > 1.5 * limit]
    inside = [value for curve in curves for value in curve.low if value <= limit]
    if not beyond or not inside or limit <= 0:
        return ""
    low = min(inside)
    layout["yaxis"] |= {"type": "linear", "range": [low - 0.05 * (limit - low), limit]}
    return f" The axis ends a little above the first losses; beyond it goes {', '.join(beyond)}."


def any_wide(curves: Iterable[Curve]) -> bool:
    lines = [line for curve in curves for line in (curve.joined.mean, *(found.y for _, found in curve.alone))]
    return is_wide(value for line in lines for value in line)
