"""Whether runs may be held against each other: what is not finished, and what differs that should not.

Only runs of one seed are paired, so only runs of one seed have to agree. Another seed may have other settings, another
machine, and always has other text: which text is held out depends on the seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from narrowgauge.comparison.labels import listed
from narrowgauge.comparison.run_stats import UNSTEADY, Trial
from narrowgauge.errors import RecipeError
from narrowgauge.spec.notation import parse

# What may differ between runs that are to be compared; their rate and steps are looked at apart.
_FREE = {
    "recipe", "seed", "out", "stop_after", "lr", "warmup_steps", "eval_every", "checkpoint_every", "keep_checkpoints",
    "log_every", "audit_every", "gauges_every", "tensorboard", "steps",
}  # fmt: skip


def caveats(groups: Mapping[str, Sequence[Trial]]) -> list[str]:
    """What should be known of these runs before a difference between them is believed, in sentences.

    Args:
        groups: the runs of each recipe.
    """
    trials = [trial for group in groups.values() for trial in group]
    said = []
    if left := [_progress(t) for t in trials if not t.counts and not t.diverged]:
        said.append(f"Not finished, and left out of every number: {listed(left)}.")
    if apart := [*_settings_apart(trials), *_texts_apart(trials)]:
        told = "; ".join(apart)
        said.append(f"The runs differ in more than recipe and seed ({told}): a difference is not the recipe's alone.")
    return [*said, *_other_models(trials), *_other_lengths(groups)]


def _other_models(trials: Sequence[Trial]) -> list[str]:
    """Unit-scaled recipes among others, which begin elsewhere and learn at a rate of their own."""
    units = list(dict.fromkeys(t.recipe for t in trials if _is_unit(t.recipe)))
    if not units or len(units) == len({t.recipe for t in trials}):
        return []
    rates = [
        listed(
            dict.fromkeys(
                str(t.run.config["lr"]) for t in trials if "lr" in t.run.config and _is_unit(t.recipe) is unit
            )
        )
        for unit in (True, False)
        if any("lr" in t.run.config and _is_unit(t.recipe) is unit for t in trials)
    ]
    told = f" (lr {rates[0]}, the others {rates[1]})" if len(rates) == 2 else ""
    one = len(units) == 1
    return [
        f"{listed(units)} {'is another parametrisation' if one else 'are other parametrisations'} of the model, with "
        f"{'its' if one else 'their'} own first weights and rate{told}: a difference is not the format's alone."
    ]


def _other_lengths(groups: Mapping[str, Sequence[Trial]]) -> list[str]:
    """Numbers of steps that differ, and whether the times at least are equal."""
    steps = steps_asked(groups)
    if len(set(steps.values())) < 2:
        return []
    told = ", ".join(f"{recipe} {number}" for recipe, number in steps.items())
    ends = {r: [t.curve.end for t in group if t.counts and t.curve.points] for r, group in groups.items()}
    seconds = {recipe: statistics.median(found) for recipe, found in ends.items() if found}
    if len(seconds) < 2:
        return [f"They took different numbers of steps ({told}): not fair at equal tokens."]
    if max(seconds.values()) <= UNSTEADY * min(seconds.values()):
        return [f"They took different numbers of steps ({told}): fair at equal time, not at equal tokens."]
    times = ", ".join(f"{recipe} {number:.3g} s" for recipe, number in seconds.items())
    return [
        f"They took different numbers of steps ({told}) and different times ({times}): their last losses are fair neither "
        "at equal tokens nor at equal time."
    ]


def steps_asked(groups: Mapping[str, Sequence[Trial]]) -> dict[str, Any]:
    """How many steps were asked of each recipe."""
    return {recipe: group[-1].run.config.get("steps") for recipe, group in groups.items()}


def _progress(trial: Trial) -> str:
    done = int(trial.run.steps[-1].get("step", 0)) if trial.run.steps else 0
    asked = trial.run.config.get("steps")
    return f"{trial.recipe}, seed {trial.seed} ({done}{f' of {asked}' if asked else ''} steps)"


def _by_seed(trials: Sequence[Trial]) -> dict[int, list[Trial]]:
    found: dict[int, list[Trial]] = {}
    for trial in trials:
        found.setdefault(trial.seed, []).append(trial)
    return found


def _settings_apart(trials: Sequence[Trial]) -> list[str]:
    """Settings in which runs of one seed differ, each with the values that were met."""
    apart: dict[str, dict[str, None]] = {}
    for group in _by_seed(trials).values():
        values: dict[str, dict[str, None]] = {}
        for trial in group:
            # A setting that an older version did not have is no other one.
            for key, value in _settings(trial):
                values.setdefault(key, {}).setdefault(str(value))
        for key, met in values.items():
            if len(met) > 1:
                apart.setdefault(key, {}).update(met)
    return [f"{key} {', '.join(met)}" for key, met in apart.items()]


def _settings(trial: Trial) -> Iterator[tuple[str, Any]]:
    """What runs of one seed should share."""
    config = trial.run.config
    # How often a run may go back says nothing of one that never did.
    free = _FREE if any(event.get("kind") == "rollback" for event in trial.run.events) else {*_FREE, "max_rollbacks"}
    yield from ((key, value) for key, value in config.items() if key not in free)
    # A unit-scaled model counts its rate in other units.
    if "lr" in config:
        yield "lr of unit-scaled models" if _is_unit(trial.recipe) else "lr", config["lr"]
    machine = trial.run.run.get("machine")
    for key, words in (("device", "device"), ("num_threads", "threads")):
        if isinstance(machine, dict) and key in machine:
            yield words, machine[key]


def _texts_apart(trials: Sequence[Trial]) -> list[str]:
    """The seeds whose runs read other text than each other. Their fingerprints would say no more than that."""
    apart = []
    for seed, group in _by_seed(trials).items():
        tables = [trial.run.run.get("data") for trial in group]
        known = [table["fingerprint"] for table in tables if isinstance(table, dict) and "fingerprint" in table]
        if any(fingerprint != known[0] for fingerprint in known):
            apart.append(str(seed))
    return [f"the text of seed{'s' if len(apart) > 1 else ''} {listed(apart)}"] if apart else []


def _is_unit(recipe: str) -> bool:
    try:
        return parse(recipe.split(" ")[0].rstrip(",")).compute.transform == "unit"
    except RecipeError:
        return False
