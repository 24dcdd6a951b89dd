"""Two runs side by side: the settings, data and software that differ, and the first step and tensor in which they differ.

Numbers of a record are written with all their digits, so two runs that computed the same have the same rows. The first row that
differs names the step; its first column that differs names the *stage* of the step: the learning rate, the loss, the gradient
norm, the skip. Where both runs recorded fingerprints (``--fingerprints-every``), the first entry that differs names the tensor.
Rows are aligned by step. Where the tokens of a step differ, no step of one is a step of the other: the difference of settings is
then the answer. Rows count the tokens seen, so wherever both have seen equally many, the mean losses since the last such place
are compared too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

from narrowgauge.analysis.diagnosis.evidence import recorded_rule
from narrowgauge.analysis.diagnosis.loop_terms import loop_of
from narrowgauge.analysis.diagnosis.pairs.all_rows import (
    Drift,
    GradientFactor,
    drift_since,
    factor_of_norms,
    factor_of_tensors,
)
from narrowgauge.analysis.diagnosis.pairs.first_difference import (
    COLUMNS,
    STAGES,
    Fingerprints,
    FirstDifference,
    beyond_rounding,
    by_step,
    common_steps,
    differing_steps,
    is_rounding,
    rounding_of,
    roundoff,
)
from narrowgauge.analysis.diagnosis.replay_findings import ReplayedPair
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.runs import arithmetic
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row, number, short
from narrowgauge.spec.notation import parse_value

TABLES: dict[str, str] = {
    "config": "settings", "data": "data", "model": "model", "optimizer": "optimizer", "versions": "versions",
    "machine": "machine",
}  # fmt: skip
"""The tables of ``run.toml`` that are compared, in words."""

NOT_COMPARED = frozenset({
    "out", "stop_after", "eval_every", "eval_batches", "checkpoint_every", "keep_checkpoints", "log_every", "tensorboard",
    "log_to", "gauges_every", "audit_every", "verify_every", "fingerprints_every", "max_rollbacks",
})  # fmt: skip
"""Settings that change no bit of the training."""


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """A setting, a version, or a property of the data or the machine in which two runs differ.

    ``values`` are those of the two runs, as text; ``table`` is that of ``run.toml`` which holds it.
    """

    name: str
    values: tuple[str, str]
    table: str = "config"

    def __str__(self) -> str:
        return f"{self.name} {self.values[0]} and {self.values[1]}"


def settings_diff(one: Row, other: Row) -> Iterator[SettingDifference]:
    """All of two ``run.toml`` that differs: the tables of :data:`TABLES` and the arithmetic; what one lacks is not compared."""
    same = {
        name for table, names in _PLACES.items() if one.get(table) and one[table] == other.get(table) for name in names
    }
    named = {name for each in (one, other) for name in (each.get("config") or {})}
    for table in TABLES:
        first, second = (each.get(table) for each in (one, other))
        if isinstance(first, dict) and isinstance(second, dict):
            found = _of_table(table, first, second)
            if table == "optimizer":  # its groups repeat what the settings say
                found = (each for each in found if each.name not in named)
            yield from (each for each in found if not (table == "config" and each.name in same and _are_places(each)))
    parted = arithmetic.differences(one, other)
    for each in parted:
        yield SettingDifference(
            each.probe.name, (_text(each.one), _text(each.other)), f"arithmetic.{arithmetic.origin(parted)}"
        )


_PLACES = {"data": ("data", "tokenizer"), "model": ("model",)}
"""By table of ``run.toml``: settings that may be folders, whose content the table describes."""


def _are_places(difference: SettingDifference) -> bool:
    """Whether both values are paths: the same content in another folder does not count as a difference."""
    return all("/" in value or "\\" in value for value in difference.values)


def _of_table(
    table: str, one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = ""
) -> Iterator[SettingDifference]:
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
            parts = _reductions(first, second) if name == "recipe" else None
            yield SettingDifference(f"{prefix}{name}", (_text(first), _text(second)), table) if parts is None else parts


def _reductions(one: Any, other: Any) -> SettingDifference | None:
    """The difference of two recipes that differ only in how gradients are summed; ``None`` of others."""
    try:
        first, second = parse_value(one), parse_value(other)
    except NarrowgaugeError:
        return None
    if replace(first, reduction=second.reduction) != second:
        return None
    return SettingDifference("recipe.reduction", (first.reduction.name, second.reduction.name))


def tables_of_both(one: Row, other: Row) -> tuple[str, ...]:
    """The tables that both ``run.toml`` have, in words: only of these can be said that they are the same."""
    return tuple(words for table, words in TABLES.items() if one.get(table) and other.get(table))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else short(value)


# ── losses at equal tokens ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class EqualTokens:
    """The losses of two runs between the places at which both have seen equally many tokens.

    Args:
        steps: of each run, those that end at these places.
        tokens: that both have seen there.
        losses: for each place, the mean loss in nats per token of both runs since the place before.
    """

    steps: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]
    losses: tuple[tuple[float, float], ...]

    @property
    def differences(self) -> list[float]:
        """The loss of the second run minus that of the first, for each place."""
        return [other - one for one, other in self.losses if math.isfinite(one) and math.isfinite(other)]

    @property
    def mean(self) -> float:
        """The mean of :attr:`differences`; NaN of none."""
        return _mean(self.differences)

    @property
    def error(self) -> float:
        """The standard error of :attr:`mean`, as if places were independent; NaN below two."""
        found = self.differences
        if len(found) < 2:
            return math.nan
        mean = _mean(found)
        return math.sqrt(sum((each - mean) ** 2 for each in found) / (len(found) - 1) / len(found))

    def __str__(self) -> str:
        first, last = self.steps[0], self.steps[-1]
        where = f"steps {first[0]} and {first[1]} to steps {last[0]} and {last[1]}"
        places = f"{len(self.steps)} place{'s' if len(self.steps) != 1 else ''}"
        said = f"at equal tokens ({places}, {where}, {self.tokens[-1]:,} tokens)"
        if not self.differences:
            return f"{said} no loss is recorded of both"
        spread = "" if math.isnan(self.error) else f" ± {self.error:.2g}"
        return f"{said} the loss of the second minus that of the first is {self.mean:+.2g}{spread} nats per token"

    def to_dict(self) -> dict[str, Any]:
        return {
            "places": len(self.steps),
            "last_steps": list(self.steps[-1]),
            "last_tokens": self.tokens[-1],
            "loss_difference": None if math.isnan(self.mean) else self.mean,
            "standard_error": None if math.isnan(self.error) else self.error,
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def have_other_tokens(one: Run, other: Run) -> bool:
    """Whether the same step of two runs has seen different numbers of tokens."""
    counts = [{int(row["step"]): number(row.get("tokens")) for row in run.steps} for run in (one, other)]
    both = [(counts[0][step], counts[1][step]) for step in counts[0].keys() & counts[1].keys()]
    return any(mine is not None and its is not None and mine != its for mine, its in both)


def at_equal_tokens(one: Run, other: Run) -> EqualTokens | None:
    """Compare two runs at equal tokens; ``None`` where they have never seen equally many."""
    seen = [
        {int(count): place for place, count in enumerate(_tokens(run)) if count is not None} for run in (one, other)
    ]
    common = sorted(seen[0].keys() & seen[1].keys())
    common = [count for count in common if count > 0]
    if not common:
        return None
    steps = tuple((int(one.steps[seen[0][n]]["step"]), int(other.steps[seen[1][n]]["step"])) for n in common)
    means = [list(_means(run.steps, [mine[n] for n in common])) for run, mine in zip((one, other), seen, strict=True)]
    return EqualTokens(steps, tuple(common), tuple(zip(*means, strict=True)))


def _tokens(run: Run) -> Iterator[float | None]:
    counts = (number(row.get("tokens")) for row in run.steps)
    return (count if count is not None and math.isfinite(count) else None for count in counts)


def _means(rows: Sequence[Row], ends: Sequence[int]) -> Iterator[float]:
    """The mean loss of the rows up to each end, since the end before; rows of one run have equally many tokens."""
    for start, end in pairwise([-1, *ends]):
        losses = [number(row.get("loss")) for row in rows[start + 1 : end + 1]]
        known = [loss for loss in losses if loss is not None]
        yield _mean(known)


# ── the alignment ────────────────────────────────────────────────────────────────────────────────────────────────────────


_OF_TOKENS = ("loss", "norm", "evaluation")
"""Stages whose values are means over tokens, of which a record need not say the number."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """Two runs, aligned.

    Args:
        first_difference: where they first differ; ``None`` where all that both recorded is equal.
        beyond_rounding: where the first difference is only rounding: the first later tensor that differs by more than that can
            have grown to.
        rounded: the first difference, by rounding, if ``first_difference`` is a later place beyond it.
        roundoff: unit roundoff of the tensors between two matmuls.
        is_complete: both are finished, and the hashes of their final weights are known and equal.
        has_fingerprints: both recorded fingerprints, of at least one common step.
        at_tokens: the losses at equal tokens, where the same steps have seen different numbers of tokens.
        replayed: what replays of both runs found; ``None`` without any.
        drift: how the losses drift apart from the first difference on, where they do by more than rounding.
        factor: one factor between all gradients, where there is one.
        is_exact: the first difference is an elementwise update of values that are equal in both: no sum came between.
        equal_outputs: of a loss that differs, how many outputs of its step were hashed, if all of them are equal; 0 otherwise.
        is_hashed: both recorded the fingerprints of the step in which they first differ.
        tables: the tables that both records have, in words.
        are_trainers: the trainer made both runs, so that one rate and one decay hold for all matrices.
    """

    differences: tuple[SettingDifference, ...]
    first_difference: FirstDifference | None
    num_common: int
    beyond_rounding: FirstDifference | None = None
    rounded: FirstDifference | None = None
    roundoff: float = 0.0
    is_complete: bool = False
    has_fingerprints: bool = False
    at_tokens: EqualTokens | None = None
    replayed: ReplayedPair | None = None
    drift: Drift | None = None
    factor: GradientFactor | None = None
    is_exact: bool = False
    equal_outputs: int = 0
    is_hashed: bool = False
    tables: tuple[str, ...] = ()
    are_trainers: bool = True
    notes: tuple[str, ...] = ()

    def is_rounding(self, difference: FirstDifference) -> bool | None:
        """Whether rounding explains a difference, by the measured envelope where there is one; ``None`` without a size.

        What drifts apart in one direction afterwards began for another reason, however small it was, and one factor over all
        gradients is none of rounding either.
        """
        is_scaled = self.factor is not None and difference.stage in ("grad", "norm")
        if self.drift is not None or is_scaled or difference.only_in is not None:
            return False
        envelope = self.replayed.envelope if self.replayed is not None else None
        if envelope is not None and (envelope.step, envelope.tensor) == (difference.step, difference.tensor):
            return None if math.isnan(difference.relative) else envelope.holds(difference.relative)
        if difference.numel <= 0 and difference.stage in _OF_TOKENS:  # it is one token at least
            return False if difference.relative > rounding_of(1, self.roundoff) else None
        return is_rounding(difference.relative, difference.numel, self.roundoff)


def align(one: Run, other: Run, replayed: ReplayedPair | None = None) -> Alignment:
    """Align two runs by step, finished or not; ``replayed`` is what replays of both found."""
    rows = [{int(row["step"]): row for row in run.steps} for run in (one, other)]
    common = sorted(rows[0].keys() & rows[1].keys())
    fingerprints = by_step(one), by_step(other)
    u = roundoff(one, other)
    first = min(
        [
            *_columns(rows, common, fingerprints),
            *islice(differing_steps(fingerprints), 1),
            *_stopped(one, other),
            *_evaluations(one, other, rows, fingerprints),
        ],
        key=_order,
        default=None,
    )
    drift = drift_since(rows, first.step) if first is not None else None
    drift = drift if drift is not None and drift.is_beyond_rounding else None
    small = first is not None and is_rounding(first.relative, first.numel, u)
    ends = [(run.summary or {}).get("weights_fingerprint") for run in (one, other)]
    if first is None and None not in ends and ends[0] != ends[1]:
        first = FirstDifference(common[-1] if common else 0, "update")
    has_other = have_other_tokens(one, other)
    at_tokens = at_equal_tokens(one, other) if has_other else None
    return Alignment(
        differences=tuple(settings_diff(one.run, other.run)),
        first_difference=first,
        num_common=len(common),
        beyond_rounding=next(beyond_rounding(fingerprints, u), None) if small else None,
        roundoff=u,
        is_complete=None not in ends and ends[0] == ends[1],
        has_fingerprints=bool(common_steps(fingerprints)),
        at_tokens=at_tokens,
        replayed=replayed,
        drift=drift,
        factor=_factor_at(first, fingerprints, rows, (one, other)),
        is_exact=first is not None and _is_exact(first, fingerprints, (one, other)),
        equal_outputs=0 if first is None else _equal_outputs(first, fingerprints),
        is_hashed=first is not None and all(first.step in each for each in fingerprints),
        tables=tables_of_both(one.run, other.run),
        are_trainers=all(loop_of(run) == "trainer" for run in (one, other)),
        notes=tuple(_notes(one, other, common, has_other, at_tokens)),
    )


def _tokens_of(step: int, rows: list[dict[int, Row]], fingerprints: Fingerprints) -> int:
    """The tokens of a step, by the count of its row, or else by the fingerprint of its batch; 0 where neither tells."""
    if counted := int((rows[0].get(step, {}).get("tokens") or 0) // max(1, step)):
        return counted
    tensors = fingerprints[0].get(step, {}).get("tensors", {})
    return sum(int(entry[2]) for key, entry in tensors.items() if key.startswith("tokens:"))


def _equal_outputs(first: FirstDifference, fingerprints: Fingerprints) -> int:
    if first.stage != "loss" or any(first.step not in each for each in fingerprints):
        return 0
    outputs = _hashes(fingerprints, first.step, "output")
    return len(outputs[0]) if outputs[0] == outputs[1] else 0


def _hashes(fingerprints: Fingerprints, step: int, kind: str) -> list[dict[str, Any]]:
    """Of both runs, the hashes of one kind of tensors in a step that both recorded."""
    tensors = [each[step]["tensors"] for each in fingerprints]
    return [{key: entry[0] for key, entry in each.items() if key.startswith(f"{kind}:")} for each in tensors]


def _columns(rows: list[dict[int, Row]], common: list[int], fingerprints: Fingerprints) -> Iterator[FirstDifference]:
    """The first step whose rows differ, by its first column that does."""
    for step in common:
        first, second = rows[0][step], rows[1][step]
        for column, stage in COLUMNS.items():
            values = first.get(column), second.get(column)
            if values[0] is not None and values[1] is not None and not same_value(*values):
                tokens = _tokens_of(step, rows, fingerprints)
                known = (math.nan, math.nan) if stage == "tokens" else (float(values[0]), float(values[1]))
                yield FirstDifference(step, stage, values=known, numel=tokens)
                return


def _evaluations(
    one: Run, other: Run, rows: list[dict[int, Row]], fingerprints: Fingerprints
) -> Iterator[FirstDifference]:
    """The first evaluation that differs: of other weights, where the next step differs too; else of another evaluation."""
    losses = [{int(row["step"]): number(row.get("val_loss")) for row in run.evals} for run in (one, other)]
    for step in sorted(losses[0].keys() & losses[1].keys()):
        values = losses[0][step], losses[1][step]
        if values[0] is None or values[1] is None or same_value(*values):
            continue
        later = next((each for each in sorted(rows[0].keys() & rows[1].keys()) if each > step), None)
        goes_on = later is not None and next(_columns(rows, [later], fingerprints), None) is not None
        tokens = _tokens_of(step, rows, fingerprints)
        yield FirstDifference(step, "update" if goes_on else "evaluation", values=(values[0], values[1]), numel=tokens)
        return


def _factor_at(
    first: FirstDifference | None, fingerprints: Fingerprints, rows: list[dict[int, Row]], runs: tuple[Run, Run]
) -> GradientFactor | None:
    """One factor over all gradients of the step in which the runs first differ, or else over the norms of all rows."""
    if first is None:
        return None
    if first.stage == "grad" and first.step in fingerprints[0] and first.step in fingerprints[1]:
        return factor_of_tensors(fingerprints[0][first.step], fingerprints[1][first.step], runs)
    return factor_of_norms(rows, runs)


def _is_exact(first: FirstDifference, fingerprints: Fingerprints, runs: tuple[Run, Run]) -> bool:
    """Whether an elementwise update took equal values: all gradients of the step were hashed and are equal."""
    if first.stage != "update" or not first.tensor or first.equal_until != first.step - 1:
        return False
    gradients = _hashes(fingerprints, first.step, "grad")
    return all(map(_is_elementwise, runs)) and bool(gradients[0]) and gradients[0] == gradients[1]


_ELEMENTWISE = frozenset({"Adagrad", "RMSprop", "NAdam", "RAdam"})
"""Classes of torch.optim beside those of our rules whose update of an element reads nothing of others."""


def _is_elementwise(run: Run) -> bool:
    """Whether the update of an element depends on that element alone, as far as the record says."""
    rule, optimizer = recorded_rule(run), run.run.get("optimizer")
    if rule is None:
        return isinstance(optimizer, dict) and optimizer.get("class") in _ELEMENTWISE
    return not rule.is_matrix


def _stopped(one: Run, other: Run) -> Iterator[FirstDifference]:
    """Where one of the two stopped because its ranks found damage that the record does not show yet."""
    found = [next((event for event in run.events if event.get("kind") == "corruption"), None) for run in (one, other)]
    if (found[0] is None) == (found[1] is None):
        return
    event = found[0] or found[1] or {}
    message, tensor, step = str(event.get("message", "")), str(event.get("tensor") or ""), int(event.get("step") or 0)
    state, _, name = tensor.rpartition(" of ")
    rank = event.get("rank")
    ranks = (rank,) if isinstance(rank, int) else ()
    check = event.get("detector")
    if check == "rest":
        yield FirstDifference(
            step + 1, "held", f"held:{state}:{name}" if state else f"held:{tensor}", ranks=ranks, said=message
        )
    elif check == "recomputation":
        yield FirstDifference(step + 1, "grad", f"grad:{tensor}", ranks=ranks, said=message)
    elif check == "replicas":
        yield FirstDifference(step, "update", ranks=ranks, said=message)


def same_value(one: Any, other: Any) -> bool:
    """Whether two recorded values are equal; NaN equals NaN, and checksums of two lengths, from two versions, count as equal."""
    if isinstance(one, str) and isinstance(other, str) and len(one) != len(other):
        return True  # checksums of two versions cannot be compared
    return bool(one == other) or (one != one and other != other)


def _order(difference: FirstDifference) -> tuple[int, int, bool]:
    """The key of the earlier step, then of the earlier stage, then of the difference that names a tensor."""
    return difference.step, list(STAGES).index(difference.stage), not difference.tensor


def _notes(one: Run, other: Run, common: list[int], has_other: bool, at_tokens: EqualTokens | None) -> Iterator[str]:
    lengths = [len(run.steps) for run in (one, other)]
    if not common:
        yield "the two records have no step in common"
    elif lengths[0] != lengths[1]:
        yield f"they recorded {lengths[0]} and {lengths[1]} steps, of which {len(common)} are common"
    if has_other:
        compared = (
            "nowhere have both seen equally many" if at_tokens is None else "they are compared at equal tokens too"
        )
        yield f"a step of one has not as many tokens as a step of the other: {compared}"
