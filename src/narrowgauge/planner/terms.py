"""Terms: each addend of a plan, with its formula and its source.

Memory and time are sums of terms, and ``--explain`` prints every term. A term without a formula has its own interval (``low``,
``high``). The interval of a sum is the sum of its terms' intervals.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from narrowgauge.spec.tables import Row


class Term(NamedTuple):
    """Describe one addend, in bytes or seconds.

    Args:
        group: its group, such as ``"optimizer"``; a key of a plan's JSON.
        formula: with its numbers: ``"32.5e9 parameters × 10 B / 64 ranks"``.
        source: the publication, or ``"definition"`` without a measurement.
        low, high: the 80 % interval; None for ``value`` itself.
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
        return (
            self.value if self.low is None else self.low,
            self.value if self.high is None else self.high,
        )


@dataclass(frozen=True)
class Terms:
    """Hold a sum and its addends."""

    addends: tuple[Term, ...]

    def __iter__(self) -> Iterator[Term]:
        return iter(self.addends)

    def without(self, *groups: str) -> Terms:
        """Return the addends of all other groups."""
        return Terms(tuple(term for term in self.addends if term.group not in groups))

    @cached_property
    def total(self) -> float:
        return float(sum(term.value for term in self.addends))

    @cached_property
    def interval(self) -> tuple[float, float]:
        ends = [term.interval for term in self.addends]
        return float(sum(low for low, _ in ends)), float(sum(high for _, high in ends))

    @property
    def groups(self) -> dict[str, float]:
        """Sum each group, in the order in which groups first appear."""
        sums: dict[str, float] = {}
        for term in self.addends:
            sums[term.group] = sums.get(term.group, 0.0) + term.value
        return sums


def changes(before: Terms, after: Terms, scale: float = 1.0) -> list[Row]:
    """Return each addend's change between sums in the same unit, the largest first: 0 where it is absent.

    Join addends of one group and name. ``scale`` multiplies the values before, such as the ratio of chips if the whole should
    have shrunk by it.
    """
    rows: dict[tuple[str, str], Row] = {}
    for side, terms, factor in (("before", before, scale), ("after", after, 1.0)):
        for term in terms:
            empty = {
                "group": term.group,
                "name": term.name,
                "before": 0.0,
                "after": 0.0,
                "formula": "",
            }
            row = rows.setdefault((term.group, term.name), empty)
            row[side] += factor * term.value
            row["formula"] = term.formula
    least = 1e-9 * max(abs(before.total) * scale, abs(after.total))
    differing = [row for row in rows.values() if abs(row["after"] - row["before"]) > least]
    return sorted(differing, key=lambda row: -abs(row["after"] - row["before"]))
