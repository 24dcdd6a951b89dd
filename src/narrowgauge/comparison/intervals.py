"""How sure a difference is: Student's t for paired differences of a few seeds.

Two runs of one seed share their first weights and their batches, so most of the luck of a seed cancels in their
difference. What is left varies from seed to seed, and its mean gets a 95 % interval: the half width shrinks with the root
of the number of seeds, and with two seeds it is 12.7 standard errors, since two numbers say little of their spread.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from narrowgauge.spec.significance import student_t

MINUS = "\N{MINUS SIGN}"
NEGLIGIBLE = 1e-3
"""A difference whose whole interval lies below this share of the yardstick's loss is worth no bytes, however certain."""


def interval(cells: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Mean of the cells' means and the half width of its 95 % interval.

    Cells are what was chosen and only seeds are drawn, so the variance is the sum of the cells' own, Σ s²/n, divided by
    the squared number of cells, with Satterthwaite's degrees of freedom rounded down. One cell is the plain t interval.

    Args:
        cells: differences, a number per seed in each.
    Returns:
        The mean, and the half width; infinite where any cell has a single seed.
    Example:
        >>> mean, half = interval([[1.0, 2.0, 3.0]])
        >>> mean, round(half, 3)
        (2.0, 2.484)
    """
    mean = statistics.fmean(statistics.fmean(cell) for cell in cells)
    if min(len(cell) for cell in cells) < 2 or not math.isfinite(mean):
        return mean, math.inf
    shares = [statistics.variance(cell) / len(cell) for cell in cells]
    if not sum(shares):
        return mean, 0.0
    degrees = sum(shares) ** 2 / sum(s**2 / (len(cell) - 1) for s, cell in zip(shares, cells, strict=True))
    return mean, student_t(int(degrees + 1e-9)) * math.sqrt(sum(shares)) / len(cells)


@dataclass(frozen=True)
class Difference:
    """A recipe's validation loss minus the yardstick's, over the seeds that both have.

    Args:
        recipe: its name.
        mean: over seeds.
        half: half the width of the 95 % interval; infinite for fewer than two seeds.
        num_pairs: seeds.
    """

    recipe: str
    mean: float
    half: float
    num_pairs: int

    @property
    def text(self) -> str:
        """As a person reads it."""
        return shown_difference(self.mean, self.half)

    def is_worse(self, loss: float) -> bool:
        """Whether it is worse beyond the noise, and by enough to matter beside the yardstick's ``loss``."""
        return self.mean - self.half > 0 and self.mean + self.half > NEGLIGIBLE * abs(loss)

    def is_better(self, loss: float) -> bool:
        """Whether it is better beyond the noise, and by enough to matter."""
        return self.mean + self.half < 0 and self.half - self.mean > NEGLIGIBLE * abs(loss)

    @property
    def holds_zero(self) -> bool:
        """Whether the interval does."""
        return self.mean - self.half <= 0 <= self.mean + self.half

    def may_be_worse(self, share: float) -> bool:
        """Whether its interval reaches above ``share``, so that these seeds do not rule such a loss out."""
        return math.isfinite(self.half) and self.mean + self.half > share


def shown_loss(loss: float) -> str:
    """A loss, or a spread of losses: four decimals, three digits where it is small, powers of ten where it is huge.

    Example:
        >>> shown_loss(4.1), shown_loss(0.0012345), shown_loss(1.5e30)
        ('4.1000', '0.00123', '1.50e+30')
    """
    return f"{loss:.4f}" if loss == 0 or 0.01 <= abs(loss) < 1e5 else f"{loss:#.3g}"


def shown_difference(mean: float, half: float) -> str:
    """A difference and half its interval, as many decimals as the half is good for, four at least.

    Example:
        >>> shown_difference(0.00024, 0.00021).replace("\N{NO-BREAK SPACE}", " ")
        '+0.00024 ± 0.00021'
        >>> shown_difference(-0.00002, math.inf), shown_difference(3e30, math.inf), shown_difference(-0.0, math.inf)
        ('−2.0e-05', '+3.0e+30', '0.0000')
    """
    sizes = [abs(size) for size in (mean, half) if math.isfinite(size)]
    if not math.isfinite(half):
        return _signed(mean, sizes, abs(mean))
    # An interval that is far narrower than the difference needs no further digits of it.
    fineness = max(half, abs(mean) / 20)
    return f"{_signed(mean, sizes, fineness)}\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{_unsigned(half, sizes, fineness)}"


def _signed(number: float, sizes: Sequence[float], fineness: float) -> str:
    text = _unsigned(abs(number), sizes, fineness)
    # What rounds to nothing has no sign.
    return text if math.isfinite(number) and not float(text) else f"{MINUS if number < 0 else '+'}{text}"


def _unsigned(size: float, sizes: Sequence[float], fineness: float) -> str:
    largest = max(sizes, default=0.0)
    if largest >= 1e5 or 0 < largest < 1e-4:
        return f"{size:.1e}"
    return f"{size:.{_decimals(fineness)}f}"


def _decimals(fineness: float) -> int:
    """Four, and more where a number of that size would be left with fewer than a good digit, or two behind a 1 or 2."""
    if not 0 < fineness < 1:
        return 4
    first = -math.floor(math.log10(fineness))
    return min(7, max(4, first + (fineness * 10.0**first < 3)))
