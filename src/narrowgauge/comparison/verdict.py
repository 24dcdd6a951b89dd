"""What the figures of a comparison mean, in sentences, the most important first.

Three questions are answered: which recipe is the cheapest that ends within the noise, which are not to be used and why,
and what these runs cannot say. A recipe wins only where its interval rules out a loss worse by more than a hundredth; a
certain loss that is smaller is told as a price, and a certain gain as one. What is left is ordered by bytes, then time. An
interval is of one recipe; of twenty harmless ones, one is to be expected outside. What holds by the clock is said in
``clock.py``, what should be known of the runs first in ``fairness.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from narrowgauge.comparison.caveats import caveats
from narrowgauge.comparison.classification import MOST_NOISE, WIDE, Evidence
from narrowgauge.comparison.equal_time import at_equal_time, fastest
from narrowgauge.comparison.intervals import Difference, shown_loss
from narrowgauge.comparison.labels import counted, listed
from narrowgauge.comparison.run_stats import late_reading


def sentences(found: Evidence) -> list[str]:
    """All that there is to say, the most important first."""
    parts = (_cheapest, _dearer, _not_to_be_used, _noisy, _unaudited, _undecided, fastest, at_equal_time)
    return [*(sentence for part in parts for sentence in part(found)), *caveats(found.groups)]


# ── which is the cheapest ───────────────────────────────────────────────────────────────────────────────────────────


def _cheapest(found: Evidence) -> list[str]:
    if (sentence := _nothing_to_compare(found)) is not None:
        return [sentence]
    if not found.has_intervals:
        return _one_seed(found)
    fit = [recipe for recipe in found.fit if found.has_size(recipe)]
    best = min(fit, key=found.price, default=None)
    # The yardstick wins only where nothing that takes less may be as good.
    rivals = [recipe for recipe in found.open if best is None or found.price(recipe) < found.price(best)]
    if best in (None, found.yardstick) and any(found.has_size(recipe) for recipe in rivals):
        return [_cannot_be_told(found, rivals), *_equals(found, None, rivals)]
    if best is None:
        return [_none_named(found), *_equals(found, None)]
    return [_won(found, best, rivals), *_quieter(found, best, fit), *_equals(found, best)]


def _none_named(found: Evidence) -> str:
    if found.fit or found.open:
        return "Nothing says how many bytes per parameter these recipes take, so none is named the cheapest."
    return f"No recipe is fit for use here, {found.yardstick} included."


def _nothing_to_compare(found: Evidence) -> str | None:
    if found.yardstick is None or not any(row["num_seeds"] for row in found.rows.values()):
        return "No run has ended in a loss that counts, so there is nothing to compare."
    row = found.rows[found.yardstick]
    if not row["num_seeds"]:
        return f"No run of {found.yardstick} has ended in a loss that counts: nothing can be held against it."
    if len(found.groups) == 1:
        spread = (
            "" if row["val_loss_std"] is None else f" with a standard deviation of {shown_loss(row['val_loss_std'])}"
        )
        seeds = counted(row["num_seeds"], "seed")
        return f"{found.yardstick} alone was run: validation loss {shown_loss(row['val_loss'])}{spread} over {seeds}."
    if not found.differences:
        return _nothing_paired(found, str(found.yardstick))
    return None


def _nothing_paired(found: Evidence, yardstick: str) -> str:
    others = [recipe for recipe in found.groups if recipe != yardstick]
    if any(found.rows[recipe]["num_seeds"] for recipe in others):
        return f"No other recipe has a finished run of the seeds of {yardstick}: nothing can be paired."
    if all(trial.diverged for recipe in others for trial in found.groups[recipe]):
        return f"Every other recipe diverged with every seed: nothing can be held against {yardstick}."
    return f"No run of another recipe has ended in a loss that counts: nothing can be held against {yardstick}."


def _one_seed(found: Evidence) -> list[str]:
    few = "One seed each"
    if any(row["num_seeds"] > 1 for row in found.rows.values()):
        few = f"No recipe has two seeds in common with {found.yardstick}"
    said = [
        f"{few}, so no interval can be given: whether a difference from {found.yardstick} is the recipe's or "
        "chance cannot be told. At least 2 seeds give one, 3 a useful one."
    ]
    if sized := [recipe for recipe in found.sound if found.has_size(recipe)]:
        best = min(sized, key=found.price)
        ended = found.differences.get(best)
        apart = f" and ended {ended.text} from the loss of {found.yardstick}" if ended is not None else ""
        among = " of those without a fault" if _is_audited(found, best) else ""
        said.append(f"{best} costs least{among}: {found.size(best)}{apart}.")
    return said


def _cannot_be_told(found: Evidence, rivals: list[str]) -> str:
    """That seeds are too few to name a cheapest."""
    base = found.rows[str(found.yardstick)]["bytes_per_param"]
    sizes = {r: f"{found.rows[r]['bytes_per_param']:.2f} bytes per parameter, " for r in rivals if found.has_size(r)}
    told = listed(f"{recipe} ({sizes.get(recipe, '')}{found.open[recipe].text})" for recipe in rivals)
    takes = f" ({base:.2f})" if base is not None else ""
    return (
        f"Which is the cheapest cannot be told {_with_seeds(found.open[r] for r in rivals)}: {told} may end worse than "
        f"{found.yardstick}{takes} by more than 1 % of the loss, or no worse. More seeds would say more."
    )


def _with_seeds(differences: Iterable[Difference]) -> str:
    numbers = {difference.num_pairs for difference in differences}
    return f"with {numbers.pop()} seeds" if len(numbers) == 1 else "with so few seeds"


def _won(found: Evidence, best: str, rivals: list[str]) -> str:
    mine = found.price(best)[0]
    if best == found.yardstick:
        others = [size for r in found.groups if r != best and math.isfinite(size := found.price(r)[0])]
        why = "all that take less end worse, are not to be used or cannot be judged"
        if not others or min(others) >= mine:
            why = "no other takes less that is fit for use"
        return f"{best} is the cheapest within the noise: {found.size(best)}; {why}."
    difference, base = found.differences[best], found.rows[str(found.yardstick)]["bytes_per_param"]
    beside = f" where {found.yardstick} takes {base:.2f}" if base is not None and mine < round(base, 1) else ""
    if base is not None and mine == round(base, 1):
        beside = f", as {found.yardstick} takes, but less time"
    rank = "is the cheapest within the noise"
    if best in found.better:
        rank = "ends better than the yardstick and is the cheapest"
    elif not difference.holds_zero:
        rank = "is the cheapest within a thousandth of the yardstick's loss"
    if rivals:
        rank = "is the cheapest of those that these seeds can judge"
    return (
        f"{best} {rank}: {found.size(best)}{beside}, and its validation loss differs from "
        f"{found.yardstick}'s by {difference.text} (95 % interval over {difference.num_pairs} seeds)."
    )


def _quieter(found: Evidence, best: str, judged: list[str]) -> list[str]:
    quiet = [recipe for recipe in judged if found.noise(recipe) <= MOST_NOISE]
    if best in quiet or not quiet:
        return []
    other = min(quiet, key=found.price)
    return [f"The cheapest whose updates are not mostly noise is {other}: {found.size(other)}."]


def _equals(found: Evidence, best: str | None, told: Iterable[str] = ()) -> list[str]:
    """The other recipes that are not worse: better, within the noise, or too little known."""
    fit = [found.differences[r] for r in found.fit if r in found.differences]
    others = [d for d in fit if d.recipe != best]
    said = []
    if better := [f"{d.recipe} ({d.text})" for d in others if d.recipe in found.better]:
        said.append(f"Ends better than {found.yardstick}, and certainly: {listed(better)}.")
    if level := [d for d in others if d.recipe not in found.better]:
        also = "Also within" if best not in (None, *found.better) else "Within"
        near = "" if all(d.holds_zero for d in level) else ", or within a thousandth of its loss"
        said.append(f"{also} the noise of {found.yardstick}{near}: {listed(f'{d.recipe} ({d.text})' for d in level)}.")
    if loose := [d.recipe for d in fit if d.half > WIDE * abs(found.loss) and d.recipe not in found.better]:
        said.append(f"The interval of {listed(loose)} is wider than 1 % of the loss: more seeds would say more.")
    if unsure := [d for d in found.open.values() if d.recipe not in set(told)]:
        names = listed(f"{d.recipe} ({d.text})" for d in unsure)
        said.append(
            f"Not to be told apart from {found.yardstick} {_with_seeds(unsure)}: {names} may end worse by more than 1 % of "
            "the loss, or no worse. More seeds would say more."
        )
    return said


# ── which are not to be used, or with care ──────────────────────────────────────────────────────────────────────────


def _dearer(found: Evidence) -> list[str]:
    told = [
        f"{recipe} ({difference.text}, {difference.mean / abs(found.loss):+.1%})"
        for recipe, difference in found.worse.items()
        if not found.faults[recipe] and found.loss
    ]
    return [f"At a small price in loss, which is certain: {listed(told)}."] if told else []


def _not_to_be_used(found: Evidence) -> list[str]:
    return [
        f"Not to be used: {recipe}{', the yardstick itself' if recipe == found.yardstick else ''}, which {listed(why)}."
        for recipe, why in found.faults.items()
        if why
    ]


def _noisy(found: Evidence) -> list[str]:
    # A lost update counts as noise of its own size, and was told already.
    noises = {recipe: found.noise(recipe) for recipe in found.groups if not found.faults[recipe]}
    return [
        f"With care: {recipe} adds {noise:.1f} times as much to its late updates as they are; this loss bears it, and a "
        "longer run at a smaller rate may not."
        for recipe, noise in noises.items()
        if noise > MOST_NOISE
    ]


def _is_audited(found: Evidence, recipe: str) -> bool:
    return late_reading(found.groups[recipe], "edq") is not None


def _unaudited(found: Evidence) -> list[str]:
    """Recipes that seem without a fault because nobody looked."""
    ended = [recipe for recipe, row in found.rows.items() if row["num_seeds"]]
    unseen = [recipe for recipe in ended if not _is_audited(found, recipe) and not found.faults[recipe]]
    if not unseen or len(ended) < 2:
        return []
    if len(unseen) == len(ended):
        return ["No step was audited, so nothing here says whether updates get lost."]
    return [f"Not audited, so nothing here says whether updates get lost: {listed(unseen)}."]


def _undecided(found: Evidence) -> list[str]:
    if not found.has_intervals:
        return []
    few = [
        recipe
        for recipe in found.sound
        if recipe != found.yardstick and (recipe not in found.differences or found.differences[recipe].num_pairs < 2)
    ]
    return [f"Not judged, for want of two seeds in common with {found.yardstick}: {listed(few)}."] if few else []
