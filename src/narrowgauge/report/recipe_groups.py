"""The recipes of a page: groups of runs that differ only in their seed, and the stored part of their gauges.

A group has one label and one palette index, in every figure and table.

The gauges of a long run are a thousand numbers for each of hundreds of samples. As Python objects they take seven times the
size of their file. For several runs, most machines lack the memory. A page shows a few dozen tensors and a few dozen
histograms. So we read each file once, extract the arrays that figures may need, and release the rest before the next file. A
missing or damaged table or list adds nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from narrowgauge.analysis.columns import Series, column
from narrowgauge.analysis.comparison.comparison import Comparison
from narrowgauge.analysis.comparison.run_stats import RunStats
from narrowgauge.analysis.diagnose import Diagnosis, diagnose
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.report.figures.heat_maps import HEAT_MAPS, MOST_TENSORS, MetricValues
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import METRICS, TENSOR_KINDS, Row, finite_number


@dataclass(frozen=True)
class Group:
    """Hold the runs of one recipe, one per seed, with their label and the index of their colour, dash and marker."""

    label: str
    index: int
    stats: tuple[RunStats, ...]

    @property
    def samples(self) -> tuple[Samples, ...]:
        """Return the samples of each run's gauges."""
        return tuple(samples for samples, _ in self._read)

    @property
    def diagnoses(self) -> tuple[Diagnosis | str, ...]:
        """Return the diagnosis of each run, or the reason why it failed."""
        return tuple(diagnosis for _, diagnosis in self._read)

    @cached_property
    def _read(self) -> tuple[tuple[Samples, Diagnosis | str], ...]:
        return tuple(map(_read_once, self.runs))

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(stats.run for stats in self.stats)

    @property
    def named(self) -> list[tuple[Run, str]]:
        """Return the runs, each with a unique name: the label, plus the seed if there are several runs."""
        several = len(self.stats) > 1
        return [(stats.run, f"{self.label} · seed {stats.seed}" if several else self.label) for stats in self.stats]

    def lines(self, table: str, name: str) -> list[Series]:
        """Return one column of ``steps`` or ``evals`` of every run."""
        return [column(run, table, name) for run in self.runs]

    def seeds(self) -> dict[int, Run]:
        return {stats.seed: stats.run for stats in self.stats}


def _read_once(run: Run) -> tuple[Samples, Diagnosis | str]:
    """Return the page's data from a run's gauges, its longest tables: read once, then released."""
    with gauges_for_now(run):
        diagnosis = diagnosed(run)
        return read_samples(run), diagnosis


def diagnosed(run: Run) -> Diagnosis | str:
    """Return a run's diagnosis, or the reason why it failed. The page must not fail with it."""
    try:
        return diagnose(run)
    except NarrowgaugeError as error:
        return error.message.rstrip(".")
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def groups_of(comparison: Comparison) -> list[Group]:
    """Return the recipes of a comparison, in its order.

    Example:
        >>> from pathlib import Path
        >>> from narrowgauge.analysis.comparison.comparison import compare_runs
        >>> made = [Run(Path("a"), {"config": {"recipe": "bfloat16/word", "seed": seed}}) for seed in (0, 1)]
        >>> [(group.label, len(group.runs)) for group in groups_of(compare_runs(made))]
        [('bfloat16/word', 2)]
    """
    return [Group(label, index, stats.runs) for index, (label, stats) in enumerate(comparison.classes.items())]


def run_names(groups: Iterable[Group]) -> list[tuple[Run, str]]:
    return [pair for group in groups for pair in group.named]


def final_loss(run: Run) -> float | None:
    """Return the validation loss of a finished run, or the last evaluation of an unfinished run."""
    last = run.evals[-1] if run.evals else {}
    return finite_number((run.summary or {}).get("val_loss", last.get("val_loss")))


# ── gauges ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

MOST_HISTOGRAMS = 60
"""Maximum number of steps with stored histograms."""


@dataclass(frozen=True)
class Samples:
    """Hold the gauges of a run that a page shows.

    Args:
        num_rows: number of samples of the run.
        steps: steps of the samples, ascending.
        lowest_edq: lowest EDQ over tensors in the last sample; 1 without any.
        histograms: rows ``step, histograms``, at most :data:`MOST_HISTOGRAMS`, including the first and the last.
        num_histograms: number of rows with histograms.
        spans: by kind, the first and the last used bin.
    """

    num_rows: int = 0
    steps: Sequence[float] = ()
    metrics: Mapping[str, MetricValues] = field(default_factory=dict)
    lowest_edq: float = 1.0
    histograms: Sequence[Row] = ()
    num_histograms: int = 0
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def read_samples(run: Run) -> Samples:
    """Read the gauges of a run and extract the page's data. Release the rows that this call read.

    Cost: about 1 s per thousand samples of 400 tensors.
    """
    with gauges_for_now(run):
        return _sampled(run.gauges)


@contextlib.contextmanager
def gauges_for_now(run: Run) -> Iterator[None]:
    """Release the gauges of a run on exit, unless they were loaded before. Inside, they are read at most once."""
    was_held = "gauges" in vars(run)
    try:
        yield
    finally:
        if not was_held:
            vars(run).pop("gauges", None)


def spread(rows: Sequence[Row], most: int) -> list[Row]:
    """Return at most ``most`` evenly spaced rows, including the first and the last."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(index * (len(rows) - 1) / (most - 1))] for index in range(most)]


def _sampled(rows: Sequence[Row]) -> Samples:
    steps = sorted({step for row in rows if (step := finite_number(row.get("step"))) is not None})
    metrics = {metric: values for table in METRICS for metric, values in _metric_values(rows, steps, table).items()}
    counted = [
        {"step": int(step), "histograms": counts}
        for row in rows
        if (step := finite_number(row.get("step"))) is not None and (counts := _counts(row))
    ]
    return Samples(
        num_rows=len(rows),
        steps=steps,
        metrics={
            name: metrics[name].farthest(metric.good, MOST_TENSORS)
            for name, metric in HEAT_MAPS.items()
            if name in metrics
        },
        lowest_edq=_lowest_edq(rows),
        histograms=spread(counted, MOST_HISTOGRAMS),
        num_histograms=len(counted),
        spans=_spans(counted),
    )


def _metric_values(rows: Sequence[Row], steps: Sequence[float], table: str) -> dict[str, MetricValues]:
    """Return the metrics of a table. Skip tensors without any finite value of a metric."""
    fields = {
        name: list(METRICS[table]).index(metric.field) for name, metric in HEAT_MAPS.items() if metric.table == table
    }
    columns = {step: column for column, step in enumerate(steps)}
    tensors = {name: line for line, name in enumerate(dict.fromkeys(name for _, name, _ in _lists(rows, table)))}
    cells = np.full((len(fields), len(tensors), len(steps)), np.nan)
    for step, tensor, values in _lists(rows, table):
        for metric, index in enumerate(fields.values()):
            if index < len(values) and (value := finite_number(values[index])) is not None:
                cells[metric, tensors[tensor], columns[step]] = value
    names = np.array(list(tensors), object)
    is_taken = (~np.isnan(cells)).any(axis=2)
    return {
        metric: MetricValues(names[taken].tolist(), values[taken], int(taken.sum()))
        for metric, values, taken in zip(fields, cells, is_taken, strict=True)
        if taken.any()
    }


def _lists(rows: Sequence[Row], table: str) -> Iterator[tuple[float, str, list[Any]]]:
    """Yield step, tensor and values of a table's rows, if the values are a list."""
    for row in rows:
        step, entries = finite_number(row.get("step")), row.get(table)
        if step is not None and isinstance(entries, dict):
            for name, values in entries.items():
                if isinstance(values, list):
                    yield step, name, values


def _lowest_edq(rows: Sequence[Row]) -> float:
    index = list(METRICS["updates"]).index("edq")
    last = [values[index] for _, _, values in _lists(rows[-1:], "updates") if index < len(values)]
    return min((value for edq in last if (value := finite_number(edq)) is not None), default=1.0)


def _counts(row: Row) -> dict[str, list[float]]:
    """Return the histograms of a row. A bin without a valid count is empty."""
    histograms = row.get("histograms")
    if not isinstance(histograms, dict):
        return {}
    return {
        kind: [max(0, count) if type(count) is int else max(0.0, finite_number(count) or 0.0) for count in counts]
        for kind, counts in histograms.items()
        if kind in TENSOR_KINDS and isinstance(counts, list)
    }


def _spans(rows: Sequence[Row]) -> dict[str, tuple[int, int]]:
    """Return the first and the last used bin, by kind."""
    spans: dict[str, tuple[int, int]] = {}
    for row in rows:
        for kind, counts in row["histograms"].items():
            used = [index for index, count in enumerate(counts) if count]
            if used:
                start, stop = spans.get(kind, (used[0], used[-1] + 1))
                spans[kind] = (min(start, used[0]), max(stop, used[-1] + 1))
    return spans
