"""The first difference of two runs that should be equal: its step, stage and tensor, its size, and
the recorded settings that differ.

Each column and each kind of fingerprint belongs to one stage of a step, and fingerprints are in the
order of computation. So the first differing fingerprint shows where the runs diverged.

A norm of n elements, each rounded independently with unit roundoff u, moves by about u/√n, as does
a mean over n tokens. The first step that differs is judged so, and later ones not at all: training
amplifies any difference.

Source: the expected error of n independent roundings (Higham 2002, section 2.8); one tolerance per
tensor instead of one for all: TTrace (2506.09280).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter

from narrowgauge.measuring.diagnose.settings_diff import PROGRAM, recipe_of, settings_diff
from narrowgauge.measuring.reading import STAGES, Reading, Readings
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import EVAL, HASHED, STEP, SUMMARY, Column, number
from narrowgauge.runs.text import join_names, plural
from narrowgauge.spec.formats import FORMATS
from narrowgauge.spec.tables import Row

COLUMNS = SUMMARY | STEP | EVAL
"""What is compared beside tensors: every column whose unit is not of :data:`UNLIKE`."""
UNLIKE = ("time", "sample")
"""Units of what differs between any two runs."""
ENVELOPE = 32.0
"""Multiples of a norm's expected rounding error: rounding errors are not independent."""
LEAST = {"size": 2.0**-10, "loss": 2.0**-20, "norm": 2.0**-20}
"""By unit, relative: 2^-20 are 8 ulps of float32. Another order of a float32 model's sums moved norms by up
to 1.4e-7.
"""
SHARE = 0.05
"""Difference of two shares, which are of samples."""
LAST = "weights_fingerprint"
"""The hash of the final weights, which is compared behind all else."""
_OWN_TIMES = ("seconds", "per_second", "bytes")
OTHER = Column("", "number", "", stage="optimizer step", unit="other")
"""A column of the loop's own. Its numbers may differ by a twentieth: no unit is known."""


@dataclass(frozen=True, slots=True)
class ComparedValue:
    """Hold a compared value.

    Args:
        tensor: ``KIND:NAME``; empty for a column.
        bits: in which equal values are equal.
        value: a number, or the norm of a tensor.
        count: elements or tokens that it is a sum over; 0 if unknown.
        hashes: of a tensor: one for each rank, or one for all.
    """

    column: Column
    tensor: str
    bits: str
    value: float | None
    count: float
    hashes: Sequence[int] = ()

    def bound(self, other: ComparedValue, u: float) -> float | None:
        """Return the difference that rounding explains, of a unit roundoff; ``None`` if that is not known."""
        unit = self.column.unit
        if self.value is None or other.value is None:
            return None
        size = max(abs(self.value), abs(other.value)) or 1.0
        if unit not in LEAST:
            return {"share": SHARE, "other": SHARE * size}.get(unit, 0.0)
        count = 1 if unit == "size" else self.count
        if u == math.inf or not count:
            return None
        return max(ENVELOPE * u / math.sqrt(count), LEAST[unit]) * size


Values = dict[str, ComparedValue]
"""The values of a step, by tensor or column."""


class FirstDifference(Readings):
    """Hold the first difference of two runs; ``print`` shows a table.

    Attributes:
        names: of both runs.
        settings: recorded settings, data and software that differ.
        readings: what differs in the first step that differs, in the order of a step: all beyond
            rounding, or else all. Each expects the first run's value; its bound is what rounding
            explains.
        is_rounding: nothing differs by more than rounding, both round alike, and no recorded setting of
            the program differs.
        verdict: the result in one sentence.
    """

    also = ("names", "verdict", "is_rounding", "settings")
    names: list[str]
    settings: dict[str, tuple[str, str]]
    verdict = "Cannot compare the records because they have no step in common."
    is_rounding = False


def first_difference(first: Run, second: Run) -> FirstDifference:
    """Find the first difference of two runs from their records, finished or not."""
    result = FirstDifference()
    result.names = [first.path.name, second.path.name]
    if first.path.name == second.path.name:
        result.names = [str(first.path), str(second.path)]
    result.settings = settings_diff(first.run, second.run)
    units = _roundoffs(first), _roundoffs(second)
    u = tuple(map(max, *units))
    details = ""
    num_steps = 0
    rows = heapq.merge(_joined(first), _joined(second), key=_STEP)
    for step, rows_of_step in groupby(rows, _STEP):
        entries = [_entries(row, step) for row in rows_of_step]
        if len(entries) == 1:  # only one run has recorded it
            continue
        num_steps += step > 0
        here, there = entries
        differing = [*_differences(step, here, there, u)]
        if differing:
            beyond = [reading for reading in differing if reading.excess > 1]
            is_measured = any(reading.bound is not None for reading in beyond)
            result.readings = beyond if is_measured else differing
            is_alike = units[0] == units[1] and not settings_diff(first.run, second.run, PROGRAM)
            result.is_rounding = not beyond and is_alike
            result.verdict, details = _sentences(result, here, there)
            break
        if LAST in here.keys() & there.keys():
            result.verdict = "The same run, bit for bit to the last weight."
        elif num_steps:
            steps = plural(num_steps, "step")
            result.verdict = f"The same in all that both recorded ({steps})."
    lines = [f"{' and '.join(result.names)}: {result.verdict}", details]
    if math.inf in u and result.readings and result.readings[0].bound is None:
        lines.append("No format of the outputs is recorded, so no bound of rounding is known.")
    pairs = [f"{name} {a} and {b}" for name, (a, b) in result.settings.items()]
    if pairs:
        lines.append(f"Recorded settings that differ: {join_names(pairs, 6)}.")
    elif result.readings and not (first.is_foreign or second.is_foreign):
        lines.append("No recorded setting differs.")
    lines += [f"Not read: {note}." for note in first.notes + second.notes]
    result.lines = [*filter(None, lines)]
    return result


def _sentences(result: FirstDifference, here: Values, there: Values) -> tuple[str, str]:
    """Return the verdict about the first reading, and which run alone has its tensor or which of its
    ranks differ.
    """
    at = result.readings[0]
    key = at.tensor or at.what
    words = " within rounding" if result.is_rounding else ""
    verdict = f"The runs first differ{words} at step {at.step}, in {key} ({at.stage})"
    if at.what == "only-in-one-run":
        return f"{verdict}.", f"Only {result.names[key in there]} has {key}."
    if at.expected and at.value is not None and math.isfinite(at.value - at.expected):
        # The first digits of both may not show it.
        verdict += f", by {abs(at.value / at.expected - 1):.2g} times its {at.what}"
    one = here[key].hashes
    other = there[key].hashes
    number = max(len(one), len(other))
    ranks = []
    if {len(one), len(other)} <= {1, number}:  # one hash stands for all ranks
        for rank in range(number):
            if one[rank % len(one)] != other[rank % len(other)]:
                ranks.append(str(rank))
    details = ""
    if 0 < len(ranks) < number:
        details = f"Of {number} ranks these differ there: {', '.join(ranks)}."
    return f"{verdict}.", details


def _roundoffs(run: Run) -> list[float]:
    """Return the coarsest unit roundoff of what a run computed, as its recorded outputs say, or else its
    recipe; and of what it stored. Infinity stands for an unknown one.
    """
    recipe = recipe_of(run)
    computed = set[str]()
    stored = set[str]()
    for row in islice(run.fingerprints, 2):
        for key, entry in row["tensors"].items():
            if key.startswith("output:"):
                computed.update(entry[3:4])
    if recipe is not None:
        stored.add(recipe.storage.visible)
        if computed.isdisjoint(FORMATS):
            computed.add(recipe.compute.dtype)
    roundoffs = []
    for names in (computed, computed | stored):
        units = [FORMATS[name].epsilon / 2 for name in names & FORMATS.keys()]
        roundoffs.append(max(units, default=math.inf))
    return roundoffs


_STEP = itemgetter("step")


def _joined(run: Run) -> Iterator[Row]:
    """Yield the columns, the evaluation and the fingerprints of each step as one row; at the last step
    those of the final weights.

    If a table has several rows of a step, take the first: a resume repeats its checkpoint's
    fingerprints.
    """
    end = []
    if run.summary is not None:
        end = [{"step": run.last_step.get("step", 0), LAST: run.summary.get(LAST)}]
    rows = heapq.merge(run.fingerprints, run.steps, run.evals, end, key=_STEP)
    for _, rows_of_step in groupby(rows, _STEP):
        joined: Row = {}
        for row in rows_of_step:
            joined = row | joined
        yield joined


def _entries(row: Row, step: int) -> Values:
    """Return each compared column and tensor. Gradients are those at loss scale 1."""
    entries = {}
    elements = 0
    tokens = (number(row.get("tokens")) or 0) / max(1, step)
    for key, (bits, norm, numel, *more) in row.get("tensors", {}).items():
        kind = key.partition(":")[0]
        if kind == "grad":
            norm /= number(row.get("loss_scale")) or 1.0
            elements += numel
        elif kind == "tokens":
            tokens = tokens or numel
            norm = None  # of integers
        if kind in HASHED:  # later versions may write further ones
            ranks = more[1] if len(more) > 1 else [bits]  # after the format
            entries[key] = ComparedValue(HASHED[kind], key, str(bits), norm, numel, ranks)
    for name, x in row.items():
        column = COLUMNS.get(name, OTHER)
        is_own = column is OTHER and (not isinstance(x, float) or name.endswith(_OWN_TIMES))
        if x is not None and not is_own and column.unit not in UNLIKE:
            count = elements if column.unit == "norm" and elements else tokens
            entries[name] = ComparedValue(column, "", str(x), number(x), count)
    return entries


def _place(item: tuple[str, ComparedValue]) -> tuple[int, ...]:
    """Return the place in a step: stage by stage settings, then tensors in their order, other numbers."""
    column = item[1].column
    is_number = not item[1].tensor
    is_setting = is_number and column.unit == "setting"
    return column.name == LAST, STAGES.index(column.stage), not is_setting, is_number


def _differences(
    step: int,
    here: Values,
    there: Values,
    u: Sequence[float],
) -> Iterator[Reading]:
    """Yield the differences of a step in its order. Without a value only bits are known to differ."""
    kinds = [{x.column.name for x in entries.values() if x.tensor} for entries in (here, there)]
    entries = {**here, **there}
    for key, entry in sorted(entries.items(), key=_place):
        column = entry.column
        stage = column.stage if step else "start"
        if key not in here or key not in there:
            if entry.tensor and column.name in kinds[0] & kinds[1]:
                yield Reading(step, stage, key, "only-in-one-run", float(key in there))
            continue
        one = here[key]
        what = key
        if entry.tensor:
            what = "bits" if entry.value is None else "norm"
        is_stored = STAGES.index(column.stage) >= STAGES.index("optimizer step")
        numbers = entry.value, one.value, one.bound(entry, u[is_stored])
        reading = Reading(step, stage, entry.tensor, what, *numbers)
        if one.bits != entry.bits and (column is not OTHER or reading.excess > 1):
            yield reading
