"""Terms: each number that a plan adds up, with its formula, its interval and its source.

Nothing is added up silently: memory and time are sums of terms, and ``--explain`` prints every one. A term that was measured
elsewhere has an interval. The interval of a sum is the sum of its terms' intervals, since an error in one term (a kernel, a
link) usually has the same direction in the others.
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
        """The 80 % interval."""
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


# ── changes between two sums ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Change:
    """One addend before and after, 0 where there was none; ``before`` is scaled already.

    ``low`` and ``high`` are the interval of the difference: an error in one of the two values is in the other too.
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
        return self.after - self.before


def changes(before: Terms, after: Terms, scale: float = 1.0) -> tuple[Change, ...]:
    """Each addend's change between sums in the same unit, the largest first; those that did not change are left out.

    Addends of one group and name are joined. ``scale`` multiplies the values before, such as the ratio of chips if the whole
    should have shrunk by it.

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
