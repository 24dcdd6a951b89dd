"""Labels of recipes, runs and run folders: the same in the verdict, in ``compare.json`` and on the
page.

Runs that differ only in their seed share a label. If one recipe ran twice with one seed, the
differing settings join the label; if no setting differs, the folder does. A label is for people: no
code parses it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.runs.record import Run
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe

_NOT_NAMED = ("recipe", "seed", "out")


def run_name(recipe: str, seed: int) -> str:
    """Return the folder name of a run within its comparison's folder."""
    name = re.sub(r"[^\w.+-]", "-", recipe.removesuffix(")").replace(" (", " "))
    return f"{name.strip('.') or 'recipe'}-seed{seed}"


def parsed_recipe(recipe: Any) -> Recipe | None:
    """Return a recipe from its name or itself; ``None`` for an unknown name."""
    try:
        return parse(recipe)
    except NarrowgaugeError:
        return None


def recipe_name(recipe: Any) -> str:
    """Return the label of a recipe: its full name, or the name itself if unknown."""
    parsed = parsed_recipe(recipe)
    return str(recipe) if parsed is None else parsed.name


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
    labels = []
    for run in runs:
        # A folder may carry the name of another recipe.
        recipe = run.config.get("recipe")
        labels.append(run.path.name if recipe is None else recipe_name(recipe))
    for suffix_of in (_settings, _folder):
        groups: dict[str, list[int]] = {}
        for place, label in enumerate(labels):
            groups.setdefault(label, []).append(place)
        for places in groups.values():
            group = [runs[place] for place in places]
            if len(set(map(seed_of, group))) < len(group):
                for place in places:
                    labels[place] += suffix_of(runs[place], group)
    return labels


def _settings(run: Run, group: Sequence[Run]) -> str:
    """Return the settings of a run in which the runs of its group differ."""
    text = ""
    for key, value in run.config.items():
        differs = any(other.config.get(key, value) != value for other in group)
        if differs and key not in _NOT_NAMED:
            text += f", {key} {value}"
    return text


def _folder(run: Run, group: Sequence[Run]) -> str:
    """Return the path of a run that no setting distinguishes."""
    return f" ({run.path})"
