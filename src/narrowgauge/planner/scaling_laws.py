"""Scaling: extrapolate measured times to other numbers of chips, with honest limits.

The time of a job on N chips is divided work plus a rest: T(N) = a/N + b f(N). The rest may be
constant, grow with the depth of a message tree (log2 N), or with the number of chips (N). Two times
fit any of the three, so nothing checks the choice. So we keep every law that the times allow. The
laws agree between the measured points and differ beyond them. Their difference is the honest
interval of an extrapolation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge.errors import DataError
from narrowgauge.planner.units import duration_text
from narrowgauge.runs.finding import counted
from narrowgauge.spec.tables import Row, Table, number_columns

NOISE = 0.02
"""Relative error of a measured time, unless the times show a larger error."""
SIGMAS = 1.2816
"""Standard deviations from the middle of an 80 % interval to its ends."""

SHAPES: dict[str, Callable[[float], float]] = {
    "divided": lambda chips: 1 / chips,
    "constant": lambda chips: 1.0,
    "logarithmic": lambda chips: math.log2(chips),
    "linear": lambda chips: float(chips),
}
"""Dependence of a part of the time on the number of chips.

Only ``divided`` shrinks with more chips.
"""
_LAWS = (("divided",), ("divided", "constant"), ("divided", "logarithmic"), ("divided", "linear"))

# Times the noise: a law may miss the points by this much, however well another law fits.
_ALLOWED = 1.5
_TEXTS = {"divided": " / N", "constant": "", "logarithmic": " × log2 N", "linear": " × N"}
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


@dataclass(frozen=True, slots=True)
class Law:
    """Describe a sum of shapes that fits the points.

    Args:
        parts: seconds of each shape where its function is 1, by name.
        error: relative error of one time, from the fit's residuals; 0 without residuals.
        weights: array of each part's change per relative error of each point's time, ``[part,
            point]``.
    """

    parts: dict[str, float]
    error: float
    weights: Any

    def seconds(self, chips: float) -> float:
        return sum(value * SHAPES[name](chips) for name, value in self.parts.items())

    def interval(self, chips: float) -> tuple[float, float]:
        """Return the 80 % interval of :meth:`seconds` that follows from the error of the points'
        times.
        """
        # Change of the time per relative error of each point's time.
        changes = [SHAPES[name](chips) for name in self.parts] @ self.weights
        margin = SIGMAS * max(NOISE, self.error) * math.hypot(*changes)
        middle = self.seconds(chips)
        return max(0.0, middle - margin), middle + margin

    def __str__(self) -> str:
        return " + ".join(duration_text(value) + _TEXTS[name] for name, value in self.parts.items())


@dataclass(frozen=True, slots=True)
class Scaling:
    """Hold the laws that measured times allow, the closest first. Reports use the first."""

    points: Points
    laws: tuple[Law, ...]

    def interval(self, chips: float) -> tuple[float, float]:
        """Return the 80 % interval of that time in seconds: the widest of all allowed laws.

        Example:
            >>> [f"{end / 86400:.1f}" for end in fit(read_points("128:10d,256:7d")).interval(512)]
            ['5.2', '8.0']
        """
        lows, highs = zip(*(law.interval(chips) for law in self.laws), strict=True)
        return min(lows), max(highs)

    def sentences(self) -> list[str]:
        """Summarize the times in at most four sentences."""
        return list(self._sentences())

    def _sentences(self) -> Iterator[str]:
        first, slow = self.points[0]
        last, fast = self.points[-1]
        law = self.laws[0]
        times = slow / fast
        ratio = last / first
        yield (
            f"{last:,} chips instead of {first:,}: {duration_text(slow)} become "
            f"{duration_text(fast)}, {times:.3g} × as fast on {ratio:.3g} × the chips, an "
            f"efficiency of {times / ratio:.0%}. {first * slow / 86_400:,.4g} chip-days become "
            f"{last * fast / 86_400:,.4g}, {ratio / times:.3g} × as many."
        )
        if law.error > 2 * NOISE:
            yield (
                "No sum of parts that shrink, stay or grow with the chips fits these times: the "
                f"closest law, {law}, misses them by {law.error:.0%}. They are not of one job, or "
                "one of them met trouble; do not extrapolate them."
            )
            return
        total = law.seconds(first)
        divided = law.parts["divided"] / first
        yield (
            f"T(N) = {law}: of {duration_text(total)} on {counted(first, 'chip')} "
            f"{duration_text(divided)} are divided among them and "
            f"{duration_text(total - divided)} are not."
        )
        least = law.parts.get("constant")
        if least is not None:
            yield f"No number of chips takes less than {duration_text(least)} by this law."
        if len(dict(self.points)) == len(law.parts):
            yield "As many sizes as unknowns: nothing checks this law. Measure a third size."
        else:
            yield (
                "More sizes than unknowns were measured: the law misses their times by "
                f"{law.error:.1%}."
            )

    def row(self, at: Sequence[int] = ()) -> Row:
        """Return plain values: the laws, and times on half the least, ``at`` and twice the most
        chips.
        """
        first = self.points[0][0]
        law = self.laws[0]
        predictions = []
        for chips in sorted({max(1, first // 2), *at, max(2 * self.points[-1][0], *at, 0)}):
            seconds = law.seconds(chips)
            low, high = self.interval(chips)
            row = {"chips": chips, "seconds": seconds, "low_seconds": low, "high_seconds": high}
            row["efficiency"] = law.seconds(first) / seconds * first / chips
            predictions.append(row)
        laws = []
        for law in self.laws:
            laws.append({"parts_seconds": law.parts, "relative_error": law.error, "text": str(law)})
        return {"laws": laws, "predictions": predictions, "sentences": self.sentences()}


def _interval_text(row: Row) -> str:
    return f"{duration_text(row['low_seconds'])} to {duration_text(row['high_seconds'])}"


def tables_of(row: Row) -> list[Table]:
    """Return the predictions of a row as a table."""
    columns = number_columns(
        chips=lambda row: f"{row['chips']:,}",
        time=lambda row: duration_text(row["seconds"]),
        interval_80=_interval_text,
        efficiency=lambda row: f"{row['efficiency']:.0%}",
    )
    return [Table(columns, row["predictions"], "Other numbers of chips")]


def fit(points: Points) -> Scaling:
    """Fit the laws that the points allow, the simplest first.

    An allowed law has no negative part. Keep all laws whose error is little above :data:`NOISE`, or
    at most twice the best law's.

    Example:
        >>> print(fit(read_points("128:10d,256:7d")).laws[0])
        768 d / N + 4 d
    """
    laws = [law for names in _LAWS if (law := _law(names, points))]
    enough = max(_ALLOWED * NOISE, 2 * min(law.error for law in laws))
    close = [law for law in laws if law.error <= enough]
    fewest = min(len(law.parts) for law in close)

    def place(law: Law) -> tuple[int, float]:
        size = len(law.parts)
        return size, round(law.error / NOISE, 1) if size == fewest else 0.0

    return Scaling(points, tuple(sorted(close, key=place)))


def _law(names: Sequence[str], points: Points) -> Law | None:
    """Fit relative errors by least squares. Return None if a part is negative."""
    # Imported here: loading takes as long as a whole plan.
    import numpy as np

    columns = [[SHAPES[name](chips) / seconds for chips, seconds in points] for name in names]
    rows = np.array(columns).T
    norms = np.linalg.norm(rows, axis=0)
    weights = np.linalg.pinv(rows / norms) / norms[:, None]
    values = weights.sum(axis=1)
    if (rows * values).min() < -1e-9:
        return None
    values = np.maximum(values, 0.0)
    residuals = rows @ values - 1
    freedom = len(points) - len(names)
    error = math.sqrt(float(residuals @ residuals) / freedom) if freedom else 0.0
    return Law(dict(zip(names, values.tolist(), strict=True)), error, weights)
