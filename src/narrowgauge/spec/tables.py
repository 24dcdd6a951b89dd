"""Tables with named columns, printed for a terminal, a pipe, GitHub markdown or JSON.

A wide terminal gets a rich table. A pipe, a narrow terminal, or one without the package rich gets
aligned text.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

Row = dict[str, Any]
Key = str | Callable[[Any], Any]


@dataclass(frozen=True)
class Column:
    """One printed column: its title, the key of a row's value or a function of the row, and its
    style.
    """

    title: str
    key: Key
    code: bool = False  # a name, printed in code style where there is one
    right: bool = False  # aligned right

    def cell(self, row: Any) -> str:
        if callable(self.key):
            return cell_text(self.key(row))
        return cell_text(row[self.key] if isinstance(row, dict) else getattr(row, self.key))


@dataclass(frozen=True)
class Table:
    """Rows, dicts or objects, and the columns of them to print."""

    columns: tuple[Column, ...]
    rows: list[Any]
    title: str = ""

    def markdown(self) -> str:
        """GitHub markdown, without the title."""
        heads = [column.title for column in self.columns]
        rules = ["---:" if column.right else "---" for column in self.columns]
        lines = [
            [
                f"`{cell}`" if column.code else cell.replace("|", r"\|")
                for column, cell in self._cells(row)
            ]
            for row in self.rows
        ]
        return "".join(f"| {' | '.join(line)} |\n" for line in [heads, rules, *lines])

    def plain(self) -> str:
        """Aligned text for a pipe: titles, then one line per row, never wrapped."""
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

    def rich(self) -> Any:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            box=box.SIMPLE_HEAD, title=self.title or None, title_justify="left", title_style="bold"
        )
        for column in self.columns:
            side: Literal["left", "right"] = "right" if column.right else "left"
            # Names and numbers are never wrapped.
            is_whole = column.code or column.right
            table.add_column(
                column.title, justify=side, style="bold" if column.code else None, no_wrap=is_whole
            )
        for row in self.rows:
            table.add_row(*(Text(cell) for _, cell in self._cells(row)))
        return table

    def _cells(self, row: Any) -> Iterable[tuple[Column, str]]:
        return ((column, column.cell(row)) for column in self.columns)


def write(parts: Table | Sequence[Table]) -> None:
    """Print tables to standard output, as the module describes."""
    tables = [parts] if isinstance(parts, Table) else parts
    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None where it is closed
    if is_terminal and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.measure import Measurement

        console = Console(highlight=False)
        rich = [part.rich() for part in tables]
        free = console.options.update(max_width=10_000)
        if all(Measurement.get(console, free, part).minimum <= console.width for part in rich):
            return console.print(*rich)
    print("\n".join(part.plain() for part in tables), end="", flush=True)


def write_json(value: Row | Sequence[Row]) -> None:
    """Print one JSON value; infinities and NaN, which JSON lacks, become the strings ``inf``,
    ``-inf`` and ``nan``.
    """
    # JSON escapes are exact. Characters that a stream lacks would be replaced.
    is_unicode = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    print(
        json.dumps(json_value(value), indent=1, allow_nan=False, ensure_ascii=not is_unicode),
        flush=True,
    )


def text_columns(**keys: Key) -> tuple[Column, ...]:
    """Return columns by title. An underscore stands for a space."""
    return tuple(Column(title.replace("_", " "), key) for title, key in keys.items())


def number_columns(**keys: Key) -> tuple[Column, ...]:
    """Columns of numbers by title, aligned right."""
    return tuple(replace(column, right=True) for column in text_columns(**keys))


def name_columns(**keys: Key) -> tuple[Column, ...]:
    """Columns of names by title, in code style."""
    return tuple(replace(column, code=True) for column in text_columns(**keys))


def cell_text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={cell_text(item)}" for name, item in value.items())
    return ", ".join(map(cell_text, value)) if isinstance(value, (list, tuple)) else str(value)


def json_value(value: Any) -> Any:
    """Convert a value to JSON: numbers of NumPy and PyTorch to Python's, paths to text, NaN and
    infinities to names.
    """
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    value = value.item() if hasattr(value, "item") else value
    is_named = isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value))
    return str(value) if is_named else value
