"""The diagnosis of one run: findings, each with its evidence, what speaks against it, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from narrowgauge.analysis.diagnosis.causes import CAUSES, HEALTHY, UNKNOWN_CAUSE, Cause
from narrowgauge.analysis.diagnosis.computed_again import Recomputed, departures, departures_noted
from narrowgauge.analysis.diagnosis.coverage import checked, not_seen
from narrowgauge.analysis.diagnosis.evidence import Evidence, gather
from narrowgauge.analysis.diagnosis.loop_terms import in_terms_of, loop_of
from narrowgauge.analysis.diagnosis.pairs.two_runs import TwoRuns, compare_two
from narrowgauge.analysis.diagnosis.posterior import (
    CONFIDENCE,
    Measurement,
    Observations,
    Ranked,
    healthy_share,
    is_considered,
    named_causes,
    next_measurement,
    ranked_causes,
    signs_against,
    signs_explained,
)
from narrowgauge.analysis.diagnosis.replay_findings import ReplayedStep
from narrowgauge.analysis.diagnosis.signs.sign import Observation
from narrowgauge.analysis.diagnosis.signs.sign_table import observe
from narrowgauge.analysis.monitor.detectors import advice_values
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.runs.finding import SEVERITIES, Finding, at_step
from narrowgauge.runs.record import Run, read_run

NUM_ALTERNATIVES = 3
MAX_LINES = 10
"""Lines of :meth:`Diagnosis.text`, for a ticket."""
LEAST_STEPS = 20
"""The fewest steps with a loss for which a run without a sign is called healthy: as many as it takes to judge a spike."""
_CHAIN, _STATED = 4, 4
_NO_CAUSE = (HEALTHY, UNKNOWN_CAUSE)
_ASKED = 0.02
"""A cause less likely than this is not said to be in question."""


@dataclass(frozen=True, kw_only=True)
class CauseFinding(Finding):
    """A cause of what a run shows: a finding that knows its evidence. ``where`` is the tensor in which it shows first.

    Args:
        cause: a row of the table of causes; of a departure, one with its name.
        probability: of this cause, among all that the run can have, by the rules' own weights. It ranks causes and decides
            whether one is named; it was not calibrated, so no text states it. 1 where it was measured.
        chain: its signs that are present, by step.
        against: signs that it predicts and the run lacks.
        alternatives: the most likely other causes.
        is_measured: it is a departure of a step that was computed again, and no cause that signs make likely.
    """

    cause: Cause
    probability: float
    chain: tuple[Observation, ...] = ()
    against: tuple[str, ...] = ()
    alternatives: tuple[Ranked, ...] = ()
    is_measured: bool = False

    @classmethod
    def measured(cls, departure: Finding) -> CauseFinding:
        """The finding of a departure: training does not compute what the loop says."""
        said = departure.message.rstrip(".")
        cause = Cause(departure.name, said, SEVERITIES[departure.severity], departure.advice, departure.source)
        known = {**vars(departure), "message": said}
        return cls(**known, cause=cause, probability=1.0, is_measured=True)

    @property
    def tensor(self) -> str | None:
        """Where it shows first; ``None`` where it shows in no tensor."""
        return self.where or None

    @property
    def remedy(self) -> str:
        """What to do, in a recipe's or a setting's words."""
        return self.advice

    def to_dict(self) -> dict[str, Any]:
        """The finding as values for JSON."""
        return {
            "cause": self.cause.name,
            "title": self.cause.title,
            "weight": self.probability,
            "measured": self.is_measured,
            "step": self.step,
            "tensor": self.tensor,
            "effect": self.cause.effect,
            "chain": [_sign_dict(sign) for sign in self.chain],
            "against": list(self.against),
            "alternatives": {row.cause.name: row.probability for row in self.alternatives},
            "remedy": self.remedy,
            "source": self.cause.source,
        }


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a run's record says about its causes.

    Args:
        name: of the run.
        findings: what steps that were computed again contradict, then causes, the most likely one first; empty where nothing
            is wrong or nothing can be said.
        verdict: one sentence.
        causes: every cause that the run can have, with its probability, before anything was explained.
        next_measurement: what would distinguish the likely causes.
        missing: what the record does not hold, one sentence each.
        signs: every sign that is present, by step.
        notes: settings and changes that lose something and show no effect, and notes of audited steps, one sentence each.
        is_enough: whether enough steps have a loss to call a run without a sign healthy.
        replay: one of its steps, computed again, if any was.
        checked: what of the run the record shows, and was looked at.
        not_seen: what the record does not show, each with the one flag or call that would; empty text where none does.
        recomputed: which steps were computed again, if any were, and what of them was equal to rounding.
    """

    name: str
    findings: tuple[CauseFinding, ...]
    verdict: str
    causes: tuple[Ranked, ...]
    next_measurement: Measurement | None
    missing: tuple[str, ...]
    signs: tuple[Observation, ...]
    notes: tuple[str, ...] = ()
    is_enough: bool = True
    replay: ReplayedStep | None = None
    checked: tuple[str, ...] = ()
    not_seen: Mapping[str, str] = field(default_factory=dict)
    recomputed: Recomputed | None = None

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is wrong, as far as the record says."""
        return self.is_enough and not self.findings and healthy_share(self.causes) >= CONFIDENCE

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as values for JSON."""
        measure = self.next_measurement
        return {
            "run": self.name,
            "verdict": self.verdict,
            "healthy": self.is_healthy,
            "findings": [finding.to_dict() for finding in self.findings],
            "causes": {row.cause.name: row.probability for row in self.causes[: NUM_ALTERNATIVES + 1]},
            "next_measurement": measure
            and {"what": measure.what, "tells": list(measure.tells), "gain_bits": measure.gain},
            "signs": [_sign_dict(sign) for sign in self.signs],
            "notes": list(self.notes),
            "missing": list(self.missing),
            "checked": list(self.checked),
            "not_seen": dict(self.not_seen),
            "recomputed": self.recomputed and self.recomputed.to_dict(),
            "replay": self.replay and self.replay.to_dict(),
        }

    def coverage(self) -> list[str]:
        """What was checked, and what is not to be seen from this record, with what would show each."""
        said = [f"checked: {', '.join(self.checked)}"] if self.checked else []
        said += [str(self.recomputed)] if self.recomputed is not None else []
        unseen = [f"{area} ({how})" if how else area for area, how in self.not_seen.items()]
        return said + ([f"not to be seen from this record: {', '.join(unseen)}"] if unseen else [])

    def text(self) -> str:
        """At most ten lines, for a ticket, and as many of a replayed step."""
        lines = [f"{self.name}: {self.verdict}"]
        for finding in self.findings[:2]:
            shown = finding.chain[: _CHAIN if len(self.findings) == 1 else 2]
            lines += [f"  {at_step(sign.step, sign.sentence)}" for sign in shown]
            lines.append(f"  what to do: {finding.remedy}")
        if not self.findings:
            lines += [f"  {at_step(sign.step, sign.sentence)}" for sign in self.signs[:_CHAIN]]
        if self.next_measurement is not None:
            lines.append(
                f"  next: {self.next_measurement.what} (distinguishes {', '.join(self.next_measurement.tells)})"
            )
        lines += [f"  note: {said}" for said in self.notes]
        lines += [f"  {said}" for said in self.coverage()] if not self.findings else []
        lines += [f"  not recorded: {said}" for said in self.missing]
        return "\n".join(lines[:MAX_LINES] + (self.replay.lines() if self.replay is not None else []))


@overload
def diagnose(run: str | Path | Run, *, replay: ReplayedStep | None = None) -> Diagnosis: ...


@overload
def diagnose(run: str | Path | Run, other: str | Path | Run) -> TwoRuns: ...


def diagnose(
    run: str | Path | Run, other: str | Path | Run | None = None, *, replay: ReplayedStep | None = None
) -> Diagnosis | TwoRuns:
    """Name the cause of what a run's record shows.

    Invariant: a function of the record alone. Nothing is guessed: below a probability of 0.7 no cause is named. What departed
    in a step that was computed again was measured, and stands before all causes.

    Args:
        run: a run folder, the log of another framework, or what :func:`narrowgauge.read_run` returned.
        other: a second run that should have been equal: where the two first differ, and why.
        replay: a step of the run that :func:`narrowgauge.replay_step` computed again: what it showed counts as evidence.

    Returns:
        The findings with their evidence, what else it could be, and what to measure next; of two runs, where they differ.

    Raises:
        RecordError: there is no run, or its record is damaged.
        NarrowgaugeError: both ``other`` and ``replay`` were given.

    Cost: below a second for 10,000 steps; longer where detectors have yet to run over samples of many tensors.

    Example:
        >>> import tempfile, narrowgauge as ng
        >>> folder = Path(tempfile.mkdtemp(), "first")
        >>> with ng.runs.RunWriter.create(folder, {"recipe": "bfloat16/word"}) as writer:
        ...     for step in range(1, 81):
        ...         writer.step({"step": step, "loss": 9.0 if step == 60 else 3.0 + 1.0 / step, "grad_norm": 1.0})
        >>> ng.diagnose(folder).findings[0].cause.name
        'bad-data'

    Source: see :mod:`narrowgauge.analysis.diagnosis.posterior`.
    """
    if other is not None:
        if replay is not None:
            raise NarrowgaugeError("A replay is evidence about one run, and two were named.", "Leave one of them out.")
        one, two = (each if isinstance(each, Run) else read_run(each) for each in (run, other))
        return compare_two(one, two)
    return _diagnosis(gather(run, replay))


def _diagnosis(evidence: Evidence) -> Diagnosis:
    seen = observe(evidence)
    causes = ranked_causes(evidence, seen)
    found = named_causes(evidence, seen)
    findings = (
        *map(CauseFinding.measured, departures(evidence)),
        *(_finding(evidence, seen, first, others) for first, others in found),
    )
    asked = causes if not found else [found[0][0], *found[0][1]]
    num_losses = sum(loss is not None for loss in evidence.column("loss"))
    return Diagnosis(
        evidence.run.path.name or evidence.run.path.resolve().name,
        findings,
        _verdict(evidence, seen, findings, causes, num_losses),
        tuple(causes),
        next_measurement(evidence, seen, asked),
        evidence.missing,
        _by_step(row for row in seen.values() if row.state == "present"),
        (*_notes(evidence, seen), *departures_noted(evidence)),
        num_losses >= LEAST_STEPS,
        evidence.replay,
        checked(evidence),
        not_seen(evidence),
        Recomputed.of(evidence) if evidence.recomputed else None,
    )


def _notes(evidence: Evidence, seen: Observations) -> Iterator[str]:
    for cause in CAUSES.values():
        if cause.applies(evidence) and not is_considered(cause, seen):
            for name in cause.notes:
                if seen[name].state == "present":
                    yield f"{seen[name].sentence} ({cause.name}); no effect shows"


def _finding(evidence: Evidence, seen: Observations, first: Ranked, others: Sequence[Ranked]) -> CauseFinding:
    cause, chain = first.cause, _by_step(seen[name] for name in signs_explained(first.cause, seen))
    tensor = next((sign.tensor for sign in chain if sign.tensor), None)
    storage = evidence.recipe.storage if evidence.recipe is not None else None
    return CauseFinding.filled(
        cause.name,
        cause.title,
        in_terms_of(loop_of(evidence.run), cause.remedy),
        advice_values(tensor, storage, evidence.compute),
        where=tensor or "",
        severity="error",
        step=next((sign.step for sign in chain if sign.step is not None), None),
        source=cause.source,
        cause=cause,
        probability=first.probability,
        chain=chain,
        against=tuple(signs_against(cause, seen)),
        alternatives=tuple(row for row in others[:NUM_ALTERNATIVES] if row.probability >= 0.001),
    )


def _verdict(
    evidence: Evidence, seen: Observations, findings: Sequence[CauseFinding], causes: Sequence[Ranked], num_losses: int
) -> str:
    if findings:
        more = f"; and {len(findings) - _STATED} more (--json)" if len(findings) > _STATED else ""
        return "; and ".join(_sentence(finding) for finding in findings[:_STATED]) + f"{more}."
    if num_losses < LEAST_STEPS:
        held = f"{num_losses or 'no'} step{'' if num_losses == 1 else 's'} with a loss"
        return f"not known from this record, which holds {held} ({LEAST_STEPS} are needed)."
    if healthy_share(causes) >= CONFIDENCE:
        return "no sign of a fault in what was checked."
    shown = [sign for sign in _by_step(seen.values()) if sign.state == "present"]
    asked = [row.cause.name for row in causes if row.probability >= _ASKED and row.cause.name not in _NO_CAUSE]
    first = next((sign for sign in shown if sign.step is not None), shown[0] if shown else None)
    since = f", since step {first.step}" if first is not None and first.step is not None else ""
    where = f", first in {first.tensor}" if first is not None and first.tensor else ""
    likeliest = next(row.cause.name for row in causes if row.cause.name != HEALTHY)
    if likeliest == UNKNOWN_CAUSE or not asked:
        also = f" (in question: {', '.join(asked[:NUM_ALTERNATIVES])})" if asked else ""
        return f"not known from this record: something is wrong{since}{where}, and no known cause explains it{also}."
    return f"not known from this record{since}{where}; in question: {', '.join(asked[:NUM_ALTERNATIVES])}."


def _sentence(finding: CauseFinding) -> str:
    # Of the steps before one that was computed again nothing is known.
    since, first = ("at", "in") if finding.is_measured else ("since", "first in")
    step = f" {since} step {finding.step}" if finding.step is not None else ""
    where = f", {first} {finding.tensor}" if finding.tensor else ""
    return f"{finding.cause.title} ({finding.cause.name}){step}{where}"


def _by_step(signs: Iterable[Observation]) -> tuple[Observation, ...]:
    return tuple(sorted(signs, key=lambda sign: -1 if sign.step is None else sign.step))


def _sign_dict(sign: Observation) -> dict[str, Any]:
    return {
        "sign": sign.sign,
        "step": sign.step,
        "tensor": sign.tensor,
        "value": sign.value,
        "threshold": sign.threshold,
        "says": sign.sentence,
    }
