"""Tables of recipes: a line for each, with its colour on the page, by columns that can be sorted; plain values for a template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """A number in a table.

    Args:
        column: the title of its column.
        value: what the table is sorted by; ``None`` is last.
        spread: its uncertainty, with a sign; empty where it has none.
        is_final: whether it is known, and of runs that ended.
    """

    column: str
    text: str = "–"
    value: float | None = None
    spread: str = ""
    is_best: bool = False
    is_final: bool = True


@dataclass(frozen=True)
class Line:
    """A row of a table of recipes.

    Args:
        index: of the recipe on the page.
        badge: a warning in a few words.
        reason: for the badge, in short; ``hint`` in full.
    """

    recipe: str
    index: int
    cells: Sequence[Cell]
    badge: str = ""
    reason: str = ""
    hint: str = ""
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class RecipeTable:
    """Recipes by figures; ``columns`` are titles, each with a hint."""

    columns: Mapping[str, str]
    lines: Sequence[Line]


def memory_text(value: float) -> str:
    """Bytes in binary units.

    Example:
        >>> memory_text(3 * 2**30), memory_text(5.2 * 2**20)
        ('3.00 GiB', '5 MiB')
    """
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def tensor_bytes(value: float) -> str:
    """Counted bytes, which small models have few of."""
    return memory_text(value) if value >= 100 * 2**20 else f"{value / 2**20:.1f} MiB"
