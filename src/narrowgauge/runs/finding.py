"""Counts, names and durations in sentences."""

from __future__ import annotations

from collections.abc import Iterable


def counted(number: int, thing: str) -> str:
    """Return a number of things.

    Example:
        >>> counted(1, "run"), counted(2, "run"), counted(1234, "step")
        ('1 run', '2 runs', '1,234 steps')
    """
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def duration(seconds: float) -> str:
    """Return a waiting time, rounded.

    Example:
        >>> [duration(seconds) for seconds in (0.4, 42, 200, 9000)]
        ['1 s', '42 s', '3 min 20 s', '2 h 30 min']
    """
    minutes, rest = divmod(max(1, round(seconds)), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


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
