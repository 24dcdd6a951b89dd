"""The rule by which a run has diverged: so many failed steps in a row, in the trainer's loop or in a user's.

A step *fails* if its loss or its gradient norm is not finite. An overflow that the loss scaler answers with a lower scale is no
failure, as long as the scale can still be lowered.
"""

from __future__ import annotations

import math

from narrowgauge.analysis.monitor.spikes import Spike
from narrowgauge.numerics.scaling import LossScaler
from narrowgauge.runs.events import Event
from narrowgauge.runs.schema import Row

FAILURES = 25
"""Failed steps in a row after which a run has diverged."""


class FailedSteps:
    """Counts failed steps in a row.

    Attributes:
        in_a_row: failed steps up to the last one.

    Example:
        >>> failed = FailedSteps()
        >>> for step in range(1, 26):
        ...     row = {"step": step, "loss": float("nan"), "grad_norm": None}
        ...     is_failure = failed.take(row)
        >>> failed.divergence(row, "Lower the learning rate.").message
        'the last 25 steps failed: the loss is nan and the gradient norm None'
    """

    def __init__(self) -> None:
        self.in_a_row = 0

    def take(self, row: Row, scaler: LossScaler | None = None, scale: float = 1.0) -> bool:
        """Count a step; whether it failed.

        Args:
            row: of the step.
            scaler: the optimizer's, if it has one.
            scale: the loss scale in that step, before the scaler took note of it.
        """
        failed = not is_finite(row) and not is_rescaled(row, scaler, scale)
        self.in_a_row = self.in_a_row + 1 if failed else 0
        return failed

    def divergence(self, row: Row, advice: str) -> Event | None:
        """The event of the step with which the run has diverged; ``None`` for every other step.

        Args:
            row: of the step that was counted last.
            advice: what to do.
        """
        if self.in_a_row != FAILURES:
            return None
        return Event("divergence", row["step"], f"the last {FAILURES} steps failed: {symptom(row)}", advice=advice)


def is_finite(row: Row) -> bool:
    """Whether a step's loss and gradient norm are finite, as far as they are known."""
    return all(row.get(name) is None or math.isfinite(row[name]) for name in ("loss", "grad_norm"))


def is_rescaled(row: Row, scaler: LossScaler | None, scale: float) -> bool:
    """Whether the loss scaler handles a step's overflow by lowering the scale; arguments as of :meth:`FailedSteps.take`."""
    return scaler is not None and math.isfinite(row.get("loss") or 0.0) and scale > scaler.floor


def symptom(row: Row) -> str:
    """What was wrong with a step, without a full stop."""
    spike = row.get("spike")
    if spike is None:
        return f"the loss is {row.get('loss', math.nan):g} and the gradient norm {row.get('grad_norm')}"
    return Spike(**spike).message
