"""Scaling: what measured times on different numbers of chips say about others, and what they cannot say.

The time of a job on N chips is work that is divided among them, and the rest: T(N) = a/N + b + c log2 N + d N. The rest may stay
the same (b), grow with the depth of a tree of messages (c) or with the number of chips (d). Two times determine two of these four
unknowns, whichever two are chosen, so nothing checks the choice. Every law that the times allow is therefore kept: they agree
between the measured points and differ beyond them, and how far they differ is the honest interval of an extrapolation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from narrowgauge.errors import DataError
from narrowgauge.planner.linear_equations import solve

SHAPES: dict[str, Callable[[float], float]] = {
    "divided": lambda chips: 1 / chips,
    "constant": lambda chips: 1.0,
    "logarithmic": lambda chips: math.log2(chips),
    "linear": lambda chips: float(chips),
}
"""How a part of the time depends on the number of chips; the first is what more chips are bought for."""

NOISE = 0.02
"""Relative error that a reported time is assumed to have where the points themselves do not show a larger one."""
_SIGMAS = 1.2816  # four times out of five
_ALLOWED = 1.5  # times that noise: what a law may miss the points by, however well another one fits
_MOST_UNKNOWNS = 3
_UNITS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_EXAMPLE = "For instance 128:10d,256:7d (units s, min, h, d)."


@dataclass(frozen=True, slots=True)
class Point:
    """A measured time of the same job.

    Args:
        chips: that ran it.
        seconds: that it took.
    """

    chips: int
    seconds: float

    def __str__(self) -> str:
        return f"{duration(self.seconds)} on {self.chips:,}"


def read_points(text: str) -> tuple[Point, ...]:
    """Read points as they are written on the command line.

    Args:
        text: ``CHIPS:TIME`` with a unit, separated by commas.
    Returns:
        The points, by number of chips.
    Raises:
        DataError: the text does not say that, or names fewer than two numbers of chips.
    Example:
        >>> [str(point) for point in read_points("256:7d, 128:240h")]
        ['10 d on 128', '7 d on 256']
    """
    points = sorted((_read_point(part.strip()) for part in text.split(",") if part.strip()), key=lambda p: p.chips)
    numbers = sorted({point.chips for point in points})
    if len(numbers) < 2:
        found = f"times on {numbers[0]:,} chips only" if numbers else "no time"
        raise DataError(
            f"measured times on several numbers of chips were requested, and {text!r} has {found}.", _EXAMPLE
        )
    return tuple(points)


def _read_point(text: str) -> Point:
    chips, _, time = text.partition(":")
    number = time.strip().rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = time.strip()[len(number) :]
    try:
        point = Point(int(chips), float(number) * _UNITS[unit])
    except (ValueError, KeyError):
        raise DataError(f"'{text}' is no measured time: it must be CHIPS:TIME.", _EXAMPLE) from None
    if point.chips < 1 or not (0 < point.seconds < math.inf):
        raise DataError(f"'{text}' is no measured time: chips and time must be above zero.", _EXAMPLE)
    return point


def duration(seconds: float) -> str:
    """A time in the largest unit of which it has two, to three digits.

    Example:
        >>> duration(864000), duration(93600), duration(5.5 * 86400), duration(0.0123)
        ('10 d', '26 h', '5.5 d', '12.3 ms')
    """
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if abs(seconds) >= 2 * size or (unit == "d" and abs(seconds) >= 1.75 * size):
            return f"{_digits(seconds / size)} {unit}"
    return f"{seconds:.3g} s" if abs(seconds) >= 1 or seconds == 0 else f"{1e3 * seconds:.3g} ms"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class Law:
    """A sum of shapes that fits the points.

    Args:
        parts: seconds at ``chips = 1`` of each shape, by name.
        error: relative error of one time, from what the points leave over; 0 where they leave nothing over.
        weights: by how much each point's time enters each part, ``[part][point]``.
    """

    parts: dict[str, float]
    error: float
    weights: tuple[tuple[float, ...], ...]

    def seconds(self, chips: float) -> float:
        """The time on so many chips."""
        return sum(self.share(name, chips) for name in self.parts)

    def share(self, name: str, chips: float) -> float:
        """The seconds of one part; 0 where the law has no such part."""
        return self.parts.get(name, 0.0) * SHAPES[name](chips)

    def deviation(self, chips: float, points: Sequence[Point]) -> float:
        """The standard deviation of :meth:`seconds`, from that of the points' times."""
        basis = [SHAPES[name](chips) for name in self.parts]
        noise = max(NOISE, self.error)
        enters = (sum(b * row[k] for b, row in zip(basis, self.weights, strict=True)) for k in range(len(points)))
        return noise * math.sqrt(sum((share * p.seconds) ** 2 for share, p in zip(enters, points, strict=True)))

    def __str__(self) -> str:
        return " + ".join(_PRINTED[name](value) for name, value in self.parts.items())


_PRINTED: dict[str, Callable[[float], str]] = {
    "divided": lambda seconds: f"{duration(seconds)} / N",
    "constant": duration,
    "logarithmic": lambda seconds: f"{duration(seconds)} × log2 N",
    "linear": lambda seconds: f"{duration(seconds)} × N",
}


@dataclass(frozen=True, slots=True)
class Scaling:
    """What measured times say.

    Args:
        points: by number of chips.
        laws: all that the points allow, the simplest first; that one's values are reported.
    """

    points: tuple[Point, ...]
    laws: tuple[Law, ...]

    @property
    def law(self) -> Law:
        """The law whose values are reported."""
        return self.laws[0]

    @property
    def num_sizes(self) -> int:
        """Different numbers of chips among the points."""
        return len({point.chips for point in self.points})

    @property
    def is_checked(self) -> bool:
        """Whether more sizes were measured than the law has unknowns, so that the points could have contradicted it."""
        return self.num_sizes > len(self.law.parts)

    @property
    def fits(self) -> bool:
        """Whether the law agrees with the points within their errors; without, the points are not of one job."""
        return self.law.error <= 2 * NOISE

    def seconds(self, chips: float) -> float:
        """The time on so many chips, by the reported law."""
        return self.law.seconds(chips)

    def interval(self, chips: float) -> tuple[float, float]:
        """The interval in which that time lies four times out of five: the widest that any allowed law gives.

        Args:
            chips: how many.
        Returns:
            Seconds, from and to.
        Example:
            >>> [f"{end / 86400:.1f}" for end in fit(read_points("128:10d,256:7d")).interval(512)]
            ['5.2', '8.0']
        """
        middles = [(law.seconds(chips), _SIGMAS * law.deviation(chips, self.points)) for law in self.laws]
        return max(0.0, min(m - d for m, d in middles)), max(m + d for m, d in middles)

    def speed_up(self, before: float, after: float) -> float:
        """How many times faster ``after`` chips are than ``before``, by the law."""
        return self.seconds(before) / self.seconds(after)

    def efficiency(self, before: float, after: float) -> float:
        """The speed-up over the ratio of the chips: 1 where no chip is wasted.

        Example:
            >>> f"{fit(read_points('128:10d,256:7d')).efficiency(128, 256):.3f}"
            '0.714'
        """
        return self.speed_up(before, after) * before / after


def fit(points: Sequence[Point]) -> Scaling:
    """Fit the laws that the points allow.

    A law is allowed where no part is negative and it has no more unknowns than sizes were measured; from three sizes on one is
    left to check it. Of those laws all are kept that miss the times by little more than :data:`NOISE`, or by twice what the best
    one does.

    Args:
        points: of two sizes or more.
    Returns:
        The laws that are kept, the simplest first.
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
    kept = [law for law in laws if law.error <= enough]
    # Work that is divided is why more chips are used: a law without it is the last resort.
    kept = [law for law in kept if "divided" in law.parts] or kept
    fewest = min(len(law.parts) for law in kept)
    kept.sort(key=lambda law: (len(law.parts), round(law.error / NOISE, 1) if len(law.parts) == fewest else 0))
    return Scaling(points, tuple(kept))


def _law(names: Sequence[str], points: Sequence[Point]) -> Law | None:
    """Least squares of relative errors; None where a part is negative or not determined."""
    rows = [[SHAPES[name](point.chips) / point.seconds for name in names] for point in points]
    normal = [[sum(row[i] * row[j] for row in rows) for j in range(len(names))] for i in range(len(names))]
    sides = [[rows[k][i] / points[k].seconds for k in range(len(points))] for i in range(len(names))]
    weights = solve(normal, sides)
    if weights is None:
        return None
    values = [sum(w * point.seconds for w, point in zip(row, points, strict=True)) for row in weights]
    if min(values) < 0:
        return None
    left = [sum(v * x for v, x in zip(values, row, strict=True)) - 1 for row in rows]
    freedom = len(points) - len(names)
    error = math.sqrt(sum(each * each for each in left) / freedom) if freedom else 0.0
    return Law(dict(zip(names, values, strict=True)), error, tuple(map(tuple, weights)))
