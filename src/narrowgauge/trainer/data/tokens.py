"""Tokenize text into a *token map*, the one format of training data, which runs memory-map.

A token map is a folder: ``tokens.bin`` (uint16 or uint32, little endian), ``documents.bin`` (pairs
of uint64: the hash of a document's name, and where the document ends), ``tokens.json`` (dtype,
vocabulary, end-of-text token), and ``tokenizer.json`` where the tokenizer is known. Every document
ends with the end-of-text token.

A document's name decides whether the document is held out. So a name never depends on other
documents. A file is named by its path within the source. A line of ``.jsonl`` is named by a hash of
its text.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from narrowgauge.errors import DataError, require_package
from narrowgauge.runs.atomic_io import load_json
from narrowgauge.runs.places import new_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
SCHEMA_VERSION = 1
SUFFIXES = (".jsonl", ".md", ".py", ".txt")

_PIECE_CHARACTERS = 1 << 18
_LONG_WORD = re.compile(r"\S{4096}")
_BATCH_DOCUMENTS = 64
_PAGE_BYTES = 1 << 12
_MAX_PAGES = 1 << 10
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>")


# ── text ──────────────────────────────────────────────────────────────────────────────────────────


class Document(NamedTuple):
    name: str
    text: str


def read_documents(source: str | Path) -> Iterator[Document]:
    """Yield the documents of a text or ``.jsonl`` file (``text`` in each line), or of a folder of
    such files, by name.

    Hidden files and empty documents are left out. A source or file that cannot be read, or is not
    UTF-8 text, is a ``DataError``.
    """
    path = Path(source)
    if not (path.is_dir() or path.is_file()):
        raise DataError(
            f"No text in {source}: there is no such file or folder.",
            "Name a file or folder of text.",
        )
    for name, file in _files(path) if path.is_dir() else [(path.name, path)]:
        for document in _read_file(file, name):
            if document.text:
                yield document


def _files(root: Path) -> list[tuple[str, Path]]:
    """Return the names relative to a folder of the files below it, with the files, by name."""
    files = []
    for folder, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            is_text = name.endswith(SUFFIXES) and not name.startswith(".")
            if is_text and not path.is_fifo():  # a pipe would wait for its writer
                files.append((path.relative_to(root).as_posix(), path))
    return sorted(files)


def _refuse(error: OSError) -> NoReturn:
    raise DataError(
        f"Cannot read the text in {error.filename}: {error.strerror}.", "Check who may read it."
    ) from error


def _read_file(path: Path, name: str) -> Iterator[Document]:
    number = 0
    try:
        if path.suffix != ".jsonl":
            yield Document(name, path.read_text(encoding="utf-8-sig"))
            return
        with path.open(encoding="utf-8-sig") as stream:
            for line in stream:
                number += 1
                if line.strip():  # JSON can hold lone surrogates, UTF-8 cannot
                    encoded = load_json(line)["text"].encode(errors="replace")
                    name = hashlib.blake2b(encoded, digest_size=16).hexdigest()
                    yield Document(name, encoded.decode())
    except UnicodeDecodeError as error:
        raise DataError(
            f"The file {path} is not UTF-8 text: byte {error.object[error.start]:#04x} "
            f"({error.reason}).",
            "Convert it, or leave it out.",
        ) from error
    except OSError as error:
        _refuse(error)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}, line {number} has no text in a field 'text' ({type(error).__name__}: "
            f"{error}).",
            'A .jsonl file has one object per line, such as {"text": "…"}.',
        ) from error


# ── reading ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class TokenMap:
    """The tokens of a source, memory-mapped.

    Args:
        ids: all tokens, ``[num_tokens]``.
        documents: uint64 ``[num_documents, 2]``: the hash of each document's name, and where the
            document ends.
        fingerprint: equal for equal tokens with the same dtype, vocabulary and end-of-text token.
            It covers all documents, and 1,024 pages of 4 KiB of ``tokens.bin``, spread evenly: all
            of it up to 4 MiB.
    """

    folder: Path
    ids: np.ndarray
    documents: np.ndarray
    vocab_size: int
    end_of_text: int
    fingerprint: str


def read_tokens(path: str | Path) -> TokenMap:
    """Open a token map, its folder or the ``tokens.bin`` in it.

    Without ``documents.bin`` it is one document.

    Raises:
        DataError: the map is missing, damaged, or from a newer version.
    """
    path = Path(path)
    folder = path.parent if path.name == "tokens.bin" else path
    try:
        head = load_json((folder / "tokens.json").read_bytes())
        if head["schema_version"] != SCHEMA_VERSION:
            raise ValueError(
                f"schema {head['schema_version']}; this version reads {SCHEMA_VERSION}"
            )
        dtype = np.dtype(head["dtype"]).newbyteorder("<")
        if dtype.kind != "u":
            raise ValueError(f"its tokens are {head['dtype']}, and uint16 or uint32 are read")
        ids = np.memmap(folder / "tokens.bin", dtype=dtype, mode="r")  # refuses an empty file
        documents = np.array([[0, len(ids)]], dtype="<u8")
        if (folder / "documents.bin").is_file():
            documents = np.fromfile(folder / "documents.bin", dtype="<u8").reshape(-1, 2)
        ends = documents[:, 1].astype(np.int64)
        if ends[-1] != len(ids) or (np.diff(ends) < 0).any():
            raise ValueError(f"documents.bin does not fit its {len(ids):,} tokens")
        identity = [len(ids), head["dtype"], int(head["vocab_size"]), int(head["end_of_text"])]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason: Any = error
        if isinstance(error, FileNotFoundError):
            reason = f"no {Path(error.filename).name} is there"
        elif isinstance(error, NotADirectoryError):
            reason = "it is a file"
        advice = "Make one from text: narrowgauge tokenize TEXT OUT, then --data OUT."
        raise DataError(f"Cannot use the token map {folder}: {reason}.", advice) from error
    fingerprint = _fingerprint(ids, json.dumps(identity).encode() + documents.tobytes())
    return TokenMap(folder, ids, documents, identity[2], identity[3], fingerprint)


def _fingerprint(ids: np.ndarray, beside: bytes) -> str:
    """Return a hash of some pages of the tokens, spread evenly, and of what is ``beside`` them."""
    state = hashlib.blake2b(beside, digest_size=16)
    content = ids.view(np.uint8)
    num_pages = -(-len(content) // _PAGE_BYTES)
    num_read = min(num_pages, _MAX_PAGES)
    for page in range(num_read):
        first = page * num_pages // num_read * _PAGE_BYTES
        state.update(content[first : first + _PAGE_BYTES].tobytes())
    return state.hexdigest()


# ── writing ───────────────────────────────────────────────────────────────────────────────────────


def write_tokens(
    documents: Iterable[Document], tokenizer: Tokenizer, end_of_text: int, out: Path
) -> Path:
    """Tokenize documents into a new token map, complete or absent.

    The token ``end_of_text`` ends each document.

    Text that spells a special token is encoded like other text. A document of more than 2^18
    characters is encoded in pieces, each up to its last newline if it has one, and a word of more
    than 4,096 in pieces of 4,096.

    Cost: about 0.5 s per MB on two cores.
    """
    vocab_size = tokenizer.get_vocab_size()
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    ends = []
    with new_folder(out) as folder:
        tokenizer.save(str(folder / "tokenizer.json"))
        tokenizer.encode_special_tokens = True
        with (folder / "tokens.bin").open("wb") as stream:
            for name_hash, ids in _encoded(documents, tokenizer):
                np.array([*ids, end_of_text], dtype=dtype).tofile(stream)
                ends.append((name_hash, stream.tell() // dtype.itemsize))
        if not ends:
            raise DataError(
                "Cannot make a token map because there is no text.",
                f"Give {' '.join(SUFFIXES)} files.",
            )
        np.array(ends, dtype="<u8").tofile(folder / "documents.bin")
        head = {"schema_version": SCHEMA_VERSION, "dtype": dtype.name}
        head |= {"vocab_size": vocab_size, "end_of_text": end_of_text}
        (folder / "tokens.json").write_text(json.dumps(head, indent=1), encoding="utf-8")
    return out


def load_tokenizer(path: str | Path | None) -> tuple[Tokenizer, int]:
    """Read a ``tokenizer.json``, or the one in a Hugging Face folder.

    Return it with its end-of-text token.

    ``None`` makes a tokenizer of 257 tokens: the bytes and the end of text.
    """
    require_package("tokenizers")
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if path is None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE(dict(zip(alphabet, range(256), strict=True)), []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
        return tokenizer, len(alphabet)
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"No tokenizer in {path}: there is no file {file}.",
            "Name a tokenizer.json or its folder.",
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise DataError(f"Cannot read the tokenizer {file}: {error}.") from error
    tokenizer.no_truncation()  # a tokenizer saved after calls with truncation=True would cut the text
    tokenizer.no_padding()
    names = list(_END_NAMES)
    with suppress(OSError, ValueError, KeyError, TypeError):  # of a Hugging Face folder
        name = load_json(file.with_name("tokenizer_config.json").read_bytes())["eos_token"]
        names.insert(0, str(name["content"] if isinstance(name, dict) else name))
    for name in names:
        number = tokenizer.token_to_id(name)
        if number is not None:
            return tokenizer, number
    raise DataError(
        f"The tokenizer {file} has no end-of-text token (looked for {', '.join(names)}).",
        "Name it as eos_token in tokenizer_config.json in the same folder.",
    )


def hash_name(name: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(name.encode(errors="replace"), digest_size=8).digest(), "little"
    )


def pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces that a tokenizer encodes in linear time."""
    start = 0
    while start < len(text):
        end = min(start + _PIECE_CHARACTERS, len(text))
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        while (word := _LONG_WORD.search(text, start, end)) is not None:
            yield text[start : word.end()]
            start = word.end()
        if start < end:
            yield text[start:end]
        start = end


def _encoded(
    documents: Iterable[Document], tokenizer: Tokenizer
) -> Iterator[tuple[int, list[int]]]:
    """Yield the hash of each document's name, and its tokens.

    Some documents are encoded at once, on all cores.
    """
    stream = iter(documents)
    while batch := list(islice(stream, _BATCH_DOCUMENTS)):
        parts = [list(pieces(text)) for _, text in batch]
        encodings = iter(
            tokenizer.encode_batch_fast([*chain.from_iterable(parts)], add_special_tokens=False)
        )
        for (name, _), part in zip(batch, parts, strict=True):
            ids: list[int] = []
            for encoding in islice(encodings, len(part)):
                ids += encoding.ids
            yield hash_name(name), ids
