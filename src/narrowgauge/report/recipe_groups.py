"""The recipes of a page: groups of runs that differ only in their seed, with their diagnoses and
the figures of their gauges.

A group has one label and one palette index, in every figure and table. The gauges of a long run
take seven times the size of their file in memory. So we read each file once, draw what the page
shows, and release the rows before the next file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from narrowgauge.analysis.columns import rows_of
from narrowgauge.analysis.comparison.classification import RunStats
from narrowgauge.analysis.comparison.comparison import Comparison
from narrowgauge.analysis.diagnose import Diagnosis, diagnose
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.report.figures.heat_maps import heat_maps
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row


@dataclass(frozen=True)
class RunDetails:
    """Hold what a page shows of the inside of one run.

    Args:
        diagnosis: the diagnosis, or the reason why it failed.
        has_gauges: whether any step was sampled.
        heat_maps: figures by metric.
        histograms: counts of exponents by kind of tensor, in the last sample that has them.
    """

    diagnosis: Diagnosis | str
    has_gauges: bool
    heat_maps: Mapping[str, Row]
    histograms: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Group:
    """Hold the runs of one recipe, one per seed, with their label and the index of their colour,
    dash and marker.
    """

    label: str
    index: int
    stats: tuple[RunStats, ...]

    @cached_property
    def details(self) -> tuple[RunDetails, ...]:
        """Return the details of each run."""
        return tuple(map(details_of, self.runs))

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(stats.run for stats in self.stats)

    @property
    def named(self) -> list[tuple[Run, str]]:
        """Return the runs, each with a unique name: the label, plus the seed if there are several
        runs.
        """
        if len(self.stats) == 1:
            return [(self.stats[0].run, self.label)]
        return [(stats.run, f"{self.label} · seed {stats.seed}") for stats in self.stats]

    def seeds(self) -> dict[int, Run]:
        return {stats.seed: stats.run for stats in self.stats}


def groups_of(comparison: Comparison) -> list[Group]:
    """Return the recipes of a comparison, in its order."""
    groups: list[Group] = []
    for label, stats in comparison.classes.items():
        groups.append(Group(label, len(groups), stats.runs))
    return groups


def details_of(run: Run) -> RunDetails:
    """Read the gauges of a run once, and release them unless they were loaded before."""
    was_held = "gauges" in vars(run)
    try:
        diagnosis = diagnosed(run)
        rows = rows_of(run, "gauges")
        histograms = [row["histograms"] for row in rows if row.get("histograms")]
        return RunDetails(
            diagnosis,
            bool(rows),
            heat_maps(rows),
            histograms[-1] if histograms else {},
        )
    finally:
        if not was_held:
            vars(run).pop("gauges", None)


def diagnosed(run: Run) -> Diagnosis | str:
    """Return a run's diagnosis, or the reason why it failed. The page must not fail with it."""
    try:
        return diagnose(run)
    except NarrowgaugeError as error:
        return error.message.rstrip(".")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
