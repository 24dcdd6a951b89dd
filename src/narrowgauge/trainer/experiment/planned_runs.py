"""The runs of a comparison: every recipe with every seed, each with its folder; made one after the other, then compared.

Two back ends make runs: ``training.py`` trains with the library's own trainer (``narrowgauge compare``), ``harness.py`` calls a
training function of yours (``ng.compare``). Folders, order, seeds, baseline, page and verdict are the same. Runs go seed by seed,
so that complete pairs exist whenever a comparison stops, and a run that has ended is not made again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from narrowgauge.analysis.comparison.comparison import Comparison, compare_runs
from narrowgauge.analysis.comparison.labels import recipe_name, run_name
from narrowgauge.errors import NarrowgaugeError, RecipeError, RecordError
from narrowgauge.report.publishing import publish
from narrowgauge.runs.atomic_io import disk_errors, held_folder
from narrowgauge.runs.record import Run, is_run, read_run


@dataclass(frozen=True)
class PlannedRun:
    """A run of a comparison: the label of its recipe, its seed, and the run folder."""

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
    """Seeds from a number of seeds, counted from 0, or from the seeds themselves; at least one, and none twice."""
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
                raise RecipeError(f"two of the recipes are identical, {labels[index]}.", "Name each once.")
            if folders[other] == folders[index]:
                raise RecipeError(
                    f"two of the recipes are called {labels[index]}.",
                    'Give each a name of its own: name = "…" in its file.',
                )


# ── making and comparing them ───────────────────────────────────────────────────────────────────────────────────────


class ShowsRuns(Protocol):
    """What is told of each run, such as :class:`~narrowgauge.trainer.experiment.progress.Progress`."""

    def begin(self, index: int) -> None:
        """A run begins or is resumed."""

    def end(self, index: int, run: Run) -> None:
        """A run has ended, now or in an earlier command."""


def make_runs(
    runs: Sequence[PlannedRun], make_run: Callable[[int], None], progress: ShowsRuns | None = None
) -> list[Run]:
    """Make or resume every run that has not ended, by its index; returns all of them, in the given order."""
    found = []
    for index, planned in enumerate(runs):
        if not planned.has_ended:
            if progress is not None:
                progress.begin(index)
            make_run(index)
        found.append(read_run(planned.folder))
        if progress is not None:
            progress.end(index, found[-1])
    return found


def compare_and_publish(runs: Sequence[Run], out: Path, resolve: float | None = None) -> tuple[Comparison, Path]:
    """Compare runs and write ``compare.json`` and the page; the comparison and the path of the page."""
    found = compare_runs(runs, resolve=resolve)
    return found, publish(found, out)


@contextlib.contextmanager
def hold(out: Path) -> Iterator[None]:
    """Create a folder and lock it for this process; remove it again where an error leaves it empty."""
    with disk_errors(out):
        if out.exists() and not out.is_dir():
            raise RecordError(f"Cannot compare in {out}: it is a file.", "Choose another folder.")
        absent = [folder for folder in (out, *out.parents) if not folder.exists()]
        out.mkdir(parents=True, exist_ok=True)
    with held_folder(out) as is_held:
        if not is_held:
            raise RecordError(
                f"Cannot compare in {out}: another process is doing that.", "Wait until it ends, or stop it."
            )
        try:
            yield
        except (NarrowgaugeError, OSError):
            for folder in absent:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise
