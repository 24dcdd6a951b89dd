"""Scaling: what measured times on several numbers of chips say, and what they do not.

The time of a job on N chips is divided work plus a rest: T(N) = a/N + b. So its chip-seconds are
the line a + b N. Two times fit any such law, so nothing checks them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import linear_regression
from typing import NamedTuple

from narrowgauge.errors import DataError
from narrowgauge.planner.units import duration_text
from narrowgauge.spec.tables import Row, Table, number_columns

NOISE = 0.05
"""Relative error of the law above which it is not extrapolated."""
_UNITS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
Points = Sequence[tuple[int, float]]
"""Numbers of chips, in increasing order, and the seconds of the job on each."""


def read_points(text: str) -> list[tuple[int, float]]:
    """Read points from the command line: ``CHIPS:TIME`` with a unit, separated by commas.

    Sort by chips.

    Example:
        >>> read_points("256:7d, 128:240h")
        [(128, 864000.0), (256, 604800.0)]
    """
    pattern = r"\s*0*([1-9]\d*)\s*:\s*(\d+\.?\d*)\s*(s|min|m|h|d)\s*"
    points: dict[int, float] = {}
    for part in text.split(","):
        match = re.fullmatch(pattern, part)
        if match and float(match[2]):
            points[int(match[1])] = float(match[2]) * _UNITS[match[3]]
        else:
            points.clear()
            break
    if len(points) < 2:
        raise DataError(
            f"Cannot fit a scaling law to {text!r}: it needs CHIPS:TIME, both above zero, of two "
            "or more numbers of chips.",
            "For instance 128:10d,256:7d (units s, min, h, d).",
        )
    return sorted(points.items())


class Law(NamedTuple):
    """Hold the law ``divided / N + constant``, in seconds, and its largest relative error."""

    divided: float
    constant: float
    error: float = 0.0

    def seconds(self, chips: float) -> float:
        return self.divided / chips + self.constant


def fit(points: Points) -> Law:
    """Fit T = a/N + b to the chip-seconds, by least squares.

    Example:
        >>> law = fit(read_points("128:10d,256:7d"))
        >>> round(law.divided / 86400), round(law.constant / 86400)
        (768, 4)
    """
    line = linear_regression([n for n, _ in points], [n * seconds for n, seconds in points])
    law = Law(line.intercept, line.slope)
    return law._replace(error=max(abs(law.seconds(n) / seconds - 1) for n, seconds in points))


def scaling_row(points: Points, at: Sequence[int] = ()) -> Row:
    """Return plain values: the law, and times on half the least, ``at`` and twice the most chips."""
    law = fit(points)
    first, slow = points[0]
    last, fast = points[-1]
    predictions = []
    for chips in sorted({max(1, first // 2), *at, 2 * last}):
        seconds = law.seconds(chips)
        efficiency = law.seconds(first) * first / seconds / chips
        predictions.append({"chips": chips, "seconds": seconds, "efficiency": efficiency})
    cost = last * fast / (first * slow)
    before = f"{first * slow / 86_400:,.4g}"
    after = f"{last * fast / 86_400:,.4g}"
    lines = [
        f"{last:,} chips instead of {first:,}: {duration_text(slow)} become {duration_text(fast)}, "
        f"an efficiency of {1 / cost:.0%}. {before} chip-days become {after}, {cost:.3g} × as many.",
        f"T(N) = {duration_text(law.divided)} / N + {duration_text(law.constant)}: the second term "
        "is not divided among chips.",
        f"The law misses the measured times by at most {law.error:.1%}.",
    ]
    if len(points) == 2:
        lines[2] = "As many sizes as unknowns: nothing checks this law. Measure a third size."
    if law.error > NOISE or law.divided < 0:
        lines[1:] = ["No time that is divided plus one that stays fits these: measure again."]
    return {"law": law._asdict(), "predictions": predictions, "sentences": lines}


def tables_of(row: Row) -> list[Table]:
    """Return the predictions of a row as a table."""
    columns = number_columns(
        chips=lambda row: f"{row['chips']:,}",
        time=lambda row: duration_text(row["seconds"]),
        efficiency=lambda row: f"{row['efficiency']:.0%}",
    )
    return [Table(columns, row["predictions"], "Other numbers of chips")]
