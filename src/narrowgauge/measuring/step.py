"""A step of a training loop as plain numbers: what the hooks measure, what a record holds, and what
the laws read.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.runs.schema import EVAL, STEP, Column, Row, number


@dataclass(frozen=True)
class Step:
    """Hold the numbers of one step. What was not measured is ``None`` or empty, and its laws are silent.
    An empty list of tensors was measured.

    Args:
        step: optimizer steps done.
        loss: of the step, of this rank.
        lr: the largest learning rate of all groups.
        grad_norm: of all gradients before a clip, as the loop or the optimizer gives it.
        val_loss: of an evaluation after the step.
        edq: of an audit: the share of the update that was stored; ``edq_error`` is its standard error.
        skipped: the update was not applied.
        limit: norm to which the loop clips, as it was declared.
        arrived: norm of the gradients that reach the update.
        zero: tensors whose gradient is exactly zero; ``missing`` those without one.
        kept: backward began with the gradient of the step before.
        bad: tensors whose gradient is not finite, in the order of backward; ``bad_values`` counts the
            values of the first.
        bad_weight: a weight of the model that was not finite before the step.
        stalled: tensors whose audit says from here on that updates are lost, with their EDQ.
        stored: of the tensors whose turn it is, the fraction of the update that their formats stored.
        behind: of these, weights that stood still while their masters moved.
        largest: largest change of a sampled weight beyond one rounding; ``largest_in`` is its tensor.
        same_data: the model's inputs have the same bits on all ranks.
        apart, unsummed: tensors whose weights, and whose gradients, differ between ranks, each with
            the rank where one alone has another tensor.
        utilization: share of the device's time, in logs of other programs.
    """

    step: int
    loss: float | None = None
    val_loss: float | None = None
    edq: float | None = None
    edq_error: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    skipped: float | None = None
    loss_scale: float | None = None
    tokens_per_second: float | None = None
    seconds: float | None = None
    utilization: float | None = None
    limit: float | None = None
    arrived: float | None = None
    zero: list[str] | None = None
    missing: list[str] | None = None
    kept: float | None = None
    bad: list[str] | None = None
    bad_values: float | None = None
    bad_weight: str = ""
    stalled: dict[str, float] = field(default_factory=dict)
    stored: dict[str, float] = field(default_factory=dict)
    behind: list[str] | None = None
    largest: float | None = None
    largest_in: str = ""
    same_data: float | None = None
    apart: list[str] | None = None
    unsummed: list[str] | None = None

    def columns(self) -> set[str]:
        """Return the names of what was measured."""
        return {name for name, x in vars(self).items() if x not in (None, "", {})}

    @classmethod
    def of(cls, row: Row) -> Step:
        """Return the step of a row of ``steps.jsonl``, of an evaluation, or of another program's log."""
        values: dict[str, Any] = {}
        for name, value in row.items():
            type_ = _MEASURED.get(name)
            if type_ is float:
                values[name] = number(value)
            elif type_ is not None and isinstance(value, type_):
                values[name] = value
        for name, count in (row.get("counts") or {}).items():
            names = values.get(name)
            if isinstance(names, list):  # its row has the first ones
                rest = range(len(names) + 1, count + 1)
                values[name] = [*names, *map("tensor {}".format, rest)]
        return cls(row["step"], **values)


COLUMNS: dict[str, Column] = STEP | EVAL
"""The columns that laws may read."""
_TYPES = {"text": str, "names": list, "object": dict}
_MEASURED: dict[str, type] = {}
"""The columns of a step that laws may read, and the types of their values."""
for _name in Step.__dataclass_fields__.keys() & (STEP | EVAL).keys() - {"step"}:
    _MEASURED[_name] = _TYPES.get(COLUMNS[_name].type, float)
Tell = Callable[..., None]
"""Takes a reading: its kind, tensors, value, expected and bound, and its step if it is not the current."""
Law = Generator[None, Step, None]
"""Takes steps, in their order, and gives the readings of each."""


@dataclass(frozen=True, eq=False)  # a law is itself alone, and hashed in every step
class Rule:
    """Declare what a law reads.

    Args:
        law: begins the law.
        needs: columns without which it is silent.
        also: further columns that it judges.
        least: steps with these columns before it may speak.
    """

    law: Callable[[Tell], Law]
    needs: frozenset[str]
    also: frozenset[str]
    least: int


def reads(needs: str = "", also: str = "", least: int = 1) -> Callable[[Callable[..., Law]], Rule]:
    """Declare what a law reads, in names between spaces."""
    return lambda law: Rule(law, frozenset(needs.split()), frozenset(also.split()), least)
