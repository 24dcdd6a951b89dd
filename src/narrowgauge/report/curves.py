"""The figures of a page, drawn by Plotly: the intervals of a comparison, and curves over steps.

Lines of recipes that train alike lie on each other. So several recipes are drawn as the difference
from the baseline's run of the same seed, and one recipe as its losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np

from narrowgauge.measuring.comparison import Comparison
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import number

COLOURS = (
    "#3b82c4", "#d4732a", "#1f9d7c", "#b4559a", "#a58412", "#3ba3c4", "#7565d0", "#7d838e",
)  # fmt: skip
"""The colour of each recipe in every figure. Each is readable on white and on near black."""
FAR = 15.0
"""The axis of intervals ends at this multiple of the threshold, or the recipes inside would overlap."""
MOST_POINTS = 400
"""A longer line is drawn by means of equal parts."""
SMALLEST = 0.001
"""Nats that an axis of differences spans at least on each side: noise in the last digits looks small."""


class PageRun(NamedTuple):
    """A run of the page, with the label and the number of its recipe there."""

    run: Run
    label: str
    recipe: int
    seed: int


class Series(NamedTuple):
    """The points of one line, in the order of the record. NaN marks a value that is not finite."""

    x: Any
    y: Any


Line = tuple[PageRun, Series]


_DIFFERENCE = (
    "Above zero a recipe is worse than the baseline. Each run is compared with the baseline's run of "
    "the same seed."
)
_LOSS = "Nats per token; lower is better."
_EDQ = (
    "The factor by which storage multiplied the learning rate: at 1 the whole update was stored, at "
    "0 nothing. The last steps count, where updates are small."
)
_FIGURES = (
    ("Training loss", "steps", "loss", _LOSS), ("Validation loss", "evals", "val_loss", _LOSS),
    ("EDQ", "steps", "edq", _EDQ),
)  # fmt: skip
_LAYOUT: dict[str, Any] = {
    "margin": {"l": 56, "r": 12, "t": 12, "b": 50}, "hovermode": "closest",
    "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
}  # fmt: skip


def intervals_of(comparison: Comparison) -> dict[str, Any]:
    """Return the figure of the paired differences with their 95 % intervals; empty without any.

    The band is the threshold: inside it a recipe is as good as the baseline. A single seed has no
    interval.
    """
    threshold = comparison.acceptable
    data: list[dict[str, Any]] = []
    limit = 1.5 * threshold
    for place, row in enumerate(comparison.rows):
        mean = row["difference"]
        if mean is None or not math.isfinite(mean):
            continue
        low, high = row["difference_interval"] or (mean, mean)
        limit = max(limit, abs(low), abs(high))
        bar = {"type": "data", "array": [high - mean]}
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [mean],
                "y": [plain(row["recipe"])],
                "error_x": bar,
                "marker": {"color": COLOURS[place % len(COLOURS)], "size": 10},
            }
        )
    if not data or not 0 < threshold < math.inf:
        return {}
    limit = 1.1 * min(limit, FAR * threshold)
    band = {"type": "rect", "yref": "paper", "x0": -threshold, "x1": threshold, "y0": 0, "y1": 1}
    band |= {"fillcolor": "#7d838e", "opacity": 0.2, "line": {"width": 0}}
    title = f"loss minus {plain(str(comparison.baseline))}, nats per token"
    layout = {
        **_LAYOUT, "height": 130 + 40 * len(data), "showlegend": False, "shapes": [band],
        "xaxis": {"title": {"text": title}, "range": [-limit, limit]},
        "yaxis": {"automargin": True, "autorange": "reversed"},
    }  # fmt: skip
    return {"data": data, "layout": layout}


def curves_of(
    runs: Sequence[PageRun], baseline: str | None
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the figures of runs: title, caption, and Plotly's data and layout.

    One that would hold no line of two points is left out.
    """
    baseline = baseline or runs[0].label
    is_compared = any(run.label != baseline for run in runs)
    for title, table, name, caption in _FIGURES:
        lines = [(run, _column(run.run, table, name)) for run in runs]
        least = 0.0
        if is_compared and caption is _LOSS:
            lines = _differences(lines, baseline)
            title = f"{title} minus {baseline}"
            caption = _DIFFERENCE
            least = SMALLEST
        figure = _figure(lines, least)
        if figure["data"]:
            yield title, caption, figure


def _column(run: Run, table: str, name: str) -> Series:
    """Return a column over the steps, without the rows that lack it."""
    rows = [row for row in getattr(run, table) if row.get(name) is not None]
    values = np.array([number(row[name]) for row in rows], float)
    steps = np.array([row["step"] for row in rows], float)
    return Series(steps, np.where(np.isfinite(values), values, np.nan))


def _differences(lines: Sequence[Line], baseline: str) -> list[Line]:
    references = {}
    for run, line in lines:
        if run.label == baseline:
            references[run.seed] = line
    differences = []
    for run, line in lines:
        reference = references.get(run.seed)
        if run.label == baseline or reference is None:
            continue
        steps, ours, theirs = np.intersect1d(line.x, reference.x, return_indices=True)
        difference = Series(steps, line.y[ours] - reference.y[theirs])
        differences.append((run, thinned(difference, 50)))
    return differences


def thinned(line: Series, most: int = MOST_POINTS) -> Series:
    """Return at most ``most`` points: the last step and the mean of equal parts, back from the end."""
    size = max(1, -(-len(line.x) // most))
    count = len(line.x) // size
    first = len(line.x) - count * size
    parts = line.y[first:].reshape(count, size)
    return Series(line.x[first + size - 1 :: size], parts.mean(1))


def _figure(lines: Sequence[Line], least: float) -> dict[str, Any]:
    data: list[dict[str, Any]] = []
    values: list[float] = []
    shown: set[str] = set()
    for run, line in lines:
        if len(line.x) < 2:
            continue
        points = thinned(line)
        values += points.y[np.isfinite(points.y)].tolist()
        name = plain(run.label)
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": points.x.tolist(),
                "y": points.y.round(6).tolist(),  # NaN, a gap, becomes null in JSON
                "name": name,
                "legendgroup": name,
                "showlegend": name not in shown,
                "line": {"color": COLOURS[run.recipe % len(COLOURS)], "width": 1.6},
                "hovertemplate": f"step %{{x}}: %{{y:.5~g}}<extra>seed {run.seed}</extra>",
            }
        )
        shown.add(name)
    yaxis: dict[str, Any] = {"automargin": True, "zeroline": least > 0}
    if values:
        yaxis["range"] = axis_range(values, least)
    layout = {
        **_LAYOUT, "height": 320, "yaxis": yaxis, "xaxis": {"title": {"text": "step"}},
        "legend": {"orientation": "h", "y": -0.25},
    }  # fmt: skip
    return {"data": data, "layout": layout}


def axis_range(values: Sequence[float], least: float) -> list[float]:
    """Return an axis around nearly all values: a spike or a diverged run does not flatten the rest."""
    low, quarter, middle, high = np.percentile(values, [0, 25, 75, 100]).tolist()
    reach = 6 * (middle - quarter)
    low = max(low, quarter - reach)
    high = max(min(high, middle + reach), least)
    if least:
        low = min(low, -least)
    margin = 0.06 * (high - low) or 0.5
    return [low - margin, high + margin]


def plain(text: str) -> str:
    """Escape text for Plotly: its labels interpret some tags and entities, its templates ``%{x}``.

    Example:
        >>> plain("<b>a</b> & %{x}")
        '&lt;b&gt;a&lt;/b&gt; &amp; %&#123;x}'
    """
    return escape(text, quote=False).replace("%{", "%&#123;")
