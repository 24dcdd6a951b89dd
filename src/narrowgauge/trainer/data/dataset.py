"""Batches whose order is a function of (seed, step), from any text.

Text becomes one long sequence of tokens, stored with the run as ``data/train.bin`` and ``data/valid.bin`` and memory-mapped.
Training divides it into windows that do not overlap and iterates over all of them in a new order every epoch. The order
comes from a Feistel network, a permutation that can be evaluated at any position, so there is no generator state to save. Batch
7,000 needs none of the 6,999 before it, a resumed run continues with the next batch, and neither the number of workers nor the
micro-batch size changes the order.

Whether a document is held out depends on the seed and on its own name: adding a file moves no other document.

``data.json`` holds the dtype of the tokens, the size of the vocabulary, the end-of-text token and the checksums of the files.
Reading the same bytes in another dtype would train on other tokens, so the fingerprint of the data covers all of these.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tokenizers import Tokenizer

from narrowgauge.errors import DataError, RecordError
from narrowgauge.runs.atomic_io import AGAIN, digest, disk_errors, load_json, sync_file, sync_folder, temporary_name
from narrowgauge.runs.schema import is_whole, short
from narrowgauge.trainer.data.corpus import open_texts
from narrowgauge.trainer.data.shuffle import shuffled
from narrowgauge.trainer.data.tokens import (
    Tokens,
    cached_tokens,
    is_token_map,
    load_tokenizer,
    mapped_tokens,
    read_tokens,
    tokenize_texts,
    train_tokenizer,
)

_FOLDER = "data"
_COPY_TOKENS = 1 << 22


@dataclass(frozen=True)
class Dataset:
    """The tokens of a run, memory-mapped and split for training and validation.

    ``folder`` is the ``data/`` folder of the run, and ``head`` the content of ``data.json`` in it.

    Invariant: ``batch`` and ``valid_batches`` are pure functions of their arguments and the tokens.
    """

    folder: Path
    train: np.ndarray
    valid: np.ndarray
    head: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        """Number of training tokens."""
        return len(self.train)

    @property
    def num_valid_tokens(self) -> int:
        return len(self.valid)

    @property
    def vocab_size(self) -> int:
        """All tokens are below it; at most the requested size."""
        return int(self.head["vocab_size"])

    @property
    def end_of_text(self) -> int:
        """The token that ends each document."""
        return int(self.head["end_of_text"])

    @property
    def fingerprint(self) -> str:
        """Equal for equal tokens and split with the same dtype, vocabulary and end-of-text token."""
        return fingerprints(self.head)[0]

    @property
    def notes(self) -> list[str]:
        """Notes for the user on how the data was prepared."""
        return list(self.head["notes"])

    @property
    def tokenizer_path(self) -> Path | None:
        """The tokenizer stored with the run, if it is known."""
        file = self.folder / "tokenizer.json"
        return file if file.is_file() else None

    def tokenizer(self) -> Tokenizer:
        """The tokenizer stored with the run; refused where the data came as tokens, without one."""
        if self.tokenizer_path is None:
            raise DataError(
                f"No tokenizer in {self.folder}: the data came as tokens.", "Put tokenizer.json into the same folder."
            )
        return load_tokenizer(self.tokenizer_path)[0]

    def require_same(self, fingerprint: str) -> None:
        """Refuse data with another fingerprint; fingerprints of older versions cover the files only."""
        if fingerprint not in fingerprints(self.head):
            raise RecordError(
                f"the tokens in {self.folder} are not those the run started with, or data.json declares another dtype or "
                "vocabulary.",
                "Restore that folder.",
            )

    def require(self, sequence_length: int) -> None:
        """Refuse a sequence length that leaves no sequence for training or validation."""
        sides = [(self.train, "the data", "Give more text or a smaller --sequence-length.")]
        if self.head["request"]["held_out"]:
            sides.append((self.valid, "the held-out part", "Give more text, or a smaller --sequence-length."))
        for tokens, what, advice in sides:
            if len(tokens) <= sequence_length:
                raise DataError(
                    f"sequence_length {sequence_length} needs {sequence_length + 1} tokens; {what} has {len(tokens)}.",
                    advice,
                )

    @cached_property
    def unigram_losses(self) -> np.ndarray:
        """What each token costs under the frequencies of tokens in the training data, float32 ``[vocab_size]``, in nats."""
        return unigram_losses(self.train, self.vocab_size)

    def batch(self, step: int, batch_size: int, sequence_length: int, seed: int) -> np.ndarray:
        """The sequences of a step: int64 ``[batch_size, sequence_length + 1]``, inputs ``[:, :-1]`` and targets ``[:, 1:]``.

        Invariant: sequence i of step s is item ``s * batch_size + i`` of an infinite stream that depends on (seed,
        sequence_length) only; each epoch of the stream holds every window once. Steps are counted from 0.

        Cost: about 0.1 ms plus reading the tokens.
        """
        self.require(sequence_length)
        num_windows = (self.num_tokens - 1) // sequence_length
        items = step * batch_size + np.arange(batch_size, dtype=np.uint64)
        return _windows(self.train, shuffled(items, num_windows, seed), sequence_length)

    def valid_batches(self, batch_size: int, sequence_length: int, limit: int | None = None) -> Iterator[np.ndarray]:
        """The validation sequences, int64 ``[batch_size, sequence_length + 1]``, the same ones in the same order each time.

        Invariant: with a ``limit`` of batches they are spread evenly over the validation data. All batches are full, so that a
        compiled model sees one shape, unless there is less than one batch. Without validation data there are none.
        """
        self.require(sequence_length)
        num_windows = max(0, (self.num_valid_tokens - 1) // sequence_length)
        num_batches = num_windows // batch_size if limit is None else min(limit, num_windows // batch_size)
        num_chosen = num_batches * batch_size or (0 if limit == 0 else num_windows)
        chosen = (np.arange(num_chosen) * num_windows) // max(1, num_chosen)
        return (
            _windows(self.valid, chosen[start : start + batch_size], sequence_length)
            for start in range(0, num_chosen, batch_size)
        )


def prepare_data(
    source: str | Path,
    folder: Path,
    *,
    vocab_size: int | None = None,
    tokenizer: str | Path | None = None,
    held_out: float = 0.05,
    seed: int = 0,
    stage: Callable[[str], None] = lambda what: None,
) -> Dataset:
    """Tokenize text into the ``data/`` folder of a run, or reuse the folder.

    Invariant: the same text and arguments give the same bytes; the folder is complete or absent.

    Args:
        source: ``stdlib``, a text or ``.jsonl`` file, a folder of ``.txt .md .py .jsonl``, a token map (see
            :mod:`narrowgauge.trainer.data.tokens`), or ``datasets:NAME[:SPLIT]``.
        folder: the run folder; created if absent.
        vocab_size: size of the tokenizer to train, or the maximum for a given one; ``None`` only with a given one.
        tokenizer: a ``tokenizer.json`` or a Hugging Face folder; ``None`` trains a byte-level BPE.
        held_out: fraction of the documents held out for validation, 0 to below 1.
        seed: of the split.

    Raises:
        DataError: the source or the tokenizer cannot be used.
        RecordError: the disk is full or not writable, or ``data/`` is damaged.

    Cost: about 0.3 s per MB of text on two cores; ``stdlib`` takes 4 s the first time and is then cached.
    The text is read up to three times; one document at a time must fit in memory.
    """
    if not 0 <= held_out < 1:
        raise DataError(f"held_out is {held_out} and must be at least 0 and below 1.", "0.05 holds out one in twenty.")
    final = Path(folder) / _FOLDER
    request = {
        "source": str(source),
        "vocab_size": vocab_size,
        "tokenizer": None if tokenizer is None else str(tokenizer),
        "held_out": held_out,
        "seed": seed,
    }
    if (final / "data.json").is_file():
        return _reopened(final, request)
    if final.exists():
        raise RecordError(f"Cannot prepare data in {final}: it exists and has no data.json.", "Remove it.")
    tokens, notes = _open_tokens(str(source), vocab_size, tokenizer, stage)
    _require_fit(tokens, vocab_size, str(source))
    stage("turning the text into tokens")
    _write_data(final, tokens, request, notes)
    return open_data(folder)


def open_data(folder: Path) -> Dataset:
    """Open the prepared data in a run folder, after a check of sizes and checksums.

    Raises:
        RecordError: it is missing, damaged, or from a newer version.

    Cost: one read of the data, about 1 GB/s.
    """
    place = Path(folder) / _FOLDER
    try:
        head = read_head(place)
        for name, expected in head["files"].items():
            if (place / name).stat().st_size != expected["bytes"] or digest(place / name) != expected["blake2b"]:
                raise ValueError(f"{name} does not match its checksum")
        train, valid = (mapped_tokens(place / f"{name}.bin", np.dtype(head["dtype"])) for name in ("train", "valid"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"data.json lacks {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise RecordError(
            f"Cannot use the data of the run, {place}: {reason}.",
            "Remove the folder to prepare it again from the same source.",
        ) from error
    return Dataset(place, train, valid, head)


def _windows(tokens: np.ndarray, windows: np.ndarray, sequence_length: int) -> np.ndarray:
    places = windows[:, None] * sequence_length + np.arange(sequence_length + 1)
    return tokens[places].astype(np.int64)


def _reopened(place: Path, request: dict[str, Any]) -> Dataset:
    data = open_data(place.parent)
    found = data.head["request"]
    for name, value in request.items():
        if found.get(name) != value:
            raise DataError(
                f"{place} was prepared with {name} {found.get(name)!r}, and {value!r} was requested.",
                "Choose another --out, or remove the folder.",
            )
    return data


def _open_tokens(
    source: str, vocab_size: int | None, tokenizer: str | Path | None, stage: Callable[[str], None]
) -> tuple[Tokens, list[str]]:
    stage("reading the text")
    if is_token_map(Path(source)):
        if tokenizer is not None:
            raise DataError(f"A tokenizer was given, but {source} is tokens already.", "Leave the tokenizer out.")
        return read_tokens(Path(source)), []
    texts = open_texts(source)
    if tokenizer is not None:
        texts.measure()
        return tokenize_texts(texts, *load_tokenizer(tokenizer)), []
    if vocab_size is None:
        raise DataError(
            f"Training a tokenizer on {source} needs a vocab_size.", "4096 suits a model of a few million parameters."
        )
    checksum, num_bytes = texts.measure()

    def train() -> Tokens:
        stage("training a tokenizer")
        trained = train_tokenizer(texts, vocab_size, num_bytes)
        stage("turning the text into tokens")
        return tokenize_texts(texts, *trained)

    if source != "stdlib":
        return train(), []
    return cached_tokens(f"stdlib-{vocab_size}", [checksum, vocab_size], train)


def _require_fit(tokens: Tokens, vocab_size: int | None, source: str) -> None:
    if vocab_size is not None and tokens.vocab_size > vocab_size:
        raise DataError(
            f"The tokenizer of {source} has {tokens.vocab_size} tokens, and vocab_size is {vocab_size}.",
            f"Use a vocab_size of at least {tokens.vocab_size}.",
        )


def _write_data(final: Path, tokens: Tokens, request: dict[str, Any], notes: list[str]) -> None:
    """Write everything under a temporary name, then rename."""
    made = not final.parent.exists()
    temporary = temporary_name(final)
    with disk_errors(final, AGAIN):
        final.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.mkdir()
            notes = notes + _split(temporary, tokens, request)
            write_head(temporary, tokens, request, notes)
            for file in temporary.iterdir():
                sync_file(file)
            sync_folder(temporary)
            os.rename(temporary, final)
            sync_folder(final.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            if made and not any(final.parent.iterdir()):
                final.parent.rmdir()


def _split(folder: Path, tokens: Tokens, request: dict[str, Any]) -> list[str]:
    """Split by document; if one split would be empty, hold out the end of the text instead."""
    held_out = request["held_out"]
    num_documents = 0
    with (folder / "train.bin").open("w+b") as train, (folder / "valid.bin").open("w+b") as valid:
        for name_hash, ids in tokens.read():
            _append(valid if _is_held_out(name_hash, held_out, request["seed"]) else train, ids, tokens)
            num_documents += 1
        if train.tell() + valid.tell() == 0:
            raise DataError(f"The data {request['source']} is empty.")
    if held_out == 0:
        return []
    if (folder / "train.bin").stat().st_size == 0:
        os.replace(folder / "valid.bin", folder / "train.bin")
    elif (folder / "valid.bin").stat().st_size:
        return []
    num_tail = _move_tail(folder, held_out, tokens.dtype.itemsize)
    documents = "document" if num_documents == 1 else "documents"
    return [
        f"The data has {num_documents} {documents}, too few to hold one out; the last {num_tail} tokens are held out."
    ]


def _move_tail(folder: Path, held_out: float, token_bytes: int) -> int:
    num_tail = max(1, int((folder / "train.bin").stat().st_size // token_bytes * held_out))
    with (folder / "train.bin").open("r+b") as train, (folder / "valid.bin").open("wb") as valid:
        cut = train.seek(-num_tail * token_bytes, os.SEEK_END)
        shutil.copyfileobj(train, valid)
        train.truncate(cut)
    return num_tail


def _append(stream: BinaryIO, ids: np.ndarray, tokens: Tokens) -> None:
    for start in range(0, len(ids), _COPY_TOKENS):
        part = ids[start : start + _COPY_TOKENS]
        if part.max() >= tokens.vocab_size:
            raise DataError(f"The tokens hold {part.max()}, and their vocabulary has {tokens.vocab_size}.")
        stream.write(part.astype(tokens.dtype, copy=False).tobytes())


def _is_held_out(name_hash: int, held_out: float, seed: int) -> bool:
    bits = hashlib.blake2b(f"{seed} {name_hash}".encode(), digest_size=8).digest()
    return int.from_bytes(bits, "little") < held_out * 2**64


# ── the header, data.json ───────────────────────────────────────────────────────────────────────────────────────────

SCHEMA_VERSION = 2
"""Version of ``data.json``. Since 2 the fingerprint covers the meaning of the tokens, not only their bytes."""

_COVERED = ("files", "dtype", "vocab_size", "end_of_text")
_KINDS = {"request": dict, "dtype": str, "vocab_size": int, "end_of_text": int, "notes": list, "files": dict}
_DTYPES = ("uint16", "uint32")


def fingerprints(head: dict[str, Any]) -> tuple[str, str]:
    """The fingerprints of data with a header: the current one, and that of older versions, which covered the files only."""
    files = _hashed(head["files"])
    return files if head["schema_version"] < 2 else _hashed({name: head[name] for name in _COVERED}), files


def read_head(folder: Path) -> dict[str, Any]:
    """Read and check the ``data.json`` of a folder.

    Raises:
        ValueError, KeyError, TypeError: an entry is wrong or missing.
        OSError: it cannot be read.
    """
    head = load_json((folder / "data.json").read_bytes())
    if not isinstance(head, dict):
        raise ValueError("data.json is not an object")
    if not is_whole(head["schema_version"]):
        raise ValueError(f"its schema_version = {short(head['schema_version'])} is not an integer")
    if head["schema_version"] > SCHEMA_VERSION:
        raise ValueError(f"it has schema {head['schema_version']}; this version reads up to {SCHEMA_VERSION}")
    for name, kind in _KINDS.items():
        if type(head[name]) is not kind:
            raise ValueError(f"data.json has {name} = {short(head[name])}")
    if head["dtype"] not in _DTYPES:
        raise ValueError(f"data.json has dtype = {short(head['dtype'])}; tokens are {' or '.join(_DTYPES)}")
    for name in ("train.bin", "valid.bin"):
        head["files"][name]  # raises KeyError if it is missing
    for name in ("held_out", "seed"):
        head["request"][name]
    return head


def write_head(folder: Path, tokens: Tokens, request: dict[str, Any], notes: list[str]) -> None:
    """Write the tokenizer and ``data.json`` next to the tokens."""
    if tokens.tokenizer_json is not None:
        (folder / "tokenizer.json").write_text(tokens.tokenizer_json, encoding="utf-8")
    files = sorted(folder.iterdir())
    head = {
        "schema_version": SCHEMA_VERSION,
        "request": request,
        "dtype": tokens.dtype.name,
        "vocab_size": tokens.vocab_size,
        "end_of_text": tokens.end_of_text,
        "notes": notes,
        "files": {file.name: {"bytes": file.stat().st_size, "blake2b": digest(file)} for file in files},
    }
    (folder / "data.json").write_text(json.dumps(head, indent=1), encoding="utf-8")


def _hashed(content: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


# ── the frequencies of single tokens ────────────────────────────────────────────────────────────────────────────────

NUM_BLOCKS, BLOCK_TOKENS = 64, 1 << 14
"""Parts of the data, evenly spread, in which tokens are counted: all of it up to a million tokens."""


def unigram_losses(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """What each token costs a model that knows how often each occurs, and nothing of the tokens before it.

    Invariant: a function of the data alone, so that a resumed run has the same.

    Returns:
        float32 ``[vocab_size]``, nats: minus the logarithm of each token's share, where every token counts once more.
    Example:
        >>> [round(float(loss), 2) for loss in unigram_losses(np.array([0, 0, 1]), 3)]
        [0.69, 1.1, 1.79]
    """
    counts = np.ones(vocab_size, dtype=np.int64)
    blocks = np.linspace(0, max(0, len(tokens) - BLOCK_TOKENS), NUM_BLOCKS, dtype=np.int64)
    parts = [tokens] if len(tokens) <= NUM_BLOCKS * BLOCK_TOKENS else [tokens[at : at + BLOCK_TOKENS] for at in blocks]
    for part in parts:
        counts += np.bincount(part, minlength=vocab_size)[:vocab_size]
    losses: np.ndarray = np.log(counts.sum() / counts).astype(np.float32)
    return losses
