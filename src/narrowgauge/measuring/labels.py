"""Labels of recipes, runs and run folders: the same in the verdict, in ``compare.json`` and on the
page.

Runs that differ only in their seed share a label. A label is for people: no code parses it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.runs.record import Run
from narrowgauge.spec.notation import parse


def run_name(recipe: str, seed: int) -> str:
    """Return the folder name of a run within its comparison's folder."""
    name = re.sub(r"[^\w.+-]", "-", recipe.removesuffix(")").replace(" (", " "))
    return f"{name.strip('.') or 'recipe'}-seed{seed}"


def recipe_name(recipe: Any) -> str:
    """Return the label of a recipe: its full name, or the name itself if unknown."""
    try:
        return parse(recipe).name
    except NarrowgaugeError:
        return str(recipe)


def seed_of(run: Run) -> int:
    """Return the seed of a run; 0 if unrecorded."""
    return int(run.config.get("seed", 0))


def run_labels(runs: Sequence[Run]) -> list[str]:
    """Return a label per run, in their order: its recipe. Runs that differ only in their seed share
    it; if one recipe ran twice with one seed, its runs show their folders.

    Example:
        >>> from pathlib import Path
        >>> run_labels([Run(Path(name), {"config": {"recipe": "bf16/word"}}) for name in ("a", "b")])
        ['bfloat16/word (a)', 'bfloat16/word (b)']
    """
    labels = []
    for run in runs:
        # A folder may carry the name of another recipe.
        recipe = run.config.get("recipe")
        labels.append(run.path.name if recipe is None else recipe_name(recipe))
    counts = Counter(zip(labels, map(seed_of, runs), strict=True))
    repeated = {label for (label, _), count in counts.items() if count > 1}
    for place, run in enumerate(runs):
        if labels[place] in repeated:
            labels[place] += f" ({run.path})"
    return labels
