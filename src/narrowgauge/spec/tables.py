"""Tables with named columns, as aligned text, GitHub markdown or JSON."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        if isinstance(row, dict):
            return cell_text(row[self.key])
        return cell_text(getattr(row, self.key))


@dataclass(frozen=True)
class Table:
    """Rows, dicts or objects, and the columns of them to print."""

    columns: tuple[Column, ...]
    rows: list[Any]
    title: str = ""

    @property
    def heads(self) -> list[str]:
        return [column.title for column in self.columns]

    def markdown(self) -> str:
        """GitHub markdown, without the title."""
        lines = [self.heads, ["---:" if column.right else "---" for column in self.columns]]
        for row in self.rows:
            cells = []
            for column in self.columns:
                cell = column.cell(row)
                cells.append(f"`{cell}`" if column.code else cell.replace("|", r"\|"))
            lines.append(cells)
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def plain(self) -> str:
        """Aligned text for a pipe: titles, then one line per row, never wrapped."""
        aligned = []
        for column in self.columns:
            cells = [column.title, *map(column.cell, self.rows)]
            width = max(map(len, cells))
            align = str.rjust if column.right else str.ljust
            aligned.append([align(cell, width) for cell in cells])
        lines = [self.title] if self.title else []
        lines += ["  ".join(line).rstrip() for line in zip(*aligned, strict=True)]
        return "".join(f"{line}\n" for line in lines)


def table_of(rows: Sequence[Row], title: str = "", hidden: Sequence[str] = ()) -> Table:
    """Return a table of all keys of dicts but the ``hidden`` ones and those without a text.

    Numbers, and texts that begin with one, are aligned right.
    """
    columns = []
    for key in rows[0]:
        cells = [cell_text(row[key]) for row in rows]
        if key in hidden or not any(cells):
            continue
        is_number = all(re.match(r"[-+]?\d|$", cell) for cell in cells)
        title_text = key.replace("_", " ")
        columns.append(Column(title_text, key, code=key in ("name", "recipe"), right=is_number))
    return Table(tuple(columns), list(rows), title)


def write(parts: Table | Sequence[Table]) -> None:
    """Print tables to standard output."""
    tables = [parts] if isinstance(parts, Table) else parts
    print("\n".join(map(Table.plain, tables)), end="", flush=True)


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
    return _columns(keys)


def number_columns(**keys: Key) -> tuple[Column, ...]:
    """Columns of numbers by title, aligned right."""
    return _columns(keys, right=True)


def name_columns(**keys: Key) -> tuple[Column, ...]:
    """Columns of names by title, in code style."""
    return _columns(keys, code=True)


def _columns(keys: Mapping[str, Key], **style: bool) -> tuple[Column, ...]:
    return tuple(Column(title.replace("_", " "), key, **style) for title, key in keys.items())


def cell_text(value: Any) -> str:
    """Write a value as a table shows it."""
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={cell_text(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(cell_text, value))
    return str(value)


def json_value(value: Any) -> Any:
    """Convert a value to JSON: numbers of NumPy and PyTorch to Python's, paths to text, NaN and
    infinities to names.
    """
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(json_value, value))
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value
