"""From signs to causes: how likely each cause is, which signs it leaves unexplained, and what to measure next.

The probability of a cause is proportional to its prior times the product, over the signs that are known, of how likely a run with
this cause shows or lacks each. One cause is named at a time; the signs that it predicts are then explained, and the causes of the
rest are ranked anew, so that a run may have several. Where no cause is likely enough, none is named: the next measurement is the
unknown sign that is expected to lower the uncertainty over the likely causes most for its cost.

Source: naive Bayes; explaining away: Pearl 1988; the expected entropy after a test: de Kleer and Williams 1987, Diagnosing
multiple faults.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from narrowgauge.analysis.diagnosis.causes import CAUSES, HEALTHY, UNKNOWN_CAUSE, Cause
from narrowgauge.analysis.diagnosis.evidence import Evidence
from narrowgauge.analysis.diagnosis.loop_terms import in_terms_of, loop_of
from narrowgauge.analysis.diagnosis.signs.sign import Observation, Sign
from narrowgauge.analysis.diagnosis.signs.sign_table import SIGNS

CONFIDENCE = 0.7
"""Below this probability nothing is claimed."""
PREDICTED = 0.3
"""From this probability on a cause predicts a sign, and explains it where it is present."""
MAJORITY = 0.5
"""From this probability on the absence of a sign counts."""
EXPECTED = 0.6
"""From this probability on the absence of a sign speaks against a cause."""
CONSEQUENCE = 0.4
"""Share of faults that later show a sign that is not their own."""
MAX_FINDINGS = 4
FLAG, REPLAY, SECOND_RUN = 1.0, 2.0, 10.0
"""Costs of measurements, relative to each other: a flag of the next run, a replay of one step of this one, another run."""
_ALIKE = 0.05
"""A cause less likely than this is not in question."""

Observations = Mapping[str, Observation]


@dataclass(frozen=True, slots=True)
class Ranked:
    cause: Cause
    probability: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measurement that would distinguish the causes in ``tells``.

    ``gain`` is the entropy that it is expected to remove, in bits, and ``cost`` is relative to a flag of the next run.
    """

    what: str
    tells: tuple[str, ...]
    gain: float
    cost: float


def sign_probability(cause: Cause, sign: str, base_rate: float | None = None, is_consequence: bool = False) -> float:
    """How likely a run with this cause shows a sign: as predicted, but not less often than healthy runs do.

    For a sign that is ``given`` another one, the prediction counts as it is: the other sign is present, and due to this cause.

    Args:
        base_rate: share of the healthy runs of this length that show it; ``None``: of short ones.
        is_consequence: another cause came before the sign, so that it may be due to that.
    """
    base = max(SIGNS[sign].base_rate if base_rate is None else base_rate, CONSEQUENCE if is_consequence else 0.0)
    if SIGNS[sign].given and sign in cause.predicts and not is_consequence:
        return cause.predicts[sign]
    return min(0.9995, max(base, cause.predicts.get(sign, base)))


def ranked_causes(evidence: Evidence, seen: Observations, onset: float = math.inf) -> list[Ranked]:
    """All causes that the run can have, the most likely one first; unknown signs do not count.

    Args:
        onset: the step at which another cause began: what shows from there on may be a consequence.
    """
    logs = {
        name: _log_likelihood(cause, seen, onset)
        for name, cause in CAUSES.items()
        if cause.applies(evidence) and is_considered(cause, seen)
    }
    top = max(logs.values())
    weights = {name: math.exp(log - top) for name, log in logs.items()}
    total = sum(weights.values())
    order = sorted(weights, key=weights.__getitem__, reverse=True)
    return [Ranked(CAUSES[name], weights[name] / total) for name in order]


def healthy_share(causes: Sequence[Ranked]) -> float:
    """How likely nothing is wrong, against the likeliest fault alone: the many others add up to no rival."""
    healthy = sum(row.probability for row in causes if row.cause.name == HEALTHY)
    rival = max((row.probability for row in causes if row.cause.name != HEALTHY), default=0.0)
    return healthy / (healthy + rival) if healthy > 0 else 0.0


def is_considered(cause: Cause, seen: Observations) -> bool:
    """Whether a sign that a cause requires is present."""
    return not cause.required or any(name in seen and seen[name].state == "present" for name in cause.required)


def _log_likelihood(cause: Cause, seen: Observations, onset: float) -> float:
    log = math.log(cause.prior)
    for name, observation in seen.items():
        if observation.state != "unknown":
            shown = sign_probability(cause, name, observation.base_rate, _may_follow(observation, name, onset))
            # Signs of a minority of cases come together or not at all: their absence counts once, which is next to nothing.
            absent = 1 - (shown if shown >= MAJORITY else observation.base_rate)
            log += math.log(shown if observation.state == "present" else absent)
    return log


def _may_follow(observation: Observation, sign: str, onset: float) -> bool:
    """Whether a sign may be due to what began at a step: signs of durations and of settings never are."""
    return observation.step is not None and observation.step >= onset and not SIGNS[sign].is_of_time


def signs_explained(cause: Cause, seen: Observations) -> list[str]:
    """The signs that are present and that a cause predicts."""
    return [
        name
        for name, observation in seen.items()
        if observation.state == "present" and cause.predicts.get(name, 0.0) >= min(PREDICTED, 3 * SIGNS[name].base_rate)
    ]


def signs_against(cause: Cause, seen: Observations) -> list[str]:
    """The signs that a cause predicts and that are absent."""
    return [
        name for name, probability in cause.predicts.items() if probability >= EXPECTED and seen[name].state == "absent"
    ]


def named_causes(evidence: Evidence, seen: Observations) -> list[tuple[Ranked, list[Ranked]]]:
    """The causes that explain a run, one after the other, until nothing is left to explain or none is likely enough.

    Each comes with all others at the time it was named. A healthy run has none.
    """
    found: list[tuple[Ranked, list[Ranked]]] = []
    rest, onset = dict(seen), math.inf
    while len(found) < MAX_FINDINGS:
        named = {first.cause.name for first, _ in found}
        causes = [row for row in ranked_causes(evidence, rest, onset) if row.cause.name not in named]
        chosen = _first_sure(causes, rest)
        if chosen is None:
            break
        first, share = chosen
        found.append((Ranked(first.cause, share), [row for row in causes if row is not first]))
        signs = signs_explained(first.cause, rest) if first.cause.spreads else []
        steps = [seen[name].step for name in signs if not SIGNS[name].is_of_time]
        onset = min([onset, *(step for step in steps if step is not None)])
        # Those that it predicts say nothing more about the others, present or not.
        rest = {name: row for name, row in rest.items() if name not in first.cause.predicts}
    return found


def _first_sure(causes: Sequence[Ranked], seen: Observations) -> tuple[Ranked, float] | None:
    """The likeliest cause that stands out among its rivals; two causes that no sign distinguishes do not hide a third."""
    unsure: list[Ranked] = []
    for first in causes:
        if first.cause.name == UNKNOWN_CAUSE:
            unsure.append(first)
            continue
        if first.cause.name == HEALTHY or any(_is_rival(row.cause, first.cause, seen) for row in unsure):
            continue
        share = first.probability / sum(row.probability for row in causes if _is_rival(first.cause, row.cause, seen))
        if share >= CONFIDENCE:
            return first, share
        unsure.append(first)
    return None


def _is_rival(cause: Cause, other: Cause, seen: Observations) -> bool:
    """Whether another cause explains a sign that this one does; this one and health always count.

    Other causes may be there as well: a slow loader and a batch of noise do not exclude each other.
    """
    explains = set(signs_explained(cause, seen))
    return other in (cause, CAUSES[HEALTHY]) or bool(explains & set(signs_explained(other, seen)))


def next_measurement(evidence: Evidence, seen: Observations, causes: Iterable[Ranked]) -> Measurement | None:
    """The measurement with the largest expected loss of entropy for its cost.

    ``None`` where one cause alone is in question, or nothing distinguishes them.
    """
    asked = [row for row in causes if row.probability >= _ALIKE and row.cause.name != UNKNOWN_CAUSE]
    if len(asked) < 2:
        return None
    total = sum(row.probability for row in asked)
    shares = [(row.cause, row.probability / total) for row in asked]
    tells = tuple(cause.name for cause, _ in shares)
    options = [
        Measurement(_said(SIGNS[name], evidence, seen), tells, _gain(shares, name), _cost(SIGNS[name]))
        for name, row in seen.items()
        if row.state == "unknown" and _can_be_recorded(name, evidence, seen)
    ]
    for cause, share in shares:
        if cause.measure:
            options.append(Measurement(cause.measure, tells, _entropy([share, 1 - share]), SECOND_RUN))
    best = max(options, key=lambda option: option.gain / option.cost, default=None)
    return best if best is not None and best.gain > 0.01 else None


def _said(sign: Sign, evidence: Evidence, seen: Observations) -> str:
    """How to find out about a sign. A replay is of the first step that shows anything, or of the last one."""
    needs = sign.needs
    if _cost(sign) == REPLAY:
        first = min((row.step for row in seen.values() if row.state == "present" and row.step), default=None)
        step = first or (evidence.steps[-1] if evidence.steps else 1)
        # The path last: it may hold the word STEP.
        needs = needs.replace("STEP", str(step)).replace("RUN", str(evidence.run.path))
    return f"{in_terms_of(loop_of(evidence.run), needs)}: {sign.meaning}?"


def _cost(sign: Sign) -> float:
    return REPLAY if any(read.startswith("replay.") for read in sign.reads) else FLAG


def _can_be_recorded(sign: str, evidence: Evidence, seen: Observations) -> bool:
    """Whether a flag would record a sign: not if another sign must come first, or on one rank if it takes several."""
    row = SIGNS[sign]
    if row.given and seen[row.given].state != "present":
        return False
    if _cost(row) == REPLAY and (evidence.replay is not None or not evidence.has("run.data")):
        return False
    if all(evidence.has(read) for read in row.reads):  # it is recorded, and says nothing of such a run
        return False
    return bool(row.needs) and all(
        evidence.has(read) for read in row.reads if read in ("run.ranks", "run.recipe", "run.ours")
    )


def _gain(shares: list[tuple[Cause, float]], sign: str) -> float:
    """The entropy over causes, less what is expected to remain once a sign is known."""
    chances = [sign_probability(cause, sign) for cause, _ in shares]
    shown = sum(share * p for (_, share), p in zip(shares, chances, strict=True))
    after = 0.0
    for weight, answers in ((shown, chances), (1 - shown, [1 - p for p in chances])):
        if weight > 0:
            after += weight * _entropy([share * p / weight for (_, share), p in zip(shares, answers, strict=True)])
    return _entropy([share for _, share in shares]) - after


def _entropy(shares: Iterable[float]) -> float:
    return -sum(share * math.log2(share) for share in shares if share > 0)
