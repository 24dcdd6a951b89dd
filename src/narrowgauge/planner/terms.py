"""Terms: the addends of a memory or a step, each with its group."""

from __future__ import annotations

from typing import NamedTuple


class Term(NamedTuple):
    """Describe one addend, in bytes or seconds; ``group`` is a key of a plan's JSON."""

    group: str
    name: str
    value: float


class Terms(tuple[Term, ...]):
    """Hold a sum and its addends."""

    @property
    def total(self) -> float:
        return float(sum(term.value for term in self))

    def of(self, *names: str) -> float:
        """Return the sum of the addends with these names or of these groups."""
        return float(sum(term.value for term in self if {term.name, term.group} & {*names}))

    @property
    def groups(self) -> dict[str, float]:
        """Sum each group, in the order in which groups first appear."""
        sums: dict[str, float] = {}
        for term in self:
            sums[term.group] = sums.get(term.group, 0.0) + term.value
        return sums

    @property
    def largest_group(self) -> str:
        groups = self.groups
        return max(groups, key=groups.__getitem__)
