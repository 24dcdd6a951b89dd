"""What to know about the runs before a difference between them is believed: unfinished runs, and settings that differ.

Only runs of one seed are paired, so only runs of one seed have to agree. Another seed may have other settings and another
machine, and always has another validation text, since the seed chooses it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from narrowgauge.analysis.comparison.labels import listed
from narrowgauge.analysis.comparison.run_stats import TIMING_NOISE, RunStats, requested_steps

# What may differ between compared runs; learning rates and steps are examined separately.
_FREE = {
    "recipe", "seed", "out", "stop_after", "lr", "warmup_steps", "eval_every", "checkpoint_every", "keep_checkpoints",
    "log_every", "audit_every", "gauges_every", "fingerprints_every", "tensorboard", "log_to",
    "steps",
}  # fmt: skip


def caveats(groups: Mapping[str, Sequence[RunStats]]) -> list[str]:
    """What to know about these runs, in sentences.

    Args:
        groups: the runs of each recipe.
    """
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
    """Runs that were read from other frameworks' logs."""
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
    """Numbers of steps that differ, and whether the times are equal."""
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
    """Settings in which runs of one seed differ, each with its values."""
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
