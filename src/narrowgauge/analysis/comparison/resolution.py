"""The smallest difference of losses that a comparison can show, and the number of seeds for a target difference.

Paired differences vary from seed to seed, with a standard deviation ``s``. With ``n`` seeds the 95 % interval is ``± t s / √n``
(Student's t with ``n - 1`` degrees of freedom). A comparison *resolves* a difference ``d`` if it shows two things, each in four
of five cases.

* A recipe worse by ``d`` is worse: the whole interval lies above zero.
* A recipe as good as the baseline is not worse by ``d``: the whole interval lies below ``d``.

Both need the same. At a true distance of ``d``, the mean is far enough from a bound of the interval. ``s`` is estimated from
the same seeds. So ``d √n / s`` must be the noncentrality at which a t test has this power. From 6 seeds on it is, within 1 %,
the sum of the two quantiles of Student's t. For fewer seeds it is tabulated.

Source: Cohen, Statistical Power Analysis for the Behavioral Sciences (1988), 2.2; Schuirmann 1987 for the second claim.
"""

from __future__ import annotations

import math

from narrowgauge.analysis.comparison.intervals import PairedDifference
from narrowgauge.spec.significance import student_t

MOST_SEEDS = 1000
NONCENTRALITY = {1: 16.334, 2: 5.653, 3: 4.256, 4: 3.761}
"""Noncentrality by degrees of freedom: noncentral t exceeds the 97.5 % quantile of Student's t with 80 % probability."""


def _noncentrality(degrees: int) -> float:
    return NONCENTRALITY.get(degrees) or student_t(degrees) + student_t(degrees, 0.6)


def resolution(spread: float, num_seeds: int) -> float:
    """Return the smallest difference that ``num_seeds`` seeds (at least 2) resolve.

    ``spread`` is the standard deviation of paired differences from seed to seed.

    Example:
        >>> [round(resolution(1.0, seeds), 2) for seeds in (2, 3, 5, 10, 30)]
        [11.55, 3.26, 1.68, 0.99, 0.53]
    """
    return _noncentrality(num_seeds - 1) * spread / math.sqrt(num_seeds)


def seeds_needed(spread: float, difference: float) -> int | None:
    """Return the fewest seeds (at least 2) that resolve a difference; ``None`` above :data:`MOST_SEEDS`.

    Example:
        >>> seeds_needed(0.003, 0.005), seeds_needed(0.003, 0.0001)
        (6, None)
    """
    low, high = 2, MOST_SEEDS
    if resolution(spread, high) > difference:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if resolution(spread, middle) <= difference else (middle + 1, high)
    return low


def spread_of(difference: PairedDifference) -> float:
    """Return the standard deviation of a paired difference over seeds, from its interval. Needs at least 2 pairs."""
    return difference.half * math.sqrt(difference.num_pairs) / student_t(difference.num_pairs - 1)
