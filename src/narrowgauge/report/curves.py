"""Figures over steps, drawn by Plotly: differences from the baseline, losses, and EDQ.

Lines of recipes that train alike lie on each other. So several recipes are drawn as the difference
from the baseline's run of the same seed, and one recipe as its losses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from narrowgauge.measuring.columns import Series, column
from narrowgauge.report.interval_figure import colour_of
from narrowgauge.runs.record import Run

MOST_POINTS = 400
"""A longer line is drawn by means of equal parts."""
SMALLEST = 0.001
"""Nats that an axis of differences spans at least on each side: noise in the last digits looks small."""
_DASHES = ("solid", "dash", "dot", "dashdot")
_LOSSES = (("Training loss", "steps", "loss"), ("Validation loss", "evals", "val_loss"))


class PageRun(NamedTuple):
    """A run of the page, with the label and the number of its recipe there."""

    run: Run
    label: str
    recipe: int
    seed: int


class Curve(NamedTuple):
    """A figure: its title, what it shows, and Plotly's data and layout."""

    title: str
    caption: str
    figure: dict[str, Any]


def curves_of(runs: Sequence[PageRun], baseline: str | None) -> list[Curve]:
    """Return the figures of runs. One that would hold no line of two points is left out."""
    curves = []
    labels = {run.label for run in runs}
    for title, table, name in _LOSSES:
        if len(labels) > 1:
            lines = _differences(runs, table, name, baseline or runs[0].label)
            caption = (
                "Above zero a recipe is worse than the baseline. Each run is compared with the "
                "baseline's run of the same seed."
            )
            curves.append(_curve(f"{title} minus {baseline}", caption, lines, SMALLEST))
        else:
            lines = _lines(runs, table, name)
            curves.append(_curve(title, "Nats per token; lower is better.", lines))
    caption = (
        "The factor by which storage multiplied the learning rate: at 1 the whole update was "
        "stored, at 0 nothing. The last steps count, where updates are small."
    )
    curves.append(_curve("EDQ", caption, _lines(runs, "steps", "edq")))
    return [curve for curve in curves if curve.figure["data"]]


def _lines(runs: Sequence[PageRun], table: str, name: str) -> list[tuple[PageRun, Series]]:
    lines = []
    for run in runs:
        lines.append((run, column(run.run, table, name)))
    return lines


def _differences(
    runs: Sequence[PageRun], table: str, name: str, baseline: str
) -> list[tuple[PageRun, Series]]:
    reference = {}
    for run, line in _lines(runs, table, name):
        if run.label == baseline:
            reference[run.seed] = line
    lines = []
    for run in runs:
        if run.label == baseline or run.seed not in reference:
            continue
        line = column(run.run, table, name)
        steps, ours, theirs = np.intersect1d(line.x, reference[run.seed].x, return_indices=True)
        difference = Series(steps, line.y[ours] - reference[run.seed].y[theirs])
        if table == "steps":
            difference = thinned(difference, 50)
        lines.append((run, difference))
    return lines


def thinned(line: Series, most: int = MOST_POINTS) -> Series:
    """Return at most ``most`` points: of equal parts the last step and the mean."""
    if len(line) <= most:
        return line
    steps = []
    means = []
    for part in np.array_split(np.arange(len(line)), most):
        steps.append(line.x[part[-1]])
        means.append(line.y[part].mean())
    return Series(np.array(steps), np.array(means))


def _curve(
    title: str, caption: str, lines: Sequence[tuple[PageRun, Series]], least: float = 0.0
) -> Curve:
    data = []
    values: list[float] = []
    shown: set[str] = set()
    for run, line in lines:
        if len(line) < 2:
            continue
        points = thinned(line)
        values += points.finite.tolist()
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": [float(f"{x:.9g}") for x in points.x.tolist()],
                "y": [None if math.isnan(y) else float(f"{y:.6g}") for y in points.y.tolist()],
                "name": plain(run.label),
                "legendgroup": run.label,
                "showlegend": run.label not in shown,
                "line": {"color": colour_of(run.recipe), "width": 1.6, "dash": _dash(run.seed)},
                "hovertemplate": f"step %{{x}}: %{{y:.5~g}}<extra>seed {run.seed}</extra>",
            }
        )
        shown.add(run.label)
    yaxis: dict[str, Any] = {"automargin": True, "zeroline": least > 0}
    if values:
        yaxis["range"] = axis_range(values, least)
    layout = {
        "height": 320, "margin": {"l": 56, "r": 12, "t": 12, "b": 44}, "yaxis": yaxis,
        "xaxis": {"title": {"text": "step"}}, "legend": {"orientation": "h", "y": -0.25},
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "hovermode": "closest",
    }  # fmt: skip
    return Curve(title, caption, {"data": data, "layout": layout})


def _dash(seed: int) -> str:
    return _DASHES[seed % len(_DASHES)]


def axis_range(values: Sequence[float], least: float) -> list[float]:
    """Return an axis around nearly all values: a spike or a diverged run does not flatten the rest."""
    low, quarter, middle, high = np.percentile(values, [0, 25, 75, 100]).tolist()
    spread = middle - quarter
    low = min(max(low, quarter - 6 * spread), -least if least else low)
    high = max(min(high, middle + 6 * spread), least)
    margin = 0.06 * (high - low) or 0.5
    return [low - margin, high + margin]


def plain(text: str) -> str:
    """Escape text for Plotly: its labels interpret some tags and entities, its templates ``%{x}``.

    Example:
        >>> plain("<b>a</b> & %{x}")
        '&lt;b&gt;a&lt;/b&gt; &amp; %&#123;x}'
    """
    for mark, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("%{", "%&#123;")):
        text = text.replace(mark, entity)
    return text
