"""Write the tables and the reference into the pages from the rows the program itself reads.

A page says ``<!-- table: formats -->`` where a table belongs and ``<!-- reference -->`` where the public names do. Both
are filled in at each build, so that no figure in the documentation is typed twice.
"""

from __future__ import annotations

import re
from itertools import groupby

import narrowgauge
from narrowgauge import show

TABLE = re.compile(r"^<!-- table: (\w+) -->$", re.MULTILINE)
REFERENCE = "<!-- reference -->"


def on_page_markdown(markdown: str, **_context: object) -> str:
    """Fill in what one page asks for; MkDocs calls this for every page."""
    markdown = TABLE.sub(lambda found: show.markdown(found.group(1)), markdown)
    return markdown.replace(REFERENCE, reference())


def reference() -> str:
    """One entry per public name, under the module it lives in, in the order of ``narrowgauge.__all__``."""
    parts = []
    for home, entries in groupby(narrowgauge._HOMES.items(), key=lambda entry: entry[1]):
        parts.append(f"## {home.replace('.', ' · ')}\n")
        parts += [f"::: narrowgauge.{home}.{name}\n" for name, _ in entries]
    return "\n".join(parts)
