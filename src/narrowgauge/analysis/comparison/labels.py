"""Labels of recipes, runs and run folders: the same in the verdict, in ``compare.json`` and on the
page.

Runs that differ only in their seed share a label. If one recipe ran twice with one seed, the
differing settings join the label; if no setting differs, the folder does. A label is for people: no
code parses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.runs.record import Run
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe

MOST_SETTINGS = 4
"""Maximum number of settings in a label. Runs that differ in more show their folders."""


def run_name(recipe: str, seed: int) -> str:
    """Return the folder name of a run within its comparison's folder."""
    plain = recipe.removesuffix(")").replace(" (", " ")
    letters = "".join(letter if letter.isalnum() or letter in "-_.+" else "-" for letter in plain)
    return f"{letters.strip('.') or 'recipe'}-seed{seed}"


def parsed_recipe(recipe: Any) -> Recipe | None:
    """Return a recipe from its name, its table or itself; ``None`` for an unknown name."""
    try:
        return parse(recipe)
    except NarrowgaugeError:
        return None


def recipe_name(recipe: Any) -> str:
    """Return the label of a recipe: its title, or the name itself if unknown."""
    parsed = parsed_recipe(recipe)
    return str(recipe) if parsed is None else parsed.title


def seed_of(run: Run) -> int:
    """Return the seed of a run; 0 if unrecorded."""
    return int(run.config.get("seed", 0))


def run_labels(runs: Sequence[Run]) -> list[str]:
    """Return a label per run, in their order. Runs that differ only in their seed share it.

    Invariant: no two runs of one seed share a label, unless one run was passed twice.

    Example:
        >>> from pathlib import Path
        >>> run_labels([Run(Path("a"), {"config": {"recipe": "bf16/word", "lr": lr}}) for lr in (1e-3, 1e-4)])
        ['bfloat16/word, lr 0.001', 'bfloat16/word, lr 0.0001']
    """
    # A folder may carry the name of another recipe.
    labels = [
        recipe_name(run.config["recipe"]) if "recipe" in run.config else run.path.name
        for run in runs
    ]
    for distinguish in (_by_settings, _by_folder):
        pairs = [(label, seed_of(run)) for label, run in zip(labels, runs, strict=True)]
        for label in sorted({label for label, seed in pairs if pairs.count((label, seed)) > 1}):
            places = [place for place, name in enumerate(labels) if name == label]
            for place, suffix in zip(
                places, distinguish([runs[place] for place in places]), strict=True
            ):
                labels[place] = label + suffix
    return labels


def _by_settings(runs: Sequence[Run]) -> list[str]:
    """Return the differing settings that all runs record, as one text per run; empty texts if too
    many differ.
    """
    shared = {key for key in runs[0].config if all(key in run.config for run in runs)} - {
        "recipe",
        "seed",
        "out",
    }
    differing = [
        k for k in runs[0].config if k in shared and len({repr(run.config[k]) for run in runs}) > 1
    ]
    named = differing if len(differing) <= MOST_SETTINGS else []
    return ["".join(f", {key} {run.config[key]}" for key in named) for run in runs]


def _by_folder(runs: Sequence[Run]) -> list[str]:
    """Return the comparison's folder if it distinguishes runs of one seed, else the run's path."""
    folders = [run.path.parent.name for run in runs]
    is_distinct = len(
        {(folder, seed_of(run)) for folder, run in zip(folders, runs, strict=True)}
    ) == len(runs)
    return [
        f" ({folder if is_distinct else run.path})"
        for folder, run in zip(folders, runs, strict=True)
    ]
