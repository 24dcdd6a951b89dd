"""The 95 % interval of paired differences over a few seeds.

Two runs of one seed share initial weights and batches, so most of a seed's effect cancels in their
difference. The rest varies between seeds, and its mean gets an interval by Student's t. With two
seeds the half width is 12.7 standard errors, since two values estimate their spread poorly.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from narrowgauge.spec.significance import student_t


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the mean of one difference per seed, and the half width of its 95 % interval; infinite
    for one seed.
    """
    mean = statistics.fmean(differences)
    number = len(differences)
    if number < 2 or not math.isfinite(mean):
        return mean, math.inf
    return mean, student_t(number - 1) * math.sqrt(statistics.variance(differences) / number)
