"""A reading: one measured number, its place, and its bound.

Checks, laws of a run and differences of two runs are all readings. They share one order, one table
and one JSON format. What a kind of reading means is in :mod:`narrowgauge.measuring.kinds`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from narrowgauge.measuring.kinds import KINDS, SEVERITIES
from narrowgauge.runs.text import join_names
from narrowgauge.spec.tables import Table

STAGES = (
    "start", "between steps", "data", "forward", "loss", "gradient", "clip", "optimizer step", "storage", "evaluation",
)  # fmt: skip
"""The stages of a step, in order.

At the start there are the weights and settings before the first step. ``optimizer step`` is the
update, or that it was left out. ``storage`` is what the formats of weights and states kept of the
update.
"""


@dataclass(frozen=True, slots=True)
class Reading:
    """Hold a measured number and its bound.

    Args:
        step: optimizer step at which it was measured, from 1; 0 is before the first.
        stage: one of :data:`STAGES`.
        tensor: ``KIND:NAME`` or a parameter's name; empty for the whole step.
        what: name of the quantity or kind.
        value: measured number; ``None`` if only bits are known to differ.
        expected: expected number, if any.
        bound: largest allowed ``|value - expected|``. Without ``expected``, the limit of ``value``.

    Example:
        >>> reading = Reading(40, "storage", "lm_head.weight", "stored-share", 0.5, 1.0, 0.1)
        >>> reading.excess, reading.severity, reading.text.partition(",")[0]
        (5.0, 'error', 'The format of the weight stores 0.50 of the update')
    """

    step: int
    stage: str
    tensor: str
    what: str
    value: float | None = None
    expected: float | None = None
    bound: float | None = None

    @property
    def text(self) -> str:
        """Return the sentence of its kind; empty for a difference of two runs, which has no kind."""
        kind = KINDS.get(self.what)
        if kind is None:
            return ""
        fields = {name: math.nan if x is None else x for name, x in asdict(self).items()}
        return kind.text.format(**fields)

    @property
    def severity(self) -> str:
        """Return the severity of its kind."""
        kind = KINDS.get(self.what)
        return "error" if kind is None else kind.severity

    @property
    def excess(self) -> float:
        """Return how many times the value is beyond its bound, on either side; infinite if unknown."""
        if self.value is None or not self.bound:
            return math.inf
        excess = abs(self.value - (self.expected or 0.0)) / self.bound
        return math.inf if math.isnan(excess) else excess

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values for JSON, with the sentence and the severity."""
        return asdict(self) | {"text": self.text, "severity": self.severity}


def measured(
    what: str,
    tensors: str | Iterable[str] = "",
    value: float | None = None,
    expected: float | None = None,
    bound: float | None = None,
    *,
    step: int = 0,
    stage: str = "",
) -> Reading:
    """Return a reading of a kind, whose row says what is left out.

    Args:
        tensors: a name, or names: the first is shown, the others are counted.
    """
    kind = KINDS[what]
    tensor = tensors if isinstance(tensors, str) else of_all(tensors)
    if bound is None:
        bound = kind.bound
    return Reading(step, stage or kind.stage, tensor, what, value, expected, bound)


def in_order(readings: Iterable[Reading]) -> list[Reading]:
    """Sort readings by step, stage, severity, and largest excess."""

    return sorted(
        readings,
        key=lambda r: (r.step, STAGES.index(r.stage), SEVERITIES.index(r.severity), -r.excess),
    )


def of_all(names: Iterable[str]) -> str:
    """Return the first name and the number of others, as the tensor of a reading."""
    return join_names(names, 1)


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


def failure_of(title: str, error: Exception) -> str:
    """Return the sentence about an error of ours in a user's loop. Tests raise the error here."""
    return f"{title} ended: {words_of(error)}"


MAX_ROWS = 10
MAX_SENTENCES = 8
"""Maximum number of printed rows, and of printed sentences. JSON has all."""
_SHOWN = {name: name for name in Reading.__slots__}


class Readings(Sequence[Reading]):
    """Hold readings that print themselves: lines, a table, the sentence of each kind, and what was not
    looked at.

    Args:
        readings: readings beyond their bound.
        lines: printed above the table.
        looked_at: printed without readings.
        unseen: what was not looked at, each with the reason or the flag that enables it; empty text
            if none does.

    Attributes:
        also: further attributes that JSON has.

    Example:
        >>> print(Readings([], ["AdamW: float32 weights"], "28 tensors"))
        AdamW: float32 weights
        Nothing found: 28 tensors.
    """

    also: Sequence[str] = ()

    def __init__(
        self,
        readings: Iterable[Reading] = (),
        lines: Iterable[str] = (),
        looked_at: str = "",
        unseen: Mapping[str, str] | None = None,
    ) -> None:
        self.readings = in_order(readings)
        self.lines = list(lines)
        self.looked_at = looked_at
        self.unseen = dict(unseen or {})

    def add(self, what: str, tensors: Any, value: float, *limits: float, stage: str = "") -> None:
        """Add a reading, with its expected value, 0 if left out, and its bound."""
        reading = measured(what, tensors, value, *(limits or (0.0,)), stage=stage)
        self.readings = in_order([*self.readings, reading])

    @property
    def ok(self) -> bool:
        """Return whether there is no reading."""
        return not self.readings

    def to_dict(self) -> dict[str, Any]:
        """Return the readings as values for JSON."""
        readings = [reading.to_dict() for reading in self.readings]
        values = {"ok": self.ok, "lines": self.lines, "readings": readings}
        for name in ("looked_at", "unseen", *self.also):
            values[name] = getattr(self, name)
        return values

    def __getitem__(self, index: Any) -> Any:
        return self.readings[index]

    def __len__(self) -> int:
        return len(self.readings)

    def __str__(self) -> str:
        lines = list(self.lines)
        sentences: dict[str, str] = {}
        for reading in self.readings:
            if reading.text:
                sentences.setdefault(reading.what, f"{reading.what}: {reading.text}")
        if self.readings:
            lines += Table(self.readings[:MAX_ROWS], _SHOWN).plain().splitlines()
        elif self.looked_at:
            lines.append(f"Nothing found: {self.looked_at}.")
        if len(self) > MAX_ROWS:
            lines.append(f"and {len(self) - MAX_ROWS} more readings (--json)")
        lines += [*sentences.values()][:MAX_SENTENCES]
        if self.unseen:
            areas = [f"{area} ({flag})" if flag else area for area, flag in self.unseen.items()]
            lines.append(f"Not looked at: {', '.join(areas)}.")
        return "\n".join(lines)
