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

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge.measuring.reading import STAGES, Reading, Readings
from narrowgauge.measuring.settings import PROGRAM, recipe_of, settings_diff
from narrowgauge.runs.finding import counted, told
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import EVAL, HASHED, STEP, SUMMARY, Column, Row, number
from narrowgauge.spec.formats import FORMATS

ROWS = STEP | EVAL
COLUMNS = SUMMARY | ROWS | HASHED
"""What is compared: every column and kind of tensor whose unit is not of :data:`UNLIKE`."""
UNLIKE = ("time", "names", "")
"""Units of what differs between any two runs."""
_TENSORS = [*HASHED]
ENVELOPE = 32.0
"""Multiples of a norm's expected rounding error: rounding errors are not independent."""
LEAST = 2.0**-20
"""Relative: 8 ulps of float32. Another order of a float32 model's sums moved norms by up to 1.4e-7."""
SHARE = 0.05
"""Difference of two shares, which are of samples."""
_OWN_TIMES = ("seconds", "per_second", "bytes")
OTHER = Column("", "number", "", stage="optimizer step", unit="other")
"""A column of the loop's own. Its numbers may differ by a twentieth: no unit is known."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Hold a compared value.

    Args:
        name: of its column, or of its kind of tensor.
        bits: in which equal values are equal.
        value: a number, or the norm of a tensor.
        count: elements or tokens that it is a sum over; 0 if unknown.
        hashes: of the ranks, where they differ.
    """

    name: str
    bits: str
    value: float | None
    count: float = 0
    hashes: Sequence[int] = ()

    @property
    def column(self) -> Column:
        return COLUMNS.get(self.name, OTHER)

    @property
    def place(self) -> tuple[int, ...]:
        """Return the place in a step: stage by stage settings, tensors in their order, other numbers."""
        column = self.column
        rank = _TENSORS.index(self.name) + 1 if self.name in HASHED else 99
        is_first = column.unit == "setting" and column.type != "names"
        is_last = self.name in SUMMARY and self.name not in ROWS
        return is_last, STAGES.index(column.stage), 0 if is_first else rank

    def bound(self, other: Entry, u: float | None) -> float | None:
        """Return the difference that rounding explains; ``None`` if that is not known."""
        size = max(abs(self.value or 0.0), abs(other.value or 0.0)) or 1.0
        match self.column.unit:
            case "share":
                return SHARE
            case "other":
                return SHARE * size
            case "setting":
                return 0.0
            case "size":
                return None if u is None else max(ENVELOPE * u, 2.0**-10) * size
        if u is None or not self.count:
            return None
        return max(ENVELOPE * u / math.sqrt(self.count), LEAST) * size


class TwoRuns(Readings):
    """Find the first difference of two runs from their records, finished or not; ``print`` shows a
    table.

    Attributes:
        readings: what differs in the first step that differs, in the order of a step: all beyond
            rounding, or else all. Each expects the first run's value; its bound is what rounding
            explains.
        is_rounding: nothing differs by more than rounding, both round alike, and no recorded setting of
            the program differs.
        is_complete: both runs finished with equal hashes of the final weights.
        settings: recorded settings, data and software that differ.
        verdict: the result in one sentence.
    """

    def __init__(self, first: Run, second: Run) -> None:
        super().__init__()
        self.names = [first.path.name, second.path.name]
        if first.path.name == second.path.name:
            self.names = [str(first.path), str(second.path)]
        self.settings = settings_diff(first.run, second.run)
        self.is_rounding = False
        self.is_complete = False
        self._is_same_program = not settings_diff(first.run, second.run, PROGRAM)
        self._units = _roundoff(first), _roundoff(second)
        here = _rows_of(first)
        there = _rows_of(second)
        steps = sorted(here.keys() & there.keys())
        details: list[str] = []
        for step in steps:
            details = self._compare(step, here[step], there[step])
            if self.readings:
                break
            self.is_complete = "weights_fingerprint" in here[step].keys() & there[step].keys()
        self.verdict = self._verdict(sum(step > 0 for step in steps))
        self.lines = [f"{' and '.join(self.names)}: {self.verdict}", *details]
        if self.settings or self.readings:
            self.lines.append(_settings_in_words(self.settings))
        self.lines += [f"Not read: {note}." for note in first.notes + second.notes]

    def _compare(self, step: int, first: Row, second: Row) -> list[str]:
        """Compare the rows of a step; return sentences about its first difference."""
        here = _entries(first, step)
        there = _entries(second, step)
        u = None if None in self._units else max(filter(None, self._units))
        differing = [*_differences(step, here, there, u)]
        beyond = [reading for reading in differing if not _is_within(reading)]
        is_measured = any(reading.bound is not None for reading in beyond)
        self.readings = beyond if is_measured else differing
        if not differing:
            return []
        is_alike = self._units[0] == self._units[1]
        self.is_rounding = not beyond and is_alike and self._is_same_program
        at = self.readings[0]
        lines = []
        if at.what == "only-in-one-run":
            lines.append(f"Only {self.names[int(at.value or 0)]} has {at.tensor}.")
        elif at.tensor:
            lines += _ranks(here[at.tensor], there[at.tensor])
        if u is None:
            lines.append("No format of the outputs is recorded, so no bound of rounding is known.")
        return lines

    def _verdict(self, number: int) -> str:
        if self.readings:
            at = self.readings[0]
            words = " within rounding" if self.is_rounding else ""
            place = f"{at.tensor or at.what} ({at.stage})"
            return f"The runs first differ{words} at step {at.step}, in {place}{_size(at)}."
        if self.is_complete:
            return "The same run, bit for bit to the last weight."
        if not number:
            return "Cannot compare the records because they have no step in common."
        return f"The same in all that both recorded ({counted(number, 'step')})."

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as values for JSON."""
        names = ("names", "verdict", "is_rounding", "settings")
        return super().to_dict() | {name: getattr(self, name) for name in names}


# ── the records of a step ─────────────────────────────────────────────────────────────────────────


def _roundoff(run: Run) -> float | None:
    """Return the coarsest unit roundoff of what a run computed: of its recipe, or of the recorded outputs
    of its modules; ``None`` without these.
    """
    recipe = recipe_of(run)
    names = [] if recipe is None else [recipe.compute.dtype, recipe.storage.visible]
    for row in run.fingerprints[:2]:
        for key, entry in (row.get("tensors") or {}).items():
            if key.startswith("output:") and len(entry) > 3:
                names.append(str(entry[3]))
    units = [FORMATS[name].epsilon / 2 for name in names if name in FORMATS]
    return max(units, default=None)


def _rows_of(run: Run) -> dict[int, Row]:
    """Return one row for each step: its columns, its evaluation, and its fingerprints; at the last
    step that of the final weights.

    If a table has several rows of a step, take the first: a resume repeats its checkpoint's
    fingerprints.
    """
    rows = dict[int, Row]()
    for table in (run.evals, run.steps, run.fingerprints):
        for row in reversed(table):
            rows[row["step"]] = rows.get(row["step"], {}) | row
    if rows and run.summary is not None:
        rows[max(rows)]["weights_fingerprint"] = run.summary.get("weights_fingerprint")
    return rows


def _entries(row: Row, step: int) -> dict[str, Entry]:
    """Return each compared column and tensor. Gradients are those at loss scale 1."""
    entries: dict[str, Entry] = {}
    tensors = row.get("tensors") or {}
    tokens = (number(row.get("tokens")) or 0) / max(1, step)
    if not tokens and "tokens:batch" in tensors:
        tokens = tensors["tokens:batch"][2]
    elements = sum(entry[2] for key, entry in tensors.items() if key.startswith("grad:"))
    for name, x in row.items():
        column = COLUMNS.get(name, OTHER)
        is_own = column is OTHER and (not isinstance(x, float) or name.endswith(_OWN_TIMES))
        if x is not None and not is_own and column.unit not in UNLIKE:
            count = elements if column.unit == "norm" and elements else tokens
            entries[name] = Entry(name, str(x), number(x), count)
    for key, (bits, norm, numel, *more) in tensors.items():
        kind = key.partition(":")[0]
        if kind == "grad":
            norm /= number(row.get("loss_scale")) or 1.0
        hashes = next((x for x in more if isinstance(x, list)), ())
        value = None if kind == "tokens" else norm  # integers have no norm
        if kind in HASHED:
            entries[key] = Entry(kind, str(bits), value, numel, hashes)
    return entries


def _kinds(entries: Mapping[str, Entry]) -> set[str]:
    """Return the kinds of recorded tensors."""
    return {key.partition(":")[0] for key in entries if ":" in key}


def _differences(
    step: int, here: Mapping[str, Entry], there: Mapping[str, Entry], u: float | None
) -> Iterator[Reading]:
    """Yield the differences of a step in its order. Without a value only bits are known to differ."""
    shared = _kinds(here) & _kinds(there)
    entries = {**here, **there}
    for key in sorted(entries, key=lambda key: entries[key].place):
        entry = entries[key]
        stage = "start" if step == 0 else entry.column.stage
        tensor = key if ":" in key else ""
        if key not in here or key not in there:
            if tensor and entry.name in shared:
                yield Reading(step, stage, tensor, "only-in-one-run", float(key in there))
            continue
        one, other = here[key], there[key]
        if one.bits == other.bits:
            continue
        if one.value is None or other.value is None:
            yield Reading(step, stage, tensor, "bits" if tensor else key)
            continue
        what = "norm" if tensor else key
        reading = Reading(step, stage, tensor, what, other.value, one.value, one.bound(other, u))
        if entry.column is not OTHER or not _is_within(reading):
            yield reading


def _is_within(at: Reading) -> bool:
    """Return whether rounding explains a difference. Within a bound that is unknown nothing is."""
    return at.excess <= 1


# ── the words about a difference ──────────────────────────────────────────────────────────────────


def _size(at: Reading) -> str:
    """Return the relative size of a difference, which the first digits of both may not show."""
    if not at.expected or at.value is None or not math.isfinite(at.value):
        return ""
    return f", by {abs(at.value / at.expected - 1):.2g} times its {at.what}"


def _settings_in_words(settings: Mapping[str, tuple[str, str]]) -> str:
    if not settings:
        return "No recorded setting differs."
    pairs = [f"{name} {a} and {b}" for name, (a, b) in settings.items()]
    return f"Recorded settings that differ: {told(pairs, 6)}."


def _ranks(here: Entry, there: Entry) -> list[str]:
    """Return which ranks' parts of a tensor differ, if some are equal. A run whose ranks are alike has
    one hash.
    """
    count = max(len(here.hashes), len(there.hashes))
    first = here.hashes or [int(here.bits)] * count
    second = there.hashes or [int(there.bits)] * count
    if not count or len(first) != len(second):
        return []
    ranks = [str(rank) for rank in range(count) if first[rank] != second[rank]]
    if len(ranks) == count:
        return []
    return [f"Of {count} ranks these differ there: {', '.join(ranks)}."]
