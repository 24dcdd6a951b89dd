"""Read training text as named documents.

A document's name decides whether the document is held out. So a name never depends on other documents. A file is named by its
path within the source. A line of ``.jsonl`` is named by a hash of its text.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

from narrowgauge.errors import DataError
from narrowgauge.runs.atomic_io import load_json

SUFFIXES = (".jsonl", ".md", ".py", ".txt")


class Document(NamedTuple):
    """One text and its name."""

    name: str
    text: str


def read_documents(source: str | Path) -> Iterator[Document]:
    """Yield the documents of a text or ``.jsonl`` file (``text`` in each line), or of a folder of such files, by name.

    Hidden files and empty documents are left out.

    Raises:
        DataError: the source, a folder or a file in it cannot be read, or is not UTF-8 text.
    """
    path = Path(source)
    if not (path.is_dir() or path.is_file()):
        raise DataError(f"No text in {source}: there is no such file or folder.", "Name a file or folder of text.")
    for file, name in _files(path) if path.is_dir() else [(path, path.name)]:
        yield from (document for document in _read_file(file, name) if document.text)


def _files(root: Path) -> list[tuple[Path, str]]:
    """Return the files below a folder with their relative names, sorted by name."""
    files = []
    for folder, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = [Path(folder, name) for name in names if name.endswith(SUFFIXES) and not name.startswith(".")]
        # A pipe would wait for its writer.
        files += [(path, path.relative_to(root).as_posix()) for path in paths if not path.is_fifo()]
    return sorted(files, key=lambda pair: pair[1])


def _refuse(error: OSError) -> NoReturn:
    raise DataError(f"Cannot read the text in {error.filename}: {error.strerror}.", "Check who may read it.") from error


def _read_file(path: Path, name: str) -> Iterator[Document]:
    try:
        if path.suffix == ".jsonl":
            with path.open(encoding="utf-8-sig") as stream:
                yield from (_json_line(path, number, line) for number, line in enumerate(stream, 1) if line.strip())
        else:
            yield Document(name, path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"The file {path} is not UTF-8 text: byte {error.object[error.start]:#04x} ({error.reason}).",
            "Convert it, or leave it out.",
        ) from error
    except OSError as error:
        _refuse(error)


def _json_line(path: Path, number: int, line: str) -> Document:
    try:
        text = load_json(line)["text"].encode(errors="replace").decode()  # JSON can hold lone surrogates, UTF-8 cannot
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}, line {number} has no text in a field 'text' ({type(error).__name__}: {error}).",
            'A .jsonl file has one object per line, such as {"text": "…"}.',
        ) from error
    return Document(hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), text)
