"""How far rounding alone carries a value, so that what lies beyond has another cause.

A norm of n elements, each rounded independently with unit roundoff u, moves by about u/√n, and so does a mean over n tokens.
From step to step differences grow, since training amplifies them, but not by much in one step: a tensor that suddenly differs
far more than any did in the step before is off for another reason than the sums of earlier steps.

Source: the expected error of n independent roundings (Higham 2002, section 2.8); envelopes in place of one tolerance: TTrace
(2506.09280).
"""

from __future__ import annotations

import math

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.runs.record import Run
from narrowgauge.spec.formats import FORMATS
from narrowgauge.spec.notation import parse_value

ENVELOPE = 32.0
"""How many times the expected rounding of a norm still counts as rounding: roundings are not independent."""
GROWTH = 30.0
"""Factor within which the largest difference of any tensor grows in one step; measured on tiny models: below 6."""


def roundoff(*runs: Run) -> float:
    """Unit roundoff of the tensors between two matmuls, the largest of some runs; bfloat16's where a record does not say."""
    return max(_roundoff_of(run) for run in runs)


def _roundoff_of(run: Run) -> float:
    try:
        recipe = parse_value(run.run.get("config", {}).get("recipe", ""))
        return max(FORMATS[name].epsilon for name in (recipe.compute.dtype, recipe.storage.visible)) / 2
    except (NarrowgaugeError, KeyError, AttributeError):
        return FORMATS["bfloat16"].epsilon / 2


def rounding_of(numel: int, u: float) -> float:
    """The relative difference up to which a norm or a mean of ``numel`` values counts as rounded differently.

    Example:
        >>> rounding_of(1024, 2.0**-8)
        0.00390625
    """
    return ENVELOPE * u / math.sqrt(numel)


def is_rounding(relative: float, numel: int, u: float) -> bool | None:
    """Whether a difference is as small as rounding; ``None`` where its size, or that of the tensor, is not known."""
    return None if math.isnan(relative) or numel <= 0 else relative <= rounding_of(numel, u)


def is_beyond(relative: float, numel: int, u: float, before: float) -> bool:
    """Whether a difference is more than rounding, and than what rounding of earlier steps can have grown to.

    Args:
        relative: the difference of a tensor's norms.
        numel: its elements.
        u: unit roundoff.
        before: the largest difference of any tensor in the step before; where it is 0, nothing has grown from it.
    """
    return before > 0 and relative > max(rounding_of(max(1, numel), u), GROWTH * before)
