"""Tables: rows with named columns, printed as each reader wants them.

A terminal gets a rich table, a pipe aligned text, the documentation GitHub markdown, a program JSON; all from the same
rows. Nothing here knows what is in them.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Row = dict[str, Any]
Key = str | Callable[[Row], Any]


@dataclass(frozen=True)
class Column:
    """One column as a person reads it: a head, the row's entry or a function of the row, and how it is set."""

    title: str
    key: Key
    code: bool = False  # a name: in code type where there is one
    right: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether a cell cut in two would mislead; only prose may wrap."""
        return self.code or self.right

    def cell(self, row: Row) -> str:
        """The text of this column in one row."""
        return said(self.key(row) if callable(self.key) else row[self.key])


@dataclass(frozen=True)
class Table:
    """Rows and the columns to print of them."""

    columns: tuple[Column, ...]
    rows: list[Row]
    title: str = ""

    def markdown(self) -> str:
        """A GitHub table, without a title."""
        heads = [column.title for column in self.columns]
        rules = ["---:" if column.right else "---" for column in self.columns]
        lines = [
            [f"`{cell}`" if column.code else cell.replace("|", r"\|") for column, cell in self._cells(row)]
            for row in self.rows
        ]
        return "".join(f"| {' | '.join(line)} |\n" for line in [heads, rules, *lines])

    def plain(self) -> str:
        """Aligned text for a pipe: heads, then a line per row; no line is wrapped or cut."""
        heads = [column.title for column in self.columns]
        lines = [heads, *([cell for _, cell in self._cells(row)] for row in self.rows)]
        widths = [max(len(line[place]) for line in lines) for place in range(len(heads))]
        text = f"{self.title}\n" if self.title else ""
        for line in lines:
            parts = [
                cell.rjust(width) if column.right else cell.ljust(width)
                for column, cell, width in zip(self.columns, line, widths, strict=True)
            ]
            text += "  ".join(parts).rstrip() + "\n"
        return text

    @property
    def min_width(self) -> int:
        """Characters a rich table needs to cut no name and no figure, and to leave prose readable."""
        width = 2
        for column in self.columns:
            widest = max(len(text) for text in (column.title, *map(column.cell, self.rows)))
            width += 3 + (widest if column.is_whole else min(widest, 16))
        return width

    def rich(self) -> Any:
        """A rich table for a terminal."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=box.SIMPLE_HEAD, title=self.title or None, title_justify="left", title_style="bold")
        for column in self.columns:
            style = "bold" if column.code else None
            side: Literal["left", "right"] = "right" if column.right else "left"
            table.add_column(column.title, justify=side, style=style, no_wrap=column.is_whole, overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(cell) for _, cell in self._cells(row)))
        return table

    def _cells(self, row: Row) -> Iterable[tuple[Column, str]]:
        return ((column, column.cell(row)) for column in self.columns)


def write(parts: Table | Sequence[Table]) -> None:
    """Print tables: with rich on a terminal wide enough, as aligned text elsewhere."""
    tables = [parts] if isinstance(parts, Table) else parts
    if sys.stdout.isatty():
        from rich.console import Console

        console = Console(highlight=False)
        if all(part.min_width <= console.width for part in tables):
            return console.print(*(part.rich() for part in tables))
    print("\n".join(part.plain() for part in tables), end="", flush=True)


def write_json(found: Row | Sequence[Row]) -> None:
    """Print a JSON list of objects; infinities and NaN, which JSON lacks, are the texts ``inf``, ``-inf``, ``nan``."""
    listed = [found] if isinstance(found, dict) else list(found)
    print(json.dumps(_plain(listed), indent=1, allow_nan=False, ensure_ascii=False), flush=True)


def said(value: Any) -> str:
    """A figure or a word as a cell."""
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        # Four digits need no comma.
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    return ", ".join(map(said, value)) if isinstance(value, (list, tuple)) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
