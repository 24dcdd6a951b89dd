"""A figure as plain data for Plotly, and the lines of runs over steps."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from narrowgauge.analysis.columns import Array, Series
from narrowgauge.report.figures.palette import colour, dash_of, plain, symbol_of
from narrowgauge.runs.schema import Row

MOST_MARKERS = 40
"""A line of more points has no markers."""


@dataclass(frozen=True)
class Figure:
    """Describe one figure of the page.

    Args:
        name, title: its id on the page, and its heading.
        how: a caption that explains it.
        layout: Plotly layout, without fonts and colours.
        height: in pixels.
    """

    name: str
    title: str
    how: str
    data: list[Row]
    layout: Row
    height: int = 340


class Line(NamedTuple):
    """One run in a figure: the index of its recipe, its name, and its points."""

    group: int
    name: str
    points: Series


def rounded(value: float, digits: int = 6) -> float:
    """Round a number to ``digits`` significant digits, to keep pages small."""
    return float(f"{value:.{digits}g}")


def json_list(values: npt.ArrayLike, digits: int = 6) -> list[float | None]:
    """Return rounded numbers for JSON, a gap as ``None``."""
    result: list[float | None] = []
    for value in np.asarray(values, float).tolist():
        result.append(None if math.isnan(value) else rounded(value, digits))
    return result


def layout_of(x: str, y: str, **yaxis: object) -> Row:
    """Return axes with titles."""
    return {
        "xaxis": {"title": {"text": x}},
        "yaxis": {"title": {"text": plain(y)}, **yaxis},
        # A second, hidden axis from 0 to 1, for marks without a value.
        "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
    }


def over_steps(
    title: str, how: str, lines: Sequence[Line], y: str, *, fits: bool = False, **yaxis: object
) -> Figure | None:
    """Return a figure with a line for each run, ``None`` where no run has two points.

    Its name is its title. A cross marks a value that is not finite.

    Args:
        lines: of the runs.
        y: title of the upright axis.
        fits: end the axis a little above the first values, so that no spike or diverged run
            flattens the others.
        yaxis: more of Plotly's options.
    """
    if max((len(line.points) for line in lines), default=0) < 2:
        return None
    layout = layout_of("step", y, **yaxis)
    if fits:
        how += fit_axis(lines, layout)
    data = []
    for line in lines:
        points = line.points
        data.append(_trace(line, points) | {
            "mode": "lines+markers" if len(points) <= MOST_MARKERS else "lines",
            "line": {"color": colour(line.group), "width": 1.8, "dash": dash_of(line.group)},
            "marker": {"size": 6, "symbol": symbol_of(line.group)}, "name": plain(line.name),
            "hovertemplate": f"{title.lower()} %{{y:.5~g}}<extra>{plain(line.name)}</extra>",
        })  # fmt: skip
        if points.gaps:
            # Along the top edge: only their x means anything.
            marks = Series(np.array(points.gaps), np.full(len(points.gaps), 0.97))
            data.append(_trace(line, marks) | {
                "yaxis": "y2", "mode": "markers",
                "marker": {"symbol": "x-thin", "size": 9, "line": {"width": 2, "color": colour(line.group)}},
                "hovertemplate": f"not finite<extra>{plain(line.name)}</extra>",
            })  # fmt: skip
    return Figure(re.sub(r"[^a-z0-9]+", "-", title.lower()), title, how, data, layout)


def _trace(line: Line, points: Series) -> Row:
    x = json_list(points.x, 9)
    y = json_list(points.y)
    return {"type": "scatter", "x": x, "y": y, "meta": {"group": line.group}}


def fit_axis(lines: Sequence[Line], layout: Row) -> str:
    """End the upright axis at the lines, and return a sentence on what lies beyond."""
    values: list[Array] = [line.points.finite for line in lines if line.points.finite.size]
    if not values:
        return ""
    limit = 1.25 * max(float(part[0]) for part in values)
    every = np.concatenate(values)
    inside = every[every <= limit]
    if not inside.size or inside.min() == inside.max():
        return ""
    low = float(inside.min())
    high = float(inside.max())
    margin = 0.15 * (high - low)
    layout["yaxis"]["range"] = [rounded(low - margin), rounded(high + margin)]
    is_cut = every.max() > high + margin
    return " Some values lie beyond the axis: double-click to see all." if is_cut else ""
