"""Tables: rows with named columns, printed as each reader wants them.

A terminal gets a rich table, or paragraphs where it is narrow, a pipe aligned text, the documentation GitHub markdown, a
program JSON; all from the same rows. Nothing here knows what is in them.
"""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Row = dict[str, Any]
Key = str | Callable[[Row], Any]
_LEAST_PROSE = 24


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

    def widths(self, width: int) -> list[int]:
        """Characters of each column in a framed table: names and figures whole, prose wrapped between words where it must.

        Args:
            width: of the terminal.
        Returns:
            One per column; none where even the longest words do not fit side by side.
        """
        cells = [[column.title, *map(column.cell, self.rows)] for column in self.columns]
        widest = [max(map(len, column)) for column in cells]
        least = [
            most if column.is_whole else max(len(word) for cell in found for word in ("", *cell.split()))
            for column, found, most in zip(self.columns, cells, widest, strict=True)
        ]
        # Prose of which only single words stand in a line is no prose any more.
        least = [max(few, min(most, _LEAST_PROSE)) for few, most in zip(least, widest, strict=True)]
        left = width - 2 - sum(3 + few for few in least)
        if left < 0:
            return []
        wanted = [most - few for most, few in zip(widest, least, strict=True)]
        share = min(1.0, left / sum(wanted)) if any(wanted) else 0.0
        return [few + int(more * share) for few, more in zip(least, wanted, strict=True)]

    def rich(self, widths: Sequence[int]) -> Any:
        """A rich table for a terminal, with columns of these widths."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=box.SIMPLE_HEAD, title=self.title or None, title_justify="left", title_style="bold")
        for column, width in zip(self.columns, widths, strict=True):
            style = "bold" if column.code else None
            side: Literal["left", "right"] = "right" if column.right else "left"
            table.add_column(column.title, justify=side, style=style, no_wrap=column.is_whole, width=width)
        for row in self.rows:
            table.add_row(*(Text(cell) for _, cell in self._cells(row)))
        return table

    def cards(self, width: int) -> str:
        """A paragraph per row for a terminal too narrow for a frame: the first column, and below it what the others say.

        Args:
            width: of the terminal. Lines end between words; a single word may be longer than a line.
        Returns:
            Text; columns without an entry are left out.
        """
        text = f"{self.title}\n" if self.title else ""
        for row in self.rows:
            (_, name), *others = self._cells(row)
            # A point stays with what it ends.
            said = "\N{NO-BREAK SPACE}· ".join(f"{column.title}: {cell}" for column, cell in others if cell)
            wrap = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
            wrap.initial_indent = wrap.subsequent_indent = "  "
            text += "\n".join([name, *wrap.wrap(said)]).replace("\N{NO-BREAK SPACE}", " ") + "\n"
        return text

    def _cells(self, row: Row) -> Iterable[tuple[Column, str]]:
        return ((column, column.cell(row)) for column in self.columns)


def write(parts: Table | Sequence[Table]) -> None:
    """Print tables: in a frame on a terminal that is wide enough, as paragraphs on one that is not, elsewhere as aligned text."""
    tables = [parts] if isinstance(parts, Table) else parts
    if sys.stdout.isatty():
        from rich.console import Console

        console = Console(highlight=False)
        found = [part.widths(console.width) for part in tables]
        if all(found):
            return console.print(*(part.rich(widths) for part, widths in zip(tables, found, strict=True)))
        print("\n".join(part.cards(console.width) for part in tables), end="", flush=True)
        return None
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
