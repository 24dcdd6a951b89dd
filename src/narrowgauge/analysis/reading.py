"""A reading: one measured number of a run, its place, and its bound.

Events, counts and differences of two runs all become readings. They share one order, one
table and one JSON format.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from narrowgauge.errors import RecipeError
from narrowgauge.runs.finding import told
from narrowgauge.spec.tables import Table, name_columns, number_columns, text_columns

SEVERITIES = ("error", "warning", "note")
"""How serious a reading is.

Error: training computes something else than it says, or stands still. Warning: something is lost
that need not be. Note: nothing is lost, and it is worth a line.
"""
STAGES = (
    "start", "between steps", "data", "forward", "loss", "gradient", "clip", "optimizer step", "storage", "evaluation",
)  # fmt: skip
"""The stages of a step, in order.

At the start there are the weights and settings before the first step. ``optimizer step`` is the
update, or that it was left out. ``storage`` is what the formats of weights and states kept of the
update.
"""
STAGE_OF: dict[str, str] = {
    "held": "between steps", "tokens": "data", "batch_crc": "data", "input": "forward", "output": "forward", "loss": "loss",
    "output_grad": "gradient", "sent": "gradient",
    "grad": "gradient", "grad_norm": "gradient", "clip": "clip", "lr": "optimizer step", "loss_scale": "optimizer step",
    "skipped": "optimizer step", "weight": "optimizer step", "exp_avg": "optimizer step", "exp_avg_sq": "optimizer step",
    "state": "optimizer step", "val_loss": "evaluation",
}  # fmt: skip
"""The stage of each compared column and kind of tensor, in the order of a step."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Hold a measured number and its bound.

    Args:
        step: optimizer step, from 1; 0 is before the first.
        stage: one of :data:`STAGES`.
        tensor: ``KIND:NAME`` or a parameter's name; empty for the whole step.
        what: name of the quantity or kind.
        value: measured number; ``None`` if only bits are known to differ.
        expected: expected number, if any.
        bound: largest allowed ``|value - expected|``. Without ``expected``, the limit of ``value``.
        side: where a limit is left, ``above`` or ``below`` it; ``within`` for a value that must not be
            near the expected one, or counts to its bound. Empty if it is not known: nothing is then
            taken for inside its bound.
        advice: meaning and next action, in sentences.
        severity: one of :data:`SEVERITIES`.
        rank: the process it is about, of a run on several ranks.
        place: the file or folder it is about, such as a checkpoint.

    Example:
        >>> Reading(40, "storage", "lm_head.weight", "lost-updates", 0.5, 1.0, 0.1).excess
        5.0
    """

    step: int
    stage: str
    tensor: str
    what: str
    value: float | None = None
    expected: float | None = None
    bound: float | None = None
    advice: str = ""
    severity: str = "error"
    side: str = ""
    rank: int | None = None
    place: str = ""

    @property
    def excess(self) -> float:
        """Return the value as a multiple of its bound; infinite if unknown.

        Below a lower limit return the limit over the value: infinite at 0, the worst.
        """
        if self.value is None or self.bound is None:
            return math.inf
        over = abs(self.value)
        under = abs(self.bound)
        if self.expected is not None:
            over = abs(self.value - self.expected)
        elif self.side == "below":
            over, under = under, over
        return over / under if math.isfinite(over) and under > 0 else math.inf

    @property
    def cause(self) -> tuple[str, ...]:
        """Return kind, stage and severity: what differs between causes of one kind."""
        return self.what, self.stage, self.severity

    @property
    def is_inside(self) -> bool:
        """Return whether the value is within its bound: then it is no reading."""
        return self.side in ("above", "below") and self.excess < 1

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values for JSON."""
        return asdict(self)


def in_order(readings: Iterable[Reading]) -> list[Reading]:
    """Sort readings: notes last, then by step, stage, and largest excess."""

    def place(r: Reading) -> tuple[float, ...]:
        return (
            r.severity == "note",
            r.step,
            STAGES.index(r.stage),
            SEVERITIES.index(r.severity),
            -r.excess,
        )

    return sorted(readings, key=place)


def of_all(names: Iterable[str]) -> str:
    """Return the first name and the number of others, as the tensor of a reading.

    Example:
        >>> of_all(["a", "b", "c"])
        'a and 2 others'
    """
    return told(names, 1)


def joined(readings: Iterable[Reading], number: int) -> list[Reading]:
    """Join readings of one kind and like values.

    The tensor is empty if all ``number`` tensors have the reading.
    """
    groups = list[list[Reading]]()
    for reading in readings:
        for members in groups:
            if _are_alike(members[0], reading):
                members.append(reading)
                break
        else:
            groups.append([reading])
    results = []
    for members in sorted(groups, key=len, reverse=True):
        worst = max(members, key=lambda r: r.excess)
        names = {r.tensor: None for r in members}
        is_all = len(names) == number > 1
        results.append(replace(worst, tensor="" if is_all else of_all(names)))
    return results


def _are_alike(first: Reading, second: Reading) -> bool:
    """Return whether two readings are of one kind, with values within 2 % or their bound where a
    value is expected.
    """
    if (first.what, first.severity, first.step) != (second.what, second.severity, second.step):
        return False
    if not first.expected or first.value is None or second.value is None:
        return True
    near = max(0.02 * abs(first.value), first.bound or 0.0)
    return first.expected == second.expected and abs(second.value - first.value) <= near


def words_of(error: Exception) -> str:
    """Return an error in one line, as the reason why something was not looked at.

    Example:
        >>> words_of(ArithmeticError("the loss has a kink")), words_of(KeyError("lr"))
        ('the loss has a kink', "KeyError: 'lr'")
    """
    words = str(error)
    if not isinstance(error, ArithmeticError):
        words = f"{type(error).__name__}: {error}"
    return words.partition("\n")[0][:300]


def reading_table(readings: Sequence[Reading]) -> Table:
    """Return readings as a table, without their advice.

    Example:
        >>> print(reading_table([Reading(40, "storage", "a.weight", "lost-updates", 0.5, 1.0, 0.1)]).plain(), end="")
        step  stage    tensor    what          value  expected  bound
          40  storage  a.weight  lost-updates    0.5         1    0.1
    """
    place = (
        *number_columns(step="step"),
        *text_columns(stage="stage"),
        *name_columns(tensor="tensor", what="what"),
    )
    numbers = number_columns(value="value", expected="expected", bound="bound")
    return Table((*place, *numbers), list(map(asdict, readings)))


MAX_ROWS = 10
MAX_ADVICE = 8
"""Maximum number of printed rows, and of printed lines of advice. JSON has all."""


class Readings(Sequence[Reading]):
    """Hold readings that print themselves: lines, a table, the advice of each kind, and skipped
    checks.

    Args:
        readings: readings beyond their bound; those inside it are left out.
        lines: printed above the table.
        looked_at: printed if no reading is beyond its bound.
        unseen: skipped checks, each with the reason or the flag that enables it; empty text if none
            does.
        taught: facts about the loss, by name.

    Example:
        >>> print(Readings([], ["AdamW: float32 weights"], "28 tensors"))
        AdamW: float32 weights
        Nothing found: 28 tensors.
    """

    def __init__(
        self,
        readings: Iterable[Reading] = (),
        lines: Iterable[str] = (),
        looked_at: str = "",
        unseen: Mapping[str, str] | None = None,
        taught: Mapping[str, Any] | None = None,
    ) -> None:
        self.readings = in_order(reading for reading in readings if not reading.is_inside)
        self.lines = list(lines)
        self.looked_at = looked_at
        self.unseen = dict(unseen or {})
        self.taught = dict(taught or {})

    @property
    def ok(self) -> bool:
        """Return whether no reading is worse than a note."""
        return all(reading.severity == "note" for reading in self.readings)

    def require(self) -> Readings:
        """Raise if any reading is worse than a note; else return the readings.

        Raises:
            RecipeError: with the advice of all readings.
        """
        serious = [reading for reading in self.readings if reading.severity != "note"]
        if serious:
            message = (
                f"Cannot train as set up because {len(serious)} readings are beyond their bound."
            )
            for reading in serious:
                message += f" {reading.what} ({reading.tensor}): {reading.advice}"
            raise RecipeError(message)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the readings as values for JSON."""
        return {
            "ok": self.ok,
            "lines": self.lines,
            "readings": list(map(asdict, self.readings)),
            "looked_at": self.looked_at,
            "unseen": self.unseen,
            "taught": self.taught,
        }

    def __getitem__(self, index: Any) -> Any:
        return self.readings[index]

    def __len__(self) -> int:
        return len(self.readings)

    def __repr__(self) -> str:
        return f"Readings({[reading.what for reading in self.readings]})"

    def __str__(self) -> str:
        lines = list(self.lines)
        if self.readings:
            lines += reading_table(self.readings[:MAX_ROWS]).plain().splitlines()
            more = len(self.readings) - MAX_ROWS
            if more > 0:
                lines.append(f"and {more} more readings (--json)")
            advice: dict[tuple[str, ...], str] = {}
            for reading in self.readings:
                kind = reading.what
                if reading.severity == "note":
                    kind += " (note)"
                if reading.advice:
                    advice.setdefault(reading.cause, f"{kind}: {reading.advice}")
            lines += list(advice.values())[:MAX_ADVICE]
        elif self.looked_at:
            lines.append(f"Nothing found: {self.looked_at}.")
        if self.unseen:
            areas = []
            for area, flag in self.unseen.items():
                areas.append(f"{area} ({flag})" if flag else area)
            lines.append(f"Not looked at: {', '.join(areas)}.")
        return "\n".join(lines)
