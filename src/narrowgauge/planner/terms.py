"""Terms: each number that a plan adds up, with its formula, its interval and its source.

A plan is only as good as what it leaves out, so nothing is added up silently: memory and time are sums of terms, and
``--explain`` prints every one. A term that was measured elsewhere has an interval; sums of terms have the sum of their
intervals, since what is wrong in one term (a kernel, a link) is usually wrong in the same direction in the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Term:
    """One addend.

    Args:
        group: what it counts towards, such as ``"optimizer"``; the keys of a plan's JSON.
        name: what it is, such as ``"moments and tails"``.
        value: bytes or seconds.
        formula: how it follows, with its numbers: ``"32.5e9 parameters × 10 B / 64 ranks"``.
        source: the publication, or ``"definition"`` where nothing was measured.
        low, high: the interval in which the value lies four times out of five; None for ``value`` itself.
    """

    group: str
    name: str
    value: float
    formula: str
    source: str = "definition"
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> tuple[float, float]:
        """The interval in which the value lies four times out of five."""
        return (self.value if self.low is None else self.low, self.value if self.high is None else self.high)


@dataclass(frozen=True, slots=True)
class Terms:
    """A sum that remembers its addends.

    Example:
        >>> terms = Terms((Term("weights", "shards", 2e9, "1e9 × 2 B"), Term("overhead", "context", 1e9, "", low=5e8, high=2e9)))
        >>> terms.total, terms.interval, terms.groups["weights"]
        (3000000000.0, (2500000000.0, 4000000000.0), 2000000000.0)
    """

    addends: tuple[Term, ...]

    def __iter__(self) -> Iterator[Term]:
        return iter(self.addends)

    def __add__(self, other: Iterable[Term]) -> Terms:
        return Terms((*self.addends, *other))

    def without(self, *groups: str) -> Terms:
        """The addends of all other groups."""
        return Terms(tuple(term for term in self.addends if term.group not in groups))

    @property
    def total(self) -> float:
        """The sum, in the unit of its addends."""
        return float(sum(term.value for term in self.addends))

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of the sum; the addends' ends are added."""
        ends = [term.interval for term in self.addends]
        return float(sum(low for low, _ in ends)), float(sum(high for _, high in ends))

    @property
    def groups(self) -> dict[str, float]:
        """The sum of each group, in the order in which groups first appear."""
        sums: dict[str, float] = {}
        for term in self.addends:
            sums[term.group] = sums.get(term.group, 0.0) + term.value
        return sums
