"""Sessions of the documentation: commands with their output, checked by tests and updated by one
command.

A session is a ``text`` block after ``<!-- session: exact -->`` or ``<!-- session: figures differ
-->`` (losses and times, which differ between machines). Its commands begin with ``$``. The sessions
of a page share one folder, so a later one may read what an earlier one wrote. ::

    python docs/sessions.py docs/quickstart.md …     run the sessions of these pages, and write what they print into them
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

from narrowgauge.cli.main import main as narrowgauge

DOCS = Path(__file__).parent
_BLOCK = re.compile(
    r"(<!-- session: (exact|figures differ) -->\n```text\n)(.*?)(^```)", re.DOTALL | re.MULTILINE
)
_COMMAND = re.compile(r"^\$ (?:.*\\\n)*.*$", re.MULTILINE)
_NUMBER = re.compile(r"[+−-]?\d[\d,.]*(?:e[+-]?\d+)?")


@dataclass(frozen=True)
class Session:
    """Commands and their output, as a page shows them."""

    is_exact: bool
    text: str

    @property
    def commands(self):
        """Return the commands as the page shows them. A backslash at the end continues a line."""
        return _COMMAND.findall(self.text)

    def run(self) -> str:
        """Run the commands in the working folder; return them with their output."""
        parts = []
        for shown in self.commands:
            name, *words = shlex.split(shown[2:].replace("\\\n", " "))
            if name != "narrowgauge":
                raise ValueError(f"a session runs narrowgauge alone, and not {name}")
            result = CliRunner().invoke(narrowgauge, words)
            output = "\n".join(line.rstrip() for line in result.output.strip().splitlines())
            parts.append(f"{shown}\n{output}\n")
            if result.exit_code:
                raise ValueError(f"{shown} ended with status {result.exit_code}: {output}")
        return "\n".join(parts)

    def agrees(self, printed: str) -> bool:
        """Return whether :attr:`text` equals this output, up to figures unless the session is
        exact.
        """
        return (
            self.text == printed
            if self.is_exact
            else _without_figures(self.text) == _without_figures(printed)
        )


def _without_figures(text: str):
    """Return the words of each line. Columns are as wide as their figures."""
    return [_NUMBER.sub("#", line).split() for line in text.splitlines()]


def sessions(page: Path):
    """Return the sessions of a page in order."""
    return [
        Session(kind == "exact", text)
        for _, kind, text, _ in _BLOCK.findall(page.read_text(encoding="utf-8"))
    ]


@contextmanager
def checkout(folder: Path):
    """Work in an empty folder with what sessions need of a checkout: the stored runs, the small
    model and a text.
    """
    for name in ("docs/case-studies", "examples"):
        shutil.copytree(DOCS.parent / name, folder / name)
    shutil.copy(DOCS.parent / "LICENSE", folder)
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def main(pages) -> int:
    """Run the sessions of pages, and write their output into them."""
    for page in map(Path.resolve, map(Path, pages)):
        with tempfile.TemporaryDirectory() as folder, checkout(Path(folder)):
            text = page.read_text(encoding="utf-8")
            page.write_text(
                _BLOCK.sub(
                    lambda match: f"{match[1]}{Session(True, match[3]).run()}{match[4]}", text
                ),
                encoding="utf-8",
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
