"""Read training text as named documents.

A document's name decides whether the document is held out. So a name never depends on other documents. A file is named by its
path within the source. A line of ``.jsonl`` or a row of a data set is named by a hash of its text.

``stdlib`` is the source of the Python standard library on this machine: 10 MB of real text, without a download.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.errors import DataError
from narrowgauge.runs.atomic_io import load_json

SUFFIXES = (".jsonl", ".md", ".py", ".txt")
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Document:
    """One text and its name."""

    name: str
    text: str


@dataclass(frozen=True)
class Texts:
    """A source of documents. ``read`` yields the same non-empty documents in the same order each time."""

    source: str
    read: Callable[[], Iterator[Document]]

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
        source: ``stdlib``, a text or ``.jsonl`` file (``text`` in each line), a folder of such files, or
            ``datasets:NAME[:SPLIT]``.

    Example:
        >>> next(open_texts("stdlib").read()).name
        '__future__.py'
    """
    if source == "stdlib":
        library = Path(sysconfig.get_path("stdlib"))
        files = _files(library, (".py",), _SKIPPED_FOLDERS)
        return Texts(source, lambda: (d for file, name in files for d in _read_file(file, name, errors="replace")))
    if source.startswith("datasets:"):
        rows = _load_dataset(source)
        return Texts(source, lambda: (_named_by_text(row["text"]) for row in rows if row["text"]))
    path = Path(source)
    if path.is_dir():
        return Texts(source, lambda: (document for file, name in _files(path) for document in _read_file(file, name)))
    if path.is_file():
        return Texts(source, lambda: _read_file(path, path.name))
    raise DataError(
        f"No data in {source}: there is no such file or folder.",
        "Name a file or folder of text, stdlib, or datasets:NAME.",
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


def _read_file(path: Path, name: str, errors: str = "strict") -> Iterator[Document]:
    try:
        if path.suffix == ".jsonl":
            with path.open(encoding="utf-8-sig") as stream:
                documents = (_json_line(path, number, line) for number, line in enumerate(stream, 1) if line.strip())
                yield from (document for document in documents if document.text)
        elif text := path.read_text(encoding="utf-8-sig", errors=errors):
            yield Document(name, text)
    except UnicodeDecodeError as error:
        raise DataError(
            f"The data file {path} is not UTF-8 text: byte {error.object[error.start]:#04x} ({error.reason}).",
            "Convert it, or leave it out of the data.",
        ) from error
    except OSError as error:
        raise DataError(f"Cannot read the data file {path}: {error.strerror}.") from error


def _json_line(path: Path, number: int, line: str) -> Document:
    try:
        row = load_json(line)
    except ValueError as error:
        raise DataError(
            f"{path}, line {number} is not JSON ({error}).", "A .jsonl file has one object per line."
        ) from error
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        fields = ", ".join(sorted(row)) if isinstance(row, dict) else type(row).__name__
        raise DataError(f"{path}, line {number} has no text in a field 'text'; it has {fields}.", "Rename the field.")
    return _named_by_text(text)


def _named_by_text(text: str) -> Document:
    text = text.encode(errors="replace").decode()  # JSON can hold lone surrogates, UTF-8 cannot
    return Document(hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), text)


def _load_dataset(source: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"The data {source} needs the package datasets, which is not installed.",
            "Install it with pip install 'narrowgauge[datasets]'.",
        ) from error
    name, _, split = source.removeprefix("datasets:").partition(":")
    try:
        rows = datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # datasets raises a dozen unrelated types for a wrong name, split or connection
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"Cannot load the data {source}: {reason}", "Check the name and the split.") from error
    if "text" not in rows.column_names:
        raise DataError(f"The data {source} has no column 'text'; it has {', '.join(rows.column_names)}.")
    return rows
