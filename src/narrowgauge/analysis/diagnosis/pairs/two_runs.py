"""The diagnosis of two runs: where they first differ, why, and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from narrowgauge.analysis.diagnosis.computed_again import recorded_departures
from narrowgauge.analysis.diagnosis.evidence import recomputed_steps
from narrowgauge.analysis.diagnosis.loop_terms import in_terms_of
from narrowgauge.analysis.diagnosis.pairs.alignment import Alignment, align
from narrowgauge.analysis.diagnosis.pairs.first_difference import STAGES, FirstDifference, rounding_of
from narrowgauge.analysis.diagnosis.pairs.reasons import REASONS, Reason, deciding, is_proven, weigh, without_rounding
from narrowgauge.analysis.diagnosis.posterior import CONFIDENCE
from narrowgauge.analysis.diagnosis.replay_findings import ReplayedPair
from narrowgauge.runs.finding import Finding, at_step, counted
from narrowgauge.runs.fingerprint_rows import APPLIED_NO_CLIP, in_words
from narrowgauge.runs.record import Run

_NAMED = 3
_ASKED = 0.01
"""A reason less likely than this is not said to be in question."""


@dataclass(frozen=True, slots=True)
class TwoRuns:
    """What the records of two runs say about their difference.

    Args:
        alignment: the settings that differ, and the first difference between the rows.
        reasons: why, with probabilities, the likeliest first; empty where the runs do not differ.
        evidence: what speaks for the first, a sentence each.
        next_measurement: what to measure next, or empty.
        loop: how both were recorded, a key of :data:`~narrowgauge.analysis.diagnosis.loop_terms.LOOPS`.
        departures: of each run, what its audited steps depart in and the other's do not, each once.
    """

    names: tuple[str, str]
    alignment: Alignment
    reasons: tuple[tuple[Reason, float], ...]
    evidence: tuple[str, ...]
    next_measurement: str
    loop: str = "trainer"
    departures: tuple[tuple[Finding, ...], tuple[Finding, ...]] = ((), ())

    @property
    def remedy(self) -> str:
        """What to do, in the words of the loops; empty where no reason is known."""
        return in_terms_of(self.loop, self.reason.remedy) if self.reason is not None else ""

    @property
    def reason(self) -> Reason | None:
        """Why they differ; ``None`` where they do not, or where these records do not tell."""
        if not self.reasons or self.reasons[0][1] < CONFIDENCE or not is_proven(self.reasons[0][0], self.alignment):
            return None
        return self.reasons[0][0]

    @property
    def verdict(self) -> str:
        """One sentence."""
        difference = self.alignment.first_difference
        if difference is None:
            return _sameness(self.alignment)
        where = f"The runs first differ at step {difference.step}, in {_place(difference)}"
        if self.reason is None:
            asked = ", ".join(row.name for row, share in self.reasons[:_NAMED] if share >= _ASKED)
            return f"{where}. Why is not known from these records{f'; in question: {asked}' if asked else ''}."
        return f"{where}. Cause: {self.reason.title} ({self.reason.name})."

    def text(self) -> str:
        """At most ten lines, for a ticket."""
        lines = [f"{' and '.join(self.names)}: {self.verdict}", *(f"  {said}" for said in self.evidence)]
        if self.reason is not None:
            lines.append(f"  what to do: {self.remedy}")
            if others := ", ".join(row.name for row, share in self.reasons[1:_NAMED] if share >= _ASKED):
                lines.append(f"  it could also be: {others}")
        if self.next_measurement:
            lines.append(f"  next: {self.next_measurement}")
        return "\n".join([*lines, *(f"  note: {said}" for said in self.alignment.notes)][:10])

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as values for JSON."""
        alignment, difference = self.alignment, self.alignment.first_difference
        return {
            "runs": list(self.names),
            "verdict": self.verdict,
            "same": difference is None,
            "step": difference and difference.step,
            "stage": difference and difference.stage,
            "tensor": (difference and difference.tensor) or None,
            "ranks": list(difference.ranks) if difference else [],
            "replayed": alignment.replayed and alignment.replayed.to_dict(),
            "equal_tokens": alignment.at_tokens and alignment.at_tokens.to_dict(),
            "rounding_since": alignment.rounded and alignment.rounded.step,
            "relative": None if difference is None or math.isnan(difference.relative) else difference.relative,
            "reasons": {row.name: share for row, share in self.reasons},
            "differences": [
                {"name": each.name, "table": each.table, "values": list(each.values)} for each in alignment.differences
            ],
            "departures": [[each.name for each in of_run] for of_run in self.departures],
            "evidence": list(self.evidence),
            "next_measurement": self.next_measurement or None,
            "notes": list(alignment.notes),
        }


def compare_two(one: Run, other: Run, replayed: ReplayedPair | None = None) -> TwoRuns:
    """Say where two runs first differ, and why, by their records, finished or not.

    Invariant: a function of the two records alone; no cause is named below a probability of 0.7.

    ``replayed`` is what :func:`narrowgauge.trainer.replays.two_replays.compare_exactly` found, if it was called.
    """
    alignment = without_rounding(align(one, other, replayed))
    ranked = tuple((REASONS[name], share) for name, share in weigh(alignment).items())
    names = _names(one, other)
    departures = _departures_of_one(one, other)
    evidence = (*_departing(departures, names), *_evidence(alignment, ranked, names))
    loop, then = "recorder", _of_own_loop(alignment)
    if alignment.are_trainers:
        loop, then = "trainer", _next(alignment, _can_be_replayed(one, other))
    return TwoRuns(names, alignment, ranked, evidence, then, loop, departures)


def _departures_of_one(one: Run, other: Run) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """What one run's audited steps depart in and the other's do not: no notes, and nothing unless both were audited."""
    if not all(map(recomputed_steps, (one, other))):
        return (), ()
    found = [
        {each.name: each for each in reversed(recorded_departures(run)) if each.severity != "note"}
        for run in (one, other)
    ]
    first, second = (
        tuple(sorted((mine[name] for name in mine.keys() - its.keys()), key=lambda each: (each.step, each.name)))
        for mine, its in (found, found[::-1])
    )
    return first, second


def _departing(departures: tuple[tuple[Finding, ...], ...], names: tuple[str, str]) -> Iterator[str]:
    for name, found in zip(names, departures, strict=True):
        for each in found[:_NAMED]:
            yield f"computed again, a step of {name} alone departs: {at_step(each.step, each.message.rstrip('.'))} ({each.name})"


def _names(one: Run, other: Run) -> tuple[str, str]:
    """The folders' names, or their paths where the names are equal."""
    first, second = one.path, other.path
    if first.name != second.name:
        return first.name, second.name
    return str(first), str(second)


def _sameness(alignment: Alignment) -> str:
    if not alignment.num_common and not alignment.has_fingerprints:
        return "The records have no step in common, so they cannot be compared."
    given = f", although they were given {_listed(alignment)}" if alignment.differences else ""
    if alignment.is_complete:
        return f"The same run, bit for bit to the last weight{given}."
    return f"The same in all that both recorded ({counted(alignment.num_common, 'step')}){given}."


def _listed(alignment: Alignment) -> str:
    shown = [str(each) for each in alignment.differences[:_NAMED]]
    more = len(alignment.differences) - len(shown)
    return ", ".join(shown) + (f" and {more} more differences" if more else "")


def _place(difference: FirstDifference) -> str:
    place = f"{difference.tensor} ({STAGES[difference.stage]})" if difference.tensor else STAGES[difference.stage]
    return f"{place} of {in_words(difference.ranks)}" if difference.ranks else place


def _evidence(alignment: Alignment, ranked: tuple[tuple[Reason, float], ...], names: tuple[str, str]) -> Iterator[str]:
    difference = alignment.first_difference
    given = _listed(alignment)
    alike = (
        f"the same in both: {', '.join(alignment.tables)}"
        if alignment.tables
        else "neither settings nor versions are recorded of both"
    )
    yield f"not the same: {given}" if given else alike
    if difference is None:
        return
    if ranked and (decided := deciding(ranked[0][0], alignment.differences)):
        yield f"of these, {', '.join(each.name for each in decided[:_NAMED])} can act there"
    yield from _of_ranks(difference)
    if difference.stage == "held" and difference.only_in is not None:
        yield _of_change(difference, names[difference.only_in])
    elif difference.only_in is not None:
        more = f", and {difference.others[0]} more such tensors" if difference.others[0] else ""
        yield f"only {names[difference.only_in]} has {difference.tensor}{more}"
    if alignment.factor is not None:
        yield alignment.factor.sentence(names)
    if alignment.drift is not None:
        yield str(alignment.drift)
    if (outputs := alignment.equal_outputs) and alignment.is_rounding(difference) is not True:
        yield f"of {counted(outputs, 'module')} the outputs were hashed and are equal: what differs comes after them"
    if alignment.is_exact:
        yield "all gradients of the step are equal, and the update is elementwise: no order of sums explains it"
    yield from alignment.replayed.sentences() if alignment.replayed is not None else ()
    if alignment.at_tokens is not None:
        yield str(alignment.at_tokens)
    if difference.equal_until is not None:
        yield f"every tensor was equal up to step {difference.equal_until}"
    if (rounded := alignment.rounded) is not None:
        yield f"before, they differ by rounding alone: since step {rounded.step}, first in {_place(rounded)}"
    yield from _of_size(alignment, difference)
    if difference.others[1] and difference.only_in is None:
        kind, (differing, of) = difference.tensor.partition(":")[0], difference.others
        yield f"{differing} of the {of - 1} other tensors of its kind ({kind}) differ in that step"


def _of_change(difference: FirstDifference, name: str) -> str:
    """What one run changed between two steps, and how often it did so again."""
    more = f" and {difference.others[0]} more" if difference.others[0] else ""
    again, of = difference.again
    times = "none" if not again else "each" if again == of else f"{again}"
    said = f", and again before {times} of the {of} later steps that were recorded" if of else ""
    return (
        f"{name} has {difference.tensor.removeprefix('held:')}{more} changed between steps {difference.step - 1} and "
        f"{difference.step}, outside of the optimizer's step{said}"
    )


def _of_size(alignment: Alignment, difference: FirstDifference) -> Iterator[str]:
    """How far apart the two values are, and how far rounding reaches, measured or by a formula."""
    replayed = alignment.replayed
    small = alignment.is_rounding(difference)
    if small is None or difference.only_in is not None:
        return
    what = "norm" if difference.tensor else "value"
    one, other = difference.values
    said = f"its {what} is {one:.6g} and {other:.6g}: a relative difference of {difference.relative:.2g}"
    if replayed is not None and replayed.envelope is not None and replayed.envelope.tensor == difference.tensor:
        yield f"{said}; {replayed.envelope}: {'inside' if small else 'outside'} of what rounding does"
        return
    if difference.numel <= 0 or (
        not small and rounding_of(difference.numel, alignment.roundoff) >= difference.relative
    ):
        yield said
        return
    explains = f"rounding explains ({rounding_of(difference.numel, alignment.roundoff):.2g})"
    yield f"{said}, {'as small as' if small else 'more than'} {explains}"


def _of_ranks(difference: FirstDifference) -> Iterator[str]:
    if difference.said:
        yield difference.said
    elif difference.ranks and difference.stage == "clip":
        which = ("the first run", "the second run")
        did = [f"by {value:.6g} in {run}" for value, run in zip(difference.values, which, strict=True)]
        none = [
            run for value, run in zip(difference.values, which, strict=True) if value == max(difference.values) == 1.0
        ]
        told = f"; it {APPLIED_NO_CLIP} in {none[0]}" if none else ""
        yield f"{in_words(difference.ranks)} multiplied its gradients {' and '.join(did)}{told}"
    elif difference.ranks:
        yield f"only {in_words(difference.ranks)} differs: the other ranks computed what they did in the other run"


def _can_be_replayed(one: Run, other: Run) -> bool:
    """Whether the trainer made both runs, so that their folders hold their data."""
    return all("recorder" not in run.run and (run.path / "data").is_dir() for run in (one, other))


def _of_own_loop(alignment: Alignment) -> str:
    """What a loop of one's own can measure: which tensor differs first, and whether one of the runs differs from itself."""
    difference = alignment.first_difference
    if difference is None or difference.stage in ("start", "tokens", "evaluation"):
        return ""
    if alignment.equal_outputs and alignment.is_rounding(difference) is False:
        return ""
    if difference.stage == "held" and difference.recurs is None and not difference.others[0]:
        return (
            f"record the steps after {difference.step} with RunRecorder(fingerprints_every=1), too: damage does not happen "
            "again, and code acts again"
        )
    if not difference.tensor and not alignment.is_hashed:
        return (
            f"repeat both with RunRecorder(fingerprints_every=1) up to step {difference.step}: that shows which tensor differs "
            "first"
        )
    return (
        f"repeat one of the two unchanged up to step {difference.step}: if it differs from itself, sums vary from run to run; "
        "if not, other code or settings act"
    )


def _next(alignment: Alignment, can_be_replayed: bool) -> str:
    difference = alignment.first_difference
    if difference is None or difference.stage in ("start", "tokens") or alignment.replayed is not None:
        return ""
    since = 0 if difference.equal_until is None else difference.equal_until
    is_located = alignment.rounded is not None or (alignment.has_fingerprints and difference.step - since <= 1)
    if can_be_replayed and difference.step > 0:
        more = (
            "tells damage from code, and measures how far rounding reaches" if is_located else "names the first tensor"
        )
        return f"narrowgauge diagnose RUN OTHER --exact computes both again, and {more}"
    if is_located:
        return ""
    hashed = f"nothing was hashed between steps {since} and {difference.step}"
    why = hashed if alignment.has_fingerprints else "that shows which tensor differs first"
    return f"repeat both with --fingerprints-every 1 --stop-after {difference.step}: {why}"
