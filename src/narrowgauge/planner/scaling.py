"""Scaling: what measured times on several numbers of chips say, and what they do not.

The time of a job on N chips is divided work plus a rest: T(N) = a/N + b. So its chip-seconds are
the line a + b N. Two times fit any such law, so nothing checks them.
"""

import re
from collections.abc import Sequence
from statistics import linear_regression

from narrowgauge.errors import DataError
from narrowgauge.planner.plan_result import duration_text
from narrowgauge.spec.tables import Row

NOISE = 0.05
"""Relative error of the law above which it is not extrapolated."""
_POINT = re.compile(r"(?:^|,)\s*([1-9]\d*):(\d+\.?\d*)(s|min|h|d)\s*(?=,|$)")
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def read_points(text: str) -> dict[int, float]:
    """Read the seconds by chips from the command line: ``CHIPS:TIME`` with a unit, between commas.

    Example:
        >>> read_points("128:240h, 256:7d")
        {128: 864000.0, 256: 604800.0}
    """
    points = {int(chips): float(time) * _UNITS[unit] for chips, time, unit in _POINT.findall(text)}
    if len(points) < max(2, text.count(",") + 1) or 0 in points.values():
        raise DataError(
            f"Cannot fit a scaling law to {text!r}: it needs CHIPS:TIME, both above zero, of two "
            "or more numbers of chips.",
            "For instance 128:10d,256:7d (units s, min, h, d).",
        )
    return points


def scaling_row(points: dict[int, float], at: Sequence[int] = ()) -> Row:
    """Fit T = a/N + b to the chip-seconds, by least squares. Return plain values: the law, and times
    on ``at``, or twice the most chips, if the law fits.
    """
    constant, divided = linear_regression(points, [n * points[n] for n in points])
    error = max(abs((divided / n + constant) / points[n] - 1) for n in points)
    seconds = {chips: divided / chips + constant for chips in at or (2 * max(points),)}
    check = f"It misses the measured times by at most {error:.1%}."
    if error > NOISE or divided < 0:
        check = "No time that is divided plus one that stays fits these: measure again."
        seconds = {}
    elif len(points) == 2:
        check = "As many sizes as unknowns: nothing checks this law. Measure a third size."
    lines = [
        f"T(N) = {duration_text(divided)} / N + {duration_text(constant)}: the second term is not "
        "divided among chips.",
        check,
    ]
    for chips, time in seconds.items():
        lines.append(f"By this law {chips:,} chips take {duration_text(time)}.")
    law = {"divided": divided, "constant": constant, "error": error}
    return {"law": law, "seconds": seconds, "sentences": lines}
