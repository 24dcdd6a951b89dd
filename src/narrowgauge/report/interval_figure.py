"""The figure of a comparison: each recipe's loss difference from the baseline, as SVG.

The page holds it, and ``narrowgauge compare`` writes it as a file for a paper. Text and lines have
the colour of the text around them, so one drawing serves a light and a dark page.
"""

from __future__ import annotations

import math
from html import escape

from narrowgauge.measuring.comparison import Comparison
from narrowgauge.measuring.intervals import PairedDifference

COLOURS = (
    "#3b82c4", "#d4732a", "#1f9d7c", "#b4559a", "#a58412", "#3ba3c4", "#7565d0", "#7d838e",
)  # fmt: skip
"""The colour of each recipe in every figure. Each is readable on white and on near black."""
FAR = 15.0
"""The axis ends at this multiple of the threshold, or the recipes inside would overlap."""
_WIDTH = 440
_ROW = 44
_TOP = 8


def colour_of(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def interval_figure(comparison: Comparison) -> str:
    """Return an SVG of the paired differences with their 95 % intervals; empty without any.

    The band is the threshold: inside it a recipe is as good as the baseline.
    """
    threshold = comparison.acceptable
    labels = [row["recipe"] for row in comparison.rows]
    drawn = [pair for pair in comparison.differences if math.isfinite(pair.mean)]
    if not drawn or not 0 < threshold < math.inf:
        return ""
    reach = 1.5 * threshold
    for pair in drawn:
        for side in (pair.low, pair.high, pair.mean):
            if math.isfinite(side):
                reach = max(reach, abs(side))
    limit = 1.1 * min(reach, FAR * threshold)
    height = _TOP + _ROW * len(drawn)

    def x_of(value: float) -> float:
        inside = max(-limit, min(limit, value))
        return round(10 + (inside + limit) / (2 * limit) * (_WIDTH - 20), 1)

    middle = x_of(0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height + 44}" '
        'role="img" font-family="system-ui, sans-serif" font-size="13" fill="currentColor">',
        f"<title>Loss minus the loss of {escape(str(comparison.baseline))}</title>",
        f'<rect x="{x_of(-threshold)}" y="{_TOP}" width="{x_of(threshold) - x_of(-threshold):.1f}" '
        f'height="{height - _TOP}" fill-opacity="0.1"/>',
        _line(middle, _TOP, middle, height),
    ]
    for place, pair in enumerate(drawn):
        y = _TOP + _ROW * place + 30
        colour = colour_of(labels.index(pair.recipe))
        parts.append(f'<text x="0" y="{y - 12}">{escape(pair.recipe)}</text>')
        parts.append(_mark(pair, x_of(pair.low), x_of(pair.mean), x_of(pair.high), y, colour))
    for value in (-threshold, 0.0, threshold):
        x = x_of(value)
        parts.append(_line(x, height, x, height + 5))
        parts.append(f'<text x="{x}" y="{height + 20}" text-anchor="middle">{value:+.2g}</text>')
    words = f"loss minus {escape(str(comparison.baseline))}, nats per token"
    parts.append(f'<text x="{middle}" y="{height + 38}" text-anchor="middle">{words}</text>')
    return "\n".join([*parts, "</svg>"])


def _mark(pair: PairedDifference, low: float, mean: float, high: float, y: int, colour: str) -> str:
    """Draw the interval and the mean; a single seed has no interval."""
    mark = f'<circle cx="{mean}" cy="{y}" r="5.5" fill="{colour}"/>'
    if pair.num_pairs > 1:
        mark += f'<path d="M{low} {y}H{high}" stroke="{colour}" stroke-width="2.5"/>'
    return f"<g><title>{escape(pair.text)} nats</title>{mark}</g>"


def _line(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path d="M{x} {y}L{to_x} {to_y}" stroke="currentColor" stroke-opacity="0.5"/>'
