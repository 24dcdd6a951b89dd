"""Signs in the loss scale: whether overflows lower it, and what the loss does meanwhile."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median

from narrowgauge.analysis.diagnosis.evidence import Evidence, step_of
from narrowgauge.analysis.diagnosis.observations import ABSENT, UNKNOWN, Observation, Sign, present
from narrowgauge.analysis.monitor.features import number


def _scale_falls_alone(evidence: Evidence) -> Observation:
    """A loss scale is halved where gradients overflow, and such a step is skipped: one that falls without is set by something."""
    before: float | None = None
    for row in evidence.run.steps:
        now = number(row.get("loss_scale"))
        if before is not None and now is not None and now < before / 2.5 and not row.get("skipped"):
            step = int(row["step"])
            return present(
                step,
                f"the loss scale fell from {before:g} to {now:g} at step {step}, and no gradient overflowed",
                None,
                now,
            )
        before = now if now is not None else before
    return ABSENT


def _rises_with_scale(evidence: Evidence) -> Observation:
    """Whether the loss is higher at the end than before the loss scale fell: skipped steps change nothing."""
    losses = evidence.column("loss")
    events = evidence.raised_by("scale-halvings", "scale-skips")
    row = next((k for k, step in enumerate(evidence.steps) if events and step >= step_of(events[0])), 0)
    before = [loss for loss in losses[max(0, row - 25) : max(0, row - 5)] if loss is not None and math.isfinite(loss)]
    late = [loss for loss in losses[max(row, len(losses) - 20) :] if loss is not None and math.isfinite(loss)]
    if min(len(before), len(late)) < 10:
        return UNKNOWN
    noise = median(abs(b - a) for a, b in pairwise(before)) * math.sqrt(2 / min(len(before), len(late)))
    was, now = median(before), median(late)
    if now <= was + 1.5 * noise:
        return ABSENT
    said = f"the loss is {now:.3f} at the end and was {was:.3f} before the loss scale fell"
    return present(evidence.steps[row], said, None, now, was + 1.5 * noise)


SIGNS_OF_LOSS_SCALE: tuple[Sign, ...] = (
    Sign(
        "loss-rises-with-scale", "the loss is higher at the end than before the loss scale fell", ("steps.loss",), 0.2,
        _rises_with_scale,
        given="loss-scale-falls",
    ),
    Sign(
        "scale-falls-alone", "the loss scale falls where no gradient overflowed", ("steps.loss_scale", "run.ours"), 0.002,
        _scale_falls_alone,
    ),
)  # fmt: skip
"""The signs in the loss scale."""
