"""Figures as SVG: lines over steps, with their names below.

A figure needs no script and no style sheet, so it may be copied into a paper: text and axes take the
colour of the text around it, and lines have colours that are readable on white and on near black.
"""

import math
from collections.abc import Sequence
from html import escape
from itertools import product
from typing import Any, NamedTuple

import numpy as np

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b4559a", "#a58412", "#7565d0", "#7d838e")
"""By recipe. The first four are told apart by the colour-blind, too (after Okabe and Ito)."""
STYLES = [*product(("none", "4 6"), COLOURS)]
"""The dashes and colour of each recipe: of more than seven, lines are dashed."""
WIDTH = 440
"""Of a figure, in units of which a letter takes about seven."""
LEFT = 52
TOP = 26
HEIGHT = 200
"""Of the axes, which begin at ``LEFT`` and ``TOP``."""
POINTS = 700
"""A figure has about this many points: longer lines are drawn by means of equal parts."""
FIGURE = (
    '<figure><figcaption><b>{0}</b>{1}</figcaption><svg viewBox="0 0 440 {3:.0f}" role="img" '
    'font-size="13" font-family="system-ui, sans-serif" fill="none" stroke-linejoin="round" '
    'stroke-linecap="round" xmlns="http://www.w3.org/2000/svg"><title>{0}</title><desc>{2}</desc>{4}</svg></figure>'
).format
TEXT = '<text x="{:.0f}" y="{:.1f}" text-anchor="{}" fill="currentColor">{}</text>'.format
GRID = '<path d="M52 {:.1f}h{}" stroke="currentColor" stroke-opacity=".18"/>'.format
BAND = '<rect y="{:.1f}" width="{}" height="{:.1f}" fill="currentColor" fill-opacity=".09"/>'.format
CURVE = '<g stroke="{}" stroke-width="{}" stroke-dasharray="{}"><title>{}</title><path d="{}"/></g>'.format
PLOT = '<svg x="52" y="26" width="{}" height="{}">{}</svg>'.format


class Line(NamedTuple):
    """A line of values over steps. A ``main`` line, whose ``label`` is written, is the only one of its
    colour, or the mean of several seeds. NaN is a gap.
    """

    label: str
    colour: str
    seed: int
    steps: np.ndarray
    values: np.ndarray
    is_main: bool = False
    dash: str = "none"


class Axis(NamedTuple):
    """An axis from ``start`` to ``end``, drawn over ``length`` units."""

    start: float
    end: float
    length: float

    def at(self, values: Any) -> Any:
        """Return where values lie, in units; far beyond the ends it does not matter where."""
        places = (np.asarray(values) - self.start) / (self.end - self.start)
        return (places * self.length).clip(-999, 999)


def figure(
    heading: Sequence[str],
    lines: Sequence[Line],
    shown: Sequence[float] = (),
    band: float = 0.0,
) -> str:
    """Return lines over steps as a figure.

    Args:
        heading: the title, the caption, and the unit of the values.
        shown: values that the axis includes, so that noise does not look like a trend.
        band: half width of a grey band around zero.
    """
    title, caption, unit = map(escape, heading)
    size = max(1, sum(len(line.steps) for line in lines) // POINTS)
    if size > 1:
        unit += f" (means of {size} points)"
    thin = [thinned(line, size) for line in lines]
    low, high = axis_range(np.concatenate([line.values for line in thin]), shown)
    across = Axis(0.0, max(line.steps.max() for line in thin), WIDTH - LEFT - 24)
    down = Axis(high, low, HEIGHT)
    top, bottom = down.at(band), down.at(-band)
    inside = BAND(top, across.length, bottom - top) if band else ""
    for line in thin:
        inside += _curve(line, across, down)
    names, end = _names([line for line in thin if line.is_main])
    parts = [TEXT(0, 12, "start", unit), PLOT(across.length, HEIGHT, inside)]
    parts += [*_scales(across, down), names]
    return FIGURE(title, caption, unit, end, "".join(parts))


def _names(lines: Sequence[Line]) -> tuple[str, float]:
    """Return the names of lines, below each other and the axes, and where the last one ends."""
    names = ""
    y = TOP + HEIGHT + 42
    for line in lines:
        names += CURVE(line.colour, 3, line.dash, "", f"M{LEFT - 26} {y - 4}h20")
        names += TEXT(LEFT, y, "start", escape(line.label))
        y += 18
    return names, y


def _scales(across: Axis, down: Axis) -> list[str]:
    """Return the grid of the values, and the numbers on both axes."""
    bottom = TOP + down.length + 18
    parts = [TEXT(0, bottom, "start", "step")]
    for value, words in ticks(down.end, down.start):
        y = TOP + down.at(value)
        parts += [GRID(y, across.length), TEXT(LEFT - 6, y + 4, "end", words)]
    for value, words in ticks(0.0, across.end, 4):
        parts.append(TEXT(LEFT + across.at(value), bottom, "middle", words))
    return parts


def _curve(line: Line, across: Axis, down: Axis) -> str:
    """Return a line, with a title that a pointer shows. A single point is a dot."""
    commands = ""
    is_gap = True
    for x, y in zip(across.at(line.steps), down.at(line.values), strict=True):
        if not math.isnan(y):
            place = f"{x:.0f} {y:.1f}"
            commands += f"M{place}h.1" if is_gap else f"L{place}"
        is_gap = math.isnan(y)
    width = 2.5 if line.is_main else 0.7
    return CURVE(line.colour, width, line.dash, escape(line.label), commands)


def ticks(low: float, high: float, most: int = 5) -> list[tuple[float, str]]:
    """Return round values of an axis with their texts.

    Example:
        >>> ticks(0, 240, 4), ticks(-0.06, 0.13, 4)[1]
        ([(0.0, '0'), (100.0, '100'), (200.0, '200')], (0.0, '0.00'))
    """
    raw = (high - low) / most
    power = math.floor(math.log10(raw))
    factor = next(factor for factor in (1, 2, 5, 10) if factor * 10.0**power >= raw)
    step = factor * 10.0**power
    values = step * np.arange(math.ceil(low / step), math.floor(high / step) + 1)
    digits = max(0, -power - factor // 10)
    return [(value, f"{value:,.{digits}f}") for value in values.tolist()]


def axis_range(values: np.ndarray, shown: Sequence[float] = ()) -> tuple[float, float]:
    """Return an axis around nearly all values: a spike or a diverged run does not flatten the rest.

    Example:
        >>> axis_range(np.array([1.0, 0.9]), (0.0, 2.0))
        (-0.1, 2.1)
    """
    finite = values[np.isfinite(values)].tolist()
    low, quarter, middle, high = np.percentile(finite or [0.0], [0, 25, 75, 100]).tolist()
    reach = 6 * (middle - quarter)
    low = min(max(low, quarter - reach), *shown, high)
    high = max(min(high, middle + reach), *shown, low)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return low - margin, high + margin


def thinned(line: Line, size: int) -> Line:
    """Return a line of means of ``size`` points each, back from the end."""
    size = min(size, len(line.steps))
    first = len(line.steps) % size
    steps = line.steps[first + size - 1 :: size]
    return line._replace(steps=steps, values=line.values[first:].reshape(-1, size).mean(1))
