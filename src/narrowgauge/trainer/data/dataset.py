"""Serve batches whose order is a function of (seed, step).

Training divides the token stream into windows that do not overlap. It reads all of them in a new order every epoch. The
order comes from a Feistel network, a permutation that can be evaluated at any position. No generator state is saved, and
batch 7,000 needs none of the batches before it.

The seed and a document's name decide whether the document is held out. So adding a file moves no other document. Tokens
are neither copied nor hashed at the start of a run: ``run.toml`` names the token map and its fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from narrowgauge.errors import DataError
from narrowgauge.trainer.data.shuffle import shuffled
from narrowgauge.trainer.data.text import open_texts
from narrowgauge.trainer.data.tokens import TokenMap, is_token_map, read_tokens, tokenized


class Stream:
    """Segments of a token array, read as one array of ``len(stream)`` tokens."""

    def __init__(self, ids: np.ndarray, segments: np.ndarray) -> None:
        """``segments`` is int64 ``[n, 2]``: where each begins and ends in ``ids``."""
        self._ids = ids
        self._ends = np.cumsum(segments[:, 1] - segments[:, 0])
        self._shifts = segments[:, 1] - self._ends

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        segments = np.searchsorted(self._ends, places, side="right")
        tokens: np.ndarray = self._ids[places + self._shifts[segments]]
        return tokens


@dataclass(frozen=True)
class Dataset:
    """Tokens for training and validation; a ``Stream`` or an array each.

    ``batch`` and ``valid_batches`` are pure functions of their arguments and the tokens. ``folder`` holds the token map.
    """

    train: Stream | np.ndarray
    valid: Stream | np.ndarray
    vocab_size: int
    end_of_text: int = 0
    folder: Path | None = None
    fingerprint: str = ""
    notes: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of training tokens."""
        return len(self.train)

    @property
    def tokenizer_path(self) -> Path | None:
        """Return the tokenizer of the token map, if it is known."""
        file = None if self.folder is None else self.folder / "tokenizer.json"
        return file if file is not None and file.is_file() else None

    def unigram_loss(self) -> float:
        """Return the loss in nats per token of guessing by the frequencies of training tokens. A model must beat it.

        Both frequencies are of the first ten million tokens, and one is added to each training count.
        """
        train, held_out = (
            np.bincount(tokens[np.arange(min(len(tokens), 10_000_000))], minlength=self.vocab_size)
            for tokens in (self.train, self.valid)
        )
        counts = train + 1.0
        return float(-(held_out * np.log(counts / counts.sum())).sum() / held_out.sum())

    def require(self, sequence_length: int) -> None:
        """Refuse a sequence length that leaves no sequence for training or validation."""
        for name, tokens in {"the data": self.train, "the held-out part": self.valid}.items():
            if len(tokens) <= sequence_length:
                raise DataError(
                    f"sequence_length {sequence_length} needs {sequence_length + 1} tokens; {name} has {len(tokens)}.",
                    "Give more text, or a smaller --sequence-length.",
                )

    def batch(
        self, step: int, batch_size: int, sequence_length: int, seed: int, rows: slice | None = None
    ) -> np.ndarray:
        """Return some or all sequences of a step: int64 ``[rows, sequence_length + 1]``.

        Inputs are ``[:, :-1]``, targets ``[:, 1:]``. Sequence i of step s is item ``s * batch_size + i`` of an infinite
        stream that depends on (seed, sequence_length) only. Each epoch of the stream holds every window once. Steps are
        counted from 0.

        Args:
            rows: which sequences of the batch to read; ``None`` for all.

        Cost: about 0.1 ms plus reading the tokens.
        """
        self.require(sequence_length)
        num_windows = (self.num_tokens - 1) // sequence_length
        items = step * batch_size + np.arange(batch_size, dtype=np.uint64)[rows or slice(None)]
        return self._windows(self.train, shuffled(items, num_windows, seed), sequence_length)

    def valid_batches(self, batch_size: int, sequence_length: int, limit: int) -> Iterator[np.ndarray]:
        """Yield at most ``limit`` batches of validation sequences, int64 ``[batch_size, sequence_length + 1]``, always the same.

        They are spread evenly over the validation data. All batches are full, so that a compiled model sees one shape. The
        only exception is data smaller than one batch.
        """
        self.require(sequence_length)
        num_windows = (len(self.valid) - 1) // sequence_length
        num_chosen = min(limit, num_windows // batch_size) * batch_size or num_windows
        chosen = (np.arange(num_chosen) * num_windows) // num_chosen
        return (
            self._windows(self.valid, chosen[start : start + batch_size], sequence_length)
            for start in range(0, num_chosen, batch_size)
        )

    def _windows(self, tokens: Stream | np.ndarray, windows: np.ndarray, sequence_length: int) -> np.ndarray:
        places = windows[:, None] * sequence_length + np.arange(sequence_length + 1)
        ids = tokens[places].astype(np.int64)
        if ids.size and ids.max() >= self.vocab_size:
            raise DataError(f"The tokens hold {ids.max()}, and their vocabulary has {self.vocab_size}.")
        return ids


def prepare_data(
    source: str | Path,
    *,
    vocab_size: int | None = None,
    tokenizer: str | Path | None = None,
    held_out: float = 0.05,
    seed: int = 0,
) -> Dataset:
    """Open a token map, or tokenize text into the cache, and split it for training and validation.

    The same text and arguments give the same tokens.

    Args:
        source: ``stdlib``, a text or ``.jsonl`` file, a folder of ``.txt .md .py .jsonl``, or a token map (see
            :mod:`narrowgauge.trainer.data.tokens`).
        vocab_size: size of the tokenizer to train, or the maximum for a given one; ``None`` only with a given one.
        tokenizer: a ``tokenizer.json`` or a Hugging Face folder; ``None`` trains a byte-level BPE. A token map needs none.
        held_out: fraction of the documents held out for validation, above 0 and below 1.
        seed: of the split.

    Raises:
        DataError: the source or the tokenizer cannot be used.
        RecordError: the cache is full or not writable.
    """
    path = Path(source)
    if is_token_map(path):
        tokens = read_tokens(path)
    else:
        tokens = tokenized(open_texts(str(source)), vocab_size, tokenizer)
    if vocab_size is not None and tokens.vocab_size > vocab_size:
        raise DataError(
            f"The tokenizer of {source} has {tokens.vocab_size} tokens, and vocab_size is {vocab_size}.",
            f"Use a vocab_size of at least {tokens.vocab_size}.",
        )
    if not len(tokens.ids):
        raise DataError(f"The data {source} is empty.")
    return _split(tokens, held_out, seed)


def open_data(folder: str | Path, held_out: float, seed: int) -> Dataset:
    """Open and split the token map in a folder.

    Raises:
        DataError: the map is missing or damaged.
    """
    return _split(read_tokens(Path(folder)), held_out, seed)


def _split(tokens: TokenMap, held_out: float, seed: int) -> Dataset:
    """Split a token map by document. If one side would be empty, hold out the end of the text instead."""
    ends = tokens.documents[:, 1].astype(np.int64)
    segments = np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=1)
    is_valid = np.array([_is_held_out(int(name), held_out, seed) for name in tokens.documents[:, 0]], dtype=bool)
    train, valid = Stream(tokens.ids, segments[~is_valid]), Stream(tokens.ids, segments[is_valid])
    notes: tuple[str, ...] = ()
    if not (len(train) and len(valid)):
        size = len(tokens.ids)
        num_tail = max(1, int(size * held_out))
        train, valid = (
            Stream(tokens.ids, np.array([part])) for part in ((0, size - num_tail), (size - num_tail, size))
        )
        documents = "1 document" if len(segments) == 1 else f"{len(segments)} documents"
        notes = (f"The data has {documents}, too few to hold one out; the last {num_tail} tokens are held out.",)
    key = json.dumps([tokens.fingerprint, held_out, seed]).encode()
    return Dataset(
        train,
        valid,
        tokens.vocab_size,
        tokens.end_of_text,
        tokens.folder.resolve(),
        hashlib.blake2b(key, digest_size=16).hexdigest(),
        notes,
    )


def _is_held_out(name_hash: int, held_out: float, seed: int) -> bool:
    bits = hashlib.blake2b(f"{seed} {name_hash}".encode(), digest_size=8).digest()
    return int.from_bytes(bits, "little") < held_out * 2**64
