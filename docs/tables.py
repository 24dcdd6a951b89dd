"""Generate the tables and the API reference of the documentation from the package.

Each build replaces ``<!-- table: formats -->`` in a page by that table, and ``<!-- reference -->``
by the public names. Most tables are those of ``narrowgauge show``; ``OWN`` has the tables of the
record.
"""

from __future__ import annotations

import ast
import re
from functools import partial
from pathlib import Path

from narrowgauge import errors
from narrowgauge.measuring.kinds import kind_table
from narrowgauge.runs import schema
from narrowgauge.spec import show
from narrowgauge.spec.tables import Table, is_number
from narrowgauge.spec.toml import load_toml

TABLE = re.compile(r"^<!-- table: (\w+) -->$", re.MULTILINE)
REFERENCE = "<!-- reference -->"
_CODE = {"name", "recipe", "reading", "table", "metric", "column"}
"""Titles of columns in code style."""
_NOT_LISTED = ("NarrowgaugeError", "ReportedError")


def on_page_markdown(markdown: str, **_context) -> str:
    """Fill in the tables of one page. MkDocs calls this for every page."""
    markdown = TABLE.sub(lambda match: table(match.group(1)), markdown)
    return markdown.replace(REFERENCE, reference()) if REFERENCE in markdown else markdown


def table(name: str) -> str:
    """Return the table of that name as GitHub markdown.

    Args:
        name: a key of :data:`OWN`, or a table of ``narrowgauge show``.
    """
    return OWN[name]() if name in OWN else markdown_of(show.table(name))


def markdown_of(table: Table) -> str:
    """Return a table as GitHub markdown."""
    aligned = []
    for title, cells in table.columns().items():
        rule = "---:" if is_number(cells) else "---"
        style = "`{}`" if title in _CODE else "{}"
        shown = [style.format(cell) for cell in cells]
        aligned.append([title, rule, *(cell.replace("|", r"\|") for cell in shown)])
    return "".join(f"| {' | '.join(line)} |\n" for line in zip(*aligned, strict=True))


def reference() -> str:
    """Return one entry per public name, under the path by which it is reached."""
    source = Path(errors.__file__).parent
    parts = []
    for stub in (source / "__init__.pyi", *sorted(source.glob("*/__init__.pyi"))):
        package = ".".join(stub.relative_to(source.parent).parent.parts)
        nodes = [
            node
            for node in ast.parse(stub.read_text("utf-8")).body
            if isinstance(node, ast.ImportFrom)
        ]
        parts.append(f"### {package.replace('narrowgauge', 'ng', 1)}\n")
        parts += [
            f"::: {package}.{node.module}.{alias.name}\n"
            for node in nodes
            if node.module
            for alias in node.names
        ]
    # The base class is a name of the package itself. The command line alone raises the other.
    names = [name for name in vars(errors) if name.endswith("Error") and name not in _NOT_LISTED]
    return "\n".join(
        (*parts, "### ng.errors\n", *(f"::: narrowgauge.errors.{name}\n" for name in names))
    )


def record(kind: str) -> str:
    """Return the columns of one file of a run folder."""
    rows = [
        {"name": column.name, "type": column.type, "help": column.help}
        for column in schema.TABLES[kind].values()
    ]
    shown = {"column": "name", "type": "type", "what it is": "help"}
    return markdown_of(Table(rows, shown))


def machines() -> str:
    """Return the hashes of each kind of processor that ran the tests, in bold where they differ."""
    file = Path(__file__).parents[1] / "tests" / "golden" / "arithmetic.toml"
    recorded = load_toml(file.read_text(encoding="utf-8"))
    first = next(iter(recorded.values()))
    rows = []
    for probe, bits in first.items():
        row = {"name": probe}
        for machine, results in recorded.items():
            short = results[probe][-8:-4]
            row[machine] = short if results[probe] == bits else f"**{short}**"
        rows.append(row)
    heads = {machine.removeprefix("x86_64 "): machine for machine in recorded}
    return markdown_of(Table(rows, {"operation": "name", **heads}))


def checks() -> str:
    """Return every kind of reading as ``narrowgauge show checks`` prints it, with its bound's source."""
    table = kind_table()
    return markdown_of(Table(table.rows, {**table.shown, "source of the bound": "source"}))


OWN = {
    **{f"record_{kind}": partial(record, kind) for kind in schema.TABLES},
    "checks": checks,
    "machines": machines,
}
"""The tables that only the documentation shows, by name."""
