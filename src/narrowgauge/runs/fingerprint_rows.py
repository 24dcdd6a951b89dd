"""The rows of ``fingerprints.jsonl``: find the rank that differs from the others.

Where ranks must hold the same value, the value of the majority is right. If two ranks disagree,
both are equally suspect.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from narrowgauge.runs.finding import listed
from narrowgauge.runs.schema import Row


def odd_ranks(values: Sequence[Hashable]) -> tuple[int, ...]:
    """Return the ranks that differ from the majority's value.

    Without a majority return none. Ignore ``None``.

    Example:
        >>> odd_ranks([7, 7, 8]), odd_ranks([7, 8]), odd_ranks([None, 7, 7, 8])
        ((2,), (), (3,))
    """
    present = [value for value in values if value is not None]
    most = max(present, key=present.count, default=None)
    if 2 * present.count(most) <= len(present):
        return ()
    return tuple(rank for rank, value in enumerate(values) if value not in (None, most))


def parted_in(row: Row) -> tuple[str, tuple[int, ...], str]:
    """Find where the ranks of one run disagree in a step, by its row of ``fingerprints.jsonl``.

    Returns:
        ``KIND:NAME`` of the difference, the ranks that differ from the others (none if unknown),
        and a sentence without its full stop. Empty if ranks agree wherever they must.
    Example:
        >>> parted_in({"step": 4, "ranks": {"clip": [1.0, 0.5, 1.0]}})[:2]
        ('clip:factor', (1,))
    """
    step = row["step"]
    ranks = row.get("ranks") or {}
    factors = ranks.get("clip") or []
    if len(set(map(repr, factors))) > 1:
        texts = []
        for rank, factor in enumerate(factors):
            if factor is not None:
                texts.append(f"{factor:.9g} on rank {rank}")
        message = f"the factor that clips the gradients differs in step {step}: {', '.join(texts)}"
        return "clip:factor", odd_ranks(factors), message
    changes = ranks.get("held") or []
    changed = tuple(rank for rank, number in enumerate(changes) if number)
    if 0 < len(changed) < len(changes):
        key = next((name for name in row["tensors"] if name.startswith("held:")), "held:")
        message = f"{key[5:]} of {in_words(changed)} changed in memory after step {step - 1}"
        return key, changed, message
    return "", (), ""


def in_words(ranks: Sequence[int]) -> str:
    """Return ranks for a sentence.

    Example:
        >>> in_words((1,)), in_words((1, 2))
        ('rank 1', 'ranks 1 and 2')
    """
    unit = "rank" if len(ranks) == 1 else "ranks"
    return f"{unit} {listed(map(str, ranks))}"
