"""The first difference of two runs: step, stage, tensor and rank, from the rows and fingerprints of
both.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from narrowgauge.analysis.columns import rows_of
from narrowgauge.analysis.reading import STAGE_OF, Reading
from narrowgauge.analysis.settings import recipe_of
from narrowgauge.analysis.thresholds import ENVELOPE, GROWTH, LEAST, SHARED
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row, number, step_of
from narrowgauge.spec.formats import FORMATS

COLUMNS = ("tokens", "batch_crc", "loss", "grad_norm", "lr", "loss_scale", "skipped", "val_loss")
"""Compared columns of a step and its evaluation. Times and bytes differ between any two runs."""
EXACT = frozenset({"held", "tokens", "batch_crc", "lr", "loss_scale", "skipped"})
"""Values that rounding cannot change."""
_KINDS = list(STAGE_OF)


@dataclass(frozen=True, slots=True)
class Difference:
    """Describe one differing column or tensor of a step.

    Args:
        kind: a key of :data:`~narrowgauge.analysis.reading.STAGE_OF`.
        what: the column. For a tensor: ``norm``, ``bits`` or ``only-in-one-run``.
        tensor: the fingerprint, as ``KIND:NAME``; empty for a column.
        values: of both runs. For a tensor: its norms. NaN if only bits are known.
        numel: elements of the tensor; for a column, tokens of the step; 0 if unknown.
        ranks: the differing ranks; empty if all differ or unknown.
        only_in: 0 or 1: the only run with this tensor.
        common: the second run's gradients over the first's, where a clip multiplies all of them.
    """

    step: int
    kind: str
    what: str
    tensor: str = ""
    values: tuple[float, float] = (math.nan, math.nan)
    numel: int = 0
    ranks: tuple[int, ...] = ()
    only_in: int | None = None
    common: float = 1.0

    @property
    def stage(self) -> str:
        """Return the stage of the step."""
        return "start" if self.step == 0 else STAGE_OF[self.kind]

    @property
    def relative(self) -> float:
        """Return the difference over the larger value; infinite if rounding cannot explain it."""
        first = self.values[0] * self.common
        second = self.values[1]
        if self.kind in EXACT or math.isnan(first) or math.isnan(second):
            return math.inf
        return abs(first - second) / (max(abs(first), abs(second)) or 1.0)

    @property
    def place(self) -> str:
        """Return the tensor or column, and the stage, as part of a sentence."""
        return f"{self.tensor or self.what} ({self.stage})"

    def reading(self, bound: float) -> Reading:
        """Return a reading: the second run's value, the first's, and the distance within ``bound``."""
        first, second = self.values
        if math.isnan(first) and math.isnan(second):
            return Reading(self.step, self.stage, self.tensor, self.what)
        allowed = bound * max(abs(first), abs(second))
        if self.kind in EXACT:
            allowed = 0.0
        return Reading(self.step, self.stage, self.tensor, self.what, second, first, allowed)


class Parting(NamedTuple):
    """Hold the first differences of two runs.

    Args:
        first: the first difference of any size; ``None`` if all common records are equal.
        beyond: the first difference beyond its bound, if any. If rounding came first, the largest
            excess of the earliest stage.
        bound: the relative difference that rounding explains, for ``beyond`` or else ``first``.
        num_common: number of steps that both recorded.
        is_hashed: both recorded fingerprints of that step.
    """

    first: Difference | None
    beyond: Difference | None
    bound: float
    num_common: int
    is_hashed: bool


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
    roundoffs = [FORMATS[name].epsilon for name in names if name in FORMATS]
    return max(roundoffs, default=FORMATS["bfloat16"].epsilon) / 2


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


def find_parting(first_run: Run, second_run: Run) -> Parting:
    """Find the first difference of two runs, and the first difference beyond rounding."""
    records = [_records(first_run), _records(second_run)]
    common = records[0].rows.keys() & records[1].rows.keys()
    hashed = records[0].prints.keys() & records[1].prints.keys()
    steps = set(map(step_of, first_run.steps))
    num_common = len(steps.intersection(map(step_of, second_run.steps)))
    search = _Search(max(roundoff(first_run), roundoff(second_run)))
    for step in sorted(common | hashed):
        differences = []
        if step in common:
            differences += _columns(step, records)
        if step in hashed:
            prints = records[0].prints[step]
            differences += _without_clip(_tensors(step, records), prints, search.u)
        beyond = search.add(step, differences, step in common, step in hashed)
        if beyond is not None:
            return Parting(search.first, *beyond, num_common, step in hashed)
    first = search.first
    if first is None:
        ends = ends_of(first_run, second_run)
        if None not in ends and ends[0] != ends[1]:
            first = Difference(max(common, default=0), "weight", "weights_fingerprint")
            return Parting(first, first, 0.0, num_common, False)
    is_hashed = first is not None and first.step in hashed
    return Parting(first, None, search.first_bound, num_common, is_hashed)


def ends_of(*runs: Run) -> list[Any]:
    """Return the hash of each run's final weights; ``None`` if it is not finished."""
    return [(run.summary or {}).get("weights_fingerprint") for run in runs]


class _Search:
    """Go through the differences step by step, until one is beyond its bound.

    Args:
        u: the unit roundoff between two matmuls.
    """

    def __init__(self, u: float) -> None:
        self.u = u
        self.first: Difference | None = None
        self.first_bound = 0.0
        # The last recorded step and its largest difference, of tensors and of columns.
        self._levels: dict[bool, tuple[int, float]] = {}

    def add(
        self, step: int, differences: list[Difference], has_columns: bool, has_tensors: bool
    ) -> tuple[Difference, float] | None:
        """Add the differences of a step. Return one that is beyond its bound, with the bound."""
        named = {row.stage for row in differences if row.tensor}
        pairs = []
        beyond = []
        largest = {True: 0.0, False: 0.0}
        for row in sorted(differences, key=self._place):
            if row.ranks and not row.tensor and row.stage in named:
                continue
            pair = row, self._bound(row)
            pairs.append(pair)
            if row.relative > pair[1]:
                beyond.append(pair)
            is_tensor = bool(row.tensor)
            largest[is_tensor] = max(largest[is_tensor], row.relative)
        if self.first is None:
            if not pairs:
                return None
            self.first, self.first_bound = pairs[0]
        if beyond:
            at = beyond[0][0]
            if at is self.first:
                return beyond[0]
            # Rounding came before, so the order within the step means little.
            alike = [pair for pair in beyond if pair[0].stage == at.stage]
            return max(alike, key=lambda pair: pair[0].relative / (pair[1] or 1e-300))
        for is_tensor, is_read in ((True, has_tensors), (False, has_columns)):
            if is_read:
                self._levels[is_tensor] = step, largest[is_tensor]
        return None

    def _place(self, row: Difference) -> tuple[int, bool, bool]:
        return _KINDS.index(row.kind), row.relative <= _rounding(row, self.u), not row.tensor

    def _bound(self, row: Difference) -> float:
        """Return the relative difference that rounding explains, including growth since the last
        recorded step.
        """
        if row.kind in EXACT:
            return 0.0
        rounding = _rounding(row, self.u)
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


def _rounding(difference: Difference, u: float) -> float:
    """Return the relative difference that rounding explains in one step."""
    return max(ENVELOPE * u / math.sqrt(max(1, difference.numel)), LEAST)


def _without_clip(differences: list[Difference], prints: Row, u: float) -> list[Difference]:
    """Set the common factor of all gradients aside if some depart from it: a clip spreads one fault
    over all of them.
    """
    ratios = {}
    for place, row in enumerate(differences):
        if row.kind == "grad" and math.isfinite(row.relative) and all(row.values):
            ratios[place] = row.values[1] / row.values[0]
    num_grads = sum(key.startswith("grad:") for key in prints["tensors"])
    if len(ratios) < max(3, num_grads):
        return differences
    common = median(ratios.values())
    aside = list(differences)
    departs = False
    for place in ratios:
        aside[place] = replace(differences[place], common=common)
        departs = departs or aside[place].relative > _rounding(aside[place], u)
    if departs:
        return aside
    return differences


def _by_step(rows: Sequence[Row]) -> dict[int, Row]:
    """Return the first row of each step. A resume repeats the fingerprints of its checkpoint."""
    return {step_of(row): row for row in reversed(rows)}


def _columns(step: int, records: Sequence[_Records]) -> list[Difference]:
    first = records[0].rows[step]
    second = records[1].rows[step]
    tokens = int((number(first.get("tokens")) or 0) // max(1, step))
    if not tokens:
        for key, entry in records[0].prints.get(step, {}).get("tensors", {}).items():
            if key.startswith("tokens:"):
                tokens += int(entry[2])
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


def _tensors(step: int, records: Sequence[_Records]) -> list[Difference]:
    """Compare the norms of tensors whose hashes differ, those of gradients at loss scale 1."""
    first = records[0].prints[step]
    second = records[1].prints[step]["tensors"]
    ranks = [*_ranks(step, first, records[1].prints[step])]
    odd = {row.stage: row.ranks for row in reversed(ranks) if row.ranks}
    differences = [*_lacking(step, first["tensors"], second), *ranks]
    scales = [_loss_scale(record, step) for record in records]
    for key, entry in first["tensors"].items():
        if key not in second or entry[0] == second[key][0]:
            continue
        kind = key.partition(":")[0]
        if kind == "tokens":  # integers have no norm
            differences.append(Difference(step, kind, "bits", key))
            continue
        norms = entry[1], second[key][1]
        if kind in ("sent", "grad"):
            norms = norms[0] / scales[0], norms[1] / scales[1]
        differences.append(Difference(step, kind, "norm", key, norms, int(entry[2])))
    for place, row in enumerate(differences):
        if not row.ranks and row.stage in odd:
            differences[place] = replace(row, ranks=odd[row.stage])
    return differences


def _loss_scale(record: _Records, step: int) -> float:
    return number(record.rows.get(step, {}).get("loss_scale")) or 1.0


def _lacking(
    step: int, first: Mapping[str, Any], second: Mapping[str, Any]
) -> Iterator[Difference]:
    """Yield the first tensor of each kind that only one run has, if both recorded most of that
    kind.
    """
    for kind in _KINDS:
        total = 0
        lacking = []
        for key in {**first, **second}:
            if key.startswith(f"{kind}:"):
                total += 1
                if key not in first or key not in second:
                    lacking.append(key)
        label = "only-in-one-run"
        if kind == "held":
            label = "changed"
        elif total - len(lacking) < SHARED * total:
            continue
        if lacking:
            only_in = int(lacking[0] not in first)
            yield Difference(step, kind, label, lacking[0], only_in=only_in)


def _ranks(step: int, first_row: Row, second_row: Row) -> Iterator[Difference]:
    """Compare the hashes of each rank."""
    first = first_row.get("ranks") or {}
    second = second_row.get("ranks") or {}
    for kind in _KINDS:
        here = first.get(kind)
        there = second.get(kind)
        if here is None or there is None or len(here) != len(there):
            continue
        odd = tuple(rank for rank, hashes in enumerate(here) if hashes != there[rank])
        # If all ranks differ, the layouts may differ too. Then ranks hold other shards.
        if odd and len(odd) < len(here):
            yield Difference(step, kind, "bits", ranks=odd)
        if odd:
            break
