"""Usual peak learning rates by size of the model: the trainer's defaults, and what a diagnosis compares a run's own with."""

from __future__ import annotations

import math

LEARNING_RATES = ((4e6, 3e-3), (6e7, 1e-3), (6e8, 6e-4), (math.inf, 3e-4))
"""Peak learning rate by number of parameters, below each bound. Up to 100 million: rates at which small Llamas on source text are
stable with every storage; above: the published rates (GPT-3, arXiv 2005.14165, table 2.1)."""

UNIT_LEARNING_RATE = 0.5
"""For unit-scaled models of any width: the best rate of those tried at 1 million parameters."""


def usual_rate(num_parameters: int, *, is_unit: bool = False) -> float:
    """The usual peak learning rate.

    Args:
        num_parameters: of the model.
        is_unit: the model is unit-scaled.
    Example:
        >>> usual_rate(1_000_000), usual_rate(7_000_000_000), usual_rate(1_000_000, is_unit=True)
        (0.003, 0.0003, 0.5)
    """
    return UNIT_LEARNING_RATE if is_unit else next(rate for bound, rate in LEARNING_RATES if num_parameters < bound)
