"""Scaling: what measured times on several numbers of chips say, and what they do not.

The time of a job on N chips is divided work plus a rest: T(N) = a/N + b. So its chip-seconds are
the line a + b N. Two times fit any such law, so nothing checks them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import linear_regression

from narrowgauge.errors import DataError
from narrowgauge.planner.words import duration_text
from narrowgauge.spec.tables import Row

NOISE = 0.05
"""Relative error of the law above which it is not extrapolated."""
_UNITS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def read_points(text: str) -> list[tuple[int, float]]:
    """Read points from the command line: ``CHIPS:TIME`` with a unit, separated by commas.

    Sort by chips.

    Example:
        >>> read_points("256:7d, 128:240h")
        [(128, 864000.0), (256, 604800.0)]
    """
    points: dict[int, float] = {}
    for chips, time, unit in re.findall(r"(\d+):(\d+\.?\d*)(s|min|m|h|d)\b", text.replace(" ", "")):
        points[int(chips)] = float(time) * _UNITS[unit]
    if len(points) < max(2, text.count(",") + 1) or 0 in (*points, *points.values()):
        raise DataError(
            f"Cannot fit a scaling law to {text!r}: it needs CHIPS:TIME, both above zero, of two "
            "or more numbers of chips.",
            "For instance 128:10d,256:7d (units s, min, h, d).",
        )
    return sorted(points.items())


def scaling_row(points: Sequence[tuple[int, float]], at: Sequence[int] = ()) -> Row:
    """Fit T = a/N + b to the chip-seconds, by least squares. Return plain values: the law, and times
    on half the least, ``at`` and twice the most chips.
    """
    line = linear_regression([n for n, _ in points], [n * seconds for n, seconds in points])
    divided = line.intercept
    constant = line.slope
    error = max(abs((divided / n + constant) / seconds - 1) for n, seconds in points)
    first, slow = points[0]
    last, fast = points[-1]
    predictions = []
    for chips in sorted({max(1, first // 2), *at, 2 * last}):
        seconds = divided / chips + constant
        predictions.append({"chips": chips, "seconds": seconds, "time": duration_text(seconds)})
    after = last * fast / (first * slow)
    lines = [
        f"{last:,} chips instead of {first:,}: {duration_text(slow)} become {duration_text(fast)}, "
        f"{after:.3g} × as many chip-days.",
        f"T(N) = {duration_text(divided)} / N + {duration_text(constant)}: the second term "
        "is not divided among chips.",
        f"The law misses the measured times by at most {error:.1%}.",
    ]
    if len(points) == 2:
        lines[2] = "As many sizes as unknowns: nothing checks this law. Measure a third size."
    if error > NOISE or divided < 0:
        lines[1:] = ["No time that is divided plus one that stays fits these: measure again."]
    law = {"divided": divided, "constant": constant, "error": error}
    return {"law": law, "predictions": predictions, "sentences": lines}
