"""Scaling: what measured times on several numbers of chips say, and what they do not.

The time of a job on N chips is divided work plus a rest: T(N) = a/N + b. Two times fit any such
law, so nothing checks them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from narrowgauge.errors import DataError
from narrowgauge.planner.units import duration_text
from narrowgauge.runs.finding import counted
from narrowgauge.spec.tables import Row, Table, number_columns

NOISE = 0.05
"""Relative error of the law above which it is not extrapolated."""
_UNITS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_EXAMPLE = "For instance 128:10d,256:7d (units s, min, h, d)."
Points = Sequence[tuple[int, float]]
"""Numbers of chips, in increasing order, and the seconds of the job on each."""


def read_points(text: str) -> list[tuple[int, float]]:
    """Read points from the command line: ``CHIPS:TIME`` with a unit, separated by commas.

    Sort by chips.

    Example:
        >>> read_points("256:7d, 128:240h")
        [(128, 864000.0), (256, 604800.0)]
    """
    points = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+\.?\d*)\s*(s|min|m|h|d)\s*", part)
        if match is None or not int(match[1]) or not float(match[2]):
            raise DataError(
                f"Cannot read '{part}' as a measured time: it must be CHIPS:TIME, both above zero.",
                _EXAMPLE,
            )
        points.append((int(match[1]), float(match[2]) * _UNITS[match[3]]))
    if len(dict(points)) < 2:
        raise DataError(
            f"Cannot fit a scaling law because {text!r} has times on "
            f"{counted(points[0][0], 'chip')} only.",
            _EXAMPLE,
        )
    return sorted(points)


class Law(NamedTuple):
    """Hold the law ``divided / N + constant``, in seconds, and its largest relative error."""

    divided: float
    constant: float
    error: float = 0.0

    def seconds(self, chips: float) -> float:
        return self.divided / chips + self.constant


def fit(points: Points) -> Law:
    """Fit T = a/N + b by least squares of relative errors.

    Example:
        >>> law = fit(read_points("128:10d,256:7d"))
        >>> round(law.divided / 86400), round(law.constant / 86400)
        (768, 4)
    """
    rr = rc = cc = r = c = 0.0  # sums of products of the columns 1/(N T) and 1/T
    for chips, seconds in points:
        row = 1 / (chips * seconds)
        column = 1 / seconds
        rr += row * row
        rc += row * column
        cc += column * column
        r += row
        c += column
    determinant = rr * cc - rc * rc
    law = Law((r * cc - c * rc) / determinant, (c * rr - r * rc) / determinant)
    misses = [abs(law.seconds(chips) / seconds - 1) for chips, seconds in points]
    return law._replace(error=max(misses))


def sentences_of(points: Points, law: Law) -> list[str]:
    """Say what the times mean in at most three sentences."""
    first, slow = points[0]
    last, fast = points[-1]
    times = slow / fast
    ratio = last / first
    lines = [
        f"{last:,} chips instead of {first:,}: {duration_text(slow)} become "
        f"{duration_text(fast)}, {times:.3g} × as fast on {ratio:.3g} × the chips, an "
        f"efficiency of {times / ratio:.0%}. {first * slow / 86_400:,.4g} chip-days become "
        f"{last * fast / 86_400:,.4g}, {ratio / times:.3g} × as many."
    ]
    if law.error > NOISE or law.divided < 0:
        return [*lines, "No time that is divided plus one that stays fits these: measure again."]
    divided = law.divided / first
    text = f"T(N) = {duration_text(law.divided)} / N + {duration_text(law.constant)}"
    lines.append(
        f"{text}: of {duration_text(law.seconds(first))} on {counted(first, 'chip')} "
        f"{duration_text(divided)} are divided among them and {duration_text(law.constant)} are not."
    )
    if len(dict(points)) == 2:
        lines.append("As many sizes as unknowns: nothing checks this law. Measure a third size.")
    else:
        lines.append(f"The law misses the measured times by at most {law.error:.1%}.")
    return lines


def scaling_row(points: Points, at: Sequence[int] = ()) -> Row:
    """Return plain values: the law, and times on half the least, ``at`` and twice the most chips."""
    law = fit(points)
    first = points[0][0]
    predictions = []
    for chips in sorted({max(1, first // 2), *at, 2 * points[-1][0]}):
        seconds = law.seconds(chips)
        efficiency = law.seconds(first) * first / seconds / chips
        predictions.append({"chips": chips, "seconds": seconds, "efficiency": efficiency})
    return {
        "law": law._asdict(),
        "predictions": predictions,
        "sentences": sentences_of(points, law),
    }


def tables_of(row: Row) -> list[Table]:
    """Return the predictions of a row as a table."""
    columns = number_columns(
        chips=lambda row: f"{row['chips']:,}",
        time=lambda row: duration_text(row["seconds"]),
        efficiency=lambda row: f"{row['efficiency']:.0%}",
    )
    return [Table(columns, row["predictions"], "Other numbers of chips")]
