"""The verdict: what the classifications mean, in sentences, the most important first.

It answers three questions: which recipe is the cheapest that ends within the noise, which should not be used and why, and what
these runs cannot show. A recipe wins only where its interval rules out a loss worse by more than 1 %. A smaller certain loss
is reported as a price, and a certain gain as a gain. Recipes are ordered by bytes, then time. Each interval is for one recipe;
of twenty harmless ones, expect one outside. Then come speed and losses at equal time, and what to know about the runs before a
difference between them is believed.

Timings are noisy. So a recipe is called faster only where every seed agrees, and with one seed only by a margin. At equal time
the sentence names who leads and who is behind, by the intervals of the paired differences; the numbers are for a table. Only runs
of one seed are paired, so only runs of one seed have to agree in their settings: another seed always has another validation text.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from narrowgauge.analysis.comparison.classification import (
    CLEAR_RATIO,
    WIDE,
    Classes,
    Classification,
    Rank,
    beats,
    largest_difference,
    ratios_by_seed,
)
from narrowgauge.analysis.comparison.intervals import MINUS, shown_loss
from narrowgauge.analysis.comparison.labels import listed
from narrowgauge.analysis.comparison.resolution import (
    MOST_SEEDS,
    SPEEDRUN_SCORE,
    pooled_spread,
    read,
    resolution,
    speedrun_score,
    spread_of,
)
from narrowgauge.analysis.comparison.run_stats import TIMING_NOISE, RunStats, requested_steps
from narrowgauge.runs.finding import counted
from narrowgauge.runs.schema import Row


def sentences(classes: Classes) -> list[str]:
    """The whole verdict, the most important first."""
    parts: tuple[Callable[[Classes], list[str]], ...] = (
        _cheapest, _resolved, _by_the_speedrun_rule, _with_a_price, _not_to_be_used, _noisy, _not_audited, _not_ranked,
        fastest, at_equal_time,
    )  # fmt: skip
    return [*(sentence for part in parts for sentence in part(classes)), *caveats(classes.groups)]


# ── which is the cheapest ───────────────────────────────────────────────────────────────────────────────────────────


def _cheapest(classes: Classes) -> list[str]:
    if (sentence := _nothing_to_compare(classes)) is not None:
        return [sentence]
    if not classes.has_intervals:
        return _one_seed(classes)
    best, rivals = classes.cheapest, classes.cheaper_open
    # The baseline wins only where no cheaper recipe may be as good.
    if (best is None or best.rank is Rank.BASELINE) and any(one.bytes_per_param is not None for one in rivals):
        return [_too_few_seeds(classes, rivals), *_no_worse(classes, None, rivals)]
    if best is None:
        return [_none_named(classes), *_no_worse(classes, None)]
    return [_won(classes, best, bool(rivals)), *_less_noisy(classes, best), *_no_worse(classes, best)]


def _none_named(classes: Classes) -> str:
    if any(one.is_fit or one.is_open for one in classes.values()):
        return "No record holds the bytes per parameter of these recipes, so none is named the cheapest."
    return f"No recipe is fit for use here, {classes.baseline} included."


def _nothing_to_compare(classes: Classes) -> str | None:
    if classes.baseline is None or not any(one.row["num_seeds"] for one in classes.values()):
        return "No run has ended in a loss that counts, so there is nothing to compare."
    row = classes[classes.baseline].row
    if not row["num_seeds"]:
        return f"No run of {classes.baseline} has ended in a loss that counts: nothing can be compared with it."
    if len(classes) == 1:
        spread = ""
        if row["val_loss_std"] is not None:
            spread = f" with a standard deviation of {shown_loss(row['val_loss_std'])}"
        seeds = counted(row["num_seeds"], "seed")
        return f"{classes.baseline} alone was run: validation loss {shown_loss(row['val_loss'])}{spread} over {seeds}."
    others = [one for one in classes.values() if one.label != classes.baseline]
    if any(one.difference is not None for one in others):
        return None
    if any(one.row["num_seeds"] for one in others):
        return f"No other recipe has a finished run with the seeds of {classes.baseline}: nothing can be paired."
    if all(run.divergence for one in others for run in one.runs):
        return f"Every other recipe diverged with every seed: nothing can be compared with {classes.baseline}."
    return f"No run of another recipe has ended in a loss that counts: nothing can be compared with {classes.baseline}."


def _one_seed(classes: Classes) -> list[str]:
    few = "One seed each"
    if any(one.row["num_seeds"] > 1 for one in classes.values()):
        few = f"No recipe has two seeds in common with {classes.baseline}"
    found = [
        f"{few}, so no interval can be given: a difference from {classes.baseline} may be due to the recipe or to chance. "
        "At least 2 seeds give an interval, 3 a useful one."
    ]
    usable = [one for one in classes.values() if (one.is_fit or one.is_unranked) and one.bytes_per_param is not None]
    if usable:
        best = min(usable, key=lambda one: one.cost)
        ended = f" and ended {best.difference.text} from the loss of {classes.baseline}" if best.difference else ""
        among = " of those without a fault" if best.is_audited else ""
        found.append(f"{best.label} costs least{among}: {_size(best)}{ended}.")
    return found


def _size(one: Classification) -> str:
    return f"{one.bytes_per_param:.2f} bytes per parameter"


def _too_few_seeds(classes: Classes, rivals: Sequence[Classification]) -> str:
    base = classes.reference.bytes_per_param
    names = listed(
        f"{one.label} ({'' if one.bytes_per_param is None else f'{_size(one)}, '}{difference.text})"
        for one in rivals
        if (difference := one.difference) is not None
    )
    size = f" ({base:.2f})" if base is not None else ""
    return (
        f"{_seeds(rivals).capitalize()} do not decide which is the cheapest: {names} may end worse than "
        f"{classes.baseline}{size} by more than {_margin(classes)}, or no worse. {_more_seeds(classes, rivals)}"
    )


def _margin(classes: Classes) -> str:
    return "1 % of the loss" if classes.resolve is None else f"{classes.resolve:g}"


def _more_seeds(classes: Classes, found: Sequence[Classification]) -> str:
    """What would decide: more seeds, and how many where a difference was to be resolved."""
    if classes.resolve is None:
        return "Use more seeds."
    needed = [read(one.difference, classes.resolve).num_seeds for one in found if one.difference is not None]
    known = [number for number in needed if number is not None]
    if len(known) < len(needed):
        return f"More than {MOST_SEEDS} seeds would be needed, by the spread of these: take longer runs or a larger difference."
    # These seeds were enough in four of five comparisons like this one, and this is the fifth.
    most = max(*known, 1 + max(one.difference.num_pairs for one in found if one.difference is not None))
    return f"By their spread --seeds {most} resolves it, in four of five such comparisons."


def _resolved(classes: Classes) -> list[str]:
    """How small a difference these seeds resolve, where one was asked for."""
    known = [one.difference for one in classes.values() if one.difference is not None and one.difference.num_pairs > 1]
    if classes.resolve is None or not known:
        return []
    sizes = {difference.recipe: resolution(spread_of(difference), difference.num_pairs) for difference in known}
    finest, coarsest = min(sizes.values()), max(sizes.values())
    reach = f"{finest:.2g}" if len(sizes) == 1 else f"{finest:.2g} to {coarsest:.2g}, depending on the recipe"
    coarse = [label for label, size in sizes.items() if size > classes.resolve]
    if not coarse:
        return [f"{classes.resolve:g} is resolved: four of five such comparisons tell differences of {reach}."]
    return [
        f"{classes.resolve:g} was to be resolved, and these seeds resolve {reach}: a difference of {classes.resolve:g} from "
        f"{classes.baseline} may well have gone unseen in {listed(coarse)}."
    ]


def _by_the_speedrun_rule(classes: Classes) -> list[str]:
    """Which recipes end less than the asked difference above the baseline, by a standard deviation that is taken as known."""
    usable = [one.difference for one in classes.values() if one.difference is not None and not one.faults]
    known = [difference for difference in usable if difference.num_pairs > 1]
    if classes.resolve is None or not known or not (spread := pooled_spread(known)):
        return []
    said = []
    for difference in known:
        score = speedrun_score(difference.mean, classes.resolve, difference.num_pairs, spread)
        shown = f"{score:.3g}".replace("-", MINUS)
        said.append(f"{difference.recipe} {shown}, {'enough' if score >= SPEEDRUN_SCORE else 'not enough'}")
    source = "of these pairs" if len(known) == 1 else f"pooled from {len(known)} recipes"
    return [
        f"By the rule of speed-run records, ({classes.resolve:g} {MINUS} difference) · √n must reach {SPEEDRUN_SCORE:g} standard "
        f"deviations (p < 0.001), that {source} taken as known ({shown_loss(spread)}): {'; '.join(said)}."
    ]


def _seeds(found: Sequence[Classification]) -> str:
    numbers = {one.difference.num_pairs for one in found if one.difference is not None}
    return f"{numbers.pop()} seeds" if len(numbers) == 1 else "so few seeds"


def _won(classes: Classes, best: Classification, has_rivals: bool) -> str:
    baseline = classes.reference
    mine, base = best.cost[0], baseline.bytes_per_param
    if best is baseline or best.difference is None:
        others = [size for one in classes.values() if one is not best and math.isfinite(size := one.cost[0])]
        why = "every smaller one ends worse, is not to be used or cannot be ranked"
        if not others or min(others) >= mine:
            why = "no smaller one is fit for use"
        return f"{best.label} is the cheapest within the noise: {_size(best)}; {why}."
    relative = f" instead of the {base:.2f} of {baseline.label}" if base is not None and mine < round(base, 1) else ""
    if base is not None and mine == round(base, 1):
        relative = f", as many as {baseline.label}, and less time"
    ranks = {
        Rank.BETTER: "ends better than the baseline and is the cheapest",
        Rank.NEGLIGIBLE: "is the cheapest within a thousandth of the baseline's loss",
    }
    place = ranks.get(best.rank, "is the cheapest within the noise")
    if has_rivals:
        place = "is the cheapest of those that these seeds can rank"
    return (
        f"{best.label} {place}: {_size(best)}{relative}. Its validation loss differs from that of {baseline.label} by "
        f"{best.difference.text} (95 % interval over {best.difference.num_pairs} seeds)."
    )


def _less_noisy(classes: Classes, best: Classification) -> list[str]:
    quiet = [one for one in classes.values() if one.is_fit and one.bytes_per_param is not None and not one.is_noisy]
    if best in quiet or not quiet:
        return []
    other = min(quiet, key=lambda one: one.cost)
    return [f"The cheapest whose updates are not mostly noise is {other.label}: {_size(other)}."]


def _no_worse(classes: Classes, best: Classification | None, named: Collection[Classification] = ()) -> list[str]:
    baseline = classes.baseline
    fit = [one for one in classes.values() if one.is_fit and one.difference is not None]
    others = [one for one in fit if one is not best]
    found = []
    if better := _with_differences(one for one in others if one.rank is Rank.BETTER):
        found.append(f"Ends better than {baseline}, with certainty: {better}.")
    level = [one for one in others if one.rank is not Rank.BETTER]
    if level:
        also = "Also within" if best is not None and best.rank is not Rank.BETTER else "Within"
        near = ", or within a thousandth of its loss" if any(one.rank is Rank.NEGLIGIBLE for one in level) else ""
        found.append(f"{also} the noise of {baseline}{near}: {_with_differences(level)}.")
    wide = WIDE * abs(classes.loss) if classes.resolve is None else classes.resolve
    if loose := [
        one.label for one in fit if one.rank is not Rank.BETTER and one.difference and one.difference.half > wide
    ]:
        found.append(f"The interval of {listed(loose)} is wider than {_margin(classes)}: use more seeds.")
    if unsure := [one for one in classes.values() if one.is_open and one not in named]:
        found.append(
            f"Not statistically distinguishable from {baseline} with {_seeds(unsure)}: {_with_differences(unsure)} may end "
            f"worse by more than {_margin(classes)}, or no worse. {_more_seeds(classes, unsure)}"
        )
    return found


def _with_differences(found: Iterable[Classification]) -> str:
    texts = [f"{one.label} ({one.difference.text})" for one in found if one.difference is not None]
    return listed(texts) if texts else ""


# ── which are not to be used, or with care ──────────────────────────────────────────────────────────────────────────


def _with_a_price(classes: Classes) -> list[str]:
    found = [
        f"{one.label} ({one.difference.text}, {one.difference.mean / abs(classes.loss):+.1%})"
        for one in classes.values()
        if one.has_price and one.difference is not None and classes.loss
    ]
    return [f"At a small but certain price in loss: {listed(found)}."] if found else []


def _not_to_be_used(classes: Classes) -> list[str]:
    return [
        f"Not to be used: {one.label}{', the baseline itself' if one.label == classes.baseline else ''}, which "
        f"{listed(fault.text for fault in one.faults)}."
        for one in classes.values()
        if one.faults
    ]


def _noisy(classes: Classes) -> list[str]:
    # A lost update counts as noise of its own size, and is reported as a fault already.
    return [
        f"With care: {one.label} adds {one.late_noise:.1f} times as much noise to its late updates as they are large; these "
        "losses do not suffer from it, and those of a longer run at a smaller learning rate may."
        for one in classes.values()
        if one.is_noisy and not one.faults
    ]


def _not_audited(classes: Classes) -> list[str]:
    """Recipes that may lose updates unseen."""
    ended = [one for one in classes.values() if one.row["num_seeds"]]
    unseen = [one.label for one in ended if not one.is_audited and not one.faults]
    if not unseen or len(ended) < 2:
        return []
    if len(unseen) == len(ended):
        return ["No step was audited, so lost updates would not be seen."]
    return [f"Not audited, so lost updates would not be seen: {listed(unseen)}."]


def _not_ranked(classes: Classes) -> list[str]:
    few = [one.label for one in classes.values() if one.is_unranked]
    if not few or not classes.has_intervals:
        return []
    return [f"Not ranked, with fewer than two seeds in common with {classes.baseline}: {listed(few)}."]


# ── speed, and losses at equal time ──────────────────────────────────────────────────────────────────────────────────────


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
    return [f"{first.label} {head[first.rank_at_equal_time]}.", *_others(others, named, classes.reference.label)]


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
        for group in (one.runs, classes.reference.runs)
    )
    ratios = [mine[seed] / theirs[seed] for seed in mine if theirs.get(seed)]
    return len(ratios) > 1 and max(ratios) > TIMING_NOISE * min(ratios)


def _is_unfair(classes: Classes, runs: Sequence[RunStats]) -> bool:
    """Whether a decaying learning rate makes the slower recipe look worse at equal time than a shorter run of it would."""
    ends = [run.curve.end for run in runs if run.has_curve]
    decays = any(run.run.config.get("schedule") not in (None, "constant") for run in runs if run.has_curve)
    return classes.has_equal_steps and decays and max(ends) > 1.05 * min(ends)


# ── caveats ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

# What may differ between compared runs; learning rates and steps are examined separately.
_FREE = {
    "recipe", "seed", "out", "stop_after", "lr", "warmup_steps", "eval_every", "checkpoint_every", "keep_checkpoints",
    "log_every", "audit_every", "gauges_every", "fingerprints_every", "tensorboard", "log_to",
    "steps",
}  # fmt: skip


def caveats(groups: Mapping[str, Sequence[RunStats]]) -> list[str]:
    """What to know about these runs, in sentences."""
    runs = [run for group in groups.values() for run in group]
    sentences = []
    left_out = [run for run in runs if not run.counts and not run.divergence]
    if unfinished := [_progress(run) for run in left_out if run.run.summary is None]:
        sentences.append(f"Not finished, and left out of every number: {listed(unfinished)}.")
    if unknown := [_progress(run) for run in left_out if run.run.summary is not None]:
        sentences.append(f"No validation loss was recorded, and left out of every number: {listed(unknown)}.")
    sentences += _other_frameworks(runs)
    if differing := [*_differing_settings(runs), *_differing_texts(runs)]:
        sentences.append(
            f"The runs differ in more than recipe and seed ({'; '.join(differing)}): a difference is not due to the recipe alone."
        )
    return [*sentences, *_unit_scaled_models(runs), *_different_lengths(groups)]


def _other_frameworks(runs: Sequence[RunStats]) -> list[str]:
    foreign = list(dict.fromkeys(run.label for run in runs if run.run.is_foreign))
    if not foreign:
        return []
    return [
        f"Read from logs of other frameworks: {listed(foreign)}. Such a log holds no recipe, size or audit, and no seed, for "
        "which 0 is taken; most do not say whether the run had ended: a difference may have any cause."
    ]


def _unit_scaled_models(runs: Sequence[RunStats]) -> list[str]:
    """Unit-scaled recipes among others: they start from other weights and use learning rates of their own."""
    units = list(dict.fromkeys(run.label for run in runs if run.is_unit_scaled))
    if not units or len(units) == len({run.label for run in runs}):
        return []
    rates = [
        dict.fromkeys(
            str(run.run.config["lr"]) for run in runs if "lr" in run.run.config and run.is_unit_scaled is is_unit
        )
        for is_unit in (True, False)
    ]
    lr = f" (lr {listed(rates[0])}, the others {listed(rates[1])})" if all(rates) else ""
    one = len(units) == 1
    return [
        f"{listed(units)} {'is another parametrization' if one else 'are other parametrizations'} of the model, with "
        f"{'its' if one else 'their'} own initial weights and learning rate{lr}: a difference is not due to the format alone."
    ]


def _different_lengths(groups: Mapping[str, Sequence[RunStats]]) -> list[str]:
    steps = {label: number for label, number in requested_steps(groups).items() if number is not None}
    if len(set(steps.values())) < 2:
        return []
    lengths = ", ".join(f"{label} {number}" for label, number in steps.items())
    ends = {label: [r.curve.end for r in group if r.counts and r.curve.points] for label, group in groups.items()}
    seconds = {label: statistics.median(found) for label, found in ends.items() if found}
    if len(seconds) < 2:
        return [f"They took different numbers of steps ({lengths}): not fair at equal tokens."]
    if max(seconds.values()) <= TIMING_NOISE * min(seconds.values()):
        return [f"They took different numbers of steps ({lengths}): fair at equal time, not at equal tokens."]
    times = ", ".join(f"{label} {number:.3g} s" for label, number in seconds.items())
    return [
        f"They took different numbers of steps ({lengths}) and different times ({times}): their final losses are fair neither "
        "at equal tokens nor at equal time."
    ]


def _progress(run: RunStats) -> str:
    done = int(run.run.steps[-1].get("step", 0)) if run.run.steps else 0
    requested = run.run.config.get("steps")
    return f"{run.label}, seed {run.seed} ({done}{f' of {requested}' if requested else ''} steps)"


def _by_seed(runs: Sequence[RunStats]) -> dict[int, list[RunStats]]:
    found: dict[int, list[RunStats]] = {}
    for run in runs:
        found.setdefault(run.seed, []).append(run)
    return found


def _differing_settings(runs: Sequence[RunStats]) -> list[str]:
    differing: dict[str, dict[str, None]] = {}
    for group in _by_seed(runs).values():
        values: dict[str, dict[str, None]] = {}
        for run in group:
            # A setting that an older version did not have is not a difference.
            for key, value in _settings(run):
                values.setdefault(key, {}).setdefault(str(value))
        for key, found in values.items():
            if len(found) > 1:
                differing.setdefault(key, {}).update(found)
    return [f"{key} {', '.join(found)}" for key, found in differing.items()]


def _settings(run: RunStats) -> Iterator[tuple[str, Any]]:
    """The settings that runs of one seed should share."""
    config = run.run.config
    # The limit of rollbacks has no effect on a run that never rolled back.
    free = _FREE if any(event.get("kind") == "rollback" for event in run.run.events) else {*_FREE, "max_rollbacks"}
    yield from ((key, value) for key, value in config.items() if key not in free)
    # The learning rate of a unit-scaled model is in other units.
    if "lr" in config:
        yield "lr of unit-scaled models" if run.is_unit_scaled else "lr", config["lr"]
    machine = run.run.run.get("machine")
    for key, words in (("device", "device"), ("num_threads", "threads")):
        if isinstance(machine, dict) and key in machine:
            yield words, machine[key]


def _differing_texts(runs: Sequence[RunStats]) -> list[str]:
    """The seeds whose runs read different texts; the fingerprints themselves would add nothing."""
    seeds = []
    for seed, group in _by_seed(runs).items():
        tables = [run.run.run.get("data") for run in group]
        known = [table["fingerprint"] for table in tables if isinstance(table, dict) and "fingerprint" in table]
        if any(fingerprint != known[0] for fingerprint in known):
            seeds.append(str(seed))
    return [f"the text of seed{'s' if len(seeds) > 1 else ''} {listed(seeds)}"] if seeds else []
