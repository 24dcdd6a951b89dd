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
from collections.abc import Iterator
from typing import Any

from narrowgauge.measuring.reading import Reading, Readings
from narrowgauge.measuring.settings import recipe_of, settings_diff
from narrowgauge.runs.finding import counted, told
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import STEP, Row, number
from narrowgauge.spec.formats import FORMATS

STAGE_OF = {
    "tokens": "data", "output": "forward", "loss": "loss", "grad": "gradient",
    "grad_norm": "gradient", "lr": "optimizer step", "loss_scale": "optimizer step",
    "skipped": "optimizer step", "weight": "optimizer step", "exp_avg": "optimizer step",
    "exp_avg_sq": "optimizer step", "state": "optimizer step",
    "val_loss": "evaluation", "weights_fingerprint": "optimizer step",
}  # fmt: skip
"""The stage of each compared column and kind of tensor, in the order of a step. Times and bytes
differ between any two runs. The hash of the final weights is last, for it has no size.
"""
_KINDS = list(STAGE_OF)
EXACT = ("tokens", "lr", "loss_scale", "skipped")
"""Values that rounding cannot change."""
ENVELOPE = 32.0
"""Multiples of a norm's expected rounding error: rounding errors are not independent."""
LEAST = 2.0**-20
"""Relative: 8 ulps of float32. Another order of a float32 model's sums moved norms by up to 1.4e-7."""
AGREES = 0.05
"""Relative difference of other recorded numbers of a step, such as the stored fraction of an update,
beside a difference by rounding.
"""
_UNLIKE = ("seconds", "per_second", "bytes")
"""Ends of the names of numbers that differ between any two runs."""


class TwoRuns(Readings):
    """Find the first difference of two runs from their records, finished or not; ``print`` shows a
    table.

    Attributes:
        readings: of the first step that differs, the first difference beyond its rounding, else the
            first. It expects the first run's value; its bound is what rounding explains.
        is_rounding: the runs differ only within rounding, both round alike, and every recorded
            number of that step agrees.
        is_complete: both runs finished with equal hashes of the final weights.
        factor: of all gradients of that step, second run over first, if they share one; else 1.
        settings: recorded settings, data and software that differ.
        verdict: the result in one sentence.
    """

    def __init__(self, first: Run, second: Run) -> None:
        super().__init__()
        self.names = [first.path.name, second.path.name]
        if first.path.name == second.path.name:
            self.names = [str(first.path), str(second.path)]
        self.settings = settings_diff(first.run, second.run)
        self.factor = 1.0
        self.is_rounding = False
        self.is_complete = False
        details: list[str] = []
        here = _rows_of(first)
        there = _rows_of(second)
        steps = sorted(here.keys() & there.keys())
        units = _roundoff(first), _roundoff(second)
        for step in steps:
            details = self._compare(step, here[step], there[step], units)
            if self.readings:
                break
            self.is_complete = "weights_fingerprint" in here[step].keys() & there[step].keys()
        self.verdict = self._verdict(sum(step > 0 for step in steps))
        self.lines = [f"{' and '.join(self.names)}: {self.verdict}", *details]
        if self.settings:
            pairs = [f"{name} {a} and {b}" for name, (a, b) in self.settings.items()]
            self.lines.append(f"Recorded settings that differ: {told(pairs, 6)}.")
        elif self.readings:
            self.lines.append("No recorded setting differs.")
        self.lines += [f"Not read: {note}." for note in first.notes + second.notes]

    def _compare(self, step: int, first: Row, second: Row, units: tuple[float, float]) -> list[str]:
        """Compare the rows of a step; return sentences about its difference."""
        here = _entries(first, step)
        there = _entries(second, step)
        readings = sorted(_differences(step, here, there, max(units)), key=_is_within)
        if not readings:
            return []
        self.readings = readings[:1]
        at = readings[0]
        lines = []
        if at.what == "only-in-one-run":
            lines.append(f"Only {self.names[int(at.value or 0)]} has {at.tensor}.")
        elif at.tensor:
            lines += _ranks(here[at.tensor], there[at.tensor])
        self.factor = _factor(here, there)
        if abs(self.factor - 1) > LEAST:
            lines.append(
                f"All gradients of {self.names[1]} are {self.factor:.6g} times the others."
            )
        unlike = ", ".join(_other_numbers(first, second))
        if unlike:
            lines.append(f"Other recorded numbers of the step differ: {unlike}.")
        is_alike = units[0] == units[1] and not unlike and abs(self.factor - 1) < AGREES
        self.is_rounding = is_alike and _is_within(at)
        return lines

    def _verdict(self, number: int) -> str:
        if self.readings:
            at = self.readings[0]
            words = " by rounding" if self.is_rounding else ""
            place = f"{at.tensor or at.what} ({at.stage})"
            return f"The runs first differ{words} at step {at.step}, in {place}{_size(at)}."
        if self.is_complete:
            return "The same run, bit for bit to the last weight."
        if not number:
            return "Cannot compare the records because they have no step in common."
        return f"The same in all that both recorded ({counted(number, 'step')})."

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as values for JSON."""
        names = ("names", "verdict", "is_rounding", "factor", "settings")
        return super().to_dict() | {name: getattr(self, name) for name in names}


# ── the records of a step ─────────────────────────────────────────────────────────────────────────


def _roundoff(run: Run) -> float:
    """Return the unit roundoff between two matmuls, from the recipe; else bfloat16's."""
    recipe = recipe_of(run)
    names = ["bfloat16"] if recipe is None else [recipe.compute.dtype, recipe.storage.visible]
    return max(FORMATS[name].epsilon for name in names) / 2


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


def _entries(row: Row, step: int) -> dict[str, Any]:
    """Return kind, bits, value or norm, elements or tokens, and hashes of ranks, of each compared
    column and tensor. Gradients are those at loss scale 1.
    """
    entries: dict[str, Any] = {}
    tensors = row.get("tensors") or {}
    tokens = (number(row.get("tokens")) or 0) / max(1, step)
    if not tokens and "tokens:batch" in tensors:
        tokens = tensors["tokens:batch"][2]
    for name in row.keys() & STAGE_OF.keys():
        if row[name] is not None:
            entries[name] = name, str(row[name]), number(row[name]), tokens
    for key, (bits, norm, *more) in tensors.items():
        kind = key.partition(":")[0]
        if kind == "tokens":  # integers have no norm
            norm = None
        if kind == "grad":
            norm /= number(row.get("loss_scale")) or 1.0
        if kind in STAGE_OF:
            entries[key] = kind, bits, norm, *more
    return entries


def _kinds(entries: Row) -> set[str]:
    """Return the kinds of recorded tensors."""
    return {entry[0] for key, entry in entries.items() if ":" in key}


def _differences(step: int, here: Row, there: Row, u: float) -> Iterator[Reading]:
    """Yield the differences of a step in its order. Without a value only bits are known to differ."""
    shared = _kinds(here) & _kinds(there)
    entries = {**here, **there}
    for key in sorted(entries, key=lambda key: _KINDS.index(entries[key][0])):
        kind = entries[key][0]
        stage = "start" if step == 0 else STAGE_OF[kind]
        tensor = key if ":" in key else ""
        if key not in here or key not in there:
            if tensor and kind in shared:
                yield Reading(step, stage, tensor, "only-in-one-run", float(key in there))
            continue
        _, bits, expected, numel, *_ = here[key]
        value = there[key][2]
        if bits == there[key][1]:
            continue
        if expected is None or value is None:
            yield Reading(step, stage, tensor, "bits" if tensor else key)
            continue
        bound = 0.0
        if kind not in EXACT:
            size = max(abs(expected), abs(value)) or 1.0
            bound = max(ENVELOPE * u / math.sqrt(max(1, numel)), LEAST) * size
        yield Reading(step, stage, tensor, "norm" if tensor else key, value, expected, bound)


def _is_within(at: Reading) -> bool:
    return at.excess <= 1


# ── the words about a difference ──────────────────────────────────────────────────────────────────


def _size(at: Reading) -> str:
    """Return the relative size of a difference, which the first digits of both may not show."""
    if not at.expected or not math.isfinite(at.excess):
        return ""
    return f", by {abs((at.value or 0.0) / at.expected - 1):.2g} times its {at.what}"


def _ranks(here: Any, there: Any) -> Iterator[str]:
    """Yield which ranks' parts of a tensor differ, if some are equal. A run whose ranks are alike has
    one hash.
    """
    for one, other in ((here, there), (there, here)):
        for hashes in one[4:]:
            others = [*other[4:], [other[1]] * len(hashes)][0]
            ranks = []
            for rank, (first, second) in enumerate(zip(hashes, others, strict=False)):
                if first != second:
                    ranks.append(str(rank))
            if len(others) == len(hashes) > len(ranks):
                yield f"Of {len(hashes)} ranks these differ there: {', '.join(ranks)}."
                return


def _factor(here: Row, there: Row) -> float:
    """Return the factor of all gradients, second over first, if they share one; else 1."""
    ratios = []
    for key, entry in here.items():
        if entry[0] == "grad" and key in there and entry[2]:
            ratios.append(there[key][2] / entry[2])
    if not ratios or max(ratios) - min(ratios) > 1e-3 * max(ratios):
        return 1.0
    return float(ratios[0])


def _other_numbers(first: Row, second: Row) -> Iterator[str]:
    """Yield the other numbers of two rows that disagree; fractions, which are known columns, by more
    than :data:`AGREES` itself.
    """
    for name in sorted(first.keys() & second.keys() - STAGE_OF.keys()):
        here = first[name]
        there = second[name]
        is_number = isinstance(here, float) and isinstance(there, float)
        if is_number and not name.endswith(_UNLIKE):
            least = AGREES if name in STEP else 0.0
            if not math.isclose(here, there, rel_tol=AGREES, abs_tol=least):
                yield f"{name} {here:.4g} and {there:.4g}"
