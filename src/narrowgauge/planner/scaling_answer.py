"""What measured times say, in sentences and as values: first the premise, then the law, then what it leaves open.

Two times never show *what* does not shrink. So the sentences name the split that the usual law gives, say whether a point could
have contradicted it, and list which measurement would tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from narrowgauge.planner.causes import CAUSES, Cause
from narrowgauge.planner.scaling_law import Law, Scaling, duration

_REST = ("constant", "logarithmic", "linear")
_SHAPE_WORDS = {
    "constant": "is the same on any number of chips",
    "logarithmic": "grows with log2 N",
    "linear": "grows with N",
}
_LEAST_SHARE = 0.005
"""Of a time: what an alternative law has less of is not worth a sentence."""


def lines(scaling: Scaling, at: Sequence[int] = ()) -> list[str]:
    """The answer in sentences.

    Args:
        scaling: the fit.
        at: numbers of chips whose time was asked for.
    Returns:
        One sentence or two each, the most important first.
    Example:
        >>> from narrowgauge.planner.scaling_law import fit, read_points
        >>> print(lines(fit(read_points("128:10d,256:7d")))[0])
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
        f"{last.chips:,} chips instead of {first.chips:,}: {duration(first.seconds)} become {duration(last.seconds)}, "
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
        f"If every step had the same batch, T(N) = {law}: of {duration(law.seconds(first))} on {first:,} chips "
        f"{duration(divided)} are divided among them"
    )
    said += f" and {duration(rest)} are not." if rest > 0 else ", all of it."
    if scaling.is_checked:
        over = scaling.num_sizes - len(law.parts)
        return f"{said} {_count(over, 'size')} more than unknowns: the law misses the times by {law.error:.1%}."
    return (
        f"{said} Two sizes fit two unknowns, whichever law has them: nothing checks this one, "
        f"and nothing in it says what the {duration(rest)} are."
    )


def _at(scaling: Scaling, chips: int) -> str:
    """The time on another number of chips, by all laws."""
    first, (low, high) = scaling.points[0].chips, scaling.interval(chips)
    said = f"On {chips:,} chips: {duration(scaling.seconds(chips))} ({duration(low)} to {duration(high)} four times out of five)"
    if chips >= first:
        said += f", {scaling.speed_up(first, chips):.3g} × as fast as {first:,}"
        said += f", an efficiency of {scaling.efficiency(first, chips):.0%}."
    else:
        said += f", {scaling.speed_up(chips, first):.3g} × as long as {first:,}."
    others = [f"{duration(law.seconds(chips))} if the rest {_rest(law)}" for law in _alternatives(scaling)]
    return said + (f" As well: {', '.join(others)}." if others else "")


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
            f"No number of chips takes less than {duration(law.parts['constant'])} by this law; "
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
        said.append(f"on {size:,} chips the laws give {duration(times[0])} to {duration(times[-1])}")
    return (
        f"Measure a third size before asserting the split: {', '.join(said)}; a few hundred steps are enough. "
        "Run folders with communication_seconds and wait_seconds attribute the rest instead of guessing."
    )


def _suspects(scaling: Scaling) -> list[Cause]:
    """Causes whose growth is in a law that the points allow."""
    shapes = {name for law in scaling.laws for name in law.parts}
    return [cause for cause in CAUSES if cause.shape in shapes]


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


def to_dict(scaling: Scaling, at: Sequence[int] = ()) -> dict[str, Any]:
    """The answer as values for JSON.

    Args:
        scaling: the fit.
        at: numbers of chips whose time was asked for.
    Returns:
        Points, laws with their seconds by shape, predictions with intervals, suspects, and the sentences of :func:`lines`.
    """
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
        "sentences": lines(scaling, at),
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
