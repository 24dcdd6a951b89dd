"""Sessions of the documentation: commands with what they print, checked by tests and written anew by one command.

A session is a ``text`` block behind ``<!-- session: exact -->`` or ``<!-- session: figures differ -->`` (losses and times, which
are others on another machine). Its commands stand behind ``$``. The sessions of a page share one folder, so a later one may read
what an earlier one wrote. ::

    python docs/sessions.py docs/command-line.md …     run the sessions of these pages, and write what they print into them
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

from narrowgauge.cli.main import main as narrowgauge

DOCS = Path(__file__).parent
_BLOCK = re.compile(r"(<!-- session: (exact|figures differ) -->\n```text\n)(.*?)(^```)", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"^\$ (?:.*\\\n)*.*$", re.MULTILINE)
_NUMBER = re.compile(r"[+−-]?\d[\d,.]*(?:e[+-]?\d+)?")


@dataclass(frozen=True)
class Session:
    """Commands, and what a page says that they print."""

    is_exact: bool
    text: str

    @property
    def commands(self) -> list[str]:
        """As the page shows them; a line that ends in a backslash goes on in the next one."""
        return _COMMAND.findall(self.text)

    def run(self) -> str:
        """The commands with what they print now, in the working folder."""
        parts = []
        for shown in self.commands:
            name, *words = shlex.split(shown[2:].replace("\\\n", " "))
            if name != "narrowgauge":
                raise ValueError(f"a session runs narrowgauge alone, and not {name}")
            result = CliRunner().invoke(narrowgauge, words)
            said = "\n".join(line.rstrip() for line in result.output.strip().splitlines())
            parts.append(f"{shown}\n{said}\n")
            if result.exit_code:
                raise ValueError(f"{shown} ended with status {result.exit_code}: {said}")
        return "\n".join(parts)

    def agrees(self, printed: str) -> bool:
        """Whether a page is right that says :attr:`text` where the commands print this."""
        return self.text == printed if self.is_exact else _without_figures(self.text) == _without_figures(printed)


def _without_figures(text: str) -> list[list[str]]:
    """The words of each line: columns are as wide as their figures."""
    return [_NUMBER.sub("#", line).split() for line in text.splitlines()]


def sessions(page: Path) -> list[Session]:
    """The sessions of a page, in their order."""
    return [Session(found[1] == "exact", found[2]) for found in _BLOCK.findall(page.read_text(encoding="utf-8"))]


@contextmanager
def checkout(folder: Path) -> Iterator[None]:
    """Work in an empty folder that has of a checkout what sessions name: the stored runs, the small model and a text."""
    for name in ("case-studies", "ideas"):
        shutil.copytree(DOCS / name, folder / "docs" / name)
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def main(pages: Sequence[str]) -> int:
    """Run the sessions of pages, and write what they print into them."""
    for page in map(Path.resolve, map(Path, pages)):
        with tempfile.TemporaryDirectory() as folder, checkout(Path(folder)):
            text = page.read_text(encoding="utf-8")
            page.write_text(
                _BLOCK.sub(lambda found: f"{found[1]}{Session(True, found[3]).run()}{found[4]}", text), encoding="utf-8"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
