"""The verdict: at most six sentences about a comparison, the most important first.

A recipe wins only if its interval rules out a loss worse by more than 1 %. Each interval is for one recipe: of twenty harmless
recipes, expect one outside. Recipes are ordered by bytes, then time. Only runs of one seed are paired, so only their settings
must agree. Another seed always has another validation text.
"""

from __future__ import annotations

from itertools import combinations

from narrowgauge.analysis.comparison.classification import Rank
from narrowgauge.analysis.comparison.intervals import MOST_SEEDS, seeds_needed, shown_loss
from narrowgauge.analysis.comparison.run_stats import RunStats
from narrowgauge.analysis.settings import settings_diff
from narrowgauge.runs.finding import listed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from narrowgauge.analysis.comparison.comparison import Comparison


def sentences(comparison: Comparison) -> list[str]:
    """Return the whole verdict."""
    parts = (_cheapest, _unresolved, _worse, _not_to_be_used, _not_audited, _left_out, _differing)
    return [sentence for part in parts if (sentence := part(comparison))]


# ── losses ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _cheapest(comparison: Comparison) -> str:
    base = comparison.baseline
    if base is None or not comparison.differences:
        if base is not None and len(comparison.classes) == 1:
            return f"{base} alone was run: validation loss {shown_loss(comparison.rows[0]['val_loss'])}."
        return "No two recipes have finished runs of one seed on the same data, so nothing can be compared."
    tables = [run.run.run.get("data") or {} for run in comparison.classes[base].runs]
    levels = [table["unigram_loss"] for table in tables if "unigram_loss" in table]
    if levels and not comparison.classes[base].row["val_loss"] < min(levels):
        return (
            f"No recipe is named: {base} learned no more than token frequencies, at {min(levels):.4f}. Take more steps."
        )
    best = comparison.cheapest
    if best is None:
        has_bytes = any(recipe.row["bytes_per_param"] is not None for recipe in comparison.classes.values())
        reason = (
            "none of known bytes per parameter is fit for use" if has_bytes else "no record holds bytes per parameter"
        )
        return f"No recipe is named the cheapest: {reason}."
    reference, size = comparison.classes[base], f"{best.row['bytes_per_param']:.2f} bytes per parameter"
    hint = "" if comparison.has_intervals else "One seed each, so a difference may be chance: take 3. "
    if best.label == base:
        is_least = all(recipe.cost[0] >= best.cost[0] for recipe in comparison.classes.values())
        words = "No recipe takes fewer bytes than" if is_least else "No smaller recipe is known to be as good as"
        return f"{hint}{words} {base}: {size}."
    if best.cost[0] == reference.cost[0]:
        size += f", as {base}, and more tokens per second"
    elif reference.row["bytes_per_param"] is not None:
        size += f" instead of the {reference.row['bytes_per_param']:.2f} of {base}"
    loss, difference = "", best.difference
    if difference is not None:
        seeds = f" (95 % interval over {difference.num_pairs} seeds)" if difference.num_pairs > 1 else ""
        loss = f" Its loss differs from that of {base} by {difference.text}{seeds}."
    if hint:
        return f"{hint}{best.label} costs least: {size}.{loss}"
    is_cheaper = [r.usable_rank is Rank.INCONCLUSIVE and r.cost < best.cost for r in comparison.classes.values()]
    place = "of those that these seeds can rank" if any(is_cheaper) else "within the noise"
    return f"{best.label} is the cheapest {place}: {size}.{loss}"


def _unresolved(comparison: Comparison) -> str:
    """Name the differences that these seeds do not resolve, and the number of seeds needed."""
    unsure = [recipe for recipe in comparison.classes.values() if recipe.usable_rank is Rank.INCONCLUSIVE]
    paired = [recipe.difference for recipe in unsure if recipe.difference is not None]
    names = [f"{difference.recipe} ({difference.text})" for difference in paired]
    if not paired:
        return ""
    counts = [seeds_needed(difference.spread, comparison.acceptable) or MOST_SEEDS + 1 for difference in paired]
    most = max(*counts, *(difference.num_pairs + 1 for difference in paired))
    advice = f"{most} seeds tell it in four of five such comparisons."
    if most > MOST_SEEDS:
        advice = f"More than {MOST_SEEDS} seeds would tell: take longer runs."
    question = f"worse than {comparison.baseline} by more than 1 % of the loss or not"
    return f"Not resolved, {question}: {listed(names)}. {advice}"


def _worse(comparison: Comparison) -> str:
    worse = [
        r.difference for r in comparison.classes.values() if r.usable_rank is Rank.WORSE and r.difference is not None
    ]
    names = [f"{difference.recipe} ({difference.text})" for difference in worse]
    return f"Worse by less than 1 %, by their 95 % intervals: {listed(names)}." if names else ""


def _not_to_be_used(comparison: Comparison) -> str:
    faulty = [recipe for recipe in comparison.classes.values() if recipe.faults]
    texts = [f"{recipe.label} {', '.join(recipe.faults)}" for recipe in faulty]
    return f"Not to be used: {'; '.join(texts)}." if faulty else ""


def _not_audited(comparison: Comparison) -> str:
    recipes = comparison.classes.values()
    unseen = [r.label for r in recipes if not r.faults and r.row["num_seeds"] and r.late_edq is None]
    is_compared = len(recipes) > 1
    return f"Not audited, so lost updates would not be seen: {listed(unseen)}." if unseen and is_compared else ""


# ── what to know about the runs ─────────────────────────────────────────────────────────────────────────────────────

_FREE = ("recipe", "seed", "warmup_steps")
"""Settings that may differ between compared runs."""
_ALIKE = (("data", "fingerprint"), ("machine", "device"), ("machine", "num_threads"))
"""Entries of other tables of ``run.toml`` that may not."""


def _runs(comparison: Comparison) -> list[RunStats]:
    return [run for recipe in comparison.classes.values() for run in recipe.runs]


def _left_out(comparison: Comparison) -> str:
    runs = []
    for run in _runs(comparison):
        if not run.counts and not run.divergence:
            steps, planned = int(run.run.steps[-1].get("step", 0)) if run.run.steps else 0, run.run.config.get("steps")
            runs.append(f"{run.label}, seed {run.seed} ({steps}{f' of {planned}' if planned else ''} steps)")
    words = "Left out of every number, not finished or without a validation loss"
    return f"{words}: {listed(runs)}." if runs else ""


def _differing(comparison: Comparison) -> str:
    """Name the settings that differ between runs of one seed, with their values. Skip settings that one run lacks."""
    values: dict[str, dict[str, None]] = {}
    for first, second in combinations(_runs(comparison), 2):
        for setting in settings_diff(first.run.run, second.run.run) if first.seed == second.seed else ():
            is_config = setting.table == "config" and setting.name not in _FREE
            if is_config or (setting.table, setting.name) in _ALIKE:
                values.setdefault(setting.name, {}).update(dict.fromkeys(setting.values))
    other_data = ["data, so those losses are not compared"] if values.pop("fingerprint", None) else []
    items = [*other_data, *(f"{name} {', '.join(texts)}" for name, texts in values.items())]
    if logs := dict.fromkeys(run.label for run in _runs(comparison) if run.run.is_foreign):
        items.append(f"logs of other frameworks, without recipe, audit or seed (0 is taken): {listed(logs)}")
    return f"The runs differ in more than recipe and seed ({'; '.join(items)})." if items else ""
