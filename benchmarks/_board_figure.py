"""The board's figure: the loss that each row costs against the bytes that it takes, as SVG text.

A band for each whole number of bytes holds its rows side by side, with the 95 % interval over all cells. The scale of differences
is linear near zero and logarithmic beyond (``asinh``), so that 0.001 and 0.2 nats are seen in one picture. The text is a function
of the records alone: same records, same bytes.

Claim and baseline: none of its own. Run: ``./dev bench board --draw``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from _board_costs import Cost, is_others
from _board_records import MASTER, RULES

from narrowgauge.analysis.comparison.intervals import MINUS, PairedDifference
from narrowgauge.spec.storages import STORAGES

IMAGES = Path(__file__).parents[1] / "docs" / "images"

TOP, BOTTOM, LEFT, RIGHT = 76, 488, 74, 16
LEAST_WIDTH = 800
STEP, LINE, LETTER = 10, 15.0, 6.7
"""Pixels between points of a band, between labels, and a letter's width."""
TICKS = (0.001, 0.005, 0.02, 0.1, 0.5)
_BEND = 0.002


@dataclass(frozen=True)
class Colours:
    """The colours of one drawing: of text, of lines, and of the two kinds of rows."""

    text: str
    line: str
    zero: str
    ours: str
    others: str
    band: float
    """The opacity of the band of what is not resolved."""

    @property
    def style(self) -> str:
        """The style sheet."""
        return f"""
  text {{ font: 13px system-ui, sans-serif; fill: {self.text} }}
  .title {{ font-size: 15px; font-weight: 600 }}
  .axis, .tick {{ stroke: {self.line}; stroke-width: 1 }} .tick {{ stroke-dasharray: 2 3 }} .zero {{ stroke: {self.zero} }}
  .band {{ fill: #2a7; opacity: {self.band:g} }} .lead {{ stroke: {self.line}; fill: none }} .bar {{ stroke-width: 1.5 }}
  .ours {{ stroke: {self.ours}; fill: {self.ours} }} .others {{ stroke: {self.others}; fill: {self.others} }}
  text.ours, text.others {{ stroke: none }}
"""


LIGHT = Colours("#333", "#bbb", "#666", "#0a62b0", "#c2500a", 0.12)
DARK = Colours("#ddd", "#555", "#aaa", "#6cb4ff", "#ffa057", 0.22)
FIGURES = {IMAGES / "costs.svg": LIGHT, IMAGES / "costs-dark.svg": DARK}
"""Two files, and no ``prefers-color-scheme`` inside one: a page may be light where the system is dark, and the page chooses."""


def _bent(difference: float) -> float:
    return math.asinh(difference / _BEND)


def figure(costs: Iterable[Cost], colours: Colours = LIGHT) -> str:
    """The SVG of all rows that are complete and compared with ``master``, but storages that belong to another compute."""
    of_computes = {name for name in STORAGES if "/" in name}
    all_costs = list(costs)
    compared = [cost for cost in all_costs if cost.baseline == MASTER and cost.over_all is not None]
    shown = [cost for cost in compared if cost.row not in of_computes]
    num_rows = len(shown)
    # The zero that the others are compared with is a row, too, once there is something to compare.
    shown += [cost for cost in all_costs if num_rows and cost.row == MASTER]
    shown.sort(key=lambda cost: (_bytes(cost), cost.over_all.mean if cost.over_all else 0.0, cost.row))
    bands = [(size, list(group)) for size, group in groupby(shown, key=_bytes)]
    least = [STEP * len(group) + LETTER * max(len(cost.row) for cost in group) + 26 for _, group in bands]
    spread = max(1.0, LEAST_WIDTH / sum(least)) if least else 1.0
    widths = [spread * wide for wide in least]
    low, high = _reach(shown)
    width = round(LEFT + RIGHT + max(sum(widths), LEAST_WIDTH))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {BOTTOM + 62}" role="img" '
        'aria-label="Validation loss difference from master against bytes per parameter">',
        f"<style>{colours.style}</style>",
        f'<text class="title" x="{LEFT}" y="20">What each format costs: validation loss against bytes per parameter</text>',
        *(f'<text x="{LEFT}" y="{y}">{line}</text>' for y, line in zip((40, 57), _subtitle(num_rows), strict=False)),
        *_frame(width, low, high),
    ]
    left = float(LEFT)
    for (size, group), wide in zip(bands, widths, strict=True):
        parts += _band(size, group, left, wide, low, high)
        left += wide
    middle = (LEFT + width - RIGHT) / 2
    parts.append(
        f'<text x="{middle:.1f}" y="{BOTTOM + 44}" text-anchor="middle">bytes per parameter: weight, gradient and states</text>'
    )
    return "\n".join([*parts, "</svg>", ""])


def _bytes(cost: Cost) -> int:
    """Whole ones: what vectors and scales add tells no rows apart."""
    return round(cost.bytes_per_param)


def _subtitle(num_rows: int) -> tuple[str, ...]:
    if not num_rows:
        return ("no row is complete yet",)
    cells = f"{len(RULES.betas)} values of beta2, {len(RULES.lrs)} rates, {len(RULES.seeds)} seeds"
    return (
        f"{RULES.model}, {RULES.steps} steps, {cells}: mean difference from {MASTER} and its 95 % interval",
        f"band: ± {RULES.resolve:g} nats; blue: Narrowgauge's rows, orange: other packages' and published ones",
    )


def _reach(shown: Sequence[Cost]) -> tuple[float, float]:
    """The ends of the scale: those of the intervals, and the band at least."""
    ends = [end for cost in shown if cost.over_all is not None for end in (cost.over_all.low, cost.over_all.high)]
    return _bent(min([*ends, -1.5 * RULES.resolve])) - 0.25, _bent(max([*ends, 2 * RULES.resolve])) + 0.25


def _height(difference: float, low: float, high: float) -> float:
    return BOTTOM - (_bent(difference) - low) / (high - low) * (BOTTOM - TOP)


def _frame(width: int, low: float, high: float) -> list[str]:
    above, below = (_height(sign * RULES.resolve, low, high) for sign in (1, -1))
    right = width - RIGHT
    parts = [f'<rect class="band" x="{LEFT}" y="{above:.1f}" width="{right - LEFT}" height="{below - above:.1f}"/>']
    for tick in (0.0, *TICKS, *(-tick for tick in TICKS)):
        if low <= _bent(tick) <= high:
            y, kind = _height(tick, low, high), "tick" if tick else "axis zero"
            text = "0" if not tick else f"{'+' if tick > 0 else MINUS}{abs(tick):g}"
            parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{BOTTOM}" y2="{BOTTOM}"/>')
    middle = (TOP + BOTTOM) / 2
    turned = f'text-anchor="middle" transform="rotate(-90 14 {middle:.1f})"'
    parts.append(f'<text x="14" y="{middle:.1f}" {turned}>nats above {MASTER}</text>')
    return parts


def _band(size: int, group: Sequence[Cost], left: float, wide: float, low: float, high: float) -> list[str]:
    """The rows of one number of bytes: points with intervals, and their names to the right, pushed apart."""
    parts = [
        f'<line class="axis" x1="{left:.1f}" x2="{left:.1f}" y1="{BOTTOM}" y2="{BOTTOM + 5}"/>',
        f'<text x="{left + wide / 2:.1f}" y="{BOTTOM + 20}" text-anchor="middle">{size}</text>',
    ]
    zero = PairedDifference(MASTER, 0.0, 0.0, len(RULES.seeds))
    found = [(cost, cost.over_all or zero) for cost in group]
    heights = [_height(difference.mean, low, high) for _, difference in found]
    labels = _apart(heights)
    beside = left + 12 + STEP * len(found)
    for place, ((cost, difference), y, at) in enumerate(zip(found, heights, labels, strict=True)):
        x, kind = left + 10 + STEP * place, "others" if is_others(cost.row) else "ours"
        top, bottom = (_height(end, low, high) for end in (difference.high, difference.low))
        parts += [
            f'<path class="lead" d="M{x:.1f} {y:.1f} L{beside:.1f} {at:.1f}"/>',
            f'<line class="bar {kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>',
            f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>',
            f'<text class="{kind}" x="{beside + 3:.1f}" y="{at + 4:.1f}">{cost.row}</text>',
        ]
    return parts


def _apart(heights: Sequence[float]) -> list[float]:
    """Heights of labels, in the order given (downwards numbers fall), at least a line apart and inside the frame."""
    # Rows come by ascending difference, so from the bottom up: lay them from below, then push down from the top.
    placed: list[float] = []
    for height in heights:
        placed.append(min(height, placed[-1] - LINE) if placed else height)
    over = TOP - min(placed, default=float(TOP))
    if over > 0:
        ceiling = float(TOP)
        for place in reversed(range(len(placed))):
            placed[place] = max(placed[place], ceiling)
            ceiling = placed[place] + LINE
    return placed


def draw(costs: Iterable[Cost]) -> None:
    """Write the figure, for light and for dark pages."""
    shown = list(costs)
    for file, colours in FIGURES.items():
        file.write_text(figure(shown, colours), encoding="utf-8")
