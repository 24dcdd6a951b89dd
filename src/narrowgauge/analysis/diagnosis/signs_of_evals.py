"""The sign in the validation losses: what the training loss gains and the validation loss does not."""

from __future__ import annotations

from bisect import bisect_right

from narrowgauge.analysis.diagnosis.evidence import Evidence
from narrowgauge.analysis.diagnosis.observations import ABSENT, UNKNOWN, Observation, Sign, present
from narrowgauge.analysis.diagnosis.signs_of_steps import BEFORE, level_of
from narrowgauge.analysis.monitor.features import number

LARGE_GAP = 0.1
"""Validation loss minus training loss, in nats, from which data have been learned by heart."""
FEWEST_EVALS = 3
"""Evaluations from which a gap can be said to grow."""


def _gaps(evidence: Evidence) -> list[tuple[int, float]]:
    """At each evaluation the validation loss, less the level of the training loss over the steps before it."""
    steps, losses = evidence.steps, evidence.column("loss")
    found = []
    for row in evidence.run.evals:
        count = bisect_right(steps, int(row["step"]))
        level, value = level_of(losses[max(0, count - BEFORE) : count]), number(row.get("val_loss"))
        if level is not None and value is not None:
            found.append((int(row["step"]), value - level))
    return found


def _parts(evidence: Evidence) -> Observation:
    gaps = _gaps(evidence)
    if len(gaps) < FEWEST_EVALS:
        return UNKNOWN
    values = [gap for _, gap in gaps]
    # It grows over the whole run, and from one evaluation to the next at the end: a single one is noise.
    if not (values[-1] > LARGE_GAP and values[-1] > values[-2] > values[0] and values[-1] > values[0] + LARGE_GAP):
        return ABSENT
    step = next(step for step, gap in gaps if gap > LARGE_GAP)
    said = f"the validation loss is {values[-1]:.2f} nats above the training loss at the end, and was {values[0]:.2f} at first"
    return present(step, said, None, values[-1], LARGE_GAP)


SIGNS_OF_EVALS: tuple[Sign, ...] = (
    Sign(
        "validation-parts-from-training", "the training loss falls, and the validation loss falls less or rises",
        ("steps.loss", "run.evals"), 0.03, _parts, "--eval-every 100",
    ),
)  # fmt: skip
"""The signs in the evaluations."""
