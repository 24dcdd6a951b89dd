"""The first difference of two runs that should be equal: step, stage, tensor and rank, from the rows
and fingerprints of both.

Each column and each kind of fingerprint belongs to one stage of a step, and fingerprints are in the
order of computation. So the first differing fingerprint shows where the runs diverged, and hashes
by rank show whether only one rank differs.

A norm of n elements, each rounded independently with unit roundoff u, moves by about u/√n, as does
a mean over n tokens. So a difference within rounding does not end the search. A larger one exceeds
its own rounding and the growth since the step before.

Source: the expected error of n independent roundings (Higham 2002, section 2.8); one tolerance per tensor instead of one for
all: TTrace (2506.09280).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
}  # fmt: skip
"""The stage of each compared column and kind of tensor, in the order of a step."""
_KINDS = list(STAGE_OF)
EXACT = frozenset({"tokens", "batch_crc", "lr", "loss_scale", "skipped"})
"""Values that rounding cannot change."""
ENVELOPE = 32.0
"""Multiples of a norm's expected rounding error: rounding errors are not independent."""
LEAST = 2.0**-20
"""Relative: 8 ulps of float32. Another order of a float32 model's sums moved norms by up to 1.4e-7."""
GROWTH = 30.0
"""Factor a step of the largest difference; measured on tiny models: below 6."""
AGREES = 0.05
"""Relative difference of other recorded numbers of a step, such as the stored share of an update,
beside a difference by rounding.
"""
_UNLIKE = ("seconds", "per_second", "bytes")
"""Ends of the names of numbers that differ between any two runs."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Describe one differing column or tensor of a step.

    Args:
        kind: a key of :data:`STAGE_OF`.
        what: the column. For a tensor: ``norm``, ``bits`` or ``only-in-one-run``.
        tensor: the fingerprint, as ``KIND:NAME``; empty for a column.
        values: of both runs. For a tensor: its norms. NaN if only bits are known.
        numel: elements of the tensor; for a column, tokens of the step; 0 if unknown.
        ranks: the differing ranks; empty if all differ or unknown.
        only_in: 0 or 1: the only run with this tensor.
    """

    step: int
    kind: str
    what: str
    tensor: str = ""
    values: tuple[float, float] = (math.nan, math.nan)
    numel: int = 0
    ranks: tuple[int, ...] = ()
    only_in: int | None = None

    @property
    def stage(self) -> str:
        """Return the stage of the step."""
        return "start" if self.step == 0 else STAGE_OF[self.kind]

    @property
    def relative(self) -> float:
        """Return the difference over the larger value; infinite if rounding cannot explain it."""
        if self.kind in EXACT:
            return math.inf
        return _relative(*self.values)

    @property
    def place(self) -> str:
        """Return the tensor or column, and the stage, as part of a sentence."""
        return f"{self.tensor or self.what} ({self.stage})"

    def rounding(self, u: float) -> float:
        """Return the relative difference that rounding explains in one step."""
        return max(ENVELOPE * u / math.sqrt(max(1, self.numel)), LEAST)

    def reading(self, bound: float) -> Reading:
        """Return a reading: the second run's value, the first's, and the distance within ``bound``."""
        first, second = self.values
        if math.isnan(first) and math.isnan(second):
            return Reading(self.step, self.stage, self.tensor, self.what)
        if self.kind in EXACT:
            bound = 0.0
        allowed = bound * max(abs(first), abs(second))
        return Reading(self.step, self.stage, self.tensor, self.what, second, first, allowed)


def _relative(first: float, second: float) -> float:
    if math.isnan(first) or math.isnan(second):
        return math.inf
    return abs(first - second) / (max(abs(first), abs(second)) or 1.0)


def roundoff(run: Run) -> float:
    """Return the unit roundoff between two matmuls, from the recipe or the graph of a forward pass;
    else bfloat16's.
    """
    recipe = recipe_of(run)
    model = run.run.get("model")
    names = []
    if recipe is not None:
        names = [recipe.compute.dtype, recipe.storage.visible]
    elif isinstance(model, dict):
        names = str(model.get("formats", "")).split(", ")
    widest = 0.0
    for name in names:
        if name in FORMATS:
            widest = max(widest, FORMATS[name].epsilon)
    return (widest or FORMATS["bfloat16"].epsilon) / 2


# ── the search ────────────────────────────────────────────────────────────────────────────────────


class _Records(NamedTuple):
    """Rows of one run by step: of steps and evaluations in one, and of fingerprints."""

    rows: dict[int, Row]
    prints: dict[int, Row]


def _records(run: Run) -> _Records:
    rows = _by_step(run.evals)
    for step, row in _by_step(run.steps).items():
        rows[step] = rows.get(step, {}) | row
    return _Records(rows, _by_step(rows_of(run, "fingerprints")))


def _by_step(rows: Sequence[Row]) -> dict[int, Row]:
    """Return the first row of each step. A resume repeats the fingerprints of its checkpoint."""
    return {step_of(row): row for row in reversed(rows)}


class Search:
    """Find the first difference of two runs, and the first difference beyond rounding.

    Attributes:
        first: the first difference of any size; ``None`` if all common records are equal.
        beyond: the first difference beyond its bound, if any. If rounding came first, the largest
            excess of the earliest stage.
        bound: the relative difference that rounding explains, for ``beyond`` or else ``first``.
        num_common: number of steps that both recorded.
        is_hashed: both recorded fingerprints of that step.
        factor: of all gradients of that step, second run over first, if they share one; else 1.
        unlike: other recorded numbers of that step that differ by more than :data:`AGREES`.
    """

    def __init__(self, first_run: Run, second_run: Run) -> None:
        self.records = [_records(first_run), _records(second_run)]
        self.u = max(roundoff(first_run), roundoff(second_run))
        self.first: Difference | None = None
        self.beyond: Difference | None = None
        self.bound = 0.0
        # The last recorded step and its largest difference, of tensors and of columns.
        self._levels: dict[bool, tuple[int, float]] = {}
        steps = set(map(step_of, first_run.steps))
        self.num_common = len(steps.intersection(map(step_of, second_run.steps)))
        common = self.records[0].rows.keys() & self.records[1].rows.keys()
        hashed = self.records[0].prints.keys() & self.records[1].prints.keys()
        is_equal = self._go_through(common, hashed)
        ends = ends_of(first_run, second_run)
        if is_equal and None not in ends and ends[0] != ends[1]:
            end = Difference(max(common, default=0), "weight", "weights_fingerprint")
            self.first = self.beyond = end
        self.at: Difference | None = self.beyond or self.first
        self.is_hashed = False
        self.factor = 1.0
        self.unlike = list[str]()
        if self.at is not None:
            self._read_numbers(self.at.step, *self.records)

    def _read_numbers(self, step: int, first: _Records, second: _Records) -> None:
        """Read the factor of all gradients of a step, and its other numbers."""
        self.is_hashed = step in first.prints and step in second.prints
        if self.is_hashed:
            self.factor = _factor(first.prints[step], second.prints[step])
        if step in first.rows and step in second.rows:
            self.unlike += _other_numbers(first.rows[step], second.rows[step])

    def _go_through(self, common: Set[int], hashed: Set[int]) -> bool:
        """Add the differences of steps until one is beyond its bound; return whether there is none."""
        for step in sorted(common | hashed):
            differences = []
            if step in common:
                differences += _columns(step, self.records)
            if step in hashed:
                differences += _tensors(step, self.records)
            self._add(step, differences, has_columns=step in common, has_tensors=step in hashed)
            if self.beyond is not None:
                break
        return self.first is None

    def _add(
        self, step: int, differences: list[Difference], *, has_columns: bool, has_tensors: bool
    ) -> None:
        """Add the differences of a step, and note the first one, and one beyond its bound."""
        differences.sort(key=self._place)
        bounds = list(map(self._bound, differences))
        largest = {True: 0.0, False: 0.0}
        excess = 0.0
        came_first = self.first is None
        for row, bound in zip(differences, bounds, strict=True):
            is_tensor = bool(row.tensor)
            largest[is_tensor] = max(largest[is_tensor], row.relative)
            if self.first is None:
                self.first, self.bound = row, bound
            if row.relative <= bound or (self.beyond and self.beyond.stage != row.stage):
                continue
            # If rounding came before, the order within the step means little.
            is_larger = row.relative / (bound or 1e-300) > excess
            if self.beyond is None or (
                is_larger and not (came_first and self.beyond is self.first)
            ):
                self.beyond, self.bound = row, bound
                excess = row.relative / (bound or 1e-300)
        if self.first is not None:
            for is_tensor, is_read in ((True, has_tensors), (False, has_columns)):
                if is_read:
                    self._levels[is_tensor] = step, largest[is_tensor]

    def _place(self, row: Difference) -> tuple[int, bool, bool]:
        return _KINDS.index(row.kind), row.relative <= row.rounding(self.u), not row.tensor

    def _bound(self, row: Difference) -> float:
        """Return the relative difference that rounding explains, including growth since the last
        recorded step.
        """
        if row.kind in EXACT:
            return 0.0
        rounding = row.rounding(self.u)
        if self.first is None:
            return rounding
        step, level = self._levels.get(bool(row.tensor), (-1, 0.0))
        if step < 0 or (row.tensor and step != row.step - 1):
            # The growth of rounding is unknown.
            if math.isfinite(row.relative):
                return math.inf
            return rounding
        gap = row.step - step
        if gap * math.log(GROWTH) > 700:
            return math.inf
        return max(rounding, GROWTH**gap * level)


def _factor(first: Row, second: Row) -> float:
    """Return the factor of all gradients, second over first, if they share one; else 1."""
    ratios = []
    for key, entry in first["tensors"].items():
        if key.startswith("grad:") and key in second["tensors"] and entry[1]:
            ratios.append(second["tensors"][key][1] / entry[1])
    if not ratios or max(ratios) - min(ratios) > 1e-3 * max(ratios):
        return 1.0
    return float(sum(ratios) / len(ratios))


def ends_of(*runs: Run) -> list[Any]:
    """Return the hash of each run's final weights; ``None`` if it is not finished."""
    return [(run.summary or {}).get("weights_fingerprint") for run in runs]


def _columns(step: int, records: Sequence[_Records]) -> list[Difference]:
    first = records[0].rows[step]
    second = records[1].rows[step]
    tokens = int((number(first.get("tokens")) or 0) // max(1, step))
    if not tokens:
        prints = records[0].prints.get(step, {"tensors": {}})
        tokens = int(prints["tensors"].get("tokens:batch", [0, 0, 0])[2])
    differences = []
    for column in COLUMNS:
        here = first.get(column)
        there = second.get(column)
        are_nan = here != here and there != there
        if here is None or there is None or here == there or are_nan:
            continue
        values = math.nan, math.nan
        if not isinstance(here, str):
            values = float(here), float(there)
        differences.append(Difference(step, column, column, values=values, numel=tokens))
    return differences


def _other_numbers(first: Row, second: Row) -> Iterator[str]:
    """Yield the other numbers of two rows that disagree; fractions, which are known columns, by more
    than :data:`AGREES` itself.
    """
    for name in sorted(first.keys() & second.keys()):
        here = first[name]
        there = second[name]
        if name in COLUMNS or name.endswith(_UNLIKE):
            continue
        if not isinstance(here, float) or not isinstance(there, float):
            continue
        size = max(abs(here), abs(there))
        if name in STEP:
            size = 1.0
        if abs(here - there) > AGREES * size:
            yield f"{name} {here:.4g} and {there:.4g}"


def _tensors(step: int, records: Sequence[_Records]) -> list[Difference]:
    """Compare the norms of tensors whose hashes differ, those of gradients at loss scale 1."""
    first = records[0].prints[step]
    second = records[1].prints[step]
    differences = []
    scales = []
    recorded = []
    for record in records:
        scales.append(number(record.rows.get(step, {}).get("loss_scale")) or 1.0)
        recorded.append({key.partition(":")[0] for key in record.prints[step]["tensors"]})
    for key in {**first["tensors"], **second["tensors"]}:
        entry = first["tensors"].get(key)
        other = second["tensors"].get(key)
        kind = key.partition(":")[0]
        if entry is None or other is None:
            if kind in recorded[0] & recorded[1] & STAGE_OF.keys():
                only_in = int(entry is None)
                differences.append(Difference(step, kind, "only-in-one-run", key, only_in=only_in))
            continue
        if entry[0] == other[0] or kind not in STAGE_OF:
            continue
        if kind == "tokens":  # integers have no norm
            differences.append(Difference(step, kind, "bits", key))
            continue
        norms = entry[1], other[1]
        if kind == "grad":
            norms = norms[0] / scales[0], norms[1] / scales[1]
        differences.append(Difference(step, kind, "norm", key, norms, int(entry[2])))
    return _with_ranks(step, differences, *_odd_ranks(first, second))


def _with_ranks(
    step: int, differences: list[Difference], kind: str, ranks: tuple[int, ...]
) -> list[Difference]:
    """Return the differences of a step, with the ranks that alone differ in one kind of tensor."""
    if not ranks:
        return differences
    named = []
    is_named = False
    for row in differences:
        if row.stage == STAGE_OF[kind]:
            row = replace(row, ranks=ranks)
            is_named = True
        named.append(row)
    if not is_named:
        named.append(Difference(step, kind, "bits", ranks=ranks))
    return named


def _odd_ranks(first_row: Row, second_row: Row) -> tuple[str, tuple[int, ...]]:
    """Return the first kind of tensor whose hashes differ on some ranks, and these ranks."""
    first = first_row.get("ranks") or {}
    second = second_row.get("ranks") or {}
    for kind in _KINDS:
        here = first.get(kind) or []
        there = second.get(kind) or []
        odd = []
        for rank, pair in enumerate(zip(here, there, strict=False)):
            if pair[0] != pair[1]:
                odd.append(rank)
        if odd and len(here) == len(there):
            # If all ranks differ, the layouts may differ too. Then ranks hold other shards.
            if len(odd) == len(here):
                odd = []
            return kind, tuple(odd)
    return "", ()
