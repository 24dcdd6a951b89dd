"""Signs of where the time goes, and of what a resume changed.

Shares of a step's time are medians of the later three quarters of a run, since the first steps compile.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from statistics import median, quantiles

from narrowgauge.analysis.diagnosis.evidence import Evidence, step_of
from narrowgauge.analysis.diagnosis.observations import ABSENT, UNKNOWN, Observation, Sign, present
from narrowgauge.analysis.diagnosis.signs_of_steps import BEFORE, FEWEST, LATER, level_of
from narrowgauge.analysis.monitor.features import number

MAX_SHARE = 0.2
"""Share of a step's time, outside its arithmetic, that is worth a word."""
SLOWER = 1.4
"""Factor between the durations of late and early steps."""
SLOWER_CLOCK = 1.5
"""Factor between the fast tenth of late steps and the median of early ones, in processor time; busy machines reached 1.33."""
LEVEL_SIGMAS = 5.0
"""Standard errors by which a level moves where chance does not move it."""


def _share(evidence: Evidence, column: str) -> tuple[int, float] | None:
    """The step at which the later three quarters of the run begin, and the median share of their time."""
    rows = [
        (row["step"], part / whole)
        for row in evidence.run.steps
        if (part := number(row.get(column))) is not None and (whole := number(row.get("seconds")))
    ]
    later = rows[len(rows) // 4 :]
    return (int(later[0][0]), median(share for _, share in later)) if len(later) >= FEWEST else None


def _waits_for(column: str, words: str, evidence: Evidence) -> Observation:
    found = _share(evidence, column)
    if found is None:
        return UNKNOWN
    step, share = found
    if share < MAX_SHARE:
        return ABSENT
    return present(step, f"{share:.0%} of a step's time is {words}", None, share, MAX_SHARE)


def _slows_down(evidence: Evidence) -> Observation:
    """Late steps take longer than early ones, in whatever neither data nor other ranks account for.

    Where processor time is recorded, it tells a slow clock from other programs, which make any step longer.
    """
    if evidence.has("steps.cpu_seconds") and evidence.has("run.on_cpu"):
        return UNKNOWN
    own = []
    for row in evidence.run.steps[3:]:
        if (seconds := number(row.get("seconds"))) is not None:
            others = (number(row.get(name)) or 0.0 for name in ("data_seconds", "wait_seconds"))
            own.append((int(row["step"]), seconds - sum(others)))
    if len(own) < 4 * FEWEST:
        return UNKNOWN
    third = len(own) // 3
    early, late = [t for _, t in own[:third]], [t for _, t in own[-third:]]
    # The slow quarter of early steps and the fast tenth of late ones: other programs slow many steps, heat slows all.
    if quantiles(late, n=10)[0] < SLOWER * quantiles(early, n=4)[2]:
        return ABSENT
    limit = SLOWER * quantiles(early, n=4)[2]
    begins = next((step for step, seconds in own[third:] if seconds > limit), own[-third][0])
    said = f"a step took {median(early):.3g} s at first and takes {median(late):.3g} s at the end"
    return present(begins, said, None, median(late), limit)


def _computes_slower(evidence: Evidence) -> Observation:
    """The same step takes more of the processor's time: its clock is slower. Other programs make it wait instead."""
    spent = [(int(row["step"]), number(row.get("cpu_seconds"))) for row in evidence.run.steps[3:]]
    known = [(step, seconds) for step, seconds in spent if seconds]
    if len(known) < 4 * FEWEST:
        return UNKNOWN
    third = len(known) // 3
    early, late = [t for _, t in known[:third]], [t for _, t in known[-third:]]
    # A core that is shared with another program makes many steps longer, and not the fastest ones.
    was, now = median(early), quantiles(late, n=10)[0]
    if now < SLOWER_CLOCK * was:
        return ABSENT
    begins = next((step for step, seconds in known[third:] if seconds > SLOWER_CLOCK * was), known[-third][0])
    said = f"a step took {was:.3g} s of processor time at first and takes {median(late):.3g} s at the end"
    return present(begins, said, None, median(late), SLOWER_CLOCK * was)


def _moves_at_resume(evidence: Evidence) -> Observation:
    losses = evidence.column("loss")
    for event in evidence.events.get("resume", []):
        row = next((k for k, step in enumerate(evidence.steps) if step > step_of(event)), len(losses))
        before, after = losses[max(0, row - BEFORE) : row], losses[row : row + BEFORE]
        known = [value for value in (*before, *after) if value is not None]
        was, now = level_of(before), level_of(after)
        if was is None or now is None:
            continue
        noise = median(abs(b - a) for a, b in pairwise(known)) / math.sqrt(min(len(before), len(after)))
        if now - was > max(LEVEL_SIGMAS * noise, 0.02 * abs(was)):
            step = step_of(event)
            return present(
                step,
                f"the level of the loss went from {was:.3f} to {now:.3f} where the run resumed, at step {step}",
                None,
                now,
                was,
            )
    return ABSENT


def _spikes_at_resume(evidence: Evidence) -> Observation:
    resumes = [step_of(event) for event in evidence.events.get("resume", [])]
    for spike in evidence.raised_by("loss-spike"):
        since = next((step for step in resumes if 0 < step_of(spike) - step <= BEFORE), None)
        if since is not None:
            step = step_of(spike)
            return present(step, f"the loss jumped at step {step}, {step - since} steps after the run resumed")
    return ABSENT


def _was_resumed(evidence: Evidence) -> Observation:
    events = evidence.events.get("resume", [])
    return present(step_of(events[0]), f"the run resumed from step {step_of(events[0])}") if events else ABSENT


_TIME, _DATA, _WAIT = "steps.seconds", "steps.data_seconds", "steps.wait_seconds"

SIGNS_OF_TIME: tuple[Sign, ...] = (
    Sign(
        "data-is-slow", "a fifth of the time or more is spent waiting for data", (_TIME, _DATA), 0.003,
        partial(_waits_for, "data_seconds", "waiting for data"), LATER.format("data_seconds"),
    ),
    Sign(
        "ranks-wait", "a fifth of the time or more is spent waiting for the slowest rank", (_TIME, _WAIT), 0.02,
        partial(_waits_for, "wait_seconds", "waiting for the slowest rank"),
    ),
    Sign("steps-slow-down", "late steps take longer than early ones", (_TIME,), 0.012, _slows_down),
    Sign(
        "computing-slows-down", "late steps take more processor time than early ones",
        ("steps.cpu_seconds", "run.on_cpu"), 0.006, _computes_slower, LATER.format("cpu_seconds"),
    ),
    Sign("run-was-resumed", "the run was resumed", ("run.ours",), 0.2, _was_resumed),
    Sign(
        "level-moves-at-resume", "the loss goes on at a higher level after a resume", ("run.ours", "steps.loss"), 0.003,
        _moves_at_resume,
    ),
    Sign(
        "spike-at-resume", "the loss jumps soon after a resume", ("run.ours", "steps.loss"), 0.1, _spikes_at_resume,
        given="loss-spikes",
    ),
)  # fmt: skip
"""The signs in the durations of steps, and at resumes."""
