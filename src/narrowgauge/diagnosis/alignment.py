"""Two runs side by side: what they were given, and the first step and tensor in which they part.

Numbers of a record are written with all their digits, so two runs that computed the same have the same rows. The first row that
differs names the step; its first column that differs names the *stage* of the step: the learning rate, the loss, the gradient
norm, the skip. Where both runs recorded fingerprints (``--fingerprints-every``), the first entry that differs names the tensor,
since entries stand in the order in which a step makes them. Rows are aligned by step; where the tokens of a step differ, no
step of one is a step of the other, and the difference of settings is the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise
from statistics import median
from typing import Any

from narrowgauge.diagnosis.envelope import is_beyond, is_rounding, roundoff
from narrowgauge.runs import arithmetic
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row, short

STAGES: dict[str, str] = {
    "start": "the weights before the first step",
    "held": "a weight that changed between two steps",
    "tokens": "the tokens of the step",
    "output": "the forward pass",
    "loss": "the loss",
    "grad": "the gradients",
    "rate": "the learning rate",
    "norm": "the gradient norm",
    "skip": "whether the update was applied",
    "update": "the update of weights and moments",
}
"""The stages of a step in the order in which they come, each with what differs there."""

KINDS: dict[str, str] = {
    "held": "held", "tokens": "tokens", "output": "output", "grad": "grad", "weight": "update", "exp_avg": "update",
    "exp_avg_sq": "update",
}  # fmt: skip
"""The stage of each kind of fingerprint."""

COLUMNS: dict[str, str] = {
    "batch_crc": "tokens", "loss": "loss", "lr": "rate", "grad_norm": "norm", "loss_scale": "skip", "skipped": "skip",
}  # fmt: skip
"""The columns of a step's row that are compared, in the order of the stages; times and bytes differ in any two runs."""

NOT_COMPARED = frozenset({
    "out", "stop_after", "eval_every", "eval_batches", "checkpoint_every", "keep_checkpoints", "log_every", "tensorboard",
    "log_to", "gauges_every", "audit_every", "verify_every", "fingerprints_every", "max_rollbacks",
})  # fmt: skip
"""Settings that change no bit of the training."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that the two runs were not given alike.

    Args:
        name: of the setting, the version, the property of the machine.
        values: of the two runs, as text.
        table: of ``run.toml`` that holds it.
    """

    name: str
    values: tuple[str, str]
    table: str = "config"

    def __str__(self) -> str:
        return f"{self.name} {self.values[0]} and {self.values[1]}"


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two runs part.

    Args:
        step: the first step that differs.
        stage: a key of :data:`STAGES`, the first of the step that is known to differ.
        tensor: the first fingerprint that differs, as ``KIND:NAME``; empty where none was recorded at that step.
        values: the column's two values, or the tensor's two norms.
        numel: the tensor's elements; of a column, the tokens of the step; 0 where nothing is rounded.
        others: how many more fingerprints of the same kind differ in that step, and how many there are.
        same_after: entries of the same step, after the first that differs, that do not differ.
        equal_until: the last step whose fingerprints are all equal; ``None`` where none are.
    """

    step: int
    stage: str
    tensor: str = ""
    values: tuple[float, float] = (math.nan, math.nan)
    numel: int = 0
    others: tuple[int, int] = (0, 0)
    same_after: int = 0
    equal_until: int | None = None

    @property
    def relative(self) -> float:
        """The difference of the two values over the larger; NaN where they are not known."""
        return relative_difference(*self.values)


def relative_difference(one: float, other: float) -> float:
    """The difference of two values over the larger magnitude; NaN where one is.

    Example:
        >>> relative_difference(2.0, 2.5), relative_difference(0.0, 0.0)
        (0.2, 0.0)
    """
    largest = max(abs(one), abs(other))
    return abs(one - other) / largest if largest else 0.0


@dataclass(frozen=True, slots=True)
class Alignment:
    """Two runs, aligned.

    Args:
        differences: what they were not given alike.
        parting: where they part; ``None`` where all that both recorded is equal.
        beyond: where they part is only rounding: the first tensor that later differs by more than rounding has grown to.
        rounded: where they part first, by rounding, if ``parting`` is a later place beyond it.
        roundoff: unit roundoff of the tensors between two matmuls.
        num_common: steps that both recorded.
        is_complete: both are finished, and the hashes of their final weights are known and equal.
        has_prints: both recorded fingerprints, of at least one common step.
        notes: what the records do not hold.
    """

    differences: tuple[Difference, ...]
    parting: Parting | None
    num_common: int
    beyond: Parting | None = None
    rounded: Parting | None = None
    roundoff: float = 0.0
    is_complete: bool = False
    has_prints: bool = False
    notes: tuple[str, ...] = field(default_factory=tuple)


def align(one: Run, other: Run) -> Alignment:
    """Align two runs by step.

    Args:
        one, other: their records, finished or not.
    Returns:
        What differs first.
    """
    rows = [{int(row["step"]): row for row in run.steps} for run in (one, other)]
    common = sorted(rows[0].keys() & rows[1].keys())
    prints = [_by_step(run) for run in (one, other)]
    u = roundoff(one, other)
    first = min([*_columns(rows, common), *islice(_prints(prints), 1)], key=_order, default=None)
    small = first is not None and is_rounding(first.relative, first.numel, u)
    ends = [(run.summary or {}).get("weights_fingerprint") for run in (one, other)]
    if first is None and None not in ends and ends[0] != ends[1]:
        first = Parting(common[-1] if common else 0, "update")
    return Alignment(
        differences=tuple(differences(one.run, other.run)),
        parting=first,
        num_common=len(common),
        beyond=next(_beyond(prints, u), None) if small else None,
        roundoff=u,
        is_complete=None not in ends and ends[0] == ends[1],
        has_prints=bool(prints[0].keys() & prints[1].keys()),
        notes=tuple(_notes(one, other, common)),
    )


def differences(one: Row, other: Row) -> Iterator[Difference]:
    """What two runs were not given alike, by their ``run.toml``: settings, data, versions, machine and its arithmetic.

    Args:
        one, other: the two tables; what one of them lacks is not compared.
    """
    same = {
        name for table, names in _PLACES.items() if one.get(table) and one[table] == other.get(table) for name in names
    }
    for table in ("config", "data", "versions", "machine"):
        first, second = (each.get(table) for each in (one, other))
        if isinstance(first, dict) and isinstance(second, dict):
            found = _of_table(table, first, second)
            yield from (each for each in found if not (table == "config" and each.name in same and _are_places(each)))
    parted = arithmetic.differences(one, other)
    for each in parted:
        yield Difference(
            each.probe.name, (_text(each.one), _text(each.other)), f"arithmetic.{arithmetic.origin(parted)}"
        )


_PLACES = {"data": ("data", "tokenizer"), "model": ("model",)}
"""By table of ``run.toml``: settings that may be folders, whose content the table describes."""


def _are_places(difference: Difference) -> bool:
    """Whether both values are paths: the same content in another folder is no difference."""
    return all("/" in value or "\\" in value for value in difference.values)


def _of_table(table: str, one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> Iterator[Difference]:
    names = [name for name in one if name in other]
    if table == "machine":  # a run of one process has no count of ranks
        names = [*names, *({"ranks"} & (one.keys() ^ other.keys()))]
    for name in names:
        if table == "config" and name in NOT_COMPARED:
            continue
        first, second = one.get(name, 1), other.get(name, 1)
        if isinstance(first, dict) and isinstance(second, dict) and name != "recipe":
            yield from _of_table(table, first, second, f"{prefix}{name}.")
        elif first != second:
            yield Difference(f"{prefix}{name}", (_text(first), _text(second)), table)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else short(value)


def _columns(rows: list[dict[int, Row]], common: list[int]) -> Iterator[Parting]:
    """The first step whose rows differ, by its first column that does."""
    for step in common:
        first, second = rows[0][step], rows[1][step]
        for column, stage in COLUMNS.items():
            values = first.get(column), second.get(column)
            if values[0] is not None and values[1] is not None and not _same(*values):
                tokens = int((first.get("tokens") or 0) // max(1, step))
                known = (math.nan, math.nan) if stage == "tokens" else (float(values[0]), float(values[1]))
                yield Parting(step, stage, values=known, numel=tokens)
                return


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, str) and isinstance(other, str) and len(one) != len(other):
        return True  # checksums of two versions say nothing of each other
    return bool(one == other) or (one != one and other != other)


def _by_step(run: Run) -> dict[int, Row]:
    """The first row of fingerprints of each step; a resume writes its checkpoint's once more."""
    found: dict[int, Row] = {}
    for row in run.fingerprints:
        found.setdefault(int(row["step"]), row["tensors"])
    return found


def _prints(prints: list[dict[int, Row]]) -> Iterator[Parting]:
    """Each recorded step whose fingerprints differ, by the first entry that does."""
    equal: int | None = None
    for step in sorted(prints[0].keys() & prints[1].keys()):
        first, second = prints[0][step], prints[1][step]
        if held := [
            key for key in {**first, **second} if key.startswith("held:") and (key in first) != (key in second)
        ]:
            entry = (first if held[0] in first else second)[held[0]]
            others = len(held) - 1, len(held)
            yield Parting(step, "held", held[0], numel=int(entry[2]), others=others, equal_until=equal)
            continue
        differing = [key for key in first if key in second and first[key][0] != second[key][0]]
        if differing:
            yield _parting(step, differing[0], first, second, equal)
        else:
            equal = step


def _parting(step: int, key: str, first: Row, second: Row, equal: int | None) -> Parting:
    """The parting at one entry of a step."""
    shared = [name for name in first if name in second]
    differing = {name for name in shared if first[name][0] != second[name][0]}
    kind = key.partition(":")[0]
    alike = [name for name in shared if name.startswith(f"{kind}:")]
    return Parting(
        step,
        "start" if step == 0 else KINDS[kind],
        key,
        (first[key][1], second[key][1]),
        0 if kind == "tokens" else int(first[key][2]),  # whole numbers are not rounded
        (sum(name in differing for name in alike) - 1, len(alike)),
        sum(name not in differing for name in shared[shared.index(key) + 1 :]),
        equal,
    )


def _beyond(prints: list[dict[int, Row]], u: float) -> Iterator[Parting]:
    """The tensors that suddenly differ by more than rounding, where the step before was recorded too, by step."""
    steps = sorted(prints[0].keys() & prints[1].keys())
    for before, step in pairwise(steps):
        if step != before + 1:
            continue
        level = {kind: median(found.values()) for kind, found in _relatives(prints, before).items()}
        for kind, found in _relatives(prints, step).items():
            for key, relative in found.items():
                if is_beyond(relative, int(prints[0][step][key][2]), u, level.get(kind, 0.0)):
                    yield _parting(step, key, prints[0][step], prints[1][step], None)


def _relatives(prints: list[dict[int, Row]], step: int) -> dict[str, dict[str, float]]:
    """By kind, how much the norm of each tensor differs in a step; tokens have none to compare."""
    first, second = prints[0][step], prints[1][step]
    found: dict[str, dict[str, float]] = {}
    for key, entry in first.items():
        if key in second and not key.startswith("tokens:"):
            found.setdefault(key.partition(":")[0], {})[key] = relative_difference(entry[1], second[key][1])
    return found


def _order(parting: Parting) -> tuple[int, int, bool]:
    """The earlier step comes first, then the earlier stage; of two such, the one that names a tensor."""
    return parting.step, list(STAGES).index(parting.stage), not parting.tensor


def _notes(one: Run, other: Run, common: list[int]) -> Iterator[str]:
    lengths = [len(run.steps) for run in (one, other)]
    if not common:
        yield "the two records have no step in common"
    elif lengths[0] != lengths[1]:
        yield f"they recorded {lengths[0]} and {lengths[1]} steps, of which {len(common)} are common"
    tokens = [{row.get("tokens") for row in run.steps[:1]} for run in (one, other)]
    if common and tokens[0] != tokens[1]:
        yield "a step of one has other tokens than a step of the other: steps are not comparable one by one"
