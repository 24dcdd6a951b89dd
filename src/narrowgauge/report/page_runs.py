"""The runs of a page, each with its name there, the colour of its recipe, its diagnosis and the
figures of its gauges.

The gauges of a long run take seven times the size of their file in memory. So we read each file
once, draw what the page shows, and release the rows before the next file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from narrowgauge.analysis.columns import rows_of
from narrowgauge.analysis.comparison.comparison import Comparison
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.measuring.diagnose import Diagnosis, diagnose
from narrowgauge.report.figures.heat_maps import heat_maps
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row


@dataclass(frozen=True)
class Inside:
    """Hold what a page shows of the inside of one run.

    Args:
        diagnosis: the diagnosis, or the reason why it failed.
        heat_maps: figures by metric.
        histograms: counts of exponents by kind of tensor, in the last sample that has them.
    """

    diagnosis: Diagnosis | str
    heat_maps: Mapping[str, Row]
    histograms: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class PageRun:
    """One run of a page.

    Args:
        name: its recipe, and its seed if the recipe has several runs.
        recipe: the label of its recipe.
        colour: the index of the recipe's colour, dash and marker.
    """

    run: Run
    name: str
    recipe: str
    colour: int
    seed: int

    @cached_property
    def inside(self) -> Inside:
        """Read the gauges once, and release them unless they were loaded before."""
        was_held = "gauges" in vars(self.run)
        try:
            diagnosis = diagnosed(self.run)
            rows = rows_of(self.run, "gauges")
            histograms = [row["histograms"] for row in rows if row.get("histograms")]
            return Inside(diagnosis, heat_maps(rows), histograms[-1] if histograms else {})
        finally:
            if not was_held:
                vars(self.run).pop("gauges", None)


def page_runs(comparison: Comparison) -> list[PageRun]:
    """Return the runs of a comparison, recipe by recipe in its order."""
    runs = []
    for colour, (label, recipe) in enumerate(comparison.classes.items()):
        for stats in recipe.runs:
            name = label
            if len(recipe.runs) > 1:
                name = f"{label} · seed {stats.seed}"
            runs.append(PageRun(stats.run, name, label, colour, stats.seed))
    return runs


def colours_of(comparison: Comparison) -> dict[str, int]:
    """Return the index of each recipe's colour, by its label."""
    return {label: colour for colour, label in enumerate(comparison.classes)}


def diagnosed(run: Run) -> Diagnosis | str:
    """Return a run's diagnosis, or the reason why it failed. The page must not fail with it."""
    try:
        return diagnose(run)
    except NarrowgaugeError as error:
        return error.message.rstrip(".")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
