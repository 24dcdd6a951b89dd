"""The verdict: at most eight sentences on the classes of a comparison, the most important first.

A recipe wins only where its interval rules out a loss worse by more than 1 %, or than the difference that was to be resolved.
Each interval is for one recipe: of twenty harmless ones, expect one outside. Recipes are ordered by bytes, then time. Timings are
noisy, so a recipe is called faster only where every seed agrees. Only runs of one seed are paired, so only these must agree in
their settings: another seed always has another validation text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from narrowgauge.analysis.comparison.classification import Classes, Classification, Rank, beats
from narrowgauge.analysis.comparison.intervals import shown_loss
from narrowgauge.analysis.comparison.labels import listed
from narrowgauge.analysis.comparison.resolution import MOST_SEEDS, resolution, seeds_needed, spread_of
from narrowgauge.analysis.comparison.run_stats import RunStats, requested_steps


def sentences(classes: Classes) -> list[str]:
    """Return the whole verdict."""
    parts = (_cheapest, _unresolved, _not_to_be_used, _with_a_price, _seen_by_the_audit, _times, _left_out, _differing)
    return [sentence for part in parts if (sentence := part(classes))]


# ── losses ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _cheapest(classes: Classes) -> str:
    base = classes.baseline
    if base is None or not any(one.difference is not None for one in classes.values()):
        if base is not None and len(classes) == 1 and classes.reference.row["num_seeds"]:
            return f"{base} alone was run: validation loss {shown_loss(classes.loss)}."
        return "No two recipes have a finished run with a seed in common, so nothing can be compared."
    usable = [one for one in classes.values() if one.is_fit or (one.is_unranked and not classes.has_intervals)]
    if not usable:
        return f"No recipe is fit for use here, {base} included."
    sized = [one for one in usable if one.bytes_per_param is not None]
    if not sized:
        return "No record holds the bytes per parameter of these recipes, so none is named the cheapest."
    best = min(sized, key=lambda one: one.cost)
    size, reference = f"{best.bytes_per_param:.2f} bytes per parameter", classes.reference.bytes_per_param
    if best.rank is not Rank.BASELINE and reference is not None:
        size += f" instead of the {reference:.2f} of {base}"
    if not classes.has_intervals:
        loss = f" Its loss differs by {best.difference.text}." if best.difference is not None else ""
        return f"One seed each, so a difference may be chance: take 3. {best.label} costs least: {size}.{loss}"
    place = (
        "the cheapest of those that these seeds can rank" if classes.cheaper_open else "the cheapest within the noise"
    )
    loss = ""
    if best.difference is not None:
        seeds = best.difference.num_pairs
        loss = f" Its loss differs from that of {base} by {best.difference.text} (95 % interval over {seeds} seeds)."
    return f"{best.label} is {place}: {size}.{loss}"


def _unresolved(classes: Classes) -> str:
    """Say which differences these seeds do not resolve, and how many seeds would."""
    unsure = [one for one in classes.values() if one.is_open and one.difference is not None]
    paired = [d for one in classes.values() if (d := one.difference) is not None and d.num_pairs > 1]
    margin = "1 % of the loss" if classes.resolve is None else f"{classes.resolve:g}"
    coarsest = max((resolution(spread_of(d), d.num_pairs) for d in paired), default=0.0)
    if not unsure:
        if classes.resolve is None or not paired:
            return ""
        verb = "is" if coarsest <= classes.resolve else "is not"
        return f"{margin} {verb} resolved: these seeds tell differences of {coarsest:.2g} in four of five comparisons."
    numbers = [
        seeds_needed(spread_of(one.difference), classes.acceptable) for one in unsure if one.difference is not None
    ]
    if None in numbers:
        advice = f"More than {MOST_SEEDS} seeds would tell: take longer runs."
    else:
        most = max(number for number in numbers if number is not None)
        advice = f"--seeds {max(most, 1 + max(d.num_pairs for d in paired))} tells it in four of five such comparisons."
    return f"Not resolved, worse than {classes.baseline} by more than {margin} or not: {_with_differences(unsure)}. {advice}"


def _not_to_be_used(classes: Classes) -> str:
    faulty = [one for one in classes.values() if one.faults]
    texts = [f"{one.label} {', '.join(fault.text for fault in one.faults)}" for one in faulty]
    return f"Not to be used: {'; '.join(texts)}." if faulty else ""


def _with_a_price(classes: Classes) -> str:
    found = [one for one in classes.values() if one.has_price]
    return f"Worse with certainty, by less than 1 %: {_with_differences(found)}." if found else ""


def _with_differences(recipes: Iterable[Classification]) -> str:
    return listed(f"{one.label} ({one.difference.text})" for one in recipes if one.difference is not None)


def _seen_by_the_audit(classes: Classes) -> str:
    """Name recipes whose late updates are mostly rounding noise, and those whose updates nobody audited."""
    noisy = [f"{one.label} ({one.late_noise:.1f} ×)" for one in classes.values() if one.is_noisy and not one.faults]
    unseen = [one.label for one in classes.values() if one.row["num_seeds"] and not one.is_audited and not one.faults]
    said = [f"Late updates are smaller than their rounding noise: {listed(noisy)}."] if noisy else []
    if unseen and len(classes) > 1:
        said.append(f"Not audited, so lost updates would not be seen: {listed(unseen)}.")
    return " ".join(said)


# ── times ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _times(classes: Classes) -> str:
    return " ".join([*_fastest(classes), *_at_equal_time(classes)])


def _fastest(classes: Classes) -> Iterator[str]:
    timed = [one for one in classes.values() if one.row["tokens_per_second"]]
    if (
        classes.baseline is None
        or classes.reference not in timed
        or len({one.row["tokens_per_second"] for one in timed}) < 2
    ):
        return
    best, slowest = (pick(timed, key=lambda one: one.row["tokens_per_second"]) for pick in (max, min))
    other = slowest if best is classes.reference else classes.reference
    if beats(best, other, "tokens_per_second"):
        ratio = best.row["tokens_per_second"] / other.row["tokens_per_second"]
        level = [one.label for one in timed if one is not best and not beats(best, one, "tokens_per_second")]
        also = f", and not clearly faster than {listed(level)}" if level else ""
        yield f"{best.label} is the fastest here, {ratio:.2f} times as fast as {other.label}{also}."
    else:
        yield "Timings are too noisy to name the fastest."


def _at_equal_time(classes: Classes) -> Iterator[str]:
    ranked = classes.at_equal_time
    if not ranked:
        return
    rows = [one.equal_time for one in ranked if one.equal_time is not None]
    seeds = max(int(row["num_seeds"]) for row in rows)
    places = listed(f"{one.label} ({one.rank_at_equal_time.value})" for one in ranked)
    yield (
        f"At equal time, after {rows[0]['seconds']:.3g} s of training steps and over {seeds} "
        f"seed{'s' if seeds > 1 else ''}, the lowest loss first: {places}."
    )
    curves = [run for one in classes.values() for run in one.runs if run.counts and run.has_curve]
    decays = any(run.run.config.get("schedule") not in (None, "constant") for run in curves)
    ends = [run.curve.end for run in curves]
    if classes.has_equal_steps and decays and max(ends) > 1.05 * min(ends):
        yield "The slower ones had not reached the end of their schedule by then."


# ── what to know about the runs ─────────────────────────────────────────────────────────────────────────────────────

# What may differ between compared runs; learning rates and steps are examined separately.
_FREE = {
    "recipe", "seed", "out", "stop_after", "lr", "warmup_steps", "eval_every", "checkpoint_every", "keep_checkpoints",
    "log_every", "audit_every", "gauges_every", "fingerprints_every", "steps",
}  # fmt: skip


def _left_out(classes: Classes) -> str:
    runs = [run for one in classes.values() for run in one.runs if not run.counts and not run.divergence]
    return (
        f"Left out of every number, not finished or without a validation loss: {listed(map(_progress, runs))}."
        if runs
        else ""
    )


def _progress(run: RunStats) -> str:
    done = int(run.run.steps[-1].get("step", 0)) if run.run.steps else 0
    requested = run.run.config.get("steps")
    return f"{run.label}, seed {run.seed} ({done}{f' of {requested}' if requested else ''} steps)"


def _differing(classes: Classes) -> str:
    """Name what else differs between the runs."""
    runs = [run for one in classes.values() for run in one.runs]
    items = [*_settings_apart(runs), *_texts_apart(runs)]
    steps = {label: number for label, number in requested_steps(classes.groups).items() if number is not None}
    if len(set(steps.values())) > 1:
        items.append(f"steps: {', '.join(f'{label} {number}' for label, number in steps.items())}")
    units = {run.label for run in runs if run.is_unit_scaled}
    if units and len(units) < len({run.label for run in runs}):
        items.append(f"unit-scaled models, with initial weights and rates of their own: {listed(sorted(units))}")
    if foreign := dict.fromkeys(run.label for run in runs if run.run.is_foreign):
        items.append(f"logs of other frameworks, without recipe, audit or seed (0 is taken): {listed(foreign)}")
    return f"The runs differ in more than recipe and seed ({'; '.join(items)})." if items else ""


def _by_seed(runs: Sequence[RunStats]) -> dict[int, list[RunStats]]:
    groups: dict[int, list[RunStats]] = {}
    for run in runs:
        groups.setdefault(run.seed, []).append(run)
    return groups


def _settings_apart(runs: Sequence[RunStats]) -> list[str]:
    apart: dict[str, dict[str, None]] = {}
    for group in _by_seed(runs).values():
        values: dict[str, dict[str, None]] = {}
        for run in group:
            # A setting that an older version did not have is not a difference.
            for key, value in _settings(run):
                values.setdefault(key, {}).setdefault(str(value))
        for key, texts in values.items():
            if len(texts) > 1:
                apart.setdefault(key, {}).update(texts)
    return [f"{key} {', '.join(texts)}" for key, texts in apart.items()]


def _settings(run: RunStats) -> Iterator[tuple[str, Any]]:
    """Yield the settings that runs of one seed should share."""
    config = run.run.config
    # The limit of rollbacks has no effect on a run that never rolled back.
    free = _FREE if any(event.get("kind") == "rollback" for event in run.run.events) else {*_FREE, "max_rollbacks"}
    yield from ((key, value) for key, value in config.items() if key not in free)
    # The learning rate of a unit-scaled model is in other units.
    if "lr" in config:
        yield "lr of unit-scaled models" if run.is_unit_scaled else "lr", config["lr"]
    machine = run.run.run.get("machine")
    for key, words in (("device", "device"), ("num_threads", "threads")):
        if isinstance(machine, Mapping) and key in machine:
            yield words, machine[key]


def _texts_apart(runs: Sequence[RunStats]) -> list[str]:
    """Name the seeds whose runs read different texts."""
    seeds = []
    for seed, group in _by_seed(runs).items():
        tables = [run.run.run.get("data") for run in group]
        prints = {table["fingerprint"] for table in tables if isinstance(table, Mapping) and "fingerprint" in table}
        if len(prints) > 1:
            seeds.append(str(seed))
    return [f"the text of seed{'s' if len(seeds) > 1 else ''} {listed(seeds)}"] if seeds else []
