"""Where the names of points stand: beside their point where there is room for them, and nowhere where there is none.

A name that lies on a neighbour is read as that neighbour's, so none may touch another point, its bar, or another name.
Names have a width in dots while points lie at shares of a figure, so that what fits depends on the figure's width: it is
found for a few widths, of which the page takes the widest that its own figure has. What fits at one width fits at every
wider one, since names keep their size while points move apart.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from narrowgauge.runs.schema import Row

WIDTHS = (280, 320, 360, 400, 440, 480, 520, 580, 640, 760, 900)
"""Widths of figures, in dots, for which places are found; the first is a small telephone's."""

SIDES: dict[str, tuple[int, float, float]] = {
    "middle right": (1, -8.5, 8.5),
    "middle left": (-1, -8.5, 8.5),
    "top center": (0, 7.5, 22.5),
    "bottom center": (0, -20.5, -5.5),
}
"""Where a name can stand: to which side of its point, and between which heights from there, in dots."""

_MARGINS = 75
_HEIGHT = 265
_LETTER, _SMALL_LETTER = 6.7, 6.1
"""What a letter takes, in dots: a little more than in the widest usual typeface."""
_SMALL_PRINT = 520 - _MARGINS
"""Below it the page's print is smaller."""
_RADIUS = 7.0


@dataclass(frozen=True)
class Box:
    """A part of a figure, in dots from its lower left corner."""

    left: float
    right: float
    low: float
    high: float

    def touches(self, other: Box) -> bool:
        """Whether the two have a dot in common."""
        apart = self.right <= other.left or other.right <= self.left or self.high <= other.low or other.high <= self.low
        return not apart


@dataclass(frozen=True)
class Spot:
    """A point with a name.

    Args:
        name: as it is read.
        x, y: its place, as shares of the figure's width and height.
        low, high: the ends of its bar, as shares of the height.
    """

    name: str
    x: float
    y: float
    low: float
    high: float

    def mark(self, width: float) -> Box:
        """What the point and its bar cover."""
        x, low, high = self.x * width, self.low * _HEIGHT, self.high * _HEIGHT
        return Box(x - _RADIUS, x + _RADIUS, low - _RADIUS, high + _RADIUS)

    def bar(self, width: float) -> Box:
        """What its bar alone covers, which its own name may not lie on."""
        x = self.x * width
        return Box(x - 1, x + 1, self.low * _HEIGHT, self.high * _HEIGHT)

    def label(self, side: str, width: float) -> Box:
        """What its name covers on that side."""
        across, low, high = SIDES[side]
        reach = (_SMALL_LETTER if width < _SMALL_PRINT else _LETTER) * len(self.name) / 2
        x = self.x * width + across * (_RADIUS + 1 + reach)
        y = self.y * _HEIGHT
        return Box(x - reach, x + reach, y + low, y + high)


def sides(spots: Sequence[Spot], width: int) -> list[str | None]:
    """Where each name stands in a figure of that width, or ``None`` where it has no room; the first to come are served first.

    Args:
        spots: the points.
        width: of the figure with its margins, in dots.

    Example:
        >>> alone, near = Spot("here", 0.2, 0.5, 0.5, 0.5), Spot("there", 0.25, 0.5, 0.5, 0.5)
        >>> sides([alone], 500), sides([alone, near], 500)
        (['middle right'], ['middle left', 'middle right'])
    """
    inner = float(width - _MARGINS)
    whole = Box(0, inner, 0, _HEIGHT)
    marks = [spot.mark(inner) for spot in spots]
    taken: list[Box] = []
    found: list[str | None] = []
    for place, spot in enumerate(spots):
        others = [*marks[:place], *marks[place + 1 :], spot.bar(inner), *taken]
        found.append(
            next((side for side in _by_choice(spot) if _is_free(spot.label(side, inner), whole, others)), None)
        )
        if (side := found[-1]) is not None:
            taken.append(spot.label(side, inner))
    return found


def keep_apart(points: Sequence[Row], x_range: Sequence[float], y_range: Sequence[float], *, log: bool = False) -> None:
    """Give each trace of one point the place of its name, and write into ``meta.fits`` what changes in wider figures.

    Args:
        points: traces with ``x``, ``y``, ``error_y`` and ``text`` of one entry each; changed in place.
        x_range, y_range: what the axes reach over.
        log: whether the upright axis counts powers of ten.
    """
    spots = [_spot(point, x_range, y_range, log) for point in points]
    before: list[str | None] = [None] * len(points)
    for point in points:
        point["mode"], point["meta"]["fits"] = "markers", []
    for width in WIDTHS:
        found = sides(spots, width)
        for point, was, side in zip(points, before, found, strict=True):
            if side != was:
                point["meta"]["fits"].append(
                    [width, {"mode": "markers+text", "textposition": side} if side else {"mode": "markers"}]
                )
        before = found


def _by_choice(spot: Spot) -> list[str]:
    """The inner side first: there is more room."""
    return sorted(SIDES, key=lambda side: side.endswith("right") and spot.x > 0.5)


def _is_free(box: Box, whole: Box, others: Sequence[Box]) -> bool:
    inside = whole.left <= box.left and box.right <= whole.right and whole.low <= box.low and box.high <= whole.high
    return inside and not any(box.touches(other) for other in others)


def _spot(point: Row, x_range: Sequence[float], y_range: Sequence[float], log: bool) -> Spot:
    (x,), (y,), bar = point["x"], point["y"], point["error_y"]
    first, last = x_range

    def up(value: float) -> float:
        low, high, at = (math.log10(one) if log else one for one in (*y_range, value))
        # The page leaves some room above and below.
        return 0.1 + 0.8 * (at - low) / (high - low) if high > low else 0.5

    # On an axis of powers of ten a bar may reach below all of them; there it ends where the figure does.
    ends = [max(y - bar["arrayminus"][0], y_range[0]), min(y + bar["array"][0], y_range[1])]
    return Spot(html.unescape(point["text"][0]), (x - first) / (last - first), up(y), up(ends[0]), up(ends[1]))
