"""Tables with named columns, as aligned text or JSON."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
"""One row of a table or of a record: column to value."""


@dataclass(frozen=True)
class Table:
    """Rows, dicts or objects, and the printed columns by title: the key of a row's value, or a
    function of the row.
    """

    rows: list[Any]
    shown: Mapping[str, str | Callable[[Any], Any]]
    title: str = ""

    def columns(self) -> dict[str, list[str]]:
        """Return the text of each cell by title."""
        columns: dict[str, list[str]] = {}
        for title, key in self.shown.items():
            columns[title] = []
            for row in self.rows:
                if callable(key):
                    value = key(row)
                elif isinstance(row, dict):
                    value = row[key]
                else:
                    value = getattr(row, key)
                columns[title].append(cell_text(value))
        return columns

    def plain(self) -> str:
        """Aligned text for a pipe: titles, then one line per row, never wrapped."""
        aligned = []
        for title, cells in self.columns().items():
            width = max(map(len, [title, *cells]))
            align = str.rjust if is_number(cells) else str.ljust
            aligned.append([align(cell, width) for cell in (title, *cells)])
        lines = [self.title] if self.title else []
        lines += ["  ".join(line).rstrip() for line in zip(*aligned, strict=True)]
        return "".join(f"{line}\n" for line in lines)


def is_number(cells: Sequence[str]) -> bool:
    """Return whether a column is aligned right: its texts begin with a number, or are empty."""
    return all(re.match(r"[-+\N{MINUS SIGN}]?\d|[-–]?$", cell) for cell in cells)


def table_of(rows: Sequence[Row], title: str = "", hidden: Sequence[str] = ()) -> Table:
    """Return a table of all keys of dicts but the ``hidden`` ones and those without a text."""
    shown = {}
    for key in rows[0]:
        if key not in hidden and any(cell_text(row[key]) for row in rows):
            shown[key.replace("_", " ")] = key
    return Table(list(rows), shown, title)


def write(parts: Table | Sequence[Table]) -> None:
    """Print tables to standard output."""
    tables = [parts] if isinstance(parts, Table) else parts
    print("\n".join(map(Table.plain, tables)), end="", flush=True)


def write_json(value: Row | Sequence[Row]) -> None:
    """Print one JSON value, as :func:`json_value` returns it."""
    print(json.dumps(json_value(value), indent=1), flush=True)


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
    """Return a value as :func:`plain` does. Infinities and NaN, which JSON lacks, become the strings
    ``inf``, ``-inf`` and ``nan``.
    """
    return plain(value, parse_constant=lambda name: str(float(name)))


def plain(value: Any, **options: Any) -> Any:
    """Return a value as JSON and Python's numbers: those of NumPy and PyTorch too, all else as text.

    ``options`` are those of ``json.loads``.
    """
    return json.loads(json.dumps(value, default=_plain), **options)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else str(value)
