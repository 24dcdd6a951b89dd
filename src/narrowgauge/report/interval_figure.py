"""The figure of a comparison: each recipe's loss difference from the baseline, as SVG.

The page holds it, and ``narrowgauge compare`` writes it as a file for a paper. Text and lines have
the colour of the text around them, so one drawing serves a light and a dark page.
"""

from __future__ import annotations

import math
from html import escape

from narrowgauge.measuring.comparison import Comparison, shown_difference
from narrowgauge.runs.schema import Row

COLOURS = (
    "#3b82c4", "#d4732a", "#1f9d7c", "#b4559a", "#a58412", "#3ba3c4", "#7565d0", "#7d838e",
)  # fmt: skip
"""The colour of each recipe in every figure. Each is readable on white and on near black."""
FAR = 15.0
"""The axis ends at this multiple of the threshold, or the recipes inside would overlap."""
_ROW = 44
_FRAME = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 440 {height}" role="img" \
font-family="system-ui, sans-serif" font-size="13" fill="currentColor">
<title>Loss minus the loss of {baseline}</title>
<rect x="{left}" y="8" width="{width}" height="{rows}" fill-opacity="0.1"/>
<path d="M220 8V{bottom}" stroke="currentColor" stroke-opacity="0.5"/>
{marks}
<text x="220" y="{title_y}" text-anchor="middle">loss minus {baseline}, nats per token</text>
</svg>"""
_MARK = """\
<text x="0" y="{text_y}">{recipe}</text>
<g><title>{words} nats</title><circle cx="{mean}" cy="{y}" r="5.5" fill="{colour}"/>\
<path d="M{low} {y}H{high}" stroke="{colour}" stroke-width="2.5"/></g>"""
_TICK = """\
<path d="M{x} {y}v5" stroke="currentColor" stroke-opacity="0.5"/>
<text x="{x}" y="{text_y}" text-anchor="middle">{value:+.2g}</text>"""


def interval_figure(comparison: Comparison) -> str:
    """Return an SVG of the paired differences with their 95 % intervals; empty without any.

    The band is the threshold: inside it a recipe is as good as the baseline. A single seed has no
    interval.
    """
    threshold = comparison.acceptable
    labels = [row["recipe"] for row in comparison.rows]
    drawn: list[tuple[Row, float, float, float]] = []
    for row in comparison.rows:
        mean = row["difference"]
        if mean is not None and math.isfinite(mean):
            low, high = row["difference_interval"] or (mean, mean)
            drawn.append((row, mean, low, high))
    if not drawn or not 0 < threshold < math.inf:
        return ""
    farthest = max(max(abs(low), abs(high)) for _, _, low, high in drawn)
    limit = 1.1 * min(max(farthest, 1.5 * threshold), FAR * threshold)

    def x_of(value: float) -> float:
        inside = max(-1.0, min(1.0, value / limit))
        return round(220 + 210 * inside, 1)

    marks = []
    y = 8
    for row, mean, low, high in drawn:
        colour = COLOURS[labels.index(row["recipe"]) % len(COLOURS)]
        words = escape(shown_difference(row))
        texts = {"recipe": escape(row["recipe"]), "words": words, "colour": colour}
        places = {"low": x_of(low), "mean": x_of(mean), "high": x_of(high)}
        marks.append(_MARK.format(y=y + 30, text_y=y + 18, **texts, **places))
        y += _ROW
    for value in (-threshold, 0.0, threshold):
        marks.append(_TICK.format(x=x_of(value), y=y, text_y=y + 20, value=value))
    left = x_of(-threshold)
    return _FRAME.format(
        baseline=escape(str(comparison.baseline)), left=left, width=round(x_of(threshold) - left, 1),
        rows=y - 8, bottom=y, height=y + 44, title_y=y + 38, marks="\n".join(marks),
    )  # fmt: skip
