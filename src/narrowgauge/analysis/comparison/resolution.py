"""How small a difference of losses a comparison can show, and how many seeds a difference asked for takes.

Paired differences vary from seed to seed, with a standard deviation ``s``. With ``n`` seeds the 95 % interval is ``± t s / √n``
(Student's t with ``n - 1`` degrees of freedom). A comparison *resolves* a difference ``d`` if

* of a recipe that is worse by ``d``, it shows that it is worse: the whole interval lies above zero;
* of a recipe that is as good as the baseline, it shows that it is not worse by ``d``: the whole interval lies below ``d``;

each in four of five such comparisons (:data:`POWER`). The two ask for the same: that the mean is far enough from a bound of the
interval, at a true distance of ``d``. With ``s`` estimated from the same seeds that is the power of a t test, whose statistic
has the noncentral t distribution with ``d √n / s`` as its noncentrality.

Source: Cohen, Statistical Power Analysis for the Behavioral Sciences (1988), 2.2; Schuirmann 1987 for the second claim.
"""

from __future__ import annotations

import math
from functools import lru_cache

from narrowgauge.analysis.comparison.intervals import PairedDifference
from narrowgauge.spec.significance import student_t

POWER = 0.8
"""The share of comparisons that tell a difference that they are said to resolve."""
MOST_SEEDS = 1000
_PIECES, _WIDEST = 400, 8.0


def power(noncentrality: float, degrees: int) -> float:
    """Return the probability that the lower end of a 95 % interval lies above zero, for a mean that is truly above it.

    Args:
        noncentrality: the true mean in units of its standard error, ``d √n / s``.
        degrees: of freedom, ``n - 1``.
    Example:
        >>> round(power(0.0, 4), 3), round(power(2.802, 10**6), 2)
        (0.025, 0.8)
    """
    # The estimate of the spread is s·u with u² = χ²/degrees; at each u the mean is normal. Simpson's rule over u.
    bound = student_t(degrees) if degrees < 10**5 else 1.959964
    width = _WIDEST / math.sqrt(2 * degrees)
    low, high = max(0.0, 1 - width), 1 + max(width, 3.0 / degrees)
    scale = math.log(2) + degrees / 2 * math.log(degrees / 2) - math.lgamma(degrees / 2)
    total = 0.0
    for piece in range(_PIECES + 1):
        u = low + (high - low) * piece / _PIECES
        if u == 0:
            density = math.exp(scale) if degrees == 1 else 0.0
        else:
            density = math.exp(scale + (degrees - 1) * math.log(u) - degrees * u * u / 2)
        weight = 1 if piece in (0, _PIECES) else 4 if piece % 2 else 2
        total += weight * density * (1 + math.erf((noncentrality - bound * u) / math.sqrt(2))) / 2
    return total * (high - low) / _PIECES / 3


@lru_cache(maxsize=MOST_SEEDS)
def _noncentrality(degrees: int) -> float:
    low, high = 0.0, 64.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, degrees) < POWER else (low, middle)
    return high


def resolution(spread: float, num_seeds: int) -> float:
    """Return the smallest difference that a number of seeds (at least 2) resolves.

    ``spread`` is the standard deviation of paired differences from seed to seed.

    Example:
        >>> [round(resolution(1.0, seeds), 2) for seeds in (2, 3, 5, 10, 30)]
        [11.55, 3.26, 1.68, 1.0, 0.53]
    """
    return _noncentrality(num_seeds - 1) * spread / math.sqrt(num_seeds)


def seeds_needed(spread: float, difference: float) -> int | None:
    """Return the fewest seeds that resolve a difference, at least 2; ``None`` for more than :data:`MOST_SEEDS`.

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
    """The standard deviation of a paired difference from seed to seed, from the interval of its mean; at least 2 pairs."""
    return difference.half * math.sqrt(difference.num_pairs) / student_t(difference.num_pairs - 1)
