"""Recipes by the clock: which is the fastest, and what each had reached when the first was done.

Time is a machine's, and machines waver. So a recipe is called faster only where every seed says so, and with one seed only
by a margin. Losses at equal time are read off each run's own line between two validations, at the moment when the fastest
recipe was done *with that seed*. Each is told as the yardstick's plus the paired difference, since means over different
seeds would differ by the seeds' luck, which is larger than what recipes differ by. The sentence says who leads and who is
behind, by the intervals of these differences; their numbers are for a table.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from enum import Enum

from narrowgauge.comparison.classification import WIDE, Evidence
from narrowgauge.comparison.intervals import Difference, interval
from narrowgauge.comparison.labels import counted, listed
from narrowgauge.comparison.run_stats import UNSTEADY, Trial
from narrowgauge.runs.schema import Row

MUCH_WIDER = 5.0
"""An interval at equal time whose half exceeds every difference there so many times leaves nothing to say."""


def losses_at_equal_time(groups: Mapping[str, Sequence[Trial]], yardstick: str | None) -> tuple[Row, ...]:
    """Losses at the moment when the fastest recipe was done, seed by seed; a row per recipe.

    Law: losses differ by exactly what is told as their difference: a loss is the yardstick's mean plus the mean of the
    paired differences, over the seeds that the two have in common. Where all have the same seeds it is the plain mean.

    Args:
        groups: the runs of each recipe.
        yardstick: the recipe whose losses are taken off the others'.
    """
    timed = {name: [t for t in group if t.counts and t.has_curve] for name, group in groups.items()}
    timed = {recipe: group for recipe, group in timed.items() if group}
    if len(timed) < 2:
        return ()
    fastest = min(timed, key=lambda recipe: statistics.median(t.curve.end for t in timed[recipe]))
    ends = {t.seed: t.curve.end for t in timed[fastest]}
    losses = {recipe: _losses_at(group, ends) for recipe, group in timed.items()}
    chosen = yardstick if yardstick is not None and losses.get(yardstick) else fastest
    base = losses[chosen]
    if not base:
        return ()
    seconds, level = statistics.median(ends[seed] for seed in base), statistics.fmean(base.values())
    rows = []
    for recipe, found in losses.items():
        pairs = [found[seed] - base[seed] for seed in base if seed in found]
        if not pairs:
            continue
        mean, half = interval([pairs]) if chosen == yardstick != recipe else (None, None)
        figures = {"seconds": seconds, "val_loss": level + statistics.fmean(pairs), "difference": mean, "half": half}
        rows.append({"recipe": recipe, **figures, "num_seeds": len(pairs)})
    return tuple(rows) if len(rows) > 1 else ()


def _losses_at(group: Sequence[Trial], ends: Mapping[int, float]) -> dict[int, float]:
    """The loss of each seed's run at that seed's moment, where it had one."""
    # Whoever happened to be done before keeps the loss it ended with.
    found = {t.seed: t.curve.loss_at(min(ends[t.seed], t.curve.end)) for t in group if t.seed in ends}
    return {seed: loss for seed, loss in found.items() if loss is not None and math.isfinite(loss)}


class Standing(Enum):
    """How a recipe stands beside the yardstick at equal time, in words; better and worse are beyond the noise."""

    YARDSTICK = "the yardstick"
    BETTER = "better"
    LEVEL = "within the noise"
    NEAR = "within a thousandth"
    WORSE = "worse"
    UNKNOWN = "no interval"
    DROWNED = "cannot be told"


def standings(at_time: Sequence[Row], yardstick: str | None) -> dict[str, Standing]:
    """How each recipe stands at equal time, the one with the lowest loss first.

    Args:
        at_time: rows of :func:`losses_at_equal_time`.
        yardstick: the recipe that their differences are taken from.

    Example:
        >>> rows = [{"recipe": "a", "val_loss": 4.0, "difference": None, "half": None, "num_seeds": 3}]
        >>> rows += [{"recipe": "b", "val_loss": 3.9, "difference": -0.1, "half": 0.01, "num_seeds": 3}]
        >>> {recipe: standing.value for recipe, standing in standings(rows, "a").items()}
        {'b': 'better', 'a': 'the yardstick'}
    """
    level = next((float(row["val_loss"]) for row in at_time if row["recipe"] == yardstick), 0.0)
    # Where an interval dwarfs every difference, and is no small one, nothing can be said.
    most = max(MUCH_WIDER * _largest(at_time), WIDE * abs(level))
    ranked = sorted(at_time, key=lambda row: float(row["val_loss"]))
    return {row["recipe"]: _standing(row, row["recipe"] == yardstick, level, most) for row in ranked}


def _standing(row: Row, is_yardstick: bool, level: float, most: float) -> Standing:
    if is_yardstick:
        return Standing.YARDSTICK
    if row["half"] is None or not math.isfinite(row["half"]):
        return Standing.UNKNOWN
    difference = Difference(row["recipe"], row["difference"], row["half"], row["num_seeds"])
    if difference.half > most:
        return Standing.DROWNED
    if difference.is_worse(level):
        return Standing.WORSE
    if difference.is_better(level):
        return Standing.BETTER
    return Standing.LEVEL if difference.holds_zero else Standing.NEAR


# ── sentences ───────────────────────────────────────────────────────────────────────────────────────────────────────


def fastest(found: Evidence) -> list[str]:
    """Which recipe is the fastest, where the seeds agree."""
    speeds = {recipe: row["tokens_per_second"] for recipe, row in found.rows.items() if row["tokens_per_second"]}
    if found.yardstick not in speeds or len(speeds) < 2:
        return []
    best, slowest = max(speeds, key=lambda r: speeds[r]), min(speeds, key=lambda r: speeds[r])
    other = slowest if best == found.yardstick else str(found.yardstick)
    level = [recipe for recipe in speeds if recipe != best and not _beats(found, best, recipe)]
    if other in level:
        if len(_ratios(found, best, other)) < 2:
            return []
        return [f"{best} was the fastest by median, but not with every seed: this machine is too unquiet to rank them."]
    which = f"{other}, the slowest" if best == found.yardstick else other
    times = f"{speeds[best] / speeds[other]:.2f} times as fast as {which}"
    if level and speeds[best] < UNSTEADY * speeds[other]:
        return [f"No recipe is clearly the fastest here: by median {best} is, {times}, but not with every seed."]
    if level:
        return [f"{listed([best, *level])} are the fastest here and cannot be ranked: {best} is {times}."]
    return [f"{best} is the fastest here, {times}."]


def _beats(found: Evidence, one: str, other: str) -> bool:
    """Whether it is faster with every seed; a single one may be chance, unless by a margin."""
    ratios = _ratios(found, one, other) or [
        found.rows[one]["tokens_per_second"] / found.rows[other]["tokens_per_second"]
    ]
    return min(ratios) > (UNSTEADY if len(ratios) == 1 else 1)


def _ratios(found: Evidence, one: str, other: str) -> list[float]:
    """How many times as fast, seed by seed."""
    rates = [
        {t.seed: t.run.summary.get("tokens_per_second") for t in found.groups[recipe] if t.run.summary is not None}
        for recipe in (one, other)
    ]
    pairs = [(rates[0][seed], rates[1].get(seed)) for seed in rates[0]]
    return [mine / theirs for mine, theirs in pairs if mine and theirs]


def at_equal_time(found: Evidence) -> list[str]:
    """What the recipes had reached when the fastest was done."""
    trials = [t for group in found.groups.values() for t in group if t.counts]
    if not found.at_time:
        # A loop of one's own that writes down no validation asks for no curve.
        asked = any("eval_every" in t.run.config or t.run.evals for t in trials)
        if not asked or len({t.recipe for t in trials}) < 2 or all(t.has_curve for t in trials):
            return []
        return ["Losses at equal time cannot be given: these runs have too few validations (--eval-every)."]
    stand = standings(found.at_time, found.yardstick)
    drowned = [recipe for recipe, standing in stand.items() if standing is Standing.DROWNED]
    ranked = [recipe for recipe in stand if recipe not in drowned]
    after = f"after {found.at_time[0]['seconds']:.3g} s of training steps{_seeds_left_out(found)}"
    said = []
    if len(ranked) > 1:
        order = " ".join(_order(found, ranked, stand))
        said.append(f"At equal time, {after}, {order}{_recipes_left_out(found)}")
    if drowned:
        said.append(_unsaid(found, drowned, after))
    if len(ranked) > 1 and _is_unfair(found, trials):
        said.append("The slower ones had not come to the end of their schedule by then: all take as many steps.")
    return said


def _order(found: Evidence, ranked: Sequence[str], stand: Mapping[str, Standing]) -> list[str]:
    """Who leads, and who stands how beside the yardstick: a sentence each."""
    first, *others = ranked
    if {stand[recipe] for recipe in ranked} <= {Standing.YARDSTICK, Standing.UNKNOWN}:
        return [f"{first} has the lowest loss.", "No interval says whether that is more than chance."]
    if stand[first] is Standing.YARDSTICK and all(stand[recipe] is Standing.WORSE for recipe in others):
        if len(others) > 3 and len(ranked) == len(found.groups):
            return [f"{first} leads: every other recipe is worse beyond the noise."]
        return [f"{first} leads.", f"Worse beyond the noise: {listed(others)}."]
    head = {
        Standing.YARDSTICK: "has the lowest loss",
        Standing.BETTER: f"leads, better than {found.yardstick} beyond the noise",
        Standing.LEVEL: f"has the lowest loss, within the noise of {found.yardstick}",
        Standing.NEAR: f"has the lowest loss, within a thousandth of {found.yardstick}'s",
        Standing.UNKNOWN: f"has the lowest loss, but no interval beside {found.yardstick}",
    }
    named = "" if stand[first] is Standing.YARDSTICK else f" {found.yardstick}"
    return [f"{first} {head[stand[first]]}.", *_classes(others, stand, named, str(found.yardstick))]


def _classes(others: Sequence[str], stand: Mapping[str, Standing], named: str, yardstick: str) -> list[str]:
    """Recipes by their standing, the best first; the yardstick is named where the sentence before is about another."""
    than, of = (f" than{named}", f" of{named}") if named else ("", "")
    level = {stand[recipe] for recipe in others} & {Standing.LEVEL, Standing.NEAR}
    near = " or within a thousandth of the loss" if Standing.NEAR in level else ""
    told = {
        f"Better{than} beyond the noise": {Standing.BETTER},
        f"Within the noise{of}{near}": level,
        f"Worse{than} beyond the noise": {Standing.WORSE},
        f"Without an interval, for want of two seeds in common with {yardstick}": {Standing.UNKNOWN},
    }
    found = {words: [recipe for recipe in others if stand[recipe] in which] for words, which in told.items()}
    return [f"{words}: {listed(recipes)}." for words, recipes in found.items() if recipes]


def _seeds_left_out(found: Evidence) -> str:
    used, there = _base_seeds(found), max(row["num_seeds"] for row in found.rows.values())
    return f" and over {used} of {counted(there, 'seed')}" if used < there else ""


def _base_seeds(found: Evidence) -> int:
    return max(int(row["num_seeds"]) for row in found.at_time)


def _recipes_left_out(found: Evidence) -> str:
    there = {row["recipe"] for row in found.at_time}
    out = [recipe for recipe, row in found.rows.items() if row["num_seeds"] and recipe not in there]
    return f" Left out, for want of a validation before that moment with the same seeds: {listed(out)}." if out else ""


def _largest(at_time: Sequence[Row]) -> float:
    """The largest difference at equal time."""
    return max((abs(row["difference"]) for row in at_time if row["difference"] is not None), default=0.0)


def _unsaid(found: Evidence, names: Sequence[str], after: str) -> str:
    """Why nothing is said of some recipes at equal time."""
    cause, advice = "These seeds are too few", "More seeds would say more"
    if any(_is_unsteady(found, name) for name in names):
        cause, advice = "This machine was too unquiet", "Run nothing else beside it, or take more seeds"
    compare = "compare" if len(names) > 1 else "compares"
    widest = max(float(row["half"]) for row in found.at_time if row["recipe"] in names)
    return (
        f"{cause} to say how {listed(names)} {compare} at equal time, {after}: no difference there is above "
        f"{_largest(found.at_time):.2g}, and the interval reaches ± {widest:.2g}. {advice}."
    )


def _is_unsteady(found: Evidence, recipe: str) -> bool:
    """Whether the time of a recipe over the yardstick's varies from seed to seed."""
    ends = [
        {t.seed: t.curve.end for t in found.groups[name] if t.counts and t.curve.points}
        for name in (recipe, str(found.yardstick))
    ]
    ratios = [ends[0][seed] / ends[1][seed] for seed in ends[0] if ends[1].get(seed)]
    return len(ratios) > 1 and max(ratios) > UNSTEADY * min(ratios)


def _is_unfair(found: Evidence, trials: Sequence[Trial]) -> bool:
    """Whether a falling rate makes the slower recipe look worse at equal time than a run of that length would."""
    ends = [t.curve.end for t in trials if t.has_curve]
    falling = any(t.run.config.get("schedule") not in (None, "constant") for t in trials if t.has_curve)
    return found.has_equal_steps and falling and max(ends) > 1.05 * min(ends)
