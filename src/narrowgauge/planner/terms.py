"""Terms: each addend of a plan, with its formula and its source.

Memory and time are sums of terms, and ``--explain`` prints every term.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple


class Term(NamedTuple):
    """Describe one addend, in bytes or seconds.

    Args:
        group: its group, such as ``"optimizer"``; a key of a plan's JSON.
        formula: with its numbers: ``"32.5e9 parameters × 10 B / 64 ranks"``; or a template and its
            numbers, since a search writes none.
        source: the publication, or ``"definition"`` without a measurement.
    """

    group: str
    name: str
    value: float
    formula: str | tuple[Any, ...]
    source: str = "definition"

    @property
    def text(self) -> str:
        """Return the formula as text."""
        if isinstance(self.formula, str):
            return self.formula
        return str(self.formula[0]).format(*self.formula[1:])


@dataclass(frozen=True)
class Terms:
    """Hold a sum and its addends."""

    addends: tuple[Term, ...]

    def __iter__(self) -> Iterator[Term]:
        return iter(self.addends)

    def without(self, *groups: str) -> Terms:
        """Return the addends of all other groups."""
        return Terms(tuple(term for term in self.addends if term.group not in groups))

    def of(self, *names: str) -> float:
        """Return the sum of the addends with these names."""
        return float(sum(term.value for term in self.addends if term.name in names))

    @cached_property
    def total(self) -> float:
        return float(sum(term.value for term in self.addends))

    @property
    def groups(self) -> dict[str, float]:
        """Sum each group, in the order in which groups first appear."""
        sums: dict[str, float] = {}
        for term in self.addends:
            sums[term.group] = sums.get(term.group, 0.0) + term.value
        return sums

    @property
    def largest_group(self) -> str:
        groups = self.groups
        return max(groups, key=groups.__getitem__)
