"""The verdict: at most eight sentences about a comparison, the most important first.

A recipe wins only if its interval rules out a loss worse by more than 1 %, or than the difference to resolve. Each interval is
for one recipe: of twenty harmless recipes, expect one outside. Recipes are ordered by bytes, then time. Timings are noisy, so a
recipe is faster only if every seed agrees. Only runs of one seed are paired, so only their settings must agree. Another seed
always has another validation text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from narrowgauge.analysis.comparison.classification import Classification, Rank, is_faster
from narrowgauge.analysis.comparison.intervals import shown_loss
from narrowgauge.analysis.comparison.labels import listed
from narrowgauge.analysis.comparison.resolution import MOST_SEEDS, resolution, seeds_needed, spread_of
from narrowgauge.analysis.comparison.run_stats import RunStats, requested_steps
from narrowgauge.analysis.settings import NOT_COMPARED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from narrowgauge.analysis.comparison.comparison import Comparison


def sentences(comparison: Comparison) -> list[str]:
    """Return the whole verdict."""
    parts = (_cheapest, _unresolved, _not_to_be_used, _with_a_price, _not_audited)
    words = [
        *(part(comparison) for part in parts),
        *_fastest(comparison),
        _left_out(comparison),
        _differing(comparison),
    ]
    return [sentence for sentence in words if sentence]


# ── losses ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _cheapest(comparison: Comparison) -> str:
    base = comparison.baseline
    if base is None or not comparison.differences:
        if base is not None and len(comparison.classes) == 1:
            return f"{base} alone was run: validation loss {shown_loss(comparison.rows[0]['val_loss'])}."
        return "No two recipes have a finished run with a seed in common, so nothing can be compared."
    if not comparison.usable:
        return f"No recipe is fit for use here, {base} included."
    best = comparison.cheapest
    if best is None:
        return "No record holds the bytes per parameter of these recipes, so none is named the cheapest."
    reference = comparison.classes[base].row["bytes_per_param"]
    size = f"{best.row['bytes_per_param']:.2f} bytes per parameter"
    if best.label != base and reference is not None:
        size += f" instead of the {reference:.2f} of {base}"
    difference = best.difference
    if not comparison.has_intervals:
        loss = f" Its loss differs by {difference.text}." if difference is not None else ""
        return f"One seed each, so a difference may be chance: take 3. {best.label} costs least: {size}.{loss}"
    place = "of those that these seeds can rank" if comparison.cheaper_open else "within the noise"
    loss = ""
    if difference is not None:
        seeds = difference.num_pairs
        loss = f" Its loss differs from that of {base} by {difference.text} (95 % interval over {seeds} seeds)."
    return f"{best.label} is the cheapest {place}: {size}.{loss}"


def _unresolved(comparison: Comparison) -> str:
    """Name the differences that these seeds do not resolve, and the number of seeds needed."""
    ranks = [recipe for recipe in comparison.classes.values() if recipe.usable_rank is Rank.INCONCLUSIVE]
    unsure = [recipe.difference for recipe in ranks if recipe.difference is not None]
    paired = [difference for difference in comparison.differences if difference.num_pairs > 1]
    resolve = comparison.resolve
    margin = "1 % of the loss" if resolve is None else f"{resolve:g}"
    if not unsure:
        if resolve is None or not paired:
            return ""
        coarsest = max(resolution(spread_of(difference), difference.num_pairs) for difference in paired)
        verb = "is" if coarsest <= resolve else "is not"
        return f"{margin} {verb} resolved: these seeds tell differences of {coarsest:.2g} in four of five comparisons."
    numbers = [seeds_needed(spread_of(difference), comparison.acceptable) for difference in unsure]
    counts = [number for number in numbers if number is not None]
    if len(counts) < len(numbers):
        advice = f"More than {MOST_SEEDS} seeds would tell: take longer runs."
    else:
        most = max(*counts, 1 + max(difference.num_pairs for difference in paired))
        advice = f"--seeds {most} tells it in four of five such comparisons."
    question = f"worse than {comparison.baseline} by more than {margin} or not"
    return f"Not resolved, {question}: {_with_differences(ranks)}. {advice}"


def _not_to_be_used(comparison: Comparison) -> str:
    faulty = [recipe for recipe in comparison.classes.values() if recipe.faults]
    texts = [f"{recipe.label} {', '.join(recipe.faults)}" for recipe in faulty]
    return f"Not to be used: {'; '.join(texts)}." if faulty else ""


def _with_a_price(comparison: Comparison) -> str:
    worse = [recipe for recipe in comparison.classes.values() if recipe.usable_rank is Rank.WORSE]
    return f"Worse with certainty, by less than 1 %: {_with_differences(worse)}." if worse else ""


def _with_differences(recipes: Iterable[Classification]) -> str:
    return listed(f"{recipe.label} ({recipe.difference.text})" for recipe in recipes if recipe.difference is not None)


def _not_audited(comparison: Comparison) -> str:
    unseen = [
        recipe.label
        for recipe in comparison.classes.values()
        if not recipe.faults and recipe.row["num_seeds"] and recipe.late.get("edq") is None
    ]
    is_compared = len(comparison.classes) > 1
    return f"Not audited, so lost updates would not be seen: {listed(unseen)}." if unseen and is_compared else ""


# ── times ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _fastest(comparison: Comparison) -> Iterator[str]:
    speed = "tokens_per_second"
    timed = sorted(
        (recipe for recipe in comparison.classes.values() if recipe.row[speed]), key=lambda recipe: -recipe.row[speed]
    )
    reference = next((recipe for recipe in timed if recipe.label == comparison.baseline), None)
    if reference is None or timed[0].row[speed] == timed[-1].row[speed]:
        return
    best, slower = timed[0], timed[-1] if timed[0] is reference else reference
    if is_faster(best, slower):
        level = [recipe.label for recipe in timed[1:] if not is_faster(best, recipe)]
        also = f", and not clearly faster than {listed(level)}" if level else ""
        ratio = best.row[speed] / slower.row[speed]
        yield f"{best.label} is the fastest here, {ratio:.2f} times as fast as {slower.label}{also}."
    else:
        yield "Timings are too noisy to name the fastest."


# ── what to know about the runs ─────────────────────────────────────────────────────────────────────────────────────

# Settings that may differ between compared runs. Learning rates and steps have their own check.
_FREE = NOT_COMPARED - {"eval_batches"} | {"recipe", "seed", "warmup_steps", "steps"}


def _runs(comparison: Comparison) -> list[RunStats]:
    return [run for recipe in comparison.classes.values() for run in recipe.runs]


def _steps(comparison: Comparison) -> dict[Any, list[str]]:
    """Return the recipes by planned number of steps."""
    labels: dict[Any, list[str]] = {}
    for label, steps in requested_steps({label: recipe.runs for label, recipe in comparison.classes.items()}).items():
        labels.setdefault(steps, []).append(label)
    return labels


def _left_out(comparison: Comparison) -> str:
    runs = [run for run in _runs(comparison) if not run.counts and not run.divergence]
    words = "Left out of every number, not finished or without a validation loss"
    return f"{words}: {listed(map(_progress, runs))}." if runs else ""


def _progress(run: RunStats) -> str:
    steps = int(run.run.steps[-1].get("step", 0)) if run.run.steps else 0
    requested = run.run.config.get("steps")
    return f"{run.label}, seed {run.seed} ({steps}{f' of {requested}' if requested else ''} steps)"


def _differing(comparison: Comparison) -> str:
    """Name other differences between the runs."""
    runs = _runs(comparison)
    items = [f"{key} {', '.join(texts)}" for key, texts in _settings_apart(runs).items()]
    steps = {number: labels for number, labels in _steps(comparison).items() if number is not None}
    if len(steps) > 1:
        items.append(f"steps: {', '.join(f'{listed(labels)} {number}' for number, labels in steps.items())}")
    if foreign := dict.fromkeys(run.label for run in runs if run.run.is_foreign):
        items.append(f"logs of other frameworks, without recipe, audit or seed (0 is taken): {listed(foreign)}")
    return f"The runs differ in more than recipe and seed ({'; '.join(items)})." if items else ""


def _settings_apart(runs: Sequence[RunStats]) -> dict[str, dict[str, None]]:
    """Return the differing settings of runs with one seed, with their values. Skip settings that one run lacks."""
    by_seed: dict[int, dict[str, dict[str, None]]] = {}
    for run in runs:
        for key, value in _settings(run):
            by_seed.setdefault(run.seed, {}).setdefault(key, {})[str(value)] = None
    differing: dict[str, dict[str, None]] = {}
    for values in by_seed.values():
        for key, texts in values.items():
            if len(texts) > 1:
                differing.setdefault(key, {}).update(texts)
    return differing


def _settings(run: RunStats) -> Iterator[tuple[str, Any]]:
    """Yield the settings that runs of one seed should share."""
    config = run.run.config
    yield from ((key, value) for key, value in config.items() if key not in _FREE)
    for table, key, words in (
        ("machine", "device", "device"), ("machine", "num_threads", "threads"), ("data", "fingerprint", "text with hash"),
    ):  # fmt: skip
        values = run.run.run.get(table)
        if isinstance(values, Mapping) and key in values:
            yield words, str(values[key])[:12]
