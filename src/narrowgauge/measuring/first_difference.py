"""The first difference of two runs that should be equal: step, stage and tensor, from the rows and
fingerprints of both.

Each column and each kind of fingerprint belongs to one stage of a step, and fingerprints are in the
order of computation. So the first differing fingerprint shows where the runs diverged.

A norm of n elements, each rounded independently with unit roundoff u, moves by about u/√n, as does
a mean over n tokens. The first step that differs is judged so, and later ones not at all: training
amplifies any difference.

Source: the expected error of n independent roundings (Higham 2002, section 2.8); one tolerance per tensor instead of one for
all: TTrace (2506.09280).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from narrowgauge.measuring.reading import Reading
from narrowgauge.measuring.settings import recipe_of
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import STEP, Row, number
from narrowgauge.spec.formats import FORMATS

COLUMNS = ("tokens", "loss", "grad_norm", "lr", "loss_scale", "skipped", "val_loss")
"""Compared columns of a step and its evaluation. Times and bytes differ between any two runs."""
STAGE_OF = {
    "tokens": "data", "output": "forward", "loss": "loss", "grad": "gradient",
    "grad_norm": "gradient", "lr": "optimizer step", "loss_scale": "optimizer step",
    "skipped": "optimizer step", "weight": "optimizer step", "exp_avg": "optimizer step",
    "exp_avg_sq": "optimizer step", "state": "optimizer step", "val_loss": "evaluation",
    "weights_fingerprint": "optimizer step",
}  # fmt: skip
"""The stage of each compared column and kind of tensor, in the order of a step."""
_KINDS = list(STAGE_OF)
EXACT = frozenset({"tokens", "lr", "loss_scale", "skipped"})
"""Values that rounding cannot change."""
ENVELOPE = 32.0
"""Multiples of a norm's expected rounding error: rounding errors are not independent."""
LEAST = 2.0**-20
"""Relative: 8 ulps of float32. Another order of a float32 model's sums moved norms by up to 1.4e-7."""
AGREES = 0.05
"""Relative difference of other recorded numbers of a step, such as the stored share of an update,
beside a difference by rounding.
"""
_UNLIKE = ("seconds", "per_second", "bytes")
"""Ends of the names of numbers that differ between any two runs."""


def roundoff(run: Run) -> float:
    """Return the unit roundoff between two matmuls, from the recipe; else bfloat16's."""
    recipe = recipe_of(run)
    names = ["bfloat16"] if recipe is None else [recipe.compute.dtype, recipe.storage.visible]
    return max(FORMATS[name].epsilon for name in names) / 2


def first_difference(step: int, first: Row, second: Row, u: float) -> Reading | None:
    """Return the first difference of a step beyond its rounding, else the first of any size.

    It has the second run's value, expects the first's, and its bound is what rounding explains: none
    where only bits are known to differ.
    """
    readings = sorted(_differences(step, first, second, u), key=lambda x: _KINDS.index(kind_of(x)))
    for reading in readings:
        if reading.excess > 1:
            return reading
    return next(iter(readings), None)


def kind_of(reading: Reading) -> str:
    """Return the key of :data:`STAGE_OF` of a difference."""
    return (reading.tensor or reading.what).partition(":")[0]


# ── the records of a step ─────────────────────────────────────────────────────────────────────────


def records_of(run: Run) -> dict[int, Row]:
    """Return one row for each step: its columns, its evaluation, and its fingerprints.

    Of several rows of a table the first one counts: a resume repeats its checkpoint's fingerprints.
    """
    rows = dict[int, Row]()
    for table in (run.evals, run.steps, run.fingerprints):
        for row in reversed(table):
            rows[row["step"]] = rows.get(row["step"], {}) | row
    return rows


def _entries(row: Row, step: int) -> dict[str, tuple[Any, float, int]]:
    """Return the bits, the value or norm, and the elements or tokens of each compared column and
    tensor. Gradients are those at loss scale 1.
    """
    tensors = row.get("tensors") or {}
    tokens = int((number(row.get("tokens")) or 0) // max(1, step))
    if not tokens and "tokens:batch" in tensors:
        tokens = int(tensors["tokens:batch"][2])
    entries = {}
    for column in COLUMNS:
        if row.get(column) is not None:
            value = number(row[column])
            # A checksum is no number.
            entries[column] = str(row[column]), math.nan if value is None else value, tokens
    for key, (bits, norm, numel) in tensors.items():
        kind = key.partition(":")[0]
        if kind == "tokens":  # integers have no norm
            norm = math.nan
        if kind == "grad":
            norm /= number(row.get("loss_scale")) or 1.0
        if kind in STAGE_OF:
            entries[key] = bits, norm, int(numel)
    return entries


def _differences(step: int, first: Row, second: Row, u: float) -> Iterator[Reading]:
    here = _entries(first, step)
    there = _entries(second, step)
    kinds = {key.partition(":")[0] for key in here} & {key.partition(":")[0] for key in there}
    for key in {**here, **there}:
        kind = key.partition(":")[0]
        stage = "start" if step == 0 else STAGE_OF[kind]
        tensor = key if ":" in key else ""
        if key not in here or key not in there:
            if tensor and kind in kinds:
                numbers = float(key in there), float(key in here), 0.0
                yield Reading(step, stage, tensor, "only-in-one-run", *numbers)
            continue
        bits, expected, numel = here[key]
        other_bits, value, _ = there[key]
        if bits == other_bits:
            continue
        if math.isnan(expected) or math.isnan(value):
            yield Reading(step, stage, tensor, "bits" if tensor else key)
            continue
        bound = 0.0
        if kind not in EXACT:
            size = max(abs(expected), abs(value)) or 1.0
            bound = max(ENVELOPE * u / math.sqrt(max(1, numel)), LEAST) * size
        yield Reading(step, stage, tensor, "norm" if tensor else key, value, expected, bound)


# ── other numbers of the step ─────────────────────────────────────────────────────────────────────


def factor_of(first: Row, second: Row) -> float:
    """Return the factor of all gradients, second over first, if they share one; else 1."""
    others = second.get("tensors") or {}
    ratios = []
    for key, entry in (first.get("tensors") or {}).items():
        if key.startswith("grad:") and key in others and entry[1]:
            ratios.append(others[key][1] / entry[1])
    if not ratios or max(ratios) - min(ratios) > 1e-3 * max(ratios):
        return 1.0
    return float(sum(ratios) / len(ratios))


def other_numbers(first: Row, second: Row) -> Iterator[str]:
    """Yield the other numbers of two rows that disagree; fractions, which are known columns, by more
    than :data:`AGREES` itself.
    """
    for name in sorted(first.keys() & second.keys()):
        here = first[name]
        there = second[name]
        is_number = isinstance(here, float) and isinstance(there, float)
        if not is_number or name in COLUMNS or name.endswith(_UNLIKE):
            continue
        size = 1.0 if name in STEP else max(abs(here), abs(there))
        if abs(here - there) > AGREES * size:
            yield f"{name} {here:.4g} and {there:.4g}"
