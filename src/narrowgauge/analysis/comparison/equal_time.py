"""The recipes at equal time: which is the fastest, and what loss each had reached when the first one finished.

Timings are noisy. So a recipe is called faster only where every seed agrees, and with one seed only by a margin. A loss at
equal time is interpolated between two validations of each run, at the moment when the fastest recipe finished *with that
seed*. It is reported as the baseline's plus the paired difference, since means over different seeds would differ by the effect
of the seeds, which is larger than that of the recipes. The sentence names who leads and who is behind, by the intervals of
these differences; the numbers are for a table.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from narrowgauge.analysis.comparison.classification import (
    CLEAR_RATIO,
    Classes,
    Classification,
    Rank,
    beats,
    largest_difference,
    ratios_by_seed,
)
from narrowgauge.analysis.comparison.intervals import interval
from narrowgauge.analysis.comparison.labels import counted, listed
from narrowgauge.analysis.comparison.run_stats import TIMING_NOISE, RunStats
from narrowgauge.runs.schema import Row


def losses_at_equal_time(groups: Mapping[str, Sequence[RunStats]], baseline: str | None) -> tuple[Row, ...]:
    """Losses at the moment when the fastest recipe finished, seed by seed; a row per recipe.

    Invariant: losses differ by exactly their reported difference. A loss is the baseline's mean plus the mean of the paired
    differences, over the seeds that the two have in common. Where all have the same seeds it is the plain mean.

    Args:
        groups: the runs of each recipe.
        baseline: the recipe whose losses are subtracted from the others'.
    """
    timed = {label: [run for run in group if run.counts and run.has_curve] for label, group in groups.items()}
    timed = {label: group for label, group in timed.items() if group}
    if len(timed) < 2:
        return ()
    fastest = min(timed, key=lambda label: statistics.median(run.curve.end for run in timed[label]))
    ends = {run.seed: run.curve.end for run in timed[fastest]}
    losses = {label: _losses_at(group, ends) for label, group in timed.items()}
    chosen = baseline if baseline is not None and losses.get(baseline) else fastest
    base = losses[chosen]
    if not base:
        return ()
    seconds, level = statistics.median(ends[seed] for seed in base), statistics.fmean(base.values())
    rows = []
    for label, found in losses.items():
        pairs = [found[seed] - base[seed] for seed in base if seed in found]
        if not pairs:
            continue
        mean, half = interval([pairs]) if chosen == baseline != label else (None, None)
        metrics = {"seconds": seconds, "val_loss": level + statistics.fmean(pairs), "difference": mean, "half": half}
        rows.append({"recipe": label, **metrics, "num_seeds": len(pairs)})
    return tuple(rows) if len(rows) > 1 else ()


def _losses_at(group: Sequence[RunStats], ends: Mapping[int, float]) -> dict[int, float]:
    """The loss of each seed's run at that seed's moment, where it had one."""
    # A run that finished earlier keeps its final loss.
    found = {run.seed: run.curve.loss_at(min(ends[run.seed], run.curve.end)) for run in group if run.seed in ends}
    return {seed: loss for seed, loss in found.items() if loss is not None and math.isfinite(loss)}


# ── sentences ───────────────────────────────────────────────────────────────────────────────────────────────────────


def fastest(classes: Classes) -> list[str]:
    """Which recipe is the fastest, where the seeds agree."""
    column = "tokens_per_second"
    timed = [one for one in classes.values() if one.row[column]]
    baseline = next((one for one in timed if one.label == classes.baseline), None)
    if baseline is None or len({one.row[column] for one in timed}) < 2:
        return []
    best, slowest = max(timed, key=lambda one: one.row[column]), min(timed, key=lambda one: one.row[column])
    other = slowest if best is baseline else baseline
    level = [one for one in timed if one is not best and not beats(best, one, column)]
    if other in level:
        if len(ratios_by_seed(best, other, column)) < 2:
            return []
        return [
            f"{best.label} was the fastest by median, but not by {CLEAR_RATIO - 1:.1%} with every seed: timings are too noisy to "
            "rank."
        ]
    ratio = best.row[column] / other.row[column]
    times = f"{ratio:.2f} times as fast as {other.label}{', the slowest' if best is baseline else ''}"
    if level and ratio < TIMING_NOISE:
        return [f"No recipe is clearly the fastest here: by median {best.label} is, {times}, but not with every seed."]
    if level:
        names = listed(one.label for one in (best, *level))
        return [f"{names} are the fastest here and cannot be ranked: {best.label} is {times}."]
    return [f"{best.label} is the fastest here, {times}."]


def at_equal_time(classes: Classes) -> list[str]:
    """The losses that the recipes had reached when the fastest finished."""
    runs = [run for one in classes.values() for run in one.runs if run.counts]
    found = classes.at_equal_time
    if not found:
        # Your own training loop need not record validations.
        requested = any("eval_every" in run.run.config or run.run.evals for run in runs if not run.run.is_foreign)
        if not requested or len({run.label for run in runs}) < 2 or all(run.has_curve for run in runs):
            return []
        return ["Losses at equal time cannot be given: these runs have too few validations (--eval-every)."]
    inconclusive = [one for one in found if one.rank_at_equal_time is Rank.INCONCLUSIVE]
    ranked = [one for one in found if one.rank_at_equal_time is not Rank.INCONCLUSIVE]
    rows = [one.equal_time for one in found if one.equal_time is not None]
    after = f"after {rows[0]['seconds']:.3g} s of training steps{_seeds_left_out(classes, rows)}"
    sentences = []
    if len(ranked) > 1:
        sentences.append(f"At equal time, {after}, {' '.join(_order(classes, ranked))}{_recipes_left_out(classes)}")
    if inconclusive:
        sentences.append(_inconclusive(classes, inconclusive, rows, after))
    if len(ranked) > 1 and _is_unfair(classes, runs):
        sentences.append(
            "The slower ones had not reached the end of their schedule by then: all take the same number of steps."
        )
    return sentences


def _order(classes: Classes, ranked: Sequence[Classification]) -> list[str]:
    """Which recipe leads, and how the others compare with the baseline: a sentence each."""
    first, others = ranked[0], ranked[1:]
    ranks = {one.rank_at_equal_time for one in ranked}
    if ranks <= {Rank.BASELINE, Rank.NO_INTERVAL}:
        return [f"{first.label} has the lowest loss.", "No interval shows whether that is more than chance."]
    if first.rank_at_equal_time is Rank.BASELINE and ranks == {Rank.BASELINE, Rank.WORSE}:
        if len(others) > 3 and len(ranked) == len(classes):
            return [f"{first.label} leads: every other recipe is worse beyond the noise."]
        return [f"{first.label} leads.", f"Worse beyond the noise: {listed(one.label for one in others)}."]
    head = {
        Rank.BASELINE: "has the lowest loss",
        Rank.BETTER: f"leads, better than {classes.baseline} beyond the noise",
        Rank.WITHIN_NOISE: f"has the lowest loss, within the noise of {classes.baseline}",
        Rank.NEGLIGIBLE: f"has the lowest loss, within a thousandth of {classes.baseline}'s",
        Rank.NO_INTERVAL: f"has the lowest loss, but no interval relative to {classes.baseline}",
    }
    named = "" if first.rank_at_equal_time is Rank.BASELINE else f" {classes.baseline}"
    return [f"{first.label} {head[first.rank_at_equal_time]}.", *_others(others, named, str(classes.baseline))]


def _others(others: Sequence[Classification], named: str, baseline: str) -> list[str]:
    """Recipes by rank, the best first; the baseline is named where the sentence before is about another recipe."""
    than, of = (f" than{named}", f" of{named}") if named else ("", "")
    level = {one.rank_at_equal_time for one in others} & {Rank.WITHIN_NOISE, Rank.NEGLIGIBLE}
    near = " or within a thousandth of the loss" if Rank.NEGLIGIBLE in level else ""
    ranks = {
        f"Better{than} beyond the noise": {Rank.BETTER},
        f"Within the noise{of}{near}": level,
        f"Worse{than} beyond the noise": {Rank.WORSE},
        f"Without an interval, having fewer than two seeds in common with {baseline}": {Rank.NO_INTERVAL},
    }
    found = {words: [one.label for one in others if one.rank_at_equal_time in which] for words, which in ranks.items()}
    return [f"{words}: {listed(labels)}." for words, labels in found.items() if labels]


def _seeds_left_out(classes: Classes, rows: Sequence[Row]) -> str:
    used, recorded = max(int(row["num_seeds"]) for row in rows), max(one.row["num_seeds"] for one in classes.values())
    return f" and over {used} of {counted(recorded, 'seed')}" if used < recorded else ""


def _recipes_left_out(classes: Classes) -> str:
    missing = [one.label for one in classes.values() if one.row["num_seeds"] and one.equal_time is None]
    return (
        f" Left out, without a validation before that moment with the same seeds: {listed(missing)}." if missing else ""
    )


def _inconclusive(classes: Classes, found: Sequence[Classification], rows: Sequence[Row], after: str) -> str:
    """Why some recipes have no rank at equal time."""
    cause, advice = "There are too few seeds", "Use more seeds"
    if any(_is_noisy(classes, one) for one in found):
        cause, advice = "Timings are too noisy", "Run nothing else on this machine, or use more seeds"
    names = listed(one.label for one in found)
    widest = max(float(one.equal_time["half"]) for one in found if one.equal_time is not None)
    return (
        f"{cause} to rank {names} at equal time, {after}: no difference is above {largest_difference(rows):.2g}, and the "
        f"interval reaches ± {widest:.2g}. {advice}."
    )


def _is_noisy(classes: Classes, one: Classification) -> bool:
    """Whether the ratio of a recipe's time to the baseline's varies from seed to seed."""
    mine, theirs = (
        {run.seed: run.curve.end for run in group if run.counts and run.curve.points}
        for group in (one.runs, classes[str(classes.baseline)].runs)
    )
    ratios = [mine[seed] / theirs[seed] for seed in mine if theirs.get(seed)]
    return len(ratios) > 1 and max(ratios) > TIMING_NOISE * min(ratios)


def _is_unfair(classes: Classes, runs: Sequence[RunStats]) -> bool:
    """Whether a decaying learning rate makes the slower recipe look worse at equal time than a run of that length would."""
    ends = [run.curve.end for run in runs if run.has_curve]
    decays = any(run.run.config.get("schedule") not in (None, "constant") for run in runs if run.has_curve)
    return classes.has_equal_steps and decays and max(ends) > 1.05 * min(ends)
