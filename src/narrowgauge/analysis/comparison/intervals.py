"""The 95 % interval of paired differences over a few seeds, its printed form, and the seeds that a
difference needs.

Two runs of one seed share initial weights and batches, so most of a seed's effect cancels in their
difference. The rest varies between seeds, and its mean gets an interval by Student's t. The half
width shrinks with the square root of the number of seeds. With two seeds it is 12.7 standard
errors, since two values estimate their spread poorly.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from narrowgauge.spec.significance import student_t

MINUS = "\N{MINUS SIGN}"
MOST_SEEDS = 1000
NONCENTRALITY = {1: 16.334, 2: 5.653, 3: 4.256, 4: 3.761}
"""Noncentrality by degrees of freedom: noncentral t exceeds the 97.5 % quantile of Student's t with
80 % probability.
"""


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the mean of one difference per seed, and the half width of its 95 % interval; infinite
    for one seed.
    """
    mean = statistics.fmean(differences)
    number = len(differences)
    if number < 2 or not math.isfinite(mean):
        return mean, math.inf
    return mean, student_t(number - 1) * math.sqrt(statistics.variance(differences) / number)


@dataclass(frozen=True)
class PairedDifference:
    """Hold a recipe's validation loss minus the baseline's: the mean over ``num_pairs`` common
    seeds.

    ``half`` is half the width of the 95 % interval; infinite for fewer than two seeds.
    """

    recipe: str
    mean: float
    half: float
    num_pairs: int

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    @property
    def text(self) -> str:
        return shown_difference(self.mean, self.half)

    @property
    def spread(self) -> float:
        """Return the standard deviation over seeds. It needs at least 2 pairs."""
        return self.half * math.sqrt(self.num_pairs) / student_t(self.num_pairs - 1)


def seeds_needed(spread: float, difference: float) -> int | None:
    """Return the fewest seeds (at least 2) that resolve a difference; ``None`` above
    :data:`MOST_SEEDS`.

    In four of five cases the interval of a recipe worse by ``d`` lies above zero, and of one as
    good as the baseline below ``d``. Both need ``d √n / spread`` at the noncentrality where a t
    test has this power. From 6 seeds on it is, within 1 %, the sum of two quantiles of Student's t.
    For fewer seeds it is tabulated.

    Source: Cohen, Statistical Power Analysis for the Behavioral Sciences (1988), 2.2; Schuirmann
    1987 for the second claim.
    """
    if not _resolves(MOST_SEEDS, spread, difference):
        return None
    return 2 + bisect.bisect_left(
        range(2, MOST_SEEDS), True, key=lambda seeds: _resolves(seeds, spread, difference)
    )


def _resolves(seeds: int, spread: float, difference: float) -> bool:
    noncentrality = NONCENTRALITY.get(seeds - 1) or student_t(seeds - 1) + student_t(seeds - 1, 0.6)
    return noncentrality * spread <= difference * math.sqrt(seeds)


def shown_loss(loss: float) -> str:
    """Format a loss or a standard deviation: four decimals, three digits if small, an exponent if
    huge.

    Example:
        >>> shown_loss(4.1), shown_loss(0.0012345), shown_loss(1.5e30)
        ('4.1000', '0.00123', '1.50e+30')
    """
    return f"{loss:.4f}" if loss == 0 or 0.01 <= abs(loss) < 1e5 else f"{loss:#.3g}"


def shown_difference(mean: float, half: float) -> str:
    """Format a difference and its half interval: four decimals, or exponents if both are tiny or
    one is huge.

    Example:
        >>> shown_difference(0.0024, 0.0021).replace("\N{NO-BREAK SPACE}", " ")
        '+0.0024 ± 0.0021'
        >>> shown_difference(-0.00002, math.inf), shown_difference(3e30, math.inf), shown_difference(-0.0, math.inf)
        ('−2.0e-05', '+3.0e+30', '0.0000')
    """
    sizes = [abs(size) for size in (mean, half) if math.isfinite(size)]
    largest = max(sizes, default=0.0)
    form = ".4f" if largest == 0 or 1e-3 <= largest < 1e5 else ".1e"
    text = f"{abs(mean):{form}}"
    # Zero after rounding has no sign.
    if not math.isfinite(mean) or float(text):
        text = f"{MINUS if mean < 0 else '+'}{text}"
    if math.isfinite(half):
        text += f"\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{half:{form}}"
    return text
