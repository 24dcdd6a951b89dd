"""Lines that hide one another are drawn in dashes by turns, so that each can be seen.

Two lines coincide where, for most of what they share, they are no further apart than a line is thick. Of those that do, the
first is drawn whole, and each later one leaves gaps for those below it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from narrowgauge.report.traces import Curve
from narrowgauge.runs.schema import Row

THICKNESS = 0.008
"""Of a line, as a share of the figure's height."""
DASH = 7
"""Pixels of one line's turn."""

TOLD = " Where lines lie on one another, they are drawn in dashes by turns."


def part_coinciding(curves: Sequence[Curve], data: Sequence[Row], layout: Row) -> str:
    """Give the lines of a figure that coincide dashes by turns.

    Args:
        curves: what is drawn, in that order.
        data: the figure's traces; those of means are changed.
        layout: of the figure, which says how high it reaches.
    Returns:
        A sentence for the reader, or nothing.
    """
    is_log = layout["yaxis"].get("type") == "log"
    lines = {curve.group.place: _line(curve, is_log) for curve in curves if len(curve.joined.x) > 1}
    low, high = _reach(lines, layout, is_log)
    dashes: dict[int, str] = {}
    for places in _clusters({place: line for place, line in lines.items() if line}, THICKNESS * (high - low)):
        for turn, place in enumerate(places[1:], 1):
            dashes[place] = f"{DASH * (len(places) - turn)}px,{DASH * turn}px"
    for trace in data:
        place = trace["meta"]["group"]
        # A recipe whose colour is another's is told from it by a dash of its own.
        if place in dashes and "name" in trace and trace["line"]["dash"] == "solid":
            trace["line"]["dash"] = dashes[place]
    return TOLD if dashes else ""


def _line(curve: Curve, is_log: bool) -> dict[float, float]:
    """What is drawn of a mean: its finite values, on the figure's own scale."""
    points = zip(curve.joined.x, curve.joined.mean, strict=True)
    known = {x: y for x, y in points if y is not None and (y > 0 or not is_log)}
    return {x: math.log10(y) if is_log else y for x, y in known.items()}


def _reach(lines: Mapping[int, dict[float, float]], layout: Row, is_log: bool) -> tuple[float, float]:
    asked = layout["yaxis"].get("range")
    if asked is not None and not is_log:
        return asked[0], asked[1]
    values = [y for line in lines.values() for y in line.values()]
    values += [] if is_log else layout["yaxis"].get("autorangeoptions", {}).get("include", [])
    return min(values, default=0.0), max(values, default=0.0)


def _clusters(lines: Mapping[int, dict[float, float]], near: float) -> list[list[int]]:
    """Lines that coincide with the first of their cluster, in the order in which they are drawn."""
    found: list[list[int]] = []
    for place, line in lines.items():
        cluster = next((one for one in found if _coincide(lines[one[0]], line, near)), None)
        if cluster is None:
            found.append([place])
        else:
            cluster.append(place)
    return found


def _coincide(one: dict[float, float], other: dict[float, float], near: float) -> bool:
    shared = [abs(y - other[x]) <= near for x, y in one.items() if x in other]
    return len(shared) > 1 and 2 * sum(shared) > len(shared)
