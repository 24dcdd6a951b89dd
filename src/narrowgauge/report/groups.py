"""The recipes of a page, each a group of runs that differ in their seed alone.

A group has one label and one index in the palette, and keeps both in every figure and table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from narrowgauge.analysis.comparison.comparison import Comparison
from narrowgauge.analysis.comparison.run_stats import RunStats
from narrowgauge.analysis.diagnosis.diagnosis import Diagnosis, diagnose
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.report.samples import Samples, gauges_for_now, read_samples
from narrowgauge.report.series import Series, column, number
from narrowgauge.runs.record import Run


@dataclass(frozen=True)
class Group:
    """The runs of one recipe.

    Args:
        label: its name on the page.
        index: its number on the page, which chooses colour, dash and marker.
        stats: its runs, one per seed.
    """

    label: str
    index: int
    stats: tuple[RunStats, ...]

    @property
    def samples(self) -> tuple[Samples, ...]:
        """What the page keeps of each run's gauges.

        Raises:
            RecordError: a run's gauges are damaged.
        """
        return tuple(samples for samples, _ in self._read)

    @property
    def diagnoses(self) -> tuple[Diagnosis | str, ...]:
        """The diagnosis of each run, or why there is none.

        Raises:
            RecordError: a run's gauges are damaged.
        """
        return tuple(found for _, found in self._read)

    @cached_property
    def _read(self) -> tuple[tuple[Samples, Diagnosis | str], ...]:
        return tuple(map(_read_once, self.runs))

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(one.run for one in self.stats)

    @property
    def named(self) -> list[tuple[Run, str]]:
        """The runs, each with a name of its own on the page: the label, and the seed where there are several."""
        several = len(self.stats) > 1
        return [(one.run, f"{self.label} · seed {one.seed}" if several else self.label) for one in self.stats]

    def lines(self, table: str, y: str) -> list[Series]:
        """One column of ``steps`` or ``evals`` of every run."""
        return [column(getattr(run, table), y) for run in self.runs]

    def seeds(self) -> dict[int, Run]:
        """The runs by seed."""
        return {one.seed: one.run for one in self.stats}


def _read_once(run: Run) -> tuple[Samples, Diagnosis | str]:
    """What a page takes from a run's gauges, which are the longest of all rows: read once, and let go."""
    with gauges_for_now(run):
        found = diagnosed(run)
        return read_samples(run), found


def diagnosed(run: Run) -> Diagnosis | str:
    """A run's diagnosis, or why there is none: whatever a record holds, the page on it can be written.

    Args:
        run: its record.
    """
    try:
        return diagnose(run)
    except NarrowgaugeError as error:
        return error.message.rstrip(".")
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def groups_of(found: Comparison) -> list[Group]:
    """The recipes of a comparison, in its order.

    Example:
        >>> from pathlib import Path
        >>> from narrowgauge.analysis.comparison.comparison import compare_runs
        >>> made = [Run(Path("a"), {"config": {"recipe": "bfloat16/word", "seed": seed}}) for seed in (0, 1)]
        >>> [(group.label, len(group.runs)) for group in groups_of(compare_runs(made))]
        [('bfloat16/word', 2)]
    """
    return [Group(label, index, one.runs) for index, (label, one) in enumerate(found.classes.items())]


def run_names(groups: Iterable[Group]) -> list[tuple[Run, str]]:
    """Every run with its name on the page, in the order of their groups."""
    return [pair for group in groups for pair in group.named]


def final_loss(run: Run) -> float | None:
    """The validation loss of a finished run; of an unfinished one, that of its last evaluation."""
    last = run.evals[-1] if run.evals else {}
    return number((run.summary or {}).get("val_loss", last.get("val_loss")))
