"""The runs of a comparison: every recipe with every seed, each with its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.analysis.comparison.labels import recipe_name, run_name
from narrowgauge.errors import NarrowgaugeError, RecipeError
from narrowgauge.runs.record import is_run, read_run


@dataclass(frozen=True)
class PlannedRun:
    """A run of a comparison.

    Args:
        label: of its recipe.
        seed: of the initial weights and the batches.
        folder: the run folder.
    """

    label: str
    seed: int
    folder: Path

    @property
    def has_ended(self) -> bool:
        """Whether the run exists and will not be resumed: it is finished, or it diverged and stopped."""
        if not is_run(self.folder):
            return False
        run = read_run(self.folder)
        return run.summary is not None or any(event.get("kind") == "divergence" for event in run.events)


def plan_runs(labels: Sequence[str], seeds: Sequence[int], out: Path) -> list[PlannedRun]:
    """The runs of a comparison, seed by seed, each with its folder."""
    return [PlannedRun(label, seed, out / run_name(label, seed)) for seed in seeds for label in labels]


def seed_numbers(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """Seeds from a number of seeds, counted from 0, or from the seeds themselves.

    Raises:
        NarrowgaugeError: there is none, or one is given twice.
    """
    numbers = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    if not numbers or len(set(numbers)) < len(numbers):
        raise NarrowgaugeError(f"seeds = {seeds!r} was requested.", "Request at least one, none twice.")
    return numbers


def require_distinct(recipes: Sequence[Any]) -> None:
    """Refuse an empty list of recipes, a recipe that is listed twice, and two that would share a folder."""
    if not recipes:
        raise RecipeError("no recipe was named.", "For instance bfloat16/master,bfloat16/word.")
    labels = [recipe_name(recipe) for recipe in recipes]
    folders = [run_name(label, 0).lower() for label in labels]
    for index, recipe in enumerate(recipes):
        for other in range(index):
            if recipes[other] == recipe:
                raise RecipeError(f"two of the recipes are one, {labels[index]}.", "Name each once.")
            if folders[other] == folders[index]:
                raise RecipeError(
                    f"two of the recipes are called {labels[index]}.",
                    'Give each a name of its own: name = "…" in its file.',
                )
