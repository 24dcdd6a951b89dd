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
from typing import Any

from narrowgauge.errors import DataError
from narrowgauge.planner.formatting import duration_text
from narrowgauge.planner.measured.least_squares import NOISE, SIGMAS, solve

SHAPES: dict[str, Callable[[float], float]] = {
    "divided": lambda chips: 1 / chips,
    "constant": lambda chips: 1.0,
    "logarithmic": lambda chips: math.log2(chips),
    "linear": lambda chips: float(chips),
}
"""How a part of the time depends on the number of chips; the first is what more chips are bought for."""

_ALLOWED = 1.5  # times that noise: what a law may miss the points by, however well another one fits
_MOST_UNKNOWNS = 3
_UNITS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_EXAMPLE = "For instance 128:10d,256:7d (units s, min, h, d)."


@dataclass(frozen=True, slots=True)
class MeasuredTime:
    """The seconds that a job took on so many chips."""

    chips: int
    seconds: float

    def __str__(self) -> str:
        return f"{duration_text(self.seconds)} on {self.chips:,}"


def read_points(text: str) -> tuple[MeasuredTime, ...]:
    """Read points from the command line: ``CHIPS:TIME`` with a unit, separated by commas; the fewest chips come first.

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
        return sum(self.share(name, chips) for name in self.parts)

    def share(self, name: str, chips: float) -> float:
        """The seconds of one part; 0 where the law has no such part."""
        return self.parts.get(name, 0.0) * SHAPES[name](chips)

    def deviation(self, chips: float, points: Sequence[MeasuredTime]) -> float:
        """The standard deviation of :meth:`seconds` that follows from that of the points' times."""
        basis = [SHAPES[name](chips) for name in self.parts]
        noise = max(NOISE, self.error)
        enters = (sum(b * row[k] for b, row in zip(basis, self.weights, strict=True)) for k in range(len(points)))
        return noise * math.sqrt(sum((share * p.seconds) ** 2 for share, p in zip(enters, points, strict=True)))

    def __str__(self) -> str:
        return " + ".join(_PRINTED[name](value) for name, value in self.parts.items())


_PRINTED: dict[str, Callable[[float], str]] = {
    "divided": lambda seconds: f"{duration_text(seconds)} / N",
    "constant": duration_text,
    "logarithmic": lambda seconds: f"{duration_text(seconds)} × log2 N",
    "linear": lambda seconds: f"{duration_text(seconds)} × N",
}


@dataclass(frozen=True, slots=True)
class Scaling:
    """What measured times say.

    ``points`` are by number of chips; ``laws`` are all that they allow, the simplest first, whose values are reported.
    """

    points: tuple[MeasuredTime, ...]
    laws: tuple[Law, ...]

    @property
    def law(self) -> Law:
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
        """Whether the law agrees with the points within their errors; if not, the points are not of one job."""
        return self.law.error <= 2 * NOISE

    def seconds(self, chips: float) -> float:
        return self.law.seconds(chips)

    def interval(self, chips: float) -> tuple[float, float]:
        """The 80 % interval of that time in seconds: the widest that any allowed law gives.

        Example:
            >>> [f"{end / 86400:.1f}" for end in fit(read_points("128:10d,256:7d")).interval(512)]
            ['5.2', '8.0']
        """
        middles = [(law.seconds(chips), SIGMAS * law.deviation(chips, self.points)) for law in self.laws]
        return max(0.0, min(m - d for m, d in middles)), max(m + d for m, d in middles)

    def speed_up(self, before: float, after: float) -> float:
        return self.seconds(before) / self.seconds(after)

    def efficiency(self, before: float, after: float) -> float:
        """The speed-up over the ratio of the chips: 1 where no chip is wasted.

        Example:
            >>> f"{fit(read_points('128:10d,256:7d')).efficiency(128, 256):.3f}"
            '0.714'
        """
        return self.speed_up(before, after) * before / after


def fit(points: Sequence[MeasuredTime]) -> Scaling:
    """Fit the laws that the points allow, the simplest first.

    A law is allowed where no part is negative and it has no more unknowns than sizes were measured; from three sizes on one is
    left to check it. Of those laws all are kept that miss the times by little more than :data:`NOISE`, or by twice what the best
    one does.

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
    # More chips are bought for the work that is divided: a law without it is the last resort.
    kept = [law for law in kept if "divided" in law.parts] or kept
    fewest = min(len(law.parts) for law in kept)
    kept.sort(key=lambda law: (len(law.parts), round(law.error / NOISE, 1) if len(law.parts) == fewest else 0))
    return Scaling(points, tuple(kept))


def _law(names: Sequence[str], points: Sequence[MeasuredTime]) -> Law | None:
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


# ── the answer: first the premise, then the law, then what it leaves open ─────────────────────────────────────────────────

_REST = ("constant", "logarithmic", "linear")
_SHAPE_WORDS = {
    "constant": "is the same on any number of chips",
    "logarithmic": "grows with log2 N",
    "linear": "grows with N",
}
_LEAST_SHARE = 0.005
"""Of a time: what an alternative law has less of is not worth a sentence."""


def scaling_lines(scaling: Scaling, at: Sequence[int] = ()) -> list[str]:
    """The answer in sentences, the most important first; ``at`` are numbers of chips whose time was asked for.

    Example:
        >>> print(scaling_lines(fit(read_points("128:10d,256:7d")))[0])
        256 chips instead of 128: 10 d become 7 d, 1.43 × as fast on 2 × the chips, an efficiency of 71%.
    """
    if not scaling.fits:
        return _premise(scaling)
    return [
        *_premise(scaling),
        _split(scaling),
        *(_at(scaling, chips) for chips in at),
        *_limits(scaling),
        *([] if scaling.is_checked else [_third_point(scaling, at)]),
    ]


def _premise(scaling: Scaling) -> list[str]:
    """What was measured, before any law."""
    first, last = scaling.points[0], scaling.points[-1]
    times, ratio = first.seconds / last.seconds, last.chips / first.chips
    said = (
        f"{last.chips:,} chips instead of {first.chips:,}: {duration_text(first.seconds)} become {duration_text(last.seconds)}, "
        f"{times:.3g} × as fast on {ratio:.3g} × the chips, an efficiency of {times / ratio:.0%}."
    )
    if scaling.fits:
        return [said]
    if times > ratio:
        why = (
            "That is faster than in proportion, so it was not the same work: look for recomputation or offloading that only "
            "the smaller one needed, another batch, or cached data."
        )
    else:
        why = (
            "No sum of parts that shrink, stay or grow with the chips fits these times, so they are not of one job, "
            "or one of them met trouble."
        )
    return [said, f"{why} The law misses them by {scaling.law.error:.0%}; do not extrapolate it."]


def _split(scaling: Scaling) -> str:
    """The law, and the smallest point's time by it."""
    first, law = scaling.points[0].chips, scaling.law
    divided = law.share("divided", first)
    rest = law.seconds(first) - divided
    said = (
        f"If every step had the same batch, T(N) = {law}: of {duration_text(law.seconds(first))} on {first:,} chips "
        f"{duration_text(divided)} are divided among them"
    )
    said += f" and {duration_text(rest)} are not." if rest > 0 else ", all of it."
    if scaling.is_checked:
        over = scaling.num_sizes - len(law.parts)
        return f"{said} {_count(over, 'size')} more than unknowns: the law misses the times by {law.error:.1%}."
    return (
        f"{said} Two sizes fit two unknowns, whichever law has them: nothing checks this one, "
        f"and nothing in it says what the {duration_text(rest)} are."
    )


def _at(scaling: Scaling, chips: int) -> str:
    """The time on another number of chips, by all laws."""
    first, (low, high) = scaling.points[0].chips, scaling.interval(chips)
    said = f"On {chips:,} chips: {duration_text(scaling.seconds(chips))}"
    said += f" (80 % interval {duration_text(low)} to {duration_text(high)})"
    if chips >= first:
        said += f", {scaling.speed_up(first, chips):.3g} × as fast as {first:,}"
        said += f", an efficiency of {scaling.efficiency(first, chips):.0%}."
    else:
        said += f", {scaling.speed_up(chips, first):.3g} × as long as {first:,}."
    others = [f"{duration_text(law.seconds(chips))} if the rest {_rest(law)}" for law in _alternatives(scaling)]
    return said + (f" Also possible: {', '.join(others)}." if others else "")


def _limits(scaling: Scaling) -> list[str]:
    """Where more chips stop paying, and what can be behind it."""
    law, first = scaling.law, scaling.points[0].chips
    rest = law.seconds(first) - law.share("divided", first)
    if rest <= _LEAST_SHARE * law.seconds(first):
        return ["Nothing that would not shrink is visible in these times."]
    said = ["What can be behind the rest, and what would tell:"]
    said += [f"  {cause.name}: {cause.why}. Measure {cause.measure}." for cause in _suspects(scaling)]
    if set(law.parts) == {"divided", "constant"}:
        half = law.parts["divided"] / law.parts["constant"]
        said.insert(
            0,
            f"No number of chips takes less than {duration_text(law.parts['constant'])} by this law; "
            f"beyond {half:,.0f} more than half of each chip's time is the rest.",
        )
    return said


def _third_point(scaling: Scaling, at: Sequence[int]) -> str:
    """The size whose time would tell the laws apart."""
    first, last = scaling.points[0].chips, scaling.points[-1].chips
    fewer, more = max(1, first // 2), max([2 * last, *at])
    tries = [size for size in dict.fromkeys((fewer, more)) if size not in (first, last)]
    said = []
    for size in tries:
        times = sorted(law.seconds(size) for law in scaling.laws)
        said.append(f"on {size:,} chips the laws give {duration_text(times[0])} to {duration_text(times[-1])}")
    return (
        f"Measure a third size before asserting the split: {', '.join(said)}; a few hundred steps are enough. "
        "Run folders with communication_seconds and wait_seconds attribute the rest instead of guessing."
    )


def _suspects(scaling: Scaling) -> list[Bottleneck]:
    """Causes whose growth is in a law that the points allow."""
    shapes = {name for law in scaling.laws for name in law.parts}
    return [cause for cause in BOTTLENECKS if cause.shape in shapes]


def _alternatives(scaling: Scaling) -> list[Law]:
    """The other laws, without those that differ from the first by a part of nearly nothing."""
    last = scaling.points[-1].chips
    return [
        law
        for law in scaling.laws[1:]
        if all(law.share(name, last) > _LEAST_SHARE * law.seconds(last) for name in law.parts)
    ]


def _rest(law: Law) -> str:
    return " and ".join(_SHAPE_WORDS[name] for name in _REST if name in law.parts) or "is nothing"


def _count(number: int, noun: str) -> str:
    return f"{('no', 'One', 'Two', 'Three')[number] if number < 4 else number} {noun}{'' if number == 1 else 's'}"


def scaling_dict(scaling: Scaling, at: Sequence[int] = ()) -> dict[str, Any]:
    """The answer as values for JSON; ``at`` as in :func:`scaling_lines`."""
    first = scaling.points[0].chips
    return {
        "points": [{"chips": point.chips, "seconds": point.seconds} for point in scaling.points],
        "laws": [{"parts_seconds": law.parts, "relative_error": law.error, "text": str(law)} for law in scaling.laws],
        "is_checked": scaling.is_checked,
        "predictions": [_prediction(scaling, first, chips) for chips in at],
        "causes": [
            {"name": c.name, "grows": c.shape, "why": c.why, "measure": c.measure, "remedy": c.remedy}
            for c in _suspects(scaling)
        ],
        "sentences": scaling_lines(scaling, at),
    }


def _prediction(scaling: Scaling, first: int, chips: int) -> dict[str, Any]:
    low, high = scaling.interval(chips)
    return {
        "chips": chips,
        "seconds": scaling.seconds(chips),
        "low_seconds": low,
        "high_seconds": high,
        "speed_up": scaling.speed_up(first, chips),
        "efficiency": scaling.efficiency(first, chips),
    }


# ── causes: what can keep twice the chips from halving the time ───────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """One reason for time that more chips do not divide.

    Args:
        shape: how its time depends on the number of chips, at the same batch: a key of ``SHAPES``; ``divided`` of what more
            chips do not make worse by themselves, so that times alone never show it.
        group: of a measured step, in which it is found.
        measure: what would show it alone.
    """

    name: str
    shape: str
    group: str
    why: str
    measure: str
    remedy: str


BOTTLENECKS: tuple[Bottleneck, ...] = (
    Bottleneck(
        "communication", "constant", "sending",
        "each chip sends the same bytes of gradients and weights, however many chips there are, and computes less beside them",
        "communication_seconds less wait_seconds of a run folder at both sizes",
        "overlap it with backward, shard within a node only (HSDP), a narrower reduction, larger batches",
    ),
    Bottleneck(
        "latency of collectives", "logarithmic", "sending",
        "a message passes log2 N hops of a tree, or N of a ring, however short it is",
        "the time of an all-reduce of four bytes at both sizes",
        "fewer and larger collectives, trees, reductions within nodes first",
    ),
    Bottleneck(
        "synchronization", "logarithmic", "waiting",
        "every collective waits for its last chip, and the slowest of many is slower than that of few",
        "wait_seconds of a run folder, and its table of ranks",
        "find the late rank; equal lengths of sequences; no other programs on the hosts",
    ),
    Bottleneck(
        "pipeline bubble", "constant", "bubble",
        "with more replicas of the same batch each has fewer micro-batches to fill its stages with",
        "the idle time of the first stage in a trace of one step, or a step with twice the micro-batches",
        "fewer stages, interleaved ones, smaller micro-batches, larger batches",
    ),
    Bottleneck(
        "smaller matmuls", "constant", "computing",
        "each chip's part of the batch, or of a matrix, gets too small to fill it",
        "one chip alone with the micro-batch of each size (narrowgauge profile)",
        "larger batches, fewer tensor ranks, fewer but larger micro-batches",
    ),
    Bottleneck(
        "work that every rank repeats", "constant", "computing",
        "an optimizer step, a norm or a cast of weights that is not sharded takes as long on every chip",
        "the optimizer's time in a trace of one step",
        "shard the states (ZeRO-1 or more)",
    ),
    Bottleneck(
        "data", "constant", "outside",
        "readers of text or a shared file system deliver the same tokens a second to any number of chips",
        "a run on random tokens from memory",
        "tokenize before the run, more readers, data on local disks",
    ),
    Bottleneck(
        "checkpoints, evaluations and starts", "constant", "outside",
        "they stop all chips for as long as before",
        "wall_seconds less seconds in summary.json",
        "asynchronous and sharded checkpoints, fewer evaluations",
    ),
    Bottleneck(
        "shared links", "linear", "sending",
        "the bytes of all chips together pass one switch, or one file system, that does not grow with them",
        "bytes over seconds of an all-reduce of 1 GB, at both sizes",
        "racks with full bandwidth between them, shards within a rack, a narrower reduction",
    ),
    Bottleneck(
        "numerics", "divided", "void",
        "an overflow, a NaN or a spike makes the work of a step void: its update is not applied, and its tokens teach nothing",
        "skipped and spike of steps.jsonl",
        "narrowgauge diagnose RUN names the cause; compute bfloat16 needs no loss scale",
    ),
    Bottleneck(
        "faults", "divided", "undone",
        "a rollback throws away the steps since a checkpoint, on all chips at once",
        "rollback in events.jsonl",
        "narrowgauge diagnose RUN names the cause; more frequent checkpoints undo fewer steps",
    ),
    Bottleneck(
        "failures", "linear", "outside",
        "twice the chips fail twice as often, and all of them repeat the steps since the last checkpoint",
        "resumed steps in events.jsonl",
        "checkpoints every sqrt(2 × seconds of a checkpoint × seconds between failures)",
    ),
)  # fmt: skip
"""What can be behind time that does not shrink, the usual ones first."""


def bottlenecks_of(*groups: str) -> tuple[Bottleneck, ...]:
    """The causes that are found in groups of a measured step.

    Example:
        >>> [cause.name for cause in bottlenecks_of("waiting")]
        ['synchronization']
    """
    return tuple(cause for cause in BOTTLENECKS if cause.group in groups)
