"""Signs in the learning rate: a jump that stays, one that is over soon, and what a resume made of it.

A schedule changes its rate a little from one step to the next; a warm-up's second step doubles its first one's rate.
"""

from __future__ import annotations

from collections.abc import Iterator

from narrowgauge.analysis.diagnosis.evidence import Evidence, step_of
from narrowgauge.analysis.diagnosis.observations import ABSENT, UNKNOWN, Observation, Sign, present

JUMP = 2.5
"""Factor between the rates of two consecutive steps that no schedule has after a warm-up's first steps."""
STAYS = 10
"""Steps from which a jump stays."""
RESUMED_BY = 1.5
"""Factor between the rates before and after a resume that no schedule has."""


def _jumps(evidence: Evidence) -> Iterator[tuple[int, float, float, int]]:
    """Rates that rise at one step above all earlier ones: the row, the rates before and after, and how many rows it lasts.

    What comes back to an earlier rate is a restart.
    """
    rates, highest = evidence.column("lr"), 0.0
    for row in range(2, len(rates)):  # a warm-up may begin at a thousandth, and its second rate be many times that
        before, now = rates[row - 1], rates[row]
        highest = max(highest, before or 0.0)
        if evidence.steps[row] - evidence.steps[row - 1] > 1 or (now or 0.0) <= 1.1 * highest:
            continue
        if before and now and now > JUMP * before:
            width = next((k for k, rate in enumerate(rates[row:]) if (rate or 0.0) < now / JUMP), len(rates) - row)
            yield row, before, now, width


def _rate_jumps(evidence: Evidence) -> Observation:
    if evidence.is_sparse:
        return UNKNOWN
    for row, before, now, width in _jumps(evidence):
        if width >= STAYS:
            step = evidence.steps[row]
            return present(
                step, f"the learning rate rose from {before:.3g} to {now:.3g} at step {step}", None, now, JUMP * before
            )
    return ABSENT


def _rate_bursts(evidence: Evidence) -> Observation:
    if evidence.is_sparse:
        return UNKNOWN
    for row, before, now, width in _jumps(evidence):
        if width < STAYS and row + width < len(evidence.steps):
            step = evidence.steps[row]
            said = f"the learning rate was {now:.3g} instead of {before:.3g} for {width} steps from step {step} on"
            return present(step, said, None, now, JUMP * before)
    return ABSENT


def _moves_at_resume(evidence: Evidence) -> Observation:
    rates = evidence.column("lr")
    for event in evidence.events.get("resume", []):
        row = next((k for k, step in enumerate(evidence.steps) if step > step_of(event)), 0)
        before, now = (rates[row - 1], rates[row]) if row else (None, None)
        if not before or not now or evidence.steps[row] - evidence.steps[row - 1] > 1 or row < 3:
            continue
        if max(now / before, before / now) >= RESUMED_BY:
            step = evidence.steps[row]
            said = f"the learning rate went from {before:.3g} to {now:.3g} where the run resumed"
            return present(step, said, None, now, RESUMED_BY * before)
    return ABSENT


_RATE = ("steps.lr",)

SIGNS_OF_RATES: tuple[Sign, ...] = (
    Sign("rate-jumps", "the learning rate jumps as no schedule lets it, and stays there", _RATE, 0.002, _rate_jumps),
    Sign("rate-bursts", "the learning rate is far higher for a few steps", _RATE, 0.001, _rate_bursts),
    Sign(
        "rate-moves-at-resume", "the learning rate is another one since a resume", (*_RATE, "run.ours"), 0.005, _moves_at_resume,
    ),
)  # fmt: skip
"""The signs in the learning rate."""
