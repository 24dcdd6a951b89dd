"""A finding: one thing that is wrong, whoever found it, and what to do about it.

Detectors of the monitor, checks of ``ng.check`` and causes of the diagnosis are rows of three tables, each with an id, a message
and advice; a plan says why a layout does not fit, and what would. All of them produce this one type, which is put into words here
alone: :meth:`Finding.filled` fills a row's templates with the values that were measured, and :func:`sentences` joins a message
and its advice for a console, a page or a logger. Code reads the fields and never the words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

SEVERITIES: dict[str, str] = {
    "error": "training computes something else than it says, or stands still",
    "warning": "something is lost that need not be",
    "note": "nothing is lost, and it is worth a line",
}
"""How serious a finding is, most serious first."""

AnyFinding = TypeVar("AnyFinding", bound="Finding")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Args:
        name: the id of what found it: a detector, a check, a cause.
        message: what was found.
        advice: what to do, with the setting or the line to change.
        where: the parameter, tensor, module or object it is about.
        severity: a key of :data:`SEVERITIES`.
        step: the optimizer step at which it shows; ``None`` where it has none.
        rank: the process it is about; ``None`` where it is about all, or it is not known which.
        value, threshold: what was measured, and what that was compared with.
        unit: of both; empty for ratios.
        source: where the symptom and its threshold are described.

    Example:
        >>> print(Finding("frozen-parameters", "2 parameters are frozen.", "Unfreeze them.", "lm_head", "note"))
        note: frozen-parameters (lm_head)
          2 parameters are frozen.
          Unfreeze them.
    """

    name: str
    message: str
    advice: str
    where: str = ""
    severity: str = "warning"
    step: int | None = None
    rank: int | None = None
    value: float | None = None
    threshold: float | None = None
    unit: str = ""
    source: str = ""

    @classmethod
    def filled(
        cls: type[AnyFinding], name: str, message: str, advice: str, values: Mapping[str, Any], **fields: Any
    ) -> AnyFinding:
        """A finding whose words are the templates of a table's row, filled with values.

        Args:
            name: of the row.
            message, advice: of the row, with a name in braces for each value.
            values: by name; those that no template names are ignored.
            fields: the other fields of the finding.

        Example:
            >>> Finding.filled("overflow", "{value:.0%} of it saturates", "Widen '{module}'.", {"value": 0.2, "module": "a"})
            Finding(name='overflow', message='20% of it saturates', advice="Widen 'a'.", where='', severity='warning', ...)
        """
        return cls(name, message.format(**values), advice.format(**values), **fields)

    @property
    def label(self) -> str:
        """The id, and in brackets where it is."""
        return f"{self.name} ({self.where})" if self.where else self.name

    def __str__(self) -> str:
        return f"{self.severity}: {self.label}\n  {self.message}\n  {self.advice}"


def sentences(message: str, advice: str = "") -> str:
    """A message and its advice as sentences, each with a full stop.

    Example:
        >>> sentences("the loss is not finite", "Go back to a checkpoint."), sentences("the run began.")
        ('the loss is not finite. Go back to a checkpoint.', 'the run began.')
    """
    return " ".join(f"{part.rstrip('.')}." for part in (message, advice) if part)


def counted(number: int, thing: str) -> str:
    """A number of things.

    Example:
        >>> counted(1, "run"), counted(2, "run"), counted(1234, "step")
        ('1 run', '2 runs', '1,234 steps')
    """
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """A waiting time, rounded.

    Example:
        >>> [duration(seconds) for seconds in (0.4, 42, 89, 200, 3599, 3600, 9000, 200_000)]
        ['1 s', '42 s', '1 min 29 s', '3 min 20 s', '1 h', '1 h', '2 h 30 min', '2 d 8 h']
    """
    least = max(1, round(seconds))
    for size, unit, below, part, most in (
        (86400, "d", 3600, "h", 24),
        (3600, "h", 60, "min", 60),
        (60, "min", 1, "s", 60),
    ):
        if least >= size - below / 2:
            whole, rest = divmod(round(least / below), most)
            return f"{whole} {unit}" + (f" {rest} {part}" if rest else "")
    return f"{least} s"


def told(names: Iterable[str], most: int = 3) -> str:
    """Some names, and how many others there are.

    Example:
        >>> told(["a", "b", "c", "d", "e"]), told(["a", "b", "c", "d"]), told([])
        ('a, b, c and 2 others', 'a, b, c and 1 other', '')
    """
    found = list(dict.fromkeys(names))
    rest = len(found) - most
    return ", ".join(found[:most]) + (f" and {rest} other{'s' * (rest > 1)}" if rest > 0 else "")


def at_step(step: int | None, message: str) -> str:
    """A message after its step, where it has one.

    Example:
        >>> at_step(7, "the loss jumped"), at_step(None, "the rate is low")
        ('step 7: the loss jumped', 'the rate is low')
    """
    return message if step is None else f"step {step}: {message}"
