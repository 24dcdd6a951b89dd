"""Counts and names in sentences."""

from collections.abc import Iterable


def plural(number: int, thing: str) -> str:
    """Return a number of things.

    Example:
        >>> plural(1, "run"), plural(2, "run"), plural(1234, "step")
        ('1 run', '2 runs', '1,234 steps')
    """
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def join_names(names: Iterable[str], most: int = 3) -> str:
    """Join some names, and count the others.

    Example:
        >>> join_names(["a", "b", "c", "d", "e"]), join_names(["a", "b", "c", "d"]), join_names([])
        ('a, b, c and 2 others', 'a, b, c and 1 other', '')
    """
    distinct = list(dict.fromkeys(names))
    text = ", ".join(distinct[:most])
    rest = len(distinct) - most
    return f"{text} and {plural(rest, 'other')}" if rest > 0 else text
