"""Tables with named columns, printed for a terminal, a pipe, GitHub markdown or JSON.

A wide terminal gets a rich table, a narrow one a paragraph per row, a pipe aligned text.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Row = dict[str, Any]
Key = str | Callable[[Row], Any]
_LEAST_PROSE = 24


@dataclass(frozen=True)
class Column:
    """One printed column: its title, the key of a row's value or a function of the row, and its style."""

    title: str
    key: Key
    code: bool = False  # a name, printed in code style where there is one
    right: bool = False  # aligned right

    @property
    def is_whole(self) -> bool:
        """Whether cells must not be wrapped: names and numbers."""
        return self.code or self.right

    def cell(self, row: Row) -> str:
        return cell_text(self.key(row) if callable(self.key) else row[self.key])


@dataclass(frozen=True)
class Table:
    """Rows, and the columns of them to print."""

    columns: tuple[Column, ...]
    rows: list[Row]
    title: str = ""

    def markdown(self) -> str:
        """GitHub markdown, without the title."""
        heads = [column.title for column in self.columns]
        rules = ["---:" if column.right else "---" for column in self.columns]
        lines = [
            [f"`{cell}`" if column.code else cell.replace("|", r"\|") for column, cell in self._cells(row)]
            for row in self.rows
        ]
        return "".join(f"| {' | '.join(line)} |\n" for line in [heads, rules, *lines])

    def latex(self) -> str:
        """A ``tabular`` with the rules of LaTeX's booktabs package, without the title."""
        sides = "".join("r" if column.right else "l" for column in self.columns)
        heads = [_in_latex(column.title) for column in self.columns]
        lines = [
            [rf"\texttt{{{_in_latex(cell)}}}" if column.code else _in_latex(cell) for column, cell in self._cells(row)]
            for row in self.rows
        ]
        body = "".join(" & ".join(line) + r" \\" + "\n" for line in lines)
        return (
            f"\\begin{{tabular}}{{{sides}}}\n\\toprule\n{' & '.join(heads)} \\\\\n\\midrule\n"
            f"{body}\\bottomrule\n\\end{{tabular}}\n"
        )

    def csv(self) -> str:
        """Comma-separated values: not the printed cells but every value of the rows in full; lists and objects as JSON."""
        keys = list(dict.fromkeys(key for row in self.rows for key in row))
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(keys)
        writer.writerows([_csv_value(row.get(key)) for key in keys] for row in self.rows)
        return text.getvalue()

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

    def widths(self, width: int) -> list[int]:
        """Widths of the columns in a rich table: names and numbers in full, prose wrapped between words.

        Empty where the longest words do not fit side by side in ``width`` characters.
        """
        cells = [[column.title, *map(column.cell, self.rows)] for column in self.columns]
        widest = [max(map(len, column)) for column in cells]
        least = [
            most if column.is_whole else max(len(word) for cell in found for word in ("", *cell.split()))
            for column, found, most in zip(self.columns, cells, widest, strict=True)
        ]
        # A column of single words is hard to read.
        least = [max(few, min(most, _LEAST_PROSE)) for few, most in zip(least, widest, strict=True)]
        left = width - 2 - sum(3 + few for few in least)
        if left < 0:
            return []
        wanted = [most - few for most, few in zip(widest, least, strict=True)]
        share = min(1.0, left / sum(wanted)) if any(wanted) else 0.0
        return [few + int(more * share) for few, more in zip(least, wanted, strict=True)]

    def rich(self, widths: Sequence[int]) -> Any:
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
        """A paragraph per row for a narrow terminal: the first column, and the others that are not empty below it.

        Lines of at most ``width`` characters break between words; a single word may be longer.
        """
        text = f"{self.title}\n" if self.title else ""
        for row in self.rows:
            (_, name), *others = self._cells(row)
            # The separator stays on the line that it ends.
            others_text = "\N{NO-BREAK SPACE}· ".join(f"{column.title}: {cell}" for column, cell in others if cell)
            wrap = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
            wrap.initial_indent = wrap.subsequent_indent = "  "
            text += "\n".join([name, *wrap.wrap(others_text)]).replace("\N{NO-BREAK SPACE}", " ") + "\n"
        return text

    def _cells(self, row: Row) -> Iterable[tuple[Column, str]]:
        return ((column, column.cell(row)) for column in self.columns)


FORMS: dict[str, Callable[[Table], str]] = {"md": Table.markdown, "csv": Table.csv, "tex": Table.latex}
"""Forms in which a table is printed for a paper or a spreadsheet."""


def write(parts: Table | Sequence[Table]) -> None:
    """Print tables to standard output, as the module describes."""
    tables = [parts] if isinstance(parts, Table) else parts
    if sys.stdout is not None and sys.stdout.isatty():  # None where it is closed
        from rich.console import Console

        console = Console(highlight=False)
        found = [part.widths(console.width) for part in tables]
        if all(found):
            return console.print(*(part.rich(widths) for part, widths in zip(tables, found, strict=True)))
        print("\n".join(part.cards(console.width) for part in tables), end="", flush=True)
        return None
    print("\n".join(part.plain() for part in tables), end="", flush=True)


def write_json(found: Row | Sequence[Row]) -> None:
    """Print a JSON list of objects; infinities and NaN, which JSON lacks, become the strings ``inf``, ``-inf`` and ``nan``."""
    write_object([found] if isinstance(found, dict) else list(found))


def write_object(found: Row | Sequence[Row]) -> None:
    """Print one JSON value, with infinities and NaN as in :func:`write_json`."""
    # Escapes of JSON are exact where characters that a stream lacks would be replaced.
    is_unicode = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    print(json.dumps(_json_value(found), indent=1, allow_nan=False, ensure_ascii=not is_unicode), flush=True)


def text_columns(**keys: Key) -> tuple[Column, ...]:
    """Columns by title, in which an underscore stands for a space."""
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
    return ", ".join(map(cell_text, value)) if isinstance(value, (list, tuple)) else str(value)


def _in_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "×": r"$\times$", "±": r"$\pm$", "−": r"$-$", "–": "--",
    "≤": r"$\le$", "≥": r"$\ge$", "…": r"\dots{}", "·": r"$\cdot$",
}  # fmt: skip
"""Characters that LaTeX reads as commands, or that its usual fonts lack."""


def _csv_value(value: Any) -> Any:
    """A value of a row for a CSV file: text and numbers as they are, in Python's shortest exact form."""
    if isinstance(value, (Mapping, list, tuple)):
        return json.dumps(_json_value(value), ensure_ascii=False)
    return "" if value is None else value


def _json_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
