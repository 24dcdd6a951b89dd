"""What a diagnosis said of a run whose cause is known, and the matrix of many such answers.

Claim: none of its own; ``diagnosis.py`` measures. Baseline: the undisturbed run. Run: ``./dev bench diagnosis``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from injections import LIVE, STRENGTHS, Injection
from timing import Row

import narrowgauge as ng
from narrowgauge.runs.record import Run

ANSWERS = ("first", "in the first three", "in a note", "not known", "healthy", "wrong")


@dataclass(frozen=True)
class Outcome:
    """One answer.

    Args:
        name, cause, strength: of the injection.
        answer: one of ``ANSWERS``.
        named: the causes that were named, the most likely first.
        sure: the probability of the first.
        live: steps from the injection to the first event of a right kind; ``None``: there was none.
        unseen: the record of one run cannot show the cause.
        in_twin: the diagnosis names the cause in the undisturbed run too, so that a right answer proves nothing.
    """

    name: str
    cause: str
    strength: str
    answer: str
    named: Sequence[str] = ()
    sure: float | None = None
    live: int | None = None
    unseen: bool = False
    in_twin: bool = False

    def row(self) -> Row:
        """The table's row of a run."""
        said = ", ".join(self.named) or "nothing"
        sure = "" if self.sure is None else f" ({self.sure:.2f})"
        live = "none" if self.live is None else str(self.live)
        return {
            "": self.name,
            "answer": self.answer,
            "diagnosis": f"{said}{sure}",
            "steps to an event": live,
            "undisturbed too": "yes" if self.in_twin else "",
        }


def effect(run: Run, twin: Run, injection: Injection) -> str:
    """What of a run is not as in the same run undisturbed; ``NONE`` where nothing is."""
    early = [row for row in run.events if row["kind"] == "corruption"]
    if early:
        return f"stopped at {early[0]['step']}"
    ours, theirs = ({row["step"]: row for row in each.steps} for each in (run, twin))
    both = [step for step in ours if step in theirs]
    parted = [s for s in both if any(ours[s][name] != theirs[s][name] for name in ("loss", "grad_norm"))]
    if parted:
        last = max(both)
        return f"from step {parted[0]}, loss {ours[last]['loss']:.3g} for {theirs[last]['loss']:.3g}"
    late, soon = ([ours[s]["seconds"] for s in both if (s >= injection.at) is after] for after in (True, False))
    ratio = statistics.median(late) / statistics.median(soon) if late and soon else 0.0
    return f"step time × {ratio:.2g}" if ratio > 1.25 else "NONE"


def injected_outcome(run: Run, injection: Injection, twin: Run | None = None) -> Outcome:
    """What the diagnosis says of a run whose cause is known.

    Where the undisturbed twin loses updates too, that is right of both runs: the finding is left out, unless it was injected.
    """
    kinds = LIVE[injection.cause]
    live = next((e["step"] for e in run.events if e["step"] >= injection.at and e["kind"] in kinds), None)
    named, others, notes = diagnosed(run)
    loses = twin is not None and any(event["kind"] == "lost_updates" for event in twin.events)
    if loses and injection.expected != "lost-updates":
        named.pop("lost-updates", None)
        others = [name for name in others if name != "lost-updates"]
    return Outcome(
        injection.name, injection.cause, injection.strength, _answer(injection.expected, list(named), others, notes), list(named),
        next(iter(named.values()), None), None if live is None else live - injection.at, bool(injection.unseen),
        twin is not None and injection.expected in diagnosed(twin)[0],
    )  # fmt: skip


def healthy_outcome(run: Run, name: str) -> Outcome:
    """What the diagnosis says of a run in which nothing is wrong."""
    named, others, _ = diagnosed(run)
    return Outcome(
        name, "healthy", "", _answer("healthy", list(named), others), list(named), next(iter(named.values()), None)
    )


def loop_outcome(run: Run, name: str, cause: str, at: int) -> Outcome:
    """What the diagnosis says of a loop of one's own."""
    named, others, notes = diagnosed(run)
    kinds = LIVE.get(cause, ())
    live = next((e["step"] for e in run.events if e["step"] >= at and e["kind"] in kinds), None)
    answer = _answer(cause, list(named), others, notes)
    return Outcome(
        name, cause, "plain", answer, list(named), next(iter(named.values()), None), None if live is None else live - at
    )


def diagnosed(run: Run) -> tuple[dict[str, float], list[str], str]:
    """The causes that a diagnosis names, with their probabilities, those in question, ``healthy`` among them, and its notes."""
    found = ng.diagnose(run)
    named = {finding.cause.name: finding.probability for finding in found.findings}
    others = [row.cause.name for finding in found.findings[:1] for row in finding.alternatives]
    asked = [row.cause.name for row in found.causes]
    return named, others or asked, "; ".join(found.notes)


def _answer(cause: str, named: Sequence[str], others: Sequence[str], notes: str = "") -> str:
    """Which of ``ANSWERS`` it is: a cause in question counts among the first three, named or not; a note is no diagnosis."""
    if named[:1] == [cause]:
        return "first"
    if not named and f"({cause})" in notes:
        return "in a note"
    if not named and others[:1] == ["healthy"]:
        return "healthy"
    ranked = [other for other in dict.fromkeys([*named, *others]) if other != "healthy"]
    if cause in ranked[:3]:
        return "in the first three"
    return "wrong" if named else "not known"


def counted(outcomes: Sequence[Outcome]) -> list[Row]:
    """The matrix: a row for each cause and strength."""
    rows: list[Row] = []
    for cause in sorted({outcome.cause for outcome in outcomes}):
        for strength in STRENGTHS:
            own = [outcome for outcome in outcomes if (outcome.cause, outcome.strength) == (cause, strength)]
            if own:
                rows.append(_row_of(cause + (" *" if own[0].unseen else ""), strength, own))
    return rows


def _row_of(cause: str, strength: str, own: Sequence[Outcome]) -> Row:
    steps = sorted(outcome.live for outcome in own if outcome.live is not None)
    wrong = dict.fromkeys(outcome.named[0] for outcome in own if outcome.answer == "wrong")
    return {
        "": cause, "strength": strength, "runs": len(own),
        **{answer: sum(outcome.answer == answer for outcome in own) for answer in ANSWERS},
        "named instead": ", ".join(wrong), "event in": f"{len(steps)} of {len(own)}",
        "median steps to it": str(steps[len(steps) // 2]) if steps else "",
    }  # fmt: skip


def totals(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The figures that are claimed, over all runs and over those whose cause the record of one run can show."""
    shown = [each for each in outcomes if not each.unseen]
    parts = {
        "all": outcomes,
        "shown by one run": shown,
        "and not in the twin": [each for each in shown if not each.in_twin],
    }
    for words, some in parts.items():
        if some:
            first, three = (sum(each.answer in ANSWERS[:k] for each in some) / len(some) for k in (1, 2))
            yield f"{words}: {len(some)} runs, named first {first:.0%}, in the first three {three:.0%}{_by_strength(some)}"


def _by_strength(outcomes: Sequence[Outcome]) -> str:
    shares = []
    for strength in STRENGTHS:
        own = [each for each in outcomes if each.strength == strength]
        if own:
            shares.append(f"{strength} {sum(each.answer == 'first' for each in own)} of {len(own)}")
    return f" (first: {', '.join(shares)})"
