"""The verdict: what the classifications mean, in sentences, the most important first.

It answers three questions: which recipe is the cheapest that ends within the noise, which are not to be used and why, and what
these runs cannot show. A recipe wins only where its interval rules out a loss worse by more than 1 %. A smaller certain loss
is reported as a price, and a certain gain as a gain. Recipes are ordered by bytes, then time. Each interval is for one recipe;
of twenty harmless ones, expect one outside. ``equal_time.py`` writes the sentences about time, ``caveats.py`` those about
the runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

from narrowgauge.analysis.comparison.caveats import caveats
from narrowgauge.analysis.comparison.classification import WIDE, Classes, Classification, Rank
from narrowgauge.analysis.comparison.equal_time import at_equal_time, fastest
from narrowgauge.analysis.comparison.intervals import shown_loss
from narrowgauge.analysis.comparison.labels import counted, listed


def sentences(classes: Classes) -> list[str]:
    """The whole verdict, the most important first."""
    parts: tuple[Callable[[Classes], list[str]], ...] = (
        _cheapest, _with_a_price, _not_to_be_used, _noisy, _not_audited, _not_ranked, fastest, at_equal_time,
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
    """That these seeds do not decide which recipe is the cheapest."""
    base = classes[str(classes.baseline)].bytes_per_param
    names = listed(
        f"{one.label} ({'' if one.bytes_per_param is None else f'{_size(one)}, '}{difference.text})"
        for one in rivals
        if (difference := one.difference) is not None
    )
    size = f" ({base:.2f})" if base is not None else ""
    return (
        f"{_seeds(rivals).capitalize()} do not decide which is the cheapest: {names} may end worse than "
        f"{classes.baseline}{size} by more than 1 % of the loss, or no worse. Use more seeds."
    )


def _seeds(found: Sequence[Classification]) -> str:
    numbers = {one.difference.num_pairs for one in found if one.difference is not None}
    return f"{numbers.pop()} seeds" if len(numbers) == 1 else "so few seeds"


def _won(classes: Classes, best: Classification, has_rivals: bool) -> str:
    baseline = classes[str(classes.baseline)]
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
    """The other recipes that are not worse: better, within the noise, or inconclusive."""
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
    wide = WIDE * abs(classes.loss)
    if loose := [
        one.label for one in fit if one.rank is not Rank.BETTER and one.difference and one.difference.half > wide
    ]:
        found.append(f"The interval of {listed(loose)} is wider than 1 % of the loss: use more seeds.")
    if unsure := [one for one in classes.values() if one.is_open and one not in named]:
        found.append(
            f"Not statistically distinguishable from {baseline} with {_seeds(unsure)}: {_with_differences(unsure)} may end "
            "worse by more than 1 % of the loss, or no worse. Use more seeds."
        )
    return found


def _with_differences(found: Iterable[Classification]) -> str:
    """Labels, each with its difference from the baseline; empty where there are none."""
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
    """Recipes that may lose updates without anything to show it."""
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
