"""Scaling: extrapolate measured times to other numbers of chips, with honest limits.

The time of a job on N chips is divided work plus a rest: T(N) = a/N + b + c log2 N + d N. The rest may be constant (b), grow
with the depth of a message tree (c), or with the number of chips (d). Two times determine any two of these four unknowns, so
nothing checks the choice. So we keep every law that the times allow. The laws agree between the measured points and differ
beyond them. Their difference is the honest interval of an extrapolation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge.errors import DataError
from narrowgauge.planner.units import duration_text
from narrowgauge.spec.tables import Table, number_columns, text_columns
from narrowgauge.spec.toml import load_data

CAUSES: dict[str, Any] = load_data("causes", "planner")
"""``cause``: possible causes of time that does not shrink. ``groups``: ways to shrink each group of a planned step."""
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
"""Dependence of a part of the time on the number of chips. Only ``divided`` shrinks with more chips."""

_ALLOWED = 1.5  # times the noise: a law may miss the points by this much, however well another law fits
_MOST_UNKNOWNS = 3
_UNITS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_EXAMPLE = "For instance 128:10d,256:7d (units s, min, h, d)."


@dataclass(frozen=True, slots=True)
class MeasuredTime:
    """Record the seconds of a job on ``chips`` chips."""

    chips: int
    seconds: float

    def __str__(self) -> str:
        return f"{duration_text(self.seconds)} on {self.chips:,}"


def read_points(text: str) -> tuple[MeasuredTime, ...]:
    """Read points from the command line: ``CHIPS:TIME`` with a unit, separated by commas. Sort by chips.

    Example:
        >>> [str(point) for point in read_points("256:7d, 128:240h")]
        ['10 d on 128', '7 d on 256']
    """
    points = sorted((_read_point(part.strip()) for part in text.split(",") if part.strip()), key=lambda p: p.chips)
    numbers = sorted({point.chips for point in points})
    if len(numbers) < 2:
        measured = f"times on {numbers[0]:,} chips only" if numbers else "no time"
        raise DataError(
            f"measured times on several numbers of chips were requested, and {text!r} has {measured}.", _EXAMPLE
        )
    return tuple(points)


def _read_point(text: str) -> MeasuredTime:
    chips, _, time = text.partition(":")
    number = time.strip().rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = time.strip()[len(number) :]
    try:
        point = MeasuredTime(int(chips), float(number) * _UNITS[unit])
    except (ValueError, KeyError):
        raise DataError(f"'{text}' is no measured time: it must be CHIPS:TIME.", _EXAMPLE) from None
    if point.chips < 1 or not (0 < point.seconds < math.inf):
        raise DataError(f"'{text}' is no measured time: chips and time must be above zero.", _EXAMPLE)
    return point


@dataclass(frozen=True, slots=True)
class Law:
    """Describe a sum of shapes that fits the points.

    Args:
        parts: seconds of each shape where its function is 1, by name.
        error: relative error of one time, from the fit's residuals; 0 without residuals.
        weights: influence of each point's time on each part, ``[part][point]``.
    """

    parts: dict[str, float]
    error: float
    weights: tuple[tuple[float, ...], ...]

    def seconds(self, chips: float) -> float:
        return sum(value * SHAPES[name](chips) for name, value in self.parts.items())

    def deviation(self, chips: float, points: Sequence[MeasuredTime]) -> float:
        """Return the standard deviation of :meth:`seconds` that follows from the error of the points' times."""
        basis = [SHAPES[name](chips) for name in self.parts]
        enters = (sum(b * row[k] for b, row in zip(basis, self.weights, strict=True)) for k in range(len(points)))
        squares = ((share * p.seconds) ** 2 for share, p in zip(enters, points, strict=True))
        return max(NOISE, self.error) * math.sqrt(sum(squares))

    def __str__(self) -> str:
        units = {"divided": " / N", "constant": "", "logarithmic": " × log2 N", "linear": " × N"}
        return " + ".join(duration_text(value) + units[name] for name, value in self.parts.items())


@dataclass(frozen=True, slots=True)
class Scaling:
    """Hold the laws that measured times allow.

    ``points`` are sorted by number of chips. ``laws`` are all allowed laws, the simplest first. Reports use the first.
    """

    points: tuple[MeasuredTime, ...]
    laws: tuple[Law, ...]

    @property
    def law(self) -> Law:
        return self.laws[0]

    @property
    def is_checked(self) -> bool:
        """Tell whether more sizes were measured than the law has unknowns. Then the points could contradict it."""
        return len({point.chips for point in self.points}) > len(self.law.parts)

    def interval(self, chips: float) -> tuple[float, float]:
        """Return the 80 % interval of that time in seconds: the widest of all allowed laws.

        Example:
            >>> [f"{end / 86400:.1f}" for end in fit(read_points("128:10d,256:7d")).interval(512)]
            ['5.2', '8.0']
        """
        middles = [(law.seconds(chips), SIGMAS * law.deviation(chips, self.points)) for law in self.laws]
        return max(0.0, min(m - d for m, d in middles)), max(m + d for m, d in middles)

    @property
    def causes(self) -> list[dict[str, str]]:
        """List the causes whose growth appears in an allowed law."""
        shapes = {name for law in self.laws for name in law.parts}
        return [cause for cause in CAUSES["cause"] if cause["shape"] in shapes]

    def sentences(self) -> list[str]:
        """Summarize the times in at most four sentences.

        Example:
            >>> print(fit(read_points("128:10d,256:7d")).sentences()[0])
            256 chips instead of 128: 10 d become 7 d, 1.43 × as fast on 2 × the chips, an efficiency of 71%.
        """
        first, last, law = self.points[0], self.points[-1], self.law
        times, ratio = first.seconds / last.seconds, last.chips / first.chips
        lines = [
            f"{last.chips:,} chips instead of {first.chips:,}: {duration_text(first.seconds)} become "
            f"{duration_text(last.seconds)}, {times:.3g} × as fast on {ratio:.3g} × the chips, an efficiency of "
            f"{times / ratio:.0%}."
        ]
        if law.error > 2 * NOISE:
            lines.append(
                f"No sum of parts that shrink, stay or grow with the chips fits these times: the closest law, {law}, misses them "
                f"by {law.error:.0%}. They are not of one job, or one of them met trouble; do not extrapolate them."
            )
            return lines
        total, divided = law.seconds(first.chips), law.parts.get("divided", 0.0) / first.chips
        lines.append(
            f"T(N) = {law}: of {duration_text(total)} on {first.chips:,} chips {duration_text(divided)} are divided among them "
            f"and {duration_text(total - divided)} are not."
        )
        if set(law.parts) == {"divided", "constant"}:
            lines.append(f"No number of chips takes less than {duration_text(law.parts['constant'])} by this law.")
        checked = f"More sizes than unknowns were measured: the law misses their times by {law.error:.1%}."
        unchecked = "As many sizes as unknowns: nothing checks this law. Measure a third size."
        return [*lines, checked if self.is_checked else unchecked]

    def _prediction(self, chips: int) -> dict[str, float]:
        seconds, (low, high), first = self.law.seconds(chips), self.interval(chips), self.points[0].chips
        speed_up = self.law.seconds(first) / seconds
        return {"chips": chips, "seconds": seconds, "low_seconds": low, "high_seconds": high, "speed_up": speed_up,
                "efficiency": speed_up * first / chips}  # fmt: skip

    def tables(self, at: Sequence[int] = ()) -> list[Table]:
        """Return predictions for other numbers of chips, such as ``at``, and the causes that the laws allow."""
        first, last = self.points[0].chips, self.points[-1].chips
        numbers = sorted({max(1, first // 2), *at, max([2 * last, *at])})
        columns = number_columns(
            chips=lambda row: f"{row['chips']:,}",
            time=lambda row: duration_text(row["seconds"]),
            interval_80=lambda row: f"{duration_text(row['low_seconds'])} to {duration_text(row['high_seconds'])}",
            efficiency=lambda row: f"{row['efficiency']:.0%}",
        )
        rows = [self._prediction(chips) for chips in numbers]
        causes = text_columns(cause="name", grows="shape", why="why", measure="measure", what_helps="remedy")
        return [Table(columns, rows, "Other numbers of chips"), Table(causes, self.causes, "What may not be divided")]

    def row(self, at: Sequence[int] = ()) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "points": [{"chips": point.chips, "seconds": point.seconds} for point in self.points],
            "laws": [{"parts_seconds": law.parts, "relative_error": law.error, "text": str(law)} for law in self.laws],
            "is_checked": self.is_checked,
            "predictions": [self._prediction(chips) for chips in at],
            "causes": self.causes,
            "sentences": self.sentences(),
        }


def fit(points: Sequence[MeasuredTime]) -> Scaling:
    """Fit the laws that the points allow, the simplest first.

    An allowed law has no negative part and at most as many unknowns as measured sizes. From three sizes on, one size is left to
    check it. Keep all laws whose error is little above :data:`NOISE`, or at most twice the best law's error.

    Example:
        >>> print(fit(read_points("128:10d,256:7d")).law)
        768 d / N + 4 d
    """
    points = tuple(sorted(points, key=lambda point: point.chips))
    sizes = len({point.chips for point in points})
    most = min(_MOST_UNKNOWNS, 2 if sizes == 2 else sizes - 1)
    names = (combination for count in range(1, most + 1) for combination in itertools.combinations(SHAPES, count))
    laws = [law for law in (_law(combination, points) for combination in names) if law is not None]
    enough = max(_ALLOWED * NOISE, 2 * min(law.error for law in laws))
    close = [law for law in laws if law.error <= enough]
    # More chips only help divided work: use a law without it only if no other fits.
    close = [law for law in close if "divided" in law.parts] or close
    fewest = min(len(law.parts) for law in close)
    close.sort(key=lambda law: (len(law.parts), round(law.error / NOISE, 1) if len(law.parts) == fewest else 0))
    return Scaling(points, tuple(close))


def _law(names: Sequence[str], points: Sequence[MeasuredTime]) -> Law | None:
    """Fit relative errors by least squares. Return None if a part is negative or undetermined."""
    # Imported here: loading takes as long as a whole plan.
    import numpy as np

    seconds = np.array([point.seconds for point in points])
    rows = np.array([[SHAPES[name](point.chips) for name in names] for point in points]) / seconds[:, None]
    scaled = rows / np.linalg.norm(rows, axis=0)
    if np.isnan(scaled).any() or np.linalg.matrix_rank(scaled, tol=1e-6) < len(names):
        return None
    weights = np.linalg.pinv(scaled) / np.linalg.norm(rows, axis=0)[:, None]
    values = weights.sum(axis=1)
    if values.min() < 0:
        return None
    residuals = rows @ values - 1
    freedom = len(points) - len(names)
    error = math.sqrt(float(residuals @ residuals) / freedom) if freedom else 0.0
    return Law(dict(zip(names, values.tolist(), strict=True)), error, tuple(map(tuple, (weights / seconds).tolist())))
