"""The training corpus: text as documents with names.

A document is a name and its text. The name determines whether the document is held out, so it must not change when other
documents are added or removed: a file is named by its path within the source, a line of a ``.jsonl`` file or a row of a data
set by a hash of its text (equal texts are in the same split). A source can be read again and gives the same documents in the
same order.

``stdlib`` is the source text of the Python standard library on this machine: 10 MB of real text, without a download.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.errors import DataError
from narrowgauge.runs.atomic_io import load_json

TEXT_SUFFIXES = (".jsonl", ".md", ".py", ".txt")

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Document:
    """One text; ``name`` does not depend on other documents."""

    name: str
    text: str


@dataclass(frozen=True)
class Texts:
    """A source that can be read repeatedly; ``read`` yields its documents, none of them empty, in a fixed order."""

    source: str
    read: Callable[[], Iterator[Document]]

    def measure(self) -> tuple[str, int]:
        """The BLAKE2b-256 of all names and texts, and the bytes of the texts in UTF-8; refuses a source without text."""
        state, num_bytes = hashlib.blake2b(digest_size=32), 0
        for document in self.read():
            name, text = document.name.encode(errors="replace"), document.text.encode()
            state.update(f"{len(name)} {len(text)} ".encode() + name + text)
            num_bytes += len(text)
        if not num_bytes:
            raise DataError(f"The data {self.source} has no text.", f"It may hold {' '.join(TEXT_SUFFIXES)} files.")
        return state.hexdigest(), num_bytes


def open_texts(source: str) -> Texts:
    """Open a source of text, without reading it yet.

    Args:
        source: ``stdlib``, a text or ``.jsonl`` file (``text`` in each line), a folder of them, or
            ``datasets:NAME[:SPLIT]``.

    Example:
        >>> next(open_texts("stdlib").read()).name
        '__future__.py'
    """
    if source == "stdlib":
        return Texts(source, _library)
    if source.startswith("datasets:"):
        rows = _data_set(source)
        return Texts(source, lambda: _data_set_documents(source, rows))
    path = Path(source)
    if path.is_dir():
        return Texts(source, lambda: _folder(path))
    if path.is_file():
        return Texts(source, lambda: _file(path, path.name))
    raise DataError(
        f"No data in {source}: there is no such file or folder.",
        "Name a file or folder of text, stdlib, or datasets:NAME.",
    )


def _library() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    for file, name in _files(root, (".py",), _NOT_LIBRARY):
        try:
            with tokenize.open(file) as stream:
                text = stream.read()
        except (SyntaxError, UnicodeDecodeError):
            text = file.read_text(encoding="utf-8", errors="replace")
        if text:
            yield Document(name, text)


def _folder(root: Path) -> Iterator[Document]:
    for file, name in _files(root, TEXT_SUFFIXES, frozenset()):
        yield from _file(file, name)


def _files(root: Path, suffixes: tuple[str, ...], without: frozenset[str]) -> list[tuple[Path, str]]:
    """Files below a folder with their relative names, sorted by name, without hidden ones."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in without and not name.startswith(".")]
        for file in files:
            if file.endswith(suffixes) and not file.startswith("."):
                path = Path(folder, file)
                found.append((path, path.relative_to(root).as_posix()))
    return sorted(found, key=lambda pair: pair[1])


def _file(path: Path, name: str) -> Iterator[Document]:
    if path.suffix == ".jsonl":
        yield from _json_lines(path)
        return
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_text(path, error) from error
    except OSError as error:
        raise DataError(f"Cannot read the data file {path}: {error.strerror}.") from error
    if text:
        yield Document(name, text)


def _json_lines(path: Path) -> Iterator[Document]:
    try:
        with path.open(encoding="utf-8-sig") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip() and (text := _text_of(line, f"{path}, line {number}")):
                    yield Document(_name_of(text), text)
    except UnicodeDecodeError as error:
        raise _not_text(path, error) from error
    except OSError as error:
        raise DataError(f"Cannot read the data file {path}: {error.strerror}.") from error


def _text_of(line: str, place: str) -> str:
    try:
        row = load_json(line)
    except ValueError as error:
        raise DataError(f"{place} is not JSON ({error}).", "A .jsonl file has one object per line.") from error
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        found = ", ".join(sorted(row)) if isinstance(row, dict) else type(row).__name__
        raise DataError(f"{place} has no text in a field 'text'; it has {found or 'nothing'}.", "Rename the field.")
    return _writable(row["text"])


def _writable(text: str) -> str:
    """Replace lone surrogates, which JSON can express and UTF-8 cannot, by question marks."""
    return text.encode(errors="replace").decode()


def _name_of(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _not_text(path: Path, error: UnicodeDecodeError) -> DataError:
    return DataError(
        f"The data file {path} is not UTF-8 text: byte {error.object[error.start]:#04x} ({error.reason}).",
        "Convert it, or leave it out of the data.",
    )


def _data_set(source: str) -> Any:
    """The rows of ``datasets:NAME[:SPLIT]``, from the Hugging Face hub or its cache."""
    name, _, split = source.removeprefix("datasets:").partition(":")
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"The data {source} needs the package datasets, which is not installed.",
            "Install it with pip install 'narrowgauge[datasets]'.",
        ) from error
    try:
        rows = datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # datasets raises a dozen unrelated types for a wrong name, split or connection
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"Cannot load the data {source}: {reason}", "Check the name and the split.") from error
    if "text" not in rows.column_names:
        raise DataError(f"The data {source} has no column 'text'; it has {', '.join(rows.column_names)}.")
    return rows


def _data_set_documents(source: str, rows: Any) -> Iterator[Document]:
    for number, row in enumerate(rows):
        text = row["text"]
        if text is not None and not isinstance(text, str):
            raise DataError(f"Row {number} of the data {source} has {type(text).__name__} as text.")
        if text:
            text = _writable(text)
            yield Document(_name_of(text), text)
