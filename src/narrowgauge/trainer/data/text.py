"""Read training text as named documents.

A document's name decides whether the document is held out. So a name never depends on other documents. A file is named by its
path within the source. A line of ``.jsonl`` is named by a hash of its text.

``stdlib`` is the source of the Python standard library on this machine: 10 MB of real text, without a download.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from narrowgauge.errors import DataError
from narrowgauge.runs.atomic_io import load_json

SUFFIXES = (".jsonl", ".md", ".py", ".txt")
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


class Document(NamedTuple):
    """One text and its name."""

    name: str
    text: str


@dataclass(frozen=True)
class Texts:
    """A source of documents: its files, each with its name."""

    source: str
    files: list[tuple[Path, str]]

    def read(self) -> Iterator[Document]:
        """Yield the same non-empty documents in the same order each time."""
        # Some files of the standard library test other encodings.
        errors = "replace" if self.source == "stdlib" else "strict"
        for path, name in self.files:
            yield from (document for document in _read_file(path, name, errors) if document.text)

    def measure(self) -> tuple[str, int]:
        """Return the BLAKE2b-256 of all names and texts, and the number of UTF-8 bytes."""
        state, num_bytes = hashlib.blake2b(digest_size=32), 0
        for document in self.read():
            name, text = document.name.encode(errors="replace"), document.text.encode()
            state.update(f"{len(name)} {len(text)} ".encode() + name + text)
            num_bytes += len(text)
        if not num_bytes:
            raise DataError(f"The data {self.source} has no text.", f"It may hold {' '.join(SUFFIXES)} files.")
        return state.hexdigest(), num_bytes


def open_texts(source: str) -> Texts:
    """Open a source of text without reading it.

    Args:
        source: ``stdlib``, a text or ``.jsonl`` file (``text`` in each line), or a folder of such files.

    Example:
        >>> next(open_texts("stdlib").read()).name
        '__future__.py'
    """
    path = Path(source)
    if source == "stdlib":
        return Texts(source, _files(Path(sysconfig.get_path("stdlib")), (".py",), _SKIPPED_FOLDERS))
    if path.is_dir():
        return Texts(source, _files(path))
    if path.is_file():
        return Texts(source, [(path, path.name)])
    raise DataError(
        f"No data in {source}: there is no such file or folder.", "Name a file or folder of text, or stdlib."
    )


def _files(
    root: Path, suffixes: tuple[str, ...] = SUFFIXES, skipped: frozenset[str] = frozenset()
) -> list[tuple[Path, str]]:
    """Return the files below a folder with their relative names, sorted by name, without hidden ones."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        paths = [Path(folder, name) for name in names if name.endswith(suffixes) and not name.startswith(".")]
        files += [(path, path.relative_to(root).as_posix()) for path in paths]
    return sorted(files, key=lambda pair: pair[1])


def _read_file(path: Path, name: str, errors: str) -> Iterator[Document]:
    try:
        if path.suffix == ".jsonl":
            with path.open(encoding="utf-8-sig") as stream:
                yield from (_json_line(path, number, line) for number, line in enumerate(stream, 1) if line.strip())
        else:
            yield Document(name, path.read_text(encoding="utf-8-sig", errors=errors))
    except UnicodeDecodeError as error:
        raise DataError(
            f"The data file {path} is not UTF-8 text: byte {error.object[error.start]:#04x} ({error.reason}).",
            "Convert it, or leave it out of the data.",
        ) from error
    except OSError as error:
        raise DataError(f"Cannot read the data file {path}: {error.strerror}.") from error


def _json_line(path: Path, number: int, line: str) -> Document:
    try:
        text = load_json(line)["text"].encode(errors="replace").decode()  # JSON can hold lone surrogates, UTF-8 cannot
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}, line {number} has no text in a field 'text' ({type(error).__name__}: {error}).",
            'A .jsonl file has one object per line, such as {"text": "…"}.',
        ) from error
    return Document(hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), text)
