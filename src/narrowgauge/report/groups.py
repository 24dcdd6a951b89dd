"""Which runs of a page belong together: one group per recipe, its runs differing in their seed alone.

A group has one label and one index in the palette, and keeps both in every figure and table. The labels are those of the
comparison, so that its rows and these groups are about the same runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from narrowgauge.comparison.labels import run_labels, seed_of
from narrowgauge.comparison.run_stats import RunStats
from narrowgauge.report.samples import Samples, read_samples
from narrowgauge.report.series import Series, column, number
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row


@dataclass(frozen=True)
class Group:
    """The runs of one recipe.

    Args:
        label: its name on the page.
        index: its number on the page, which chooses colour, dash and marker.
        runs: one per seed.
    """

    label: str
    index: int
    runs: tuple[Run, ...]

    @cached_property
    def samples(self) -> tuple[Samples, ...]:
        """What the page keeps of each run's gauges.

        Raises:
            RecordError: a run's gauges are damaged.
        """
        return tuple(map(read_samples, self.runs))

    @cached_property
    def stats(self) -> tuple[RunStats, ...]:
        """The runs as the comparison sees them."""
        return tuple(RunStats.of(run, self.label) for run in self.runs)

    @property
    def named(self) -> list[tuple[Run, str]]:
        """The runs, each with a name of its own on the page: the label, and the seed where there are several."""
        several = len(self.runs) > 1
        return [(run, f"{self.label} · seed {seed_of(run)}" if several else self.label) for run in self.runs]

    def lines(self, table: str, y: str) -> list[Series]:
        """One column of ``steps`` or ``evals`` of every run."""
        return [column(getattr(run, table), y) for run in self.runs]

    def seeds(self) -> dict[int, Run]:
        """The runs by seed."""
        return {seed_of(run): run for run in self.runs}


def group_runs(runs: Iterable[Run], rows: Sequence[Row] = ()) -> list[Group]:
    """Sort runs into groups.

    Args:
        runs: any runs.
        rows: of ``compare.json``; their order of recipes is kept, other recipes follow.

    Raises:
        RecordError: a run's ``run.toml`` has no settings.

    Example:
        >>> from pathlib import Path
        >>> made = [Run(Path("a"), {"config": {"recipe": "bfloat16/word", "seed": seed}}) for seed in (0, 1)]
        >>> [(group.label, len(group.runs)) for group in group_runs(made)]
        [('bfloat16/word', 2)]
    """
    runs = list(runs)
    found: dict[str, list[Run]] = {}
    for label, run in zip(run_labels(runs), runs, strict=True):
        found.setdefault(label, []).append(run)
    order = {str(row.get("recipe")): index for index, row in enumerate(rows)}
    labels = sorted(found, key=lambda label: order.get(label, len(order)))
    return [Group(label, index, tuple(found[label])) for index, label in enumerate(labels)]


def run_names(groups: Iterable[Group]) -> list[tuple[Run, str]]:
    """Every run with its name on the page, in the order of their groups."""
    return [pair for group in groups for pair in group.named]


def final_loss(run: Run) -> float | None:
    """The validation loss of a finished run; of an unfinished one, that of its last evaluation."""
    last = run.evals[-1] if run.evals else {}
    return number((run.summary or {}).get("val_loss", last.get("val_loss")))
