"""The first difference of two runs that should be equal: step, stage, tensor and rank, from the rows
and fingerprints of both.

Each column and each kind of fingerprint belongs to one stage of a step, and fingerprints are in the
order of computation. So the first differing fingerprint shows where the runs diverged, and hashes
by rank show whether only one rank differs.

A norm of n elements, each rounded independently with unit roundoff u, moves by about u/√n, as does
a mean over n tokens. The first step that differs is judged so, and later ones not at all: training
amplifies any difference.

Source: the expected error of n independent roundings (Higham 2002, section 2.8); one tolerance per tensor instead of one for
all: TTrace (2506.09280).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from narrowgauge.measuring.columns import rows_of
from narrowgauge.measuring.reading import Reading
from narrowgauge.measuring.settings import recipe_of
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import STEP, Row, number, step_of
from narrowgauge.spec.formats import FORMATS

COLUMNS = ("tokens", "batch_crc", "loss", "grad_norm", "lr", "loss_scale", "skipped", "val_loss")
"""Compared columns of a step and its evaluation. Times and bytes differ between any two runs."""
STAGE_OF = {
    "tokens": "data", "batch_crc": "data", "output": "forward", "loss": "loss", "grad": "gradient",
    "grad_norm": "gradient", "lr": "optimizer step", "loss_scale": "optimizer step",
    "skipped": "optimizer step", "weight": "optimizer step", "exp_avg": "optimizer step",
    "exp_avg_sq": "optimizer step", "state": "optimizer step", "val_loss": "evaluation",
    "weights_fingerprint": "optimizer step",
}  # fmt: skip
"""The stage of each compared column and kind of tensor, in the order of a step."""
_KINDS = list(STAGE_OF)
EXACT = frozenset({"tokens", "batch_crc", "lr", "loss_scale", "skipped"})
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


Entry = tuple[Any, float, int]
"""Of a recorded column or tensor: its bits, its value or norm, and its elements or tokens."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Describe one differing column or tensor of a step.

    Args:
        key: the column, or the fingerprint as ``KIND:NAME``.
        values: of both runs. For a tensor: its norms. NaN if only bits are known.
        numel: elements of the tensor; for a column, tokens of the step; 0 if unknown.
        only_in: 0 or 1: the only run with this tensor.
    """

    step: int
    key: str
    values: tuple[float, float] = (math.nan, math.nan)
    numel: int = 0
    only_in: int | None = None

    @property
    def kind(self) -> str:
        """Return the key of :data:`STAGE_OF`."""
        return self.key.partition(":")[0]

    @property
    def stage(self) -> str:
        """Return the stage of the step."""
        if self.step == 0:
            return "start"
        return STAGE_OF[self.kind]

    @property
    def relative(self) -> float:
        """Return the difference over the larger value; infinite if rounding cannot explain it."""
        first, second = self.values
        if self.kind in EXACT or math.isnan(first) or math.isnan(second):
            return math.inf
        return abs(first - second) / (max(abs(first), abs(second)) or 1.0)

    def rounding(self, u: float) -> float:
        """Return the relative difference that rounding explains in one step."""
        return max(ENVELOPE * u / math.sqrt(max(1, self.numel)), LEAST)

    def reading(self, u: float) -> Reading:
        """Return a reading: the second run's value, the first's, and the distance within rounding."""
        first, second = self.values
        tensor = ""
        what = self.key
        if ":" in self.key:
            tensor = self.key
            what = "norm"
        if self.only_in is not None:
            what = "only-in-one-run"
        elif math.isnan(first):
            what = what.replace("norm", "bits")
        if math.isnan(first) or math.isnan(second):
            return Reading(self.step, self.stage, tensor, what)
        bound = 0.0
        if self.kind not in EXACT:
            bound = self.rounding(u) * max(abs(first), abs(second))
        return Reading(self.step, self.stage, tensor, what, second, first, bound)


def roundoff(run: Run) -> float:
    """Return the unit roundoff between two matmuls, from the recipe or the graph of a forward pass;
    else bfloat16's.
    """
    recipe = recipe_of(run)
    names = str((run.run.get("model") or {}).get("formats", "")).split(", ")
    if recipe is not None:
        names = [recipe.compute.dtype, recipe.storage.visible]
    widest = [FORMATS[name].epsilon for name in names if name in FORMATS]
    return max(widest, default=FORMATS["bfloat16"].epsilon) / 2


def first_difference(step: int, first: Row, second: Row, u: float) -> Difference | None:
    """Return the first difference of a step beyond its rounding, else the first of any size."""
    differences = sorted(_differences(step, first, second), key=lambda row: _KINDS.index(row.kind))
    for row in differences:
        if row.relative > row.rounding(u):
            return row
    return next(iter(differences), None)


# ── the records of a step ─────────────────────────────────────────────────────────────────────────


def records_of(run: Run) -> dict[int, Row]:
    """Return one row for each step: its columns, its evaluation, and its fingerprints.

    Of several rows of a table the first one counts: a resume repeats its checkpoint's fingerprints.
    """
    rows = dict[int, Row]()
    for table in ("evals", "steps", "fingerprints"):
        for row in reversed(rows_of(run, table)):
            rows[step_of(row)] = rows.get(step_of(row), {}) | row
    return rows


def _entries(row: Row, step: int) -> dict[str, Entry]:
    """Return the compared columns and tensors of a step. Gradients are those at loss scale 1."""
    tensors = row.get("tensors") or {}
    tokens = int((number(row.get("tokens")) or 0) // max(1, step))
    if not tokens and "tokens:batch" in tensors:
        tokens = int(tensors["tokens:batch"][2])
    entries = {}
    for column in COLUMNS:
        value = row.get(column)
        if value is not None:
            real = number(value)
            if real is None:  # a checksum
                real = math.nan
            entries[column] = str(value), real, tokens
    scale = number(row.get("loss_scale")) or 1.0
    for key, (bits, norm, numel) in tensors.items():
        kind = key.partition(":")[0]
        if kind == "tokens":  # integers have no norm
            norm = math.nan
        if kind == "grad":
            norm /= scale
        if kind in STAGE_OF:
            entries[key] = bits, norm, int(numel)
    return entries


def _differences(step: int, first_row: Row, second_row: Row) -> Iterator[Difference]:
    here = _entries(first_row, step)
    there = _entries(second_row, step)
    kinds = {key.partition(":")[0] for key in here} & {key.partition(":")[0] for key in there}
    for key in {**here, **there}:
        if key in here and key in there:
            bits, value, numel = here[key]
            other_bits, other_value, _ = there[key]
            if bits != other_bits:
                yield Difference(step, key, (value, other_value), numel)
        elif ":" in key and key.partition(":")[0] in kinds:
            yield Difference(step, key, only_in=int(key in there))


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
        size = max(abs(here), abs(there))
        if name in STEP:
            size = 1.0
        if abs(here - there) > AGREES * size:
            yield f"{name} {here:.4g} and {there:.4g}"


def odd_ranks(first: Row, second: Row, kind: str) -> list[int]:
    """Return the ranks that alone differ in a kind of tensor. If all do, their shards may be others."""
    here = (first.get("ranks") or {}).get(kind) or []
    there = (second.get("ranks") or {}).get(kind) or []
    if len(here) != len(there):
        return []
    odd = [rank for rank in range(len(here)) if here[rank] != there[rank]]
    if len(odd) == len(here):
        return []
    return odd
