"""Serve batches whose order is a function of (seed, step).

Training divides the token stream into windows that do not overlap. It reads all of them in a new
order every epoch. The order comes from a Feistel network, a permutation given by a formula. It
splits a number into two halves and scrambles each in turn with a hash of the other, keyed by (seed,
epoch). This is invertible. On a range that is not a power of two it is repeated until the result is
in range. So no generator state is saved, batch 7,000 needs none of the batches before it, and no
library changes the order of an old run.

A document's name decides whether the document is held out. So adding a file moves no other
document, and all seeds are judged on one text. Tokens are not copied at the start of a run: ``run.toml`` names the token map and
its fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from narrowgauge.errors import DataError
from narrowgauge.runs.finding import counted
from narrowgauge.trainer.data.tokens import TokenMap, read_tokens

_ROUNDS = 6


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

    ``batch`` and ``validation`` are pure functions of their arguments and the tokens. ``folder``
    holds the token map.
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
        return len(self.train)

    @property
    def tokenizer_path(self) -> Path | None:
        if self.folder is None or not (self.folder / "tokenizer.json").is_file():
            return None
        return self.folder / "tokenizer.json"

    def unigram_loss(self) -> float:
        """Return the loss in nats per token of guessing by the frequencies of training tokens.

        A model must beat it.

        Both frequencies are of the first ten million tokens, and one is added to each training
        count.
        """
        held_out = self._counts(self.valid)
        counts = self._counts(self.train) + 1.0
        return float(-(held_out * np.log(counts / counts.sum())).sum() / held_out.sum())

    def _counts(self, tokens: Stream | np.ndarray) -> np.ndarray:
        first = tokens[np.arange(min(len(tokens), 10_000_000))]
        return np.bincount(first, minlength=self.vocab_size)

    def require(self, sequence_length: int) -> None:
        """Refuse a sequence length that leaves no sequence for training or validation."""
        for name, tokens in {"the data": self.train, "the held-out part": self.valid}.items():
            if len(tokens) <= sequence_length:
                raise DataError(
                    f"sequence_length {sequence_length} needs {sequence_length + 1} tokens; {name} "
                    f"has {len(tokens)}.",
                    "Give more text, or a smaller --sequence-length.",
                )

    def batch(self, first: int, num_sequences: int, sequence_length: int, seed: int) -> np.ndarray:
        """Return sequences ``first`` and following of an infinite stream: int64 ``[num_sequences,
        sequence_length + 1]``.

        Inputs are ``[:, :-1]``, targets ``[:, 1:]``. The stream depends on (seed, sequence_length)
        only. Each epoch of the stream holds every window once.
        """
        self.require(sequence_length)
        num_windows = (self.num_tokens - 1) // sequence_length
        items = np.uint64(first) + np.arange(num_sequences, dtype=np.uint64)
        return self._windows(self.train, shuffled(items, num_windows, seed), sequence_length)

    def num_validation(self, limit: int, sequence_length: int) -> int:
        """Return how many validation sequences there are, at most ``limit``."""
        return min(limit, (len(self.valid) - 1) // sequence_length)

    def validation(self, limit: int, sequence_length: int, rows: slice | None = None) -> np.ndarray:
        """Return some or all of at most ``limit`` validation sequences, int64 ``[rows,
        sequence_length + 1]``.

        They are always the same, and spread evenly over the validation data.
        """
        self.require(sequence_length)
        num_windows = (len(self.valid) - 1) // sequence_length
        num_chosen = self.num_validation(limit, sequence_length)
        chosen = np.arange(num_chosen) * num_windows // num_chosen
        return self._windows(self.valid, chosen[rows or slice(None)], sequence_length)

    def _windows(
        self, tokens: Stream | np.ndarray, windows: np.ndarray, sequence_length: int
    ) -> np.ndarray:
        places = windows[:, None] * sequence_length + np.arange(sequence_length + 1)
        ids = tokens[places].astype(np.int64)
        if ids.size and ids.max() >= self.vocab_size:
            raise DataError(
                f"The tokens hold {ids.max()}, and their vocabulary has {self.vocab_size}."
            )
        return ids


def open_data(folder: str | Path, held_out: float) -> Dataset:
    """Open a token map, and split it by document.

    If one side would be empty, hold out the end of the text instead.

    Args:
        held_out: fraction of the documents held out for validation, above 0 and below 1: the same
            for every seed of a run.
    """
    tokens = read_tokens(folder)
    ends = tokens.documents[:, 1].astype(np.int64)
    segments = np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=1)
    is_valid = np.array([_is_held_out(int(name), held_out) for name in tokens.documents[:, 0]])
    train = segments[~is_valid]
    valid = segments[is_valid]
    notes: tuple[str, ...] = ()
    if not (np.diff(train).any() and np.diff(valid).any()):
        size = len(tokens.ids)
        num_tail = max(1, int(size * held_out))
        train = np.array([[0, size - num_tail]])
        valid = np.array([[size - num_tail, size]])
        notes = (
            f"The data has {counted(len(segments), 'document')}, too few to hold one out; the last "
            f"{num_tail} tokens are held out.",
        )
    return Dataset(
        Stream(tokens.ids, train),
        Stream(tokens.ids, valid),
        tokens.vocab_size,
        tokens.end_of_text,
        tokens.folder.resolve(),
        data_fingerprint(tokens, held_out),
        notes,
    )


def data_fingerprint(tokens: TokenMap, held_out: float) -> str:
    key = json.dumps([tokens.fingerprint, held_out]).encode()
    return hashlib.blake2b(key, digest_size=16).hexdigest()


def _is_held_out(name_hash: int, held_out: float) -> bool:
    bits = hashlib.blake2b(f"0 {name_hash}".encode(), digest_size=8).digest()
    return int.from_bytes(bits, "little") < held_out * 2**64


# ── the order ─────────────────────────────────────────────────────────────────────────────────────


def shuffled(items: np.ndarray, num_windows: int, seed: int) -> np.ndarray:
    """Return the windows at given positions of the infinite stream of epochs.

    Args:
        items: positions in the stream, uint64.
    Returns:
        int64 of the same shape, values below ``num_windows``: over each epoch (as many consecutive
            positions) a permutation.
    Source: Luby and Rackoff 1988 (Feistel networks); Black and Rogaway 2002 (walking the cycle to
    any size).
    """
    items = np.asarray(items, dtype=np.uint64)
    epochs = items // np.uint64(num_windows)
    places = items % np.uint64(num_windows)
    keys = _mix(_mix(np.full_like(items, seed & (1 << 64) - 1)) + epochs)
    # At least six bits: with fewer, a Feistel network reaches too few permutations.
    half = np.uint64(max(3, ((num_windows - 1).bit_length() + 1) // 2))
    places = _feistel(places, keys, half)
    while (outside := places >= num_windows).any():
        places[outside] = _feistel(places[outside], keys[outside], half)
    return places.astype(np.int64)


def _feistel(places: np.ndarray, keys: np.ndarray, half: np.uint64) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    high = places >> half
    low = places & mask
    for number in range(_ROUNDS):
        high, low = low, high ^ (_mix(keys + _mix(low + np.uint64(number << 40))) & mask)
    joined: np.ndarray = high << half | low
    return joined


def _mix(words: np.ndarray) -> np.ndarray:
    """splitmix64 (Steele, Lea and Flood 2014): every input bit moves every output bit."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = words ^ words >> np.uint64(31)
    return mixed
