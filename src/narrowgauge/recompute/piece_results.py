"""What a piece of a step showed when it was computed again: ids and numbers; sentences are made from them in one table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

EQUAL, DEPARTS, NOT_CHECKED = "equal", "departs", "not checked"


@dataclass(frozen=True)
class Alternative:
    """A cause with which a piece agrees again.

    Args:
        cause, values: as of :class:`PieceResult`.
        free: the name of the value that was fitted, or empty.
        error: how far that value is determined.
        evidence: the logarithm of its likelihood, less what it gains by a number that is free.
    """

    cause: str
    values: dict[str, Any]
    free: str = ""
    error: float = 0.0
    evidence: float = 0.0

    @property
    def fixed(self) -> tuple[object, ...]:
        """What must be the same for two alternatives to be the same."""
        return self.cause, *((name, value) for name, value in sorted(self.values.items()) if name != self.free)


@dataclass(frozen=True)
class PieceResult:
    """One piece of a step, computed again.

    Args:
        piece: a key of :data:`narrowgauge.runs.departure_table.PIECES`.
        status: :data:`EQUAL` to rounding, :data:`DEPARTS`, or :data:`NOT_CHECKED`.
        where: the parameters or modules; empty for all.
        difference: between the run's values and those computed again, relative to the latter.
        envelope: what rounding alone gives, measured in the same unit.
        cause: the id of the alternative with which the run agrees again; empty where none does.
        values: of that alternative, by name.
        step: the step's number.
        alternatives: where rounding leaves more than one, all of them.

    Example:
        >>> PieceResult("update", DEPARTS, ("head.weight",), 0.5, 1e-6, "rate", {"factor": 0.5}, 7).cause
        'rate'
    """

    piece: str
    status: str
    where: tuple[str, ...] = ()
    difference: float = 0.0
    envelope: float = 0.0
    cause: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    alternatives: tuple[Alternative, ...] = ()


def not_checked(piece: str, why: str, step: int) -> PieceResult:
    """The result of a piece for which something is missing."""
    return PieceResult(piece, NOT_CHECKED, values={"why": why}, step=step)


def joined(departs: Iterable[PieceResult], number: int) -> list[PieceResult]:
    """Results of one cause and like values as one, those of most parameters first; ``where`` is empty if it is all of them.

    Args:
        departs: results about one parameter each.
        number: parameters that were compared.
    """
    groups: dict[tuple[object, ...], list[PieceResult]] = {}
    for each in departs:
        alike = tuple((k, f"{v:.1e}" if isinstance(v, float) else v) for k, v in sorted(each.values.items()))
        groups.setdefault((each.cause, *alike), []).append(each)
    results = []
    for members in sorted(groups.values(), key=len, reverse=True):
        most = max(members, key=lambda each: each.difference)
        names = tuple(dict.fromkeys(name for each in members for name in each.where))
        results.append(replace(most, where=() if len(names) == number and number > 1 else names))
    return results
