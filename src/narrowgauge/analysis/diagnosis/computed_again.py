"""Steps that were computed again: what departs there was measured, and stands before every cause that rows make likely.

The audit of a loop with ``ng.RunRecorder(audit_every=…)`` writes an event for each departure, and into the row of each audited
step which pieces are equal to rounding. A replay has both, of one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from narrowgauge.analysis.diagnosis.evidence import Evidence
from narrowgauge.runs.departure_table import severity_of
from narrowgauge.runs.finding import SEVERITIES, Finding, at_step, told
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row, number, step_of


def departures(evidence: Evidence) -> list[Finding]:
    """What departs and is no note: errors first, each once."""
    replayed = evidence.replay.departures if evidence.replay is not None else ()
    found: dict[tuple[str, str], Finding] = {}
    for each in (*recorded_departures(evidence.run), *replayed):
        if each.severity != "note":
            found.setdefault((each.name, each.where), each)
    return sorted(found.values(), key=lambda each: list(SEVERITIES).index(each.severity))


def departures_noted(evidence: Evidence) -> list[str]:
    """The notes among them, of audited steps; a replay prints its own."""
    found = [each for each in recorded_departures(evidence.run) if each.severity == "note"]
    return [at_step(each.step, f"{each.label}: {each.message.rstrip('.')}") for each in found]


def recorded_departures(run: Run) -> list[Finding]:
    """The departures of a run's audited steps, in the order of its events."""
    return [_finding(event) for event in run.events if severity_of(_name(event))]


def _name(event: Row) -> str:
    return str(event.get("detector") or "")


def _finding(event: Row) -> Finding:
    return Finding(
        _name(event),
        str(event.get("message") or ""),
        str(event.get("advice") or ""),
        where=str(event.get("tensor") or ""),
        severity=severity_of(_name(event)),
        step=step_of(event),
        value=number(event.get("value")),
        threshold=number(event.get("threshold")),
    )


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Which steps were computed again, and what their pieces showed.

    Args:
        equal: the pieces that were equal to rounding and never depart.
        unchecked: by piece, why it could not be computed again.
    """

    steps: tuple[int, ...]
    equal: tuple[str, ...]
    unchecked: Mapping[str, str]

    @classmethod
    def of(cls, evidence: Evidence) -> Recomputed:
        """What audited steps and a replay showed together."""
        shown = evidence.recomputed.values()
        departs = {piece for each in shown for piece in each.get("departs") or ()}
        equal = (piece for each in shown for piece in each.get("equal") or () if piece not in departs)
        found = tuple(dict.fromkeys(equal))
        unchecked = {piece: why for each in shown for piece, why in (each.get("unchecked") or {}).items()}
        never = {piece: why for piece, why in unchecked.items() if piece not in found}
        return cls(tuple(evidence.recomputed), found, never)

    def __str__(self) -> str:
        said = [f"equal to rounding in {', '.join(self.equal)}"] if self.equal else []
        said += [f"not checked: {piece} ({why})" for piece, why in self.unchecked.items()]
        steps = f"step{'s' if len(self.steps) > 1 else ''} {told(map(str, self.steps))} computed again"
        return f"{steps}: {'; '.join(said)}" if said else steps

    def to_dict(self) -> dict[str, Any]:
        """The same as values for JSON."""
        return {"steps": list(self.steps), "equal": list(self.equal), "unchecked": dict(self.unchecked)}
