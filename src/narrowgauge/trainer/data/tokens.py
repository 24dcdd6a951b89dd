"""Tokenize text, and store the tokens in a *token map* that runs reference and memory-map.

A token map is a folder: ``tokens.bin`` (uint16 or uint32, little endian), ``documents.bin`` (pairs of uint64: the hash of a
document's name, and where the document ends), ``tokens.json`` (dtype, vocabulary, end-of-text token, checksums), and
``tokenizer.json`` where the tokenizer is known. Every document ends with the end-of-text token.

Text is tokenized once, into the user's cache folder. The entry's name is a hash of the text, the tokenizer and the version of
``tokenizers``. The cache may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from narrowgauge.errors import DataError, RecordError, require_package
from narrowgauge.machine import cache_folder
from narrowgauge.runs.atomic_io import digest, disk_errors, load_json, whole_folder
from narrowgauge.trainer.data.text import Document, Texts

require_package("tokenizers")
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257
"""256 bytes and the end of text."""
SCHEMA_VERSION = 1

_TRAINING_BYTES = 16_000_000
_PIECE_CHARACTERS = 1 << 18
_BATCH_CHARACTERS = 1 << 22
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>")


@dataclass(frozen=True)
class TokenMap:
    """The tokens of a source, memory-mapped.

    Args:
        ids: all tokens, ``[num_tokens]``.
        documents: uint64 ``[num_documents, 2]``: the hash of each document's name, and where the document ends.
        fingerprint: equal for equal tokens with the same dtype, vocabulary and end-of-text token.
    """

    folder: Path
    ids: np.ndarray
    documents: np.ndarray
    vocab_size: int
    end_of_text: int
    fingerprint: str


def tokenized(texts: Texts, vocab_size: int | None, tokenizer: str | Path | None) -> TokenMap:
    """Return the tokens of a text from the cache, where the first use writes them. Arguments as for ``prepare_data``.

    Cost: text is read once for its checksum; the first time about 0.5 s per MB on two cores.
    """
    if tokenizer is None and vocab_size is None:
        raise DataError(
            f"Training a tokenizer on {texts.source} needs a vocab_size.",
            "4096 suits a model of a few million parameters.",
        )
    checksum, num_bytes = texts.measure()
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    key = vocab_size if loaded is None else [loaded[0].to_str(), loaded[1]]
    hashed = json.dumps([SCHEMA_VERSION, version("tokenizers"), checksum, key]).encode()
    stem = Path(texts.source.replace(":", "-")).stem or "text"
    name = f"{stem}-{hashlib.blake2b(hashed, digest_size=8).hexdigest()}"
    place = cache_folder() / "data" / name
    try:
        return read_tokens(place, check=True)
    except DataError:
        shutil.rmtree(place, ignore_errors=True)  # absent or damaged
    with disk_errors(place.parent, "Set NARROWGAUGE_CACHE to a folder for tokenized text."):
        place.parent.mkdir(parents=True, exist_ok=True)
    try:
        with whole_folder(place) as folder:
            write_tokens(folder, texts, *(loaded or train_tokenizer(texts, vocab_size or 0, num_bytes)))
    except RecordError:
        if not (place / "tokens.json").is_file():  # else another process was faster
            raise
    return read_tokens(place)


# ── token maps ──────────────────────────────────────────────────────────────────────────────────────────────────────


def write_tokens(folder: Path, texts: Texts, tokenizer: Tokenizer, end_of_text: int) -> None:
    """Tokenize text into an existing folder. Write ``tokens.json`` last, so a map without it is incomplete.

    Text that spells a special token is encoded like other text. A document of more than 2^18 characters is encoded in pieces,
    each up to its last newline if it has one.
    """
    vocab_size, tokenizer_json = tokenizer.get_vocab_size(), tokenizer.to_str()
    tokenizer.encode_special_tokens = True
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    documents = []
    with (folder / "tokens.bin").open("wb") as stream:
        for batch in _batches(texts.read()):
            for name_hash, ids in _encode(batch, tokenizer, end_of_text):
                ids.astype(dtype).tofile(stream)
                documents.append((name_hash, stream.tell() // dtype.itemsize))
    np.array(documents, dtype="<u8").tofile(folder / "documents.bin")
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    head = {
        "schema_version": SCHEMA_VERSION,
        "dtype": dtype.name,
        "vocab_size": vocab_size,
        "end_of_text": end_of_text,
        "blake2b": {name: digest(folder / name) for name in ("tokens.bin", "documents.bin", "tokenizer.json")},
    }
    (folder / "tokens.json").write_text(json.dumps(head, indent=1), encoding="utf-8")


def is_token_map(path: Path) -> bool:
    """Return whether a path names a token map, not text."""
    return path.name == "tokens.bin" or (path / "tokens.bin").is_file()


def read_tokens(path: Path, *, check: bool = False) -> TokenMap:
    """Open a token map, its folder or the ``tokens.bin`` in it. Without ``documents.bin`` it is one document.

    With ``check`` compare the files with their checksums: one read, about 1 GB/s.

    Raises:
        DataError: the map is missing, damaged, or from a newer version.
    """
    folder = path.parent if path.name == "tokens.bin" else path
    try:
        head = load_json((folder / "tokens.json").read_bytes())
        if head["schema_version"] > SCHEMA_VERSION:
            raise ValueError(f"schema {head['schema_version']}; this version reads up to {SCHEMA_VERSION}")
        dtype = np.dtype(head["dtype"]).newbyteorder("<")
        if dtype.kind != "u":
            raise ValueError(f"its tokens are {head['dtype']}, and uint16 or uint32 are read")
        tokens_file, documents_file = folder / "tokens.bin", folder / "documents.bin"
        ids = np.memmap(tokens_file, dtype=dtype, mode="r") if tokens_file.stat().st_size else np.zeros(0, dtype)
        documents = np.array([[0, len(ids)]], dtype=np.uint64)
        if documents_file.is_file():
            documents = np.fromfile(documents_file, dtype="<u8").reshape(-1, 2)
            ends = documents[:, 1].astype(np.int64)
            if len(ends) and (ends[-1] != len(ids) or (np.diff(ends) < 0).any()):
                raise ValueError(f"documents.bin does not fit its {len(ids):,} tokens")
        for name, checksum in head["blake2b"].items() if check else ():
            if digest(folder / name) != checksum:
                raise ValueError(f"{name} does not match its checksum")
        checksums = head["blake2b"] or {"tokens.bin": digest(tokens_file)}
        identity = [checksums, head["dtype"], int(head["vocab_size"]), int(head["end_of_text"])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"Cannot use the token map {folder}: {error}.", "Rebuild it from its text.") from error
    fingerprint = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()
    return TokenMap(folder, ids, documents, identity[2], identity[3], fingerprint)


# ── tokenizers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def train_tokenizer(texts: Texts, vocab_size: int, num_bytes: int) -> tuple[Tokenizer, int]:
    """Train a byte-level BPE tokenizer, and return it with its end-of-text token.

    The same text and size give the same tokenizer, in any process.

    Args:
        vocab_size: maximum number of tokens, with the end-of-text token. A small text gives fewer.
        num_bytes: size of the text. Above 16 MB a sample is used.

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
    """Read a ``tokenizer.json``, or the one in a Hugging Face folder. Return it with its end-of-text token."""
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"No tokenizer in {path}: there is no file {file}.", "Name a tokenizer.json or its folder.")
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
        if (number := tokenizer.token_to_id(name)) is not None:
            return tokenizer, number
    raise DataError(
        f"The tokenizer {file} has no end-of-text token (looked for {', '.join(names)}).",
        "Name it as eos_token in tokenizer_config.json in the same folder.",
    )


def hash_name(name: str) -> int:
    """Return the 64-bit hash of a document's name, which decides whether it is held out."""
    return int.from_bytes(hashlib.blake2b(name.encode(errors="replace"), digest_size=8).digest(), "little")


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        end = text.rfind("\n", start, start + _PIECE_CHARACTERS) + 1 or start + _PIECE_CHARACTERS
        yield text[start:end]
        start = end
    yield text[start:]


def _sample(texts: Texts, share: float) -> Iterator[str]:
    for document in texts.read():
        for number, part in enumerate(_pieces(document.text)):
            if share >= 1 or hash_name(f"{number} {document.name}") < share * 2**64:
                yield part


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
    pieces = [(number, part) for number, document in enumerate(batch) for part in _pieces(document.text)]
    encodings = tokenizer.encode_batch_fast([part for _, part in pieces], add_special_tokens=False)
    parts: list[list[np.ndarray]] = [[] for _ in batch]
    for (number, _), encoding in zip(pieces, encodings, strict=True):
        parts[number].append(np.array(encoding.ids, dtype=np.uint32))
    end = np.array([end_of_text], dtype=np.uint32)
    for document, arrays in zip(batch, parts, strict=True):
        yield hash_name(document.name), np.concatenate([*arrays, end])
