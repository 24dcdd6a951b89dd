"""Counts and names in sentences."""

from __future__ import annotations

from collections.abc import Iterable


def counted(number: int, thing: str) -> str:
    """Return a number of things.

    Example:
        >>> counted(1, "run"), counted(2, "run"), counted(1234, "step")
        ('1 run', '2 runs', '1,234 steps')
    """
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def told(names: Iterable[str], most: int = 3) -> str:
    """Join some names, and count the others.

    Example:
        >>> told(["a", "b", "c", "d", "e"]), told(["a", "b", "c", "d"]), told([])
        ('a, b, c and 2 others', 'a, b, c and 1 other', '')
    """
    distinct = list(dict.fromkeys(names))
    text = ", ".join(distinct[:most])
    rest = len(distinct) - most
    return f"{text} and {counted(rest, 'other')}" if rest > 0 else text
