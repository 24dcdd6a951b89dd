"""Changes between two sums of terms: which addend grew, and by how much."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from narrowgauge.planner.terms import Term, Terms


@dataclass(frozen=True, slots=True)
class Change:
    """One addend before and after.

    Args:
        group, name: of the addend.
        before, after: its values, 0 where there was none; ``before`` is scaled already.
        formula_before, formula_after: how they follow.
        low, high: the interval of the difference. What is wrong in one of the two values is wrong in both alike.
    """

    group: str
    name: str
    before: float
    after: float
    formula_before: str = ""
    formula_after: str = ""
    low: float = 0.0
    high: float = 0.0

    @property
    def difference(self) -> float:
        """By how much it grew."""
        return self.after - self.before


def changes(before: Terms, after: Terms, scale: float = 1.0) -> tuple[Change, ...]:
    """Each addend's change, the largest first.

    Args:
        before, after: sums in the same unit; addends of one group and name are joined.
        scale: of the values before, such as the ratio of chips, if the whole should have shrunk by it.
    Returns:
        A change per addend of either sum; those that changed by nothing are left out.
    Example:
        >>> was = Terms((Term("matmuls", "mlp", 2.0, ""), Term("communication", "gradients", 0.5, "")))
        >>> now = Terms((Term("matmuls", "mlp", 1.0, ""), Term("communication", "gradients", 0.6, "")))
        >>> [(c.name, round(c.difference, 2)) for c in changes(was, now, scale=0.5)]
        [('gradients', 0.35)]
    """
    old, new = _joined(before), _joined(after)
    found = (_change(*key, old.get(key, ()), new.get(key, ()), scale) for key in dict.fromkeys((*old, *new)))
    total = max(abs(before.total) * scale, abs(after.total))
    kept = [change for change in found if abs(change.difference) > 1e-9 * total]
    return tuple(sorted(kept, key=lambda change: -abs(change.difference)))


def _joined(terms: Iterable[Term]) -> dict[tuple[str, str], tuple[Term, ...]]:
    joined: dict[tuple[str, str], tuple[Term, ...]] = {}
    for term in terms:
        key = (term.group, term.name)
        joined[key] = (*joined.get(key, ()), term)
    return joined


def _change(group: str, name: str, old: tuple[Term, ...], new: tuple[Term, ...], scale: float) -> Change:
    was, now = Terms(old), Terms(new)
    ends = [b - scale * a for a, b in zip(was.interval, now.interval, strict=True)]
    return Change(
        group,
        name,
        scale * was.total,
        now.total,
        "; ".join(term.formula for term in old),
        "; ".join(term.formula for term in new),
        min(ends),
        max(ends),
    )
