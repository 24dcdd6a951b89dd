"""What a page keeps of a run's gauges: far less than the run wrote down, so that one run after the other can be read.

The gauges of a long run are a thousand numbers for each of hundreds of samples; as Python's objects they take seven times
the room of their file, and of several runs more than a machine has. A page shows a few dozen of the tensors, and of the
histograms a few dozen. So each file is read once, what any figure may ask for is taken out of it, closely packed, and the
rest is let go before the next is opened. Rows are borne as they are: a table or a list that is missing, or damaged, adds
nothing.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.report.heat_map_metrics import MEASURES, Measure
from narrowgauge.report.series import number
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import METRICS, TENSOR_KINDS, Row

MOST_TENSORS = 64
"""Rows of a heat map, at most."""

MOST_HISTOGRAMS = 60
"""Steps whose histograms are kept, at most."""

_LARGEST = sys.float_info.max
_Lines = dict[str, "array[float]"]


@dataclass(frozen=True)
class Readings:
    """One reading of the tensors that strayed farthest from health.

    Args:
        lines: by tensor, in the order in which the run names them, a value per step of :attr:`Samples.steps`; NaN where it
            was not taken.
        total: how many tensors had the reading.
    """

    lines: Mapping[str, Sequence[float]]
    total: int


@dataclass(frozen=True)
class Samples:
    """The gauges of a run, as far as a page shows them.

    Args:
        num_rows: how many samples the run took.
        steps: of the samples, ascending.
        readings: by measure, where there are any.
        worst: by column of ``tensors`` and by step, the tensor with the largest reading, and the reading.
        lowest_edq: what the worst tensor's update kept at last; 1 where nothing says it.
        histograms: rows ``step, histograms``, at most :data:`MOST_HISTOGRAMS`, the first and the last among them.
        num_histograms: how many rows had histograms.
        spans: by kind, the bins from the first that was ever used to the last.
    """

    num_rows: int = 0
    steps: Sequence[float] = ()
    readings: Mapping[str, Readings] = field(default_factory=dict)
    worst: Mapping[str, Mapping[float, tuple[str, float]]] = field(default_factory=dict)
    lowest_edq: float = 1.0
    histograms: Sequence[Row] = ()
    num_histograms: int = 0
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def read_samples(run: Run) -> Samples:
    """Read the gauges of a run and keep what a page can show.

    Law: rows that were not read before are not held afterwards.

    Args:
        run: any.

    Raises:
        RecordError: the file is damaged.

    Cost: about 0.8 s per thousand samples of 400 tensors.
    """
    was_held = "gauges" in vars(run)
    try:
        return _sampled(run.gauges)
    finally:
        if not was_held:
            vars(run).pop("gauges", None)


def spread(rows: Sequence[Row], most: int) -> list[Row]:
    """Rows evenly spread, the first and the last among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(place * (len(rows) - 1) / (most - 1))] for place in range(most)]


def known(line: Iterable[float]) -> list[float]:
    """The readings that were taken."""
    return [value for value in line if not math.isnan(value)]


def farthest(lines: Mapping[str, Sequence[float]], measure: Measure, most: int) -> dict[str, Sequence[float]]:
    """Of too many tensors those whose worst reading is farthest from health, in the order they have."""
    reach = {name: abs(measure.worst(known(line)) - measure.good) for name, line in lines.items()}
    kept = set(sorted(reach, key=lambda name: -reach[name])[:most])
    return {name: line for name, line in lines.items() if name in kept}


def _sampled(rows: Sequence[Row]) -> Samples:
    steps = sorted({step for row in rows if (step := number(row.get("step"))) is not None})
    lines = {name: line for table in METRICS for name, line in _lines(rows, steps, table).items()}
    counted = [
        {"step": int(step), "histograms": counts}
        for row in rows
        if (step := number(row.get("step"))) is not None and (counts := _counts(row))
    ]
    return Samples(
        num_rows=len(rows),
        steps=steps,
        readings={name: _readings(lines[name], measure) for name, measure in MEASURES.items() if lines[name]},
        worst={name: _worst(steps, lines[name]) for name in ("underflow", "overflow")},
        lowest_edq=_lowest_edq(rows),
        histograms=spread(counted, MOST_HISTOGRAMS),
        num_histograms=len(counted),
        spans=_spans(counted),
    )


def _lines(rows: Sequence[Row], steps: Sequence[float], table: str) -> dict[str, _Lines]:
    """By measure and tensor, the readings of a table over the steps."""
    measures = [name for name, measure in MEASURES.items() if measure.table == table]
    places = [list(METRICS[table]).index(MEASURES[name].field) for name in measures]
    columns = {step: column for column, step in enumerate(steps)}
    blank = array("d", [math.nan]) * len(steps)
    found: dict[str, list[array[float]]] = {}
    for step, name, values in _lists(rows, table):
        if name not in found:
            found[name] = [blank[:] for _ in places]
        for line, place in zip(found[name], places, strict=True):
            value = values[place] if place < len(values) else None
            # Millions of these: a finite float is the common case, and asked for without a call.
            if type(value) is not float or not -_LARGEST <= value <= _LARGEST:
                value = number(value)
            if value is not None:
                line[columns[step]] = value
    by_measure = zip(measures, zip(*found.values(), strict=True), strict=True) if found else ()
    taken = {measure: dict(zip(found, lines, strict=True)) for measure, lines in by_measure}
    return {name: {tensor: line for tensor, line in taken.get(name, {}).items() if known(line)} for name in measures}


def _lists(rows: Sequence[Row], table: str) -> Iterator[tuple[float, str, list[Any]]]:
    """Step, tensor and figures of a table's rows; what is no list is left out."""
    for row in rows:
        step, found = number(row.get("step")), row.get(table)
        if step is not None and isinstance(found, dict):
            for name, values in found.items():
                if isinstance(values, list):
                    yield step, name, values


def _readings(lines: _Lines, measure: Measure) -> Readings:
    return Readings(farthest(lines, measure, MOST_TENSORS), len(lines))


def _worst(steps: Sequence[float], lines: _Lines) -> dict[float, tuple[str, float]]:
    """By step the tensor with the largest reading; a step without the reading is left out."""
    names, highest = [""] * len(steps), [-math.inf] * len(steps)
    for name, line in lines.items():
        for column, value in enumerate(line):
            if value > highest[column]:
                names[column], highest[column] = name, value
    found = zip(steps, names, highest, strict=True)
    return {step: (name, value) for step, name, value in found if value > -math.inf}


def _lowest_edq(rows: Sequence[Row]) -> float:
    place = list(METRICS["updates"]).index("edq")
    last = [values[place] for _, _, values in _lists(rows[-1:], "updates") if place < len(values)]
    return min((value for one in last if (value := number(one)) is not None), default=1.0)


def _counts(row: Row) -> dict[str, list[float]]:
    """The histograms of a row; a bin whose count is none is empty."""
    found = row.get("histograms")
    if not isinstance(found, dict):
        return {}
    return {
        kind: [max(0, count) if type(count) is int else max(0.0, number(count) or 0.0) for count in counts]
        for kind, counts in found.items()
        if kind in TENSOR_KINDS and isinstance(counts, list)
    }


def _spans(rows: Sequence[Row]) -> dict[str, tuple[int, int]]:
    """Per kind the bins from the first that was ever used to the last."""
    spans: dict[str, tuple[int, int]] = {}
    for row in rows:
        for kind, counts in row["histograms"].items():
            used = [place for place, count in enumerate(counts) if count]
            if used:
                start, stop = spans.get(kind, (used[0], used[-1] + 1))
                spans[kind] = (min(start, used[0]), max(stop, used[-1] + 1))
    return spans
