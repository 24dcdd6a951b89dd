"""The findings of an audited step: what departs, in words.

Pieces hand over ids and numbers (:class:`~narrowgauge.recompute.piece_results.PieceResult`); sentences are made here alone, with
the words of :mod:`narrowgauge.runs.departure_table`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from narrowgauge.recompute.piece_results import DEPARTS, EQUAL, NOT_CHECKED, PieceResult
from narrowgauge.runs.departure_table import DEPARTURES, NORMS, PIECES, unexplained
from narrowgauge.runs.finding import Finding, told
from narrowgauge.runs.schema import Row

_UNKNOWN = "computed again it differs by {difference:.2g}, where rounding gives {envelope:.1g}; no alternative agrees."


def findings_of(results: Iterable[PieceResult]) -> list[Finding]:
    """The findings of an audited step, in the order of a step's pieces; what was not checked is no finding.

    A piece that departs without an alternative that agrees is a note: where is known, and what is not.
    """
    order = list(PIECES)
    departs = sorted((each for each in results if each.status == DEPARTS), key=lambda each: order.index(each.piece))
    return [_finding(each) for each in departs]


def _finding(result: PieceResult) -> Finding:
    row = DEPARTURES.get(result.cause)
    where = told(result.where)
    values: dict[str, Any] = {**result.values, "difference": result.difference, "envelope": result.envelope}
    values["equal_to"] = f", and equals {result.values['equals']}" if "equals" in result.values else ""
    values["over"] = NORMS.get(over := str(values.get("over", "")), over)
    name, message, advice, severity = result.cause or unexplained(result.piece), _UNKNOWN, "", "note"
    if row is not None:
        message, advice, severity = row.message, row.advice, row.severity
    else:
        advice = f"Look at {PIECES[result.piece]}, or declare what is meant with ng.task(…)."
    return Finding.filled(
        name, message, advice, values,
        where=where, severity=severity, step=result.step, value=result.difference, threshold=result.envelope,
    )  # fmt: skip


def outcomes(results: Sequence[PieceResult]) -> Row:
    """What the pieces of a step showed, as the column ``recomputed`` of its row has it."""
    departs = dict.fromkeys(each.piece for each in results if each.status == DEPARTS)
    equal = dict.fromkeys(each.piece for each in results if each.status == EQUAL and each.piece not in departs)
    return {"equal": list(equal), "departs": list(departs), "unchecked": unchecked(results)}


def unchecked(results: Iterable[PieceResult]) -> dict[str, str]:
    """Why a piece was not checked, by piece."""
    return {each.piece: str(each.values.get("why", "")) for each in results if each.status == NOT_CHECKED}
