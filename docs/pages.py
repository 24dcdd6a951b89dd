"""Tables of the documentation that a phone can show: wide ones are marked, and each cell says which column it is of.

MkDocs calls :func:`on_page_content` for every page. ``stylesheets/pages.css`` turns the rows of a marked table into blocks where
the screen is narrow.
"""

from __future__ import annotations

import html
import re

WIDE = 3
"""Columns from which on a table is wide."""

_TABLE = re.compile(r"<table>(.*?)</table>", re.DOTALL)
_HEAD = re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL)
_ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
_CELL = re.compile(r"<td([^>]*)>")


def on_page_content(content: str, **_context: object) -> str:
    """Mark the wide tables of a page."""
    return _TABLE.sub(_marked, content)


def _marked(table: re.Match[str]) -> str:
    heads = [html.unescape(re.sub(r"<[^>]+>", "", head)).strip() for head in _HEAD.findall(table[1])]
    if len(heads) < WIDE:
        return table[0]
    return f"<table data-stacked>{_ROW.sub(lambda row: _named(row[0], heads), table[1])}</table>"


def _named(row: str, heads: list[str]) -> str:
    names = iter(heads)

    def name(cell: re.Match[str]) -> str:
        column = next(names, "")
        return f'<td{cell[1]} data-column="{html.escape(column)}">' if column else cell[0]

    return _CELL.sub(name, row)
