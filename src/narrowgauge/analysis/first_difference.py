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
from narrowgauge.runs.fingerprint_rows import parted_in
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
        allowed = 0.0 if self.kind in EXACT else bound * max(abs(first), abs(second))
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


def _roundoff(run: Run) -> float:
    """Return the unit roundoff between two matmuls, from the recipe or the graph of a forward pass;
    else bfloat16's.
    """
    recipe = recipe_of(run)
    model = run.run.get("model")
    recorded = str(model.get("formats", "")).split(", ") if isinstance(model, dict) else []
    names = recorded if recipe is None else [recipe.compute.dtype, recipe.storage.visible]
    return max(
        (FORMATS[name].epsilon / 2 for name in names if name in FORMATS),
        default=FORMATS["bfloat16"].epsilon / 2,
    )


# ── the search ────────────────────────────────────────────────────────────────────────────────────


def find_parting(first_run: Run, second_run: Run) -> Parting:
    """Find the first difference of two runs, and the first difference beyond rounding."""
    runs = first_run, second_run
    tables = [(_by_step(run.steps), _by_step(run.evals)) for run in runs]
    rows = [
        {n: {**evals.get(n, {}), **steps.get(n, {})} for n in steps.keys() | evals.keys()}
        for steps, evals in tables
    ]
    prints = [_by_step(rows_of(run, "fingerprints")) for run in runs]
    common = rows[0].keys() & rows[1].keys()
    hashed = prints[0].keys() & prints[1].keys()
    num_common = len(
        {step_of(row) for row in first_run.steps} & {step_of(row) for row in second_run.steps}
    )
    u = max(map(_roundoff, runs))
    first = None
    first_bound = 0.0
    levels: dict[bool, tuple[int, float]] = {}
    for step in sorted(common | hashed):
        differences = _columns(step, rows, prints) if step in common else []
        differences += (
            _without_clip(_tensors(step, rows, prints), prints[0][step], u)
            if step in hashed
            else []
        )
        named = {difference.stage for difference in differences if difference.tensor}
        differences = [
            row for row in differences if row.tensor or not row.ranks or row.stage not in named
        ]
        differences.sort(
            key=lambda row: (
                _KINDS.index(row.kind),
                row.relative <= _rounding(row, u),
                not row.tensor,
            )
        )
        if not differences and first is None:
            continue
        bounds = [_bound(difference, u, levels, first is not None) for difference in differences]
        pairs = zip(differences, bounds, strict=True)
        beyond = [(difference, bound) for difference, bound in pairs if difference.relative > bound]
        if first is None:
            first = differences[0]
            first_bound = bounds[0]
        if beyond:
            at, bound = beyond[0]
            if at is not first:  # rounding came before, so the order within the step means little
                alike = [pair for pair in beyond if pair[0].stage == at.stage]
                at, bound = max(
                    alike, key=lambda pair: pair[0].relative / pair[1] if pair[1] else math.inf
                )
            return Parting(first, at, bound, num_common, step in hashed)
        for source, is_read in ((True, step in hashed), (False, step in common)):
            if is_read:
                levels[source] = (
                    step,
                    max((d.relative for d in differences if bool(d.tensor) is source), default=0.0),
                )
    ends = [(run.summary or {}).get("weights_fingerprint") for run in runs]
    if first is None and None not in ends and ends[0] != ends[1]:
        first = Difference(max(common, default=0), "weight", "weights_fingerprint")
        return Parting(first, first, 0.0, num_common, False)
    return Parting(first, None, first_bound, num_common, first is not None and first.step in hashed)


def _bound(
    difference: Difference, u: float, levels: Mapping[bool, tuple[int, float]], is_later: bool
) -> float:
    """Return the relative difference that rounding explains, including growth since the last
    recorded step.

    ``levels`` hold that step and its largest difference, for tensors and for columns.
    """
    if difference.kind in EXACT:
        return 0.0
    rounding = _rounding(difference, u)
    if not is_later:
        return rounding
    step, level = levels.get(bool(difference.tensor), (-1, 0.0))
    if step < 0 or (difference.tensor and step != difference.step - 1):
        return (
            math.inf if math.isfinite(difference.relative) else rounding
        )  # the growth of rounding is unknown
    gap = difference.step - step
    return max(rounding, math.inf if gap * math.log(GROWTH) > 700 else GROWTH**gap * level)


def _rounding(difference: Difference, u: float) -> float:
    """Return the relative difference that rounding explains in one step."""
    return max(ENVELOPE * u / math.sqrt(max(1, difference.numel)), LEAST)


def _without_clip(differences: list[Difference], prints: Row, u: float) -> list[Difference]:
    """Set the common factor of all gradients aside if some depart from it: a clip spreads one fault
    over all of them.
    """
    grads = [
        row
        for row in differences
        if row.kind == "grad" and math.isfinite(row.relative) and all(row.values)
    ]
    if len(grads) < max(3, sum(key.startswith("grad:") for key in prints["tensors"])):
        return differences
    common = median(row.values[1] / row.values[0] for row in grads)
    aside = [replace(row, common=common) if row in grads else row for row in differences]
    return (
        aside
        if any(row.kind == "grad" and row.relative > _rounding(row, u) for row in aside)
        else differences
    )


def _by_step(rows: Sequence[Row]) -> dict[int, Row]:
    """Return the first row of each step. A resume repeats the fingerprints of its checkpoint."""
    return {step_of(row): row for row in reversed(rows)}


def _columns(
    step: int, rows: Sequence[Mapping[int, Row]], prints: Sequence[Mapping[int, Row]]
) -> list[Difference]:
    first = rows[0][step]
    second = rows[1][step]
    prints_of = prints[0].get(step, {}).get("tensors", {})
    tokens = int((number(first.get("tokens")) or 0) // max(1, step))
    tokens = tokens or sum(
        int(entry[2]) for key, entry in prints_of.items() if key.startswith("tokens:")
    )
    differences = []
    for column in COLUMNS:
        first_value = first.get(column)
        second_value = second.get(column)
        are_nan = first_value != first_value and second_value != second_value
        if (
            first_value is not None
            and second_value is not None
            and first_value != second_value
            and not are_nan
        ):
            values = (
                (math.nan, math.nan)
                if isinstance(first_value, str)
                else (float(first_value), float(second_value))
            )
            differences.append(Difference(step, column, column, values=values, numel=tokens))
    return differences


def _tensors(
    step: int, rows: Sequence[Mapping[int, Row]], prints: Sequence[Mapping[int, Row]]
) -> list[Difference]:
    """Compare the norms of tensors whose hashes differ, those of gradients at loss scale 1."""
    first, second = (prints[run][step]["tensors"] for run in (0, 1))
    ranks = [*_ranks(step, prints[0][step], prints[1][step])]
    odd = {row.stage: row.ranks for row in reversed(ranks) if row.ranks}
    differences = [*_lacking(step, first, second), *ranks]
    # A row holds the loss scale after its step.
    known = [
        [number(table.get(at, {}).get("loss_scale")) for at in (step - 1, step)] for table in rows
    ]
    scales = [next(filter(None, values), 1.0) for values in known]
    for key, entry in first.items():
        if key in second and entry[0] != second[key][0]:
            kind = key.partition(":")[0]
            if kind == "tokens":  # integers have no norm
                differences.append(Difference(step, kind, "bits", key))
            else:
                by = scales if kind in ("sent", "grad") else (1.0, 1.0)
                norms = entry[1] / by[0], second[key][1] / by[1]
                differences.append(Difference(step, kind, "norm", key, norms, int(entry[2])))
    return [replace(row, ranks=row.ranks or odd.get(row.stage, ())) for row in differences]


def _lacking(
    step: int, first: Mapping[str, Any], second: Mapping[str, Any]
) -> Iterator[Difference]:
    """Yield the first tensor of each kind that only one run has, if both recorded most of that
    kind.
    """
    for kind in _KINDS:
        names = [
            [key for key in tensors if key.startswith(f"{kind}:")] for tensors in (first, second)
        ]
        shared = set(names[0]) & set(names[1])
        lacking = [key for key in dict.fromkeys([*names[0], *names[1]]) if key not in shared]
        if lacking and (kind == "held" or len(shared) >= SHARED * (len(shared) + len(lacking))):
            label = "changed" if kind == "held" else "only-in-one-run"
            yield Difference(step, kind, label, lacking[0], only_in=0 if lacking[0] in first else 1)


def _ranks(step: int, first_row: Row, second_row: Row) -> Iterator[Difference]:
    """Compare the hashes of each rank, and the disagreements among the ranks of one run."""
    first = first_row.get("ranks") or {}
    second = second_row.get("ranks") or {}
    for kind in STAGE_OF:
        mine = first.get(kind)
        its = second.get(kind)
        if mine is None or its is None or len(mine) != len(its):
            continue
        odd = tuple(
            rank for rank, (here, there) in enumerate(zip(mine, its, strict=True)) if here != there
        )
        if odd:
            # If all ranks differ, the layouts may differ too. Then ranks hold other shards.
            if len(odd) < len(mine):
                values = (
                    (float(mine[odd[0]]), float(its[odd[0]]))
                    if kind == "clip"
                    else (math.nan, math.nan)
                )
                yield Difference(
                    step, kind, "factor" if kind == "clip" else "bits", values=values, ranks=odd
                )
            break
    parted = [parted_in(row) for row in (first_row, second_row)]
    if bool(parted[0][0]) != bool(parted[1][0]):
        key, odd, _ = parted[0] if parted[0][0] else parted[1]
        if key != "clip:factor" or not (first.get("clip") and second.get("clip")):
            yield Difference(step, key.partition(":")[0], "ranks-differ", key, ranks=odd)
