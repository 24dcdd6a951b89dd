"""The stages of a training step, and the place in which two runs part.

A step reads tokens, computes outputs, a loss and gradients, clips them, and updates weights and moments. Each column of a record
and each kind of fingerprint belongs to one stage, so whichever differs first says how far into the step the two runs were equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

STAGES: dict[str, str] = {
    "start": "the weights before the first step",
    "held": "a weight that changed between two steps",
    "tokens": "the tokens of the step",
    "output": "the forward pass",
    "loss": "the loss",
    "grad": "the gradients",
    "rate": "the learning rate",
    "norm": "the gradient norm",
    "skip": "whether the update was applied",
    "clip": "the factor that clips the gradients",
    "update": "the update of weights and moments",
}
"""The stages of a step in the order in which they come, each with what differs there."""

KINDS: dict[str, str] = {
    "held": "held", "tokens": "tokens", "output": "output", "sent": "grad", "grad": "grad", "clip": "clip",
    "weight": "update", "exp_avg": "update", "exp_avg_sq": "update",
}  # fmt: skip
"""The stage of each kind of fingerprint; what a rank sent into the sum of the gradients is recorded by rank alone."""

COLUMNS: dict[str, str] = {
    "batch_crc": "tokens", "loss": "loss", "lr": "rate", "grad_norm": "norm", "loss_scale": "skip", "skipped": "skip",
}  # fmt: skip
"""The columns of a step's row that are compared, in the order of the stages; times and bytes differ in any two runs."""


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two runs part.

    Args:
        step: the first step that differs.
        stage: a key of :data:`STAGES`, the first of the step that is known to differ.
        tensor: the first fingerprint that differs, as ``KIND:NAME``; empty where none was recorded at that step.
        values: the column's two values, or the tensor's two norms.
        numel: the tensor's elements; of a column, the tokens of the step; 0 where nothing is rounded.
        others: how many more fingerprints of the same kind differ in that step, and how many there are.
        same_after: entries of the same step, after the first that differs, that do not differ.
        equal_until: the last step whose fingerprints are all equal; ``None`` where none are.
        ranks: the ranks that alone are not as in the other run, or as the other ranks; empty where all differ, or none is known.
        said: what one run's ranks do not agree on, in words; empty where they agree.
        recurs: whether the tensor stands out in the next steps too; ``None`` where they were not recorded.
    """

    step: int
    stage: str
    tensor: str = ""
    values: tuple[float, float] = (math.nan, math.nan)
    numel: int = 0
    others: tuple[int, int] = (0, 0)
    same_after: int = 0
    equal_until: int | None = None
    ranks: tuple[int, ...] = ()
    said: str = ""
    recurs: bool | None = None

    @property
    def relative(self) -> float:
        """The difference of the two values over the larger; NaN where they are not known."""
        return relative_difference(*self.values)


def relative_difference(one: float, other: float) -> float:
    """The difference of two values over the larger magnitude; NaN where one is.

    Example:
        >>> relative_difference(2.0, 2.5), relative_difference(0.0, 0.0)
        (0.2, 0.0)
    """
    largest = max(abs(one), abs(other))
    return abs(one - other) / largest if largest else 0.0
