"""The 95 % interval of paired differences over a few seeds, and how losses are printed.

Two runs of one seed share initial weights and batches, so most of a seed's effect cancels in their
difference. The rest varies between seeds, and its mean gets an interval by Student's t. With two
seeds the half width is 12.7 standard errors, since two values estimate their spread poorly.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from narrowgauge.spec.significance import student_t

MINUS = "\N{MINUS SIGN}"


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


def shown_loss(loss: float) -> str:
    """Format a loss or a standard deviation: four decimals, three digits if small, an exponent if
    huge.

    Example:
        >>> shown_loss(4.1), shown_loss(0.0012345), shown_loss(1.5e30)
        ('4.1000', '0.00123', '1.50e+30')
    """
    if loss == 0 or 0.01 <= abs(loss) < 1e5:
        return f"{loss:.4f}"
    return f"{loss:#.3g}"


def shown_difference(mean: float, half: float) -> str:
    """Format a difference and its half interval: four decimals, or exponents if both are tiny or
    one is huge.

    Example:
        >>> shown_difference(0.0024, 0.0021).replace("\N{NO-BREAK SPACE}", " ")
        '+0.0024 ± 0.0021'
        >>> shown_difference(-0.00002, math.inf), shown_difference(-0.0, math.inf)
        ('−2.0e-05', '0.0000')
    """
    largest = max(map(abs, filter(math.isfinite, (mean, half))), default=0.0)
    form = ".1e"
    if largest == 0 or 1e-3 <= largest < 1e5:
        form = ".4f"
    text = f"{abs(mean):{form}}"
    if float(text):  # zero has no sign
        text = f"{MINUS if mean < 0 else '+'}{text}"
    if math.isfinite(half):
        text += f"\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{half:{form}}"
    return text
