"""The 95 % interval of paired differences over a few seeds, by Student's t, and its printed form.

Two runs of one seed share initial weights and batches, so most of a seed's effect cancels in their difference. The rest varies
between seeds, and its mean gets an interval. The half width shrinks with the square root of the number of seeds. With two seeds
it is 12.7 standard errors, since two values estimate their spread poorly.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from narrowgauge.spec.significance import student_t

MINUS = "\N{MINUS SIGN}"


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the mean of one difference per seed, and the half width of its 95 % interval; infinite for one seed.

    Example:
        >>> mean, half = interval([1.0, 2.0, 3.0])
        >>> mean, round(half, 3)
        (2.0, 2.484)
    """
    mean, number = statistics.fmean(differences), len(differences)
    if number < 2 or not math.isfinite(mean):
        return mean, math.inf
    return mean, student_t(number - 1) * math.sqrt(statistics.variance(differences) / number)


@dataclass(frozen=True)
class PairedDifference:
    """Hold a recipe's validation loss minus the baseline's: the mean over ``num_pairs`` common seeds.

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
    """Format a loss or a standard deviation: four decimals, three digits if small, an exponent if huge.

    Example:
        >>> shown_loss(4.1), shown_loss(0.0012345), shown_loss(1.5e30)
        ('4.1000', '0.00123', '1.50e+30')
    """
    return f"{loss:.4f}" if loss == 0 or 0.01 <= abs(loss) < 1e5 else f"{loss:#.3g}"


def shown_difference(mean: float, half: float) -> str:
    """Format a difference and its half interval: four decimals, or more if the half width justifies them.

    Example:
        >>> shown_difference(0.00024, 0.00021).replace("\N{NO-BREAK SPACE}", " ")
        '+0.00024 ± 0.00021'
        >>> shown_difference(-0.00002, math.inf), shown_difference(3e30, math.inf), shown_difference(-0.0, math.inf)
        ('−2.0e-05', '+3.0e+30', '0.0000')
    """
    has_half = math.isfinite(half)
    largest = max([abs(size) for size in (mean, half) if math.isfinite(size)], default=0.0)
    # A much smaller interval needs no further digits of the difference.
    fineness = max(half, abs(mean) / 20) if has_half else abs(mean)
    decimals = 4
    if 0 < fineness < 1:  # keep one significant digit, or two that begin with 1 or 2
        first = -math.floor(math.log10(fineness))
        decimals = min(7, max(4, first + (fineness * 10.0**first < 3)))
    form = ".1e" if largest >= 1e5 or 0 < largest < 1e-4 else f".{decimals}f"
    size = f"{abs(mean):{form}}"
    # Zero after rounding has no sign.
    sign = "" if math.isfinite(mean) and not float(size) else MINUS if mean < 0 else "+"
    return f"{sign}{size}" + (f"\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{half:{form}}" if has_half else "")
