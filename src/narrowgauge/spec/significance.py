"""Student's t, and where updates count as lost: shared by the comparison of seeds and the
audit of steps.
"""

from __future__ import annotations

import math
from functools import lru_cache

MIN_EDQ = 0.9
"""A storage with a lower effective descent quality loses its updates."""


@lru_cache(maxsize=256)
def student_t(degrees: int, confidence: float = 0.95) -> float:
    """Return the two-sided quantile of Student's t: a sample lies within ± this many standard
    errors with that probability.

    ``degrees`` of freedom are at least 1, ``confidence`` is from 0 to below 1.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.3 and 26.7.4.
    """
    low = 0.0
    high = math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if _probability(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


def _probability(angle: float, degrees: int) -> float:
    """Return the probability of a sample within ± ``sqrt(degrees) * tan(angle)``."""
    cosine = math.cos(angle)
    exponent = degrees % 2
    term = cosine**exponent
    total = 0.0
    while exponent <= degrees - 2:
        total += term
        term *= (exponent + 1) / (exponent + 2) * cosine**2
        exponent += 2
    total *= math.sin(angle)
    if degrees % 2:
        return 2 / math.pi * (angle + total)
    return total
