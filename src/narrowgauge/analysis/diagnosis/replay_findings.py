"""What replays find: of one step, computed again in several ways, and of two runs, computed again side by side.

:mod:`narrowgauge.trainer.replays` replays the steps, which needs PyTorch; their results, held here, need none.

A *place* is where a step rounds. Each place is widened to float32 alone, with all others as they were: what this removes of the
difference to the step in float32 came from there. The replay, the command, the documentation and the tests read
:data:`REPLAY_VARIANTS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from narrowgauge.runs.finding import Finding
from narrowgauge.spec.tables import Row, Table, name_columns, number_columns, text_columns

HELD = "held:"
"""The prefix of a tensor that the run itself found changed between two steps."""


@dataclass(frozen=True, slots=True)
class ReplayMismatch:
    """Where a replay first differs from the record.

    Args:
        what: the column of ``steps.jsonl``, or the tensor; ``held:NAME``: the run itself found it changed between two steps.
        recorded, replayed: the two values; of a tensor its norms.
    """

    step: int
    what: str
    recorded: Any
    replayed: Any

    @property
    def message(self) -> str:
        if self.what.startswith(HELD):
            name = self.what.removeprefix(HELD)
            return (
                f"the run found {name} changed between steps {self.step - 1} and {self.step}, which no replay repeats"
            )
        values = f"{self.what} is {self.replayed} and was {self.recorded}"
        return f"the replay first differs from the record at step {self.step}: {values}"


# ── the variants of a step, a row per change of its arithmetic ───────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ReplayVariant:
    """One way to compute the step once more.

    Args:
        changed: what differs from the run's own step.
        shows: what its difference to the step in float32 says.
        is_widening: one place is widened; the other rows are what they are compared with.
    """

    name: str
    changed: str
    shows: str
    is_widening: bool = True


_ROWS = (
    ReplayVariant(
        "as-run", "nothing: every rounding of the recipe, with sums in float32",
        "how far the recipe's roundings carry the step", is_widening=False,
    ),
    ReplayVariant(
        "float32", "every rounding is left out, from the same stored weights and moments",
        "the step that all others are compared with", is_widening=False,
    ),
    ReplayVariant("inputs", "linear layers take their inputs uncast, in all their matmuls", "casts of activations"),
    ReplayVariant("weights", "all layers take the stored weights uncast and uncut", "casts of weights, and bits that they hide"),
    ReplayVariant("output-gradients", "linear layers take gradients of their outputs uncast", "casts in the backward pass"),
    ReplayVariant("linear-outputs", "the outputs of linear layers are not rounded", "what a 16-bit result of a matmul loses"),
    ReplayVariant("attention", "rotary embedding, softmax and products of attention are not rounded", "attention in few bits"),
    ReplayVariant("norms", "the outputs of norms are not rounded", "normalization in few bits"),
    ReplayVariant("residual", "the residual stream and products of gates are not rounded", "a residual stream in few bits"),
    ReplayVariant("logits", "the head's logits are not rounded", "a head in few bits"),
    ReplayVariant("own-casts", "casts that the model's own code makes are left out", "a cast that no recipe asked for"),
    ReplayVariant("activation-gradients", "gradients between layers are not rounded", "a backward pass in few bits"),
    ReplayVariant(
        "weight-gradients", "gradients of weights are neither rounded nor added up in the format of their weights",
        "gradients of weights in few bits",
    ),
    ReplayVariant("accumulation", "gradients of micro-batches are summed in float32", "a sum over micro-batches in few bits"),
    ReplayVariant("storage", "the update is applied to float32 weights and moments", "updates that the storage rounds away"),
    ReplayVariant(
        "other-order", "the sequences of the batch in reverse, so that every sum over them has another order",
        "how far the order of sums carries the same step", is_widening=False,
    ),
    ReplayVariant(
        "other-order-float32", "the same in float32", "the part of it that float32 has too", is_widening=False,
    ),
)  # fmt: skip

REPLAY_VARIANTS: dict[str, ReplayVariant] = {row.name: row for row in _ROWS}
WIDENINGS: tuple[str, ...] = tuple(row.name for row in _ROWS if row.is_widening)


def variant_rows() -> list[Row]:
    """The table as plain values.

    Example:
        >>> [row["name"] for row in variant_rows()][:2]
        ['as-run', 'float32']
    """
    return [{"name": row.name, "changed": row.changed, "shows": row.shows} for row in _ROWS]


def variant_table() -> Table:
    return Table(
        (*name_columns(variant="name"), *text_columns(what_is_changed="changed", what_it_shows="shows")), variant_rows()
    )


# ── one step ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

SHARE = 0.5
"""The least share of a difference that a widening removes to be named as its cause."""
ORDER = 4.0
"""The order of sums alone explains a difference up to so many times that of another order."""
EXACT = 1e-5
"""A relative difference to the step in float32 that sums in float32 make by themselves."""
_SHOWN, _LINES = 4, 10


@dataclass(frozen=True, slots=True)
class VariantResult:
    """One computation of the step, compared with the step in float32.

    Args:
        name: a key of :data:`REPLAY_VARIANTS`.
        loss, gradient, update: relative differences to the step in float32; of other orders to the same step in the first order.
            ``None`` where there is none: it is not finite, or the variant does not change it.
        gradient_share, update_share: how much of the run's own squared difference a widening removes, at most 1.
        tensors: the relative differences of the gradients that differ most, by parameter.
        is_finite: whether the loss and all gradients are.
    """

    name: str
    loss: float | None = None
    gradient: float | None = None
    update: float | None = None
    gradient_share: float | None = None
    update_share: float | None = None
    tensors: Mapping[str, float] | None = None
    is_finite: bool = True


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A step of a run, computed again in several ways.

    Args:
        started: the step of the checkpoint that the replay began from; 0 for the initial weights.
        mismatch: where the replay first differs from the record, if it does.
        bad_value: the operation that made the first value that is not finite, or empty.
        unexplained: the share of the step's squared difference to float32 that no place of the table accounts for.
        losses: by parameter, the share of its elements whose update the storage rounded away; those with most.
        lost_share: the same share of all elements.
        edq: the part of the intended update that arrived, over all tensors; 1 is all.
        watched: what the gauges read of the step: by table, tensor and metric.
        checked: the pieces of the step (:mod:`narrowgauge.recompute`) that are the same to rounding, computed again.
        departed: the pieces that are not.
        departures: what departs of these.
        unchecked: by piece, why it could not be computed again.
        is_compared: whether the record holds anything of this step to compare with.
        reasons: why it is not the run's own computation, so that it may differ from the record, in sentences.
    """

    run: str
    step: int
    started: int
    mismatch: ReplayMismatch | None
    loss: float
    grad_norm: float | None
    bad_value: str = ""
    variants: tuple[VariantResult, ...] = ()
    unexplained: float | None = None
    losses: Mapping[str, float] | None = None
    lost_share: float | None = None
    edq: float | None = None
    watched: Mapping[str, Mapping[str, Mapping[str, float | None]]] | None = None
    checked: tuple[str, ...] = ()
    departed: tuple[str, ...] = ()
    departures: tuple[Finding, ...] = ()
    unchecked: Mapping[str, str] | None = None
    is_compared: bool = True
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_the_run(self) -> bool | None:
        """Whether it is the run's own step to the last digit; ``None`` where the record cannot tell."""
        return False if self.mismatch is not None else True if self.is_compared else None

    def variant(self, name: str) -> VariantResult | None:
        """The result of one row of the table, if it was computed."""
        return next((row for row in self.variants if row.name == name), None)

    @property
    def difference(self) -> float | None:
        """The relative difference of the step's gradient to float32's."""
        row = self.variant("as-run")
        return row.gradient if row is not None else None

    @property
    def is_order(self) -> bool:
        """Whether the order of sums alone explains the difference to float32."""
        order = self.variant("other-order-float32")
        moved = order.gradient if order is not None and order.gradient is not None else 0.0
        return self.difference is not None and self.difference <= max(EXACT, ORDER * moved)

    @property
    def cause(self) -> VariantResult | None:
        """The widening that removes most of the gradient's difference to float32, or makes it finite."""
        widened = [row for row in self.variants if row.name in WIDENINGS]
        as_run = self.variant("as-run")
        if as_run is not None and not as_run.is_finite:
            return next((row for row in widened if row.is_finite), None)
        return None if self.is_order else _largest(widened, "gradient_share")

    @property
    def cause_of_update(self) -> VariantResult | None:
        """The widening that removes most of the update's difference to float32."""
        row = self.variant("as-run")
        if row is None or row.update is None or row.update <= EXACT:
            return None
        return _largest([row for row in self.variants if row.name in WIDENINGS], "update_share")

    def share_of(self, name: str) -> float:
        """The share of the gradient's difference that a widening removes; 0 where it was not computed or nothing differs."""
        row = self.variant(name)
        return 0.0 if row is None or self.is_order or row.gradient_share is None else row.gradient_share

    def to_dict(self) -> dict[str, Any]:
        """The replay as values for JSON."""
        return {
            "step": self.step,
            "started": self.started,
            "is_the_run": self.is_the_run,
            "departure": self.mismatch and self.mismatch.message,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "bad_value": self.bad_value,
            "cause": self.cause and self.cause.name,
            "cause_of_update": self.cause_of_update and self.cause_of_update.name,
            "order_explains_it": self.is_order,
            "unexplained_share": self.unexplained,
            "lost_share": self.lost_share,
            "edq": self.edq,
            "losses": dict(self.losses or {}),
            "variants": [_row(each) for each in self.variants],
            "watched": dict(self.watched or {}),
            "checked": list(self.checked),
            "departures": [asdict(each) for each in self.departures],
            "unchecked": dict(self.unchecked or {}),
            "reasons": list(self.reasons),
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """At most ten lines."""
        lines = self.every_line()
        return (
            lines if len(lines) <= _LINES else [*lines[: _LINES - 1], f"  and {len(lines) - _LINES + 1} more (--json)"]
        )

    def every_line(self) -> list[str]:
        """What it has shown, the most important first."""
        since = f"checkpoint {self.started}" if self.started else "the initial weights"
        is_the_run = "the bits of the record" if self.is_compared else "the record holds nothing of it to compare with"
        if self.mismatch is not None:
            is_the_run = self.mismatch.message
        norm = "" if self.grad_norm is None else f", gradient norm {self.grad_norm:.4g}"
        lines = [f"replay of step {self.step} from {since}: loss {self.loss:.6g}{norm}; {is_the_run}"]
        lines += [f"  note: {said}" for said in self.reasons]
        lines += [f"  {self.bad_value}"] if self.bad_value else []
        lines += self._piece_lines()
        lines += self._difference_lines()
        if self.lost_share is not None and self.edq is not None:
            first, share = next(iter((self.losses or {}).items()), ("", 0.0))
            where = f", most in {first} ({share:.0%})" if first and self.lost_share > 0.01 else ""
            lines.append(f"  storage: {self.lost_share:.1%} of the updates rounded away{where}; EDQ {self.edq:.4f}")
        lines += [f"  watched: {said}" for said in [self._worst()] if said]
        return lines + [f"  note: {said}" for said in self.notes]

    def _piece_lines(self) -> list[str]:
        """What departs of the step's pieces, and which do not."""
        lines = [f"  {each.label}: {each.message}" for each in self.departures]
        said = [f"the same to rounding: {', '.join(self.checked)}"] if self.checked else []
        said += [f"not checked: {piece} ({why})" for piece, why in (self.unchecked or {}).items()]
        return [*lines, *([f"  computed again, {'; '.join(said)}"] if said else [])]

    def _worst(self) -> str:
        """The tensors whose casts lose most."""
        tensors = (self.watched or {}).get("tensors", {})
        said = []
        for metric, what in (("overflow", "saturates"), ("underflow", "is rounded to zero")):
            name = max(tensors, key=lambda each: tensors[each].get(metric) or 0.0, default="")
            if name and (share := tensors[name].get(metric) or 0.0) >= 0.001:
                said.append(f"{share:.1%} of {name} {what}")
        return ", ".join(said)

    def _difference_lines(self) -> list[str]:
        as_run = self.variant("as-run")
        if as_run is None:
            return []
        if not as_run.is_finite:
            wide = self.variant("float32")
            if wide is not None and not wide.is_finite:
                return ["  the step is not finite in float32 either: no format is the cause"]
            which = (
                f", and with this alone widened: {self.cause.name}"
                if self.cause
                else ", and no place alone makes it so"
            )
            return [f"  the step is finite in float32{which}"]
        lines = [
            f"  difference to float32: loss {_of(as_run.loss)}, gradient {_of(as_run.gradient)}, update {_of(as_run.update)}"
        ]
        if self.is_order:
            return [*lines, "  the order of sums alone explains the gradient's"]
        for what in ("gradient", "update"):
            ranked = _ranked(self.variants, f"{what}_share")[:_SHOWN]
            said = ", ".join(f"{row.name} {getattr(row, f'{what}_share'):.0%}" for row in ranked)
            lines += [f"  of the {what}'s difference, widening removes: {said}"] if said else []
        cause = self.cause
        if cause is not None:
            tensor = next(iter(as_run.tensors or {}), "")
            lines.append(f"  mostly: {REPLAY_VARIANTS[cause.name].shows}{f'; most in {tensor}' if tensor else ''}")
        if self.unexplained is not None and self.unexplained > SHARE:
            lines.append(
                f"  {self.unexplained:.0%} of it comes from no place of the table: the kernels, or what the code does itself"
            )
        return lines


def _ranked(rows: Sequence[VariantResult], share: str) -> list[VariantResult]:
    """Widenings that remove a tenth of the difference or more, the largest first."""
    known = [row for row in rows if (getattr(row, share) or 0.0) >= 0.1]
    return sorted(known, key=lambda row: -getattr(row, share))


def _largest(rows: Sequence[VariantResult], share: str) -> VariantResult | None:
    first = next(iter(_ranked(rows, share)), None)
    return first if first is not None and getattr(first, share) >= SHARE else None


def _of(value: float | None) -> str:
    return "none" if value is None or not math.isfinite(value) else f"{value:.2e}"


def _row(row: VariantResult) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__slots__} | {"tensors": dict(row.tensors or {})}


RESULT_COLUMNS = (
    *text_columns(variant="name", what_is_changed="changed"),
    *number_columns(
        loss="loss",
        gradient="gradient",
        removes_of_it="gradient_share",
        update="update",
        removes_of_that="update_share",
    ),
    *text_columns(gradient_differs_most_in="tensor"),
)


def variant_results(variants: Sequence[VariantResult]) -> list[Row]:
    """Variants as a table: relative differences, and the shares of the run's own that a widening removes."""
    return [
        {
            "name": row.name,
            "changed": REPLAY_VARIANTS[row.name].changed,
            **{
                what: _of(getattr(row, what)) if row.is_finite else "not finite"
                for what in ("loss", "gradient", "update")
            },
            "gradient_share": "" if row.gradient_share is None else f"{row.gradient_share:.0%}",
            "update_share": "" if row.update_share is None else f"{row.update_share:.0%}",
            "tensor": next(iter(row.tensors or {}), ""),
        }
        for row in variants
    ]


# ── two runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

MARGIN = 4.0
"""How many times the largest of a few measured changes still counts as rounding: the next one may be larger."""


@dataclass(frozen=True, slots=True)
class MeasuredEnvelope:
    """How far one-ulp changes of all weights carry one tensor (``KIND:NAME``) in one step.

    ``changes`` are those of its norm, relative, one for each replay.
    """

    step: int
    tensor: str
    changes: tuple[float, ...]

    @property
    def limit(self) -> float:
        """The relative difference up to which rounding explains it."""
        return MARGIN * max(self.changes, default=0.0)

    def holds(self, relative: float) -> bool:
        """Whether a relative difference lies inside.

        Example:
            >>> MeasuredEnvelope(3, "grad:w", (1e-4, 2e-4)).holds(5e-4), MeasuredEnvelope(3, "grad:w", (1e-4,)).holds(5e-4)
            (True, False)
        """
        return relative <= self.limit

    def __str__(self) -> str:
        times = "one replay" if len(self.changes) == 1 else f"{len(self.changes)} replays"
        return f"in {times} with weights changed by one ulp of float32 it moved by at most {max(self.changes):.2g}"


@dataclass(frozen=True, slots=True)
class ReplayedPair:
    """Two runs, computed again from the last state that they have in common.

    Args:
        since: the step of that state.
        repeats: whether each replay has the bits of its record; ``None`` where ranks summed in another order than one process.
        agree: the replays are equal to each other in every step, so that the runs do not differ by what they were given.
        said: where a replay differs from its record, a sentence each.
        persists: whether a run that cannot be repeated differs from its replay again after a later checkpoint, if it has one.
        envelope: of the tensor in which the runs first differ, if it was measured.
    """

    since: int
    repeats: tuple[bool | None, bool | None]
    agree: bool
    said: tuple[str, ...] = ()
    persists: bool | None = None
    envelope: MeasuredEnvelope | None = None

    @property
    def excludes_settings(self) -> bool:
        """Whether no setting can be why: computed again as they were given, the two runs are equal."""
        return self.agree and False in self.repeats

    def sentences(self) -> list[str]:
        found = []
        if self.repeats == (True, True):
            found.append(f"both were computed again from step {self.since} on, with the bits of their records")
        found += self.said
        if self.excludes_settings:
            found.append("computed again here, both give the same: settings and data do not explain the difference")
        return found

    def to_dict(self) -> dict[str, Any]:
        envelope = self.envelope
        return {
            "since": self.since,
            "repeats": list(self.repeats),
            "agree": self.agree,
            "persists": self.persists,
            "envelope": envelope
            and {"tensor": envelope.tensor, "changes": list(envelope.changes), "limit": envelope.limit},
        }
