"""Tokens of a text: a byte-level BPE tokenizer, the token maps that store its output, and a cache of them.

A byte-level tokenizer can encode any text, so there is no unknown token. It is trained on at most 16 MB, a sample chosen by
hash; sample, training and encoding are deterministic. Every document ends with the end-of-text token.

A *token map* is a folder with tokenized text: ``tokens.bin`` (all tokens, uint16 or uint32, little
endian), ``documents.bin`` (pairs of uint64: a hash of the document's name, and where it ends), ``tokens.json`` (dtype,
vocabulary, end-of-text token, checksums) and, where known, ``tokenizer.json``.

Training a tokenizer on the standard library and encoding it takes seconds, so its token map is cached in the user's cache
folder, under a name with a hash of everything it depends on: the text, the vocabulary size, the version of ``tokenizers``.
Concurrent processes wait for each other; damaged entries are rebuilt. Old entries are not removed; the folder may be deleted at
any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from narrowgauge.errors import DataError, RecordError
from narrowgauge.machine.cache_folder import cache_folder
from narrowgauge.runs.atomic_io import AGAIN, TEMPORARY, digest, disk_errors, load_json, lock
from narrowgauge.trainer.data.corpus import Document, Texts

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257
"""256 bytes and the end of text."""
SCHEMA_VERSION = 1

_TRAINING_BYTES = 16_000_000
_PIECE_CHARACTERS = 1 << 18
_BATCH_CHARACTERS = 1 << 22
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>")


@dataclass(frozen=True)
class Tokens:
    """A tokenized source, document by document.

    Args:
        vocab_size: all tokens are below it.
        tokenizer_json: the tokenizer, or ``None`` if it is not known.
        read: yields (hash of the document's name, its tokens) for each document.
    """

    vocab_size: int
    end_of_text: int
    tokenizer_json: str | None
    read: Callable[[], Iterator[tuple[int, np.ndarray]]]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest unsigned dtype that represents every token."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")


def train_tokenizer(texts: Texts, vocab_size: int, num_bytes: int) -> tuple[Tokenizer, int]:
    """Train a byte-level BPE tokenizer, and find its end-of-text token.

    Invariant: the same text and size give the same tokenizer, in any process.

    Args:
        vocab_size: maximum number of tokens, including the end-of-text token; a small text gives fewer.
        num_bytes: size of the text; of more than 16 MB a sample is used.

    Cost: about 0.3 s per MB on two cores.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise DataError(
            f"vocab_size {vocab_size} is too small: the bytes and the end of text need {MIN_VOCAB_SIZE}.",
            "A few thousand suit a small model.",
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(texts, _TRAINING_BYTES / num_bytes), trainer)
    return tokenizer, tokenizer.get_vocab()[END_OF_TEXT]


def load_tokenizer(path: str | Path) -> tuple[Tokenizer, int]:
    """Read a ``tokenizer.json``, or the one in a Hugging Face folder, and find its end-of-text token."""
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"No tokenizer in {path}: there is no file {file}.", "Name a tokenizer.json or its folder.")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise DataError(f"Cannot read the tokenizer {file}: {error}.") from error
    names = (*_configured_end(file.with_name("tokenizer_config.json")), *_ENDS)
    found = [number for name in names if (number := tokenizer.token_to_id(name)) is not None]
    if not found:
        raise DataError(
            f"The tokenizer {file} has no end-of-text token (looked for {', '.join(names)}).",
            "Name it as eos_token in tokenizer_config.json in the same folder.",
        )
    return tokenizer, found[0]


def tokenizer_of_run(path: Path | None) -> tuple[Tokenizer, int]:
    """:func:`load_tokenizer` of what a run says of its own.

    Raises:
        RecordError: it has none.
    """
    if path is None:
        raise RecordError("This run has no tokenizer: its data was a token map without one.", "Export the model alone.")
    return load_tokenizer(path)


def tokenize_texts(texts: Texts, tokenizer: Tokenizer, end_of_text: int) -> Tokens:
    """Tokenize text while it is read.

    Text that spells a special token is encoded like any other text. Documents above 256 Ki characters are encoded in
    pieces split after a newline, where no token spans the two sides.

    Cost: about 0.2 s per MB on two cores.
    """
    vocab_size, tokenizer_json = tokenizer.get_vocab_size(), tokenizer.to_str()
    tokenizer.encode_special_tokens = True

    def read() -> Iterator[tuple[int, np.ndarray]]:
        for batch in _batches(texts.read()):
            yield from _encode(batch, tokenizer, end_of_text)

    return Tokens(vocab_size, end_of_text, tokenizer_json, read)


def write_tokens(folder: Path, tokens: Tokens) -> None:
    """Write a token map into an existing folder; ``tokens.json`` is written last, so a map without it is incomplete."""
    ends = []
    with disk_errors(folder / "tokens.bin", AGAIN), (folder / "tokens.bin").open("wb") as stream:
        for name_hash, ids in tokens.read():
            ids.astype(tokens.dtype, copy=False).tofile(stream)
            ends.append((name_hash, stream.tell() // tokens.dtype.itemsize))
    with disk_errors(folder, AGAIN):
        np.array(ends, dtype="<u8").tofile(folder / "documents.bin")
        if tokens.tokenizer_json is not None:
            (folder / "tokenizer.json").write_text(tokens.tokenizer_json, encoding="utf-8")
        names = [name for name in ("tokens.bin", "documents.bin", "tokenizer.json") if (folder / name).exists()]
        head = {
            "schema_version": SCHEMA_VERSION,
            "dtype": tokens.dtype.name,
            "vocab_size": tokens.vocab_size,
            "end_of_text": tokens.end_of_text,
            "blake2b": {name: digest(folder / name) for name in names},
        }
        (folder / "tokens.json").write_text(json.dumps(head, indent=1), encoding="utf-8")


def is_token_map(path: Path) -> bool:
    """Whether a path is a ``tokens.bin`` or a folder that holds one."""
    return path.name == "tokens.bin" or (path / "tokens.bin").is_file()


def read_tokens(path: Path) -> Tokens:
    """Open a token map, its folder or the ``tokens.bin`` in it; without ``documents.bin`` it is one document.

    Raises:
        DataError: the map is missing, damaged, or from a newer version.

    Cost: one read of the whole map for its checksums, about 1 GB/s.
    """
    folder = path.parent if path.name == "tokens.bin" else path
    try:
        head = load_json((folder / "tokens.json").read_bytes())
        if head["schema_version"] > SCHEMA_VERSION:
            raise ValueError(f"schema {head['schema_version']}; this version reads up to {SCHEMA_VERSION}")
        for name, checksum in head["blake2b"].items():
            if digest(folder / name) != checksum:
                raise ValueError(f"{name} does not match its checksum")
        ids = mapped_tokens(folder / "tokens.bin", np.dtype(head["dtype"]))
        ends = _ends(folder / "documents.bin", len(ids))
        file = folder / "tokenizer.json"
        tokenizer = file.read_text(encoding="utf-8") if file.is_file() else None
        vocab_size, end_of_text = int(head["vocab_size"]), int(head["end_of_text"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"Cannot use the token map {folder}: {error}.", "Rebuild it from its text.") from error

    def read() -> Iterator[tuple[int, np.ndarray]]:
        start = 0
        for name_hash, end in ends.tolist():
            yield name_hash, ids[start:end]
            start = end

    return Tokens(vocab_size, end_of_text, tokenizer, read)


def hash_name(name: str) -> int:
    """A 64-bit hash of a document's name, which determines its split."""
    return int.from_bytes(hashlib.blake2b(name.encode(errors="replace"), digest_size=8).digest(), "little")


def mapped_tokens(file: Path, dtype: np.dtype[Any]) -> np.ndarray:
    """A file of little-endian tokens as an array; an empty file cannot be memory-mapped."""
    dtype = dtype.newbyteorder("<")
    return np.memmap(file, dtype=dtype, mode="r") if file.stat().st_size else np.zeros(0, dtype)


def _ends(file: Path, num_tokens: int) -> np.ndarray:
    if not file.is_file():
        return np.array([[0, num_tokens]], dtype=np.uint64)
    ends = np.fromfile(file, dtype="<u8").reshape(-1, 2)
    if len(ends) and (ends[-1, 1] != num_tokens or (np.diff(ends[:, 1].astype(np.int64)) < 0).any()):
        raise ValueError(f"documents.bin does not fit its {num_tokens:,} tokens")
    return ends


def _configured_end(file: Path) -> tuple[str, ...]:
    """``eos_token`` of a Hugging Face tokenizer configuration, a string or an object."""
    try:
        name = load_json(file.read_bytes()).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return ()
    name = name.get("content") if isinstance(name, dict) else name
    return (name,) if isinstance(name, str) else ()


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        end = text.rfind("\n", start, start + _PIECE_CHARACTERS) + 1 or start + _PIECE_CHARACTERS
        yield text[start:end]
        start = end
    yield text[start:]


def _sample(texts: Texts, share: float) -> Iterator[str]:
    for document in texts.read():
        for number, piece in enumerate(_pieces(document.text)):
            if share >= 1 or hash_name(f"{number} {document.name}") < share * 2**64:
                yield piece


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch


def _encode(batch: list[Document], tokenizer: Tokenizer, end_of_text: int) -> Iterator[tuple[int, np.ndarray]]:
    pieces = [(number, piece) for number, document in enumerate(batch) for piece in _pieces(document.text)]
    encodings = tokenizer.encode_batch_fast([piece for _, piece in pieces], add_special_tokens=False)
    parts: list[list[np.ndarray]] = [[] for _ in batch]
    for (number, _), encoding in zip(pieces, encodings, strict=True):
        parts[number].append(np.array(encoding.ids, dtype=np.uint32))
    end = np.array([end_of_text], dtype=np.uint32)
    for document, arrays in zip(batch, parts, strict=True):
        yield hash_name(document.name), np.concatenate([*arrays, end])


# ── the cache ───────────────────────────────────────────────────────────────────────────────────────────────────────


def cached_tokens(name: str, key: list[str | int], make: Callable[[], Tokens]) -> tuple[Tokens, list[str]]:
    """Get a token map from the cache, building it if it is missing or damaged.

    Args:
        name: readable part of the entry's name.
        key: everything else the tokens depend on.
    Returns:
        The tokens, and notes for the user: none, or that the cache cannot be used.
    """
    dependencies = json.dumps([SCHEMA_VERSION, version("tokenizers"), *key])
    name = f"{name}-{hashlib.blake2b(dependencies.encode(), digest_size=8).hexdigest()}"
    final = cache_folder() / "data" / name
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(final.with_name(f"{name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        return make(), [f"The cache {final.parent} cannot be written ({error.strerror}): tokens are rebuilt each time."]
    try:
        lock(descriptor, wait=True)
        try:
            return read_tokens(final), []
        except DataError:
            _fill(final, make())
            return read_tokens(final), []
    finally:
        os.close(descriptor)


def _fill(final: Path, tokens: Tokens) -> None:
    temporary = final.with_name(f"{TEMPORARY}{final.name}")
    with disk_errors(final, AGAIN):
        for stale in (temporary, final):
            if stale.exists():
                shutil.rmtree(stale)
        temporary.mkdir()
        try:
            write_tokens(temporary, tokens)
            os.rename(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
