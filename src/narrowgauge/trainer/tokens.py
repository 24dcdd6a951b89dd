"""Text as tokens, and the batches of a run.

The data of a run is a folder: ``tokens.npy``, one row of uint16 or uint32, and a tokenizer where it
is known. ``narrowgauge tokenize`` makes it from text; ``numpy.save`` of the tokens of any other
pipeline makes it too. A token ends each document. The last twentieth is held out.

The order of an epoch is ``RandomState([seed, epoch]).permutation``, which no release of NumPy
changes. So no generator state is saved, and batch 7,000 needs none of those before it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from narrowgauge.errors import DataError, require_package
from narrowgauge.runs.atomic_io import digest
from narrowgauge.runs.paths import new_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
_ADVICE = "Make them from text: narrowgauge tokenize TEXT OUT, then --data OUT."


# ── text to tokens ────────────────────────────────────────────────────────────────────────────────


def read_texts(source: Path) -> Iterator[str]:
    """Yield a text file, or the ``.txt`` files of a folder by name: a document each.

    Raises:
        DataError: a source or file that cannot be read, or is not UTF-8 text.
    """
    files = sorted(source.rglob("*.txt"))
    for file in files or [source]:
        try:
            yield file.read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            raise DataError(
                f"Cannot read the text in {file}: {type(error).__name__}: {error}.",
                "Give a file of UTF-8 text, or a folder of .txt files.",
            ) from error


SAFELY = {"local_files_only": True, "trust_remote_code": False}
"""Options of transformers: it downloads nothing, and no code of a model runs."""


@contextmanager
def explained(source: str | Path) -> Iterator[None]:
    """Say in one line why transformers cannot read a model or tokenizer: a folder, or a name of the
    hub.

    Raises:
        DataError: whatever was raised within.
    """
    try:
        yield
    except Exception as error:  # transformers, its packages and its many models raise any kind
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        advice = "Name a Hugging Face folder, or a preset (narrowgauge show models)."
        if isinstance(error, OSError) and not Path(source).exists():
            reason = "it is not a folder or a preset, and was not downloaded"
            advice = f"For a model of the hub run: hf download {source}"
        raise DataError(f"Cannot read '{source}': {reason.rstrip('.')}.", advice) from error


def load_tokenizer(path: Path | None) -> PreTrainedTokenizerFast:
    """Read the tokenizer in a Hugging Face folder.

    ``None`` makes a tokenizer of 257 tokens: the bytes and the end of text.
    """
    require_package("transformers")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if path is None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        of_bytes = Tokenizer(models.BPE(dict(zip(alphabet, range(256), strict=True)), []))
        of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        of_bytes.decoder = decoders.ByteLevel()
        return PreTrainedTokenizerFast(tokenizer_object=of_bytes, eos_token=END_OF_TEXT)
    with explained(path):
        tokenizer: Any = AutoTokenizer.from_pretrained(path, **SAFELY)
    if tokenizer.eos_token is None:
        raise DataError(
            f"Cannot use the tokenizer in {path}: it has no token that ends a document.",
            "Write eos_token in its tokenizer_config.json.",
        )
    return tokenizer


def write_tokens(texts: Iterable[str], tokenizer: PreTrainedTokenizerFast, out: Path) -> Path:
    """Tokenize documents into a folder, with the end-of-text token behind each.

    Text that spells a special token is encoded like other text.

    Cost: about 0.5 s per MB on two cores.
    """
    coder = tokenizer.backend_tokenizer
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    end = np.array([tokenizer.eos_token_id], dtype)
    coder.encode_special_tokens = True
    coder.no_truncation()
    parts = []
    for text in filter(None, texts):
        (encoding,) = coder.encode_batch_fast([text], add_special_tokens=False)
        parts += [np.array(encoding.ids, dtype), end]
    if not parts:
        raise DataError("Cannot write tokens because there is no text.", "Give .txt files.")
    with new_folder(out) as folder:
        tokenizer.save_pretrained(folder)
        np.save(folder / "tokens.npy", np.concatenate(parts))
    return out


# ── tokens to batches ─────────────────────────────────────────────────────────────────────────────


@functools.lru_cache(maxsize=4)
def order_of_epoch(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.RandomState([seed, epoch]).permutation(count)


@dataclass(frozen=True)
class Tokens:
    """The tokens of a run: ``train`` and ``held_out``, one dimension each.

    Batches are pure functions of their arguments and the tokens.
    """

    train: np.ndarray
    held_out: np.ndarray
    vocab_size: int
    fingerprint: str = ""

    def batch(self, first: int, num_sequences: int, sequence_length: int, seed: int) -> np.ndarray:
        """Return sequences ``first`` and following of an infinite stream: int64 ``[num_sequences,
        sequence_length + 1]``.

        Inputs are ``[:, :-1]``, targets ``[:, 1:]``. Each epoch holds every window once.
        """
        count = (len(self.train) - 1) // sequence_length
        windows = []
        for place in range(first, first + num_sequences):
            windows.append(order_of_epoch(seed, place // count, count)[place % count])
        return _windows(self.train, windows, sequence_length)

    def validation(self, limit: int, sequence_length: int) -> np.ndarray:
        """Return at most ``limit`` validation sequences, spread evenly over the held-out tokens."""
        count = (len(self.held_out) - 1) // sequence_length
        chosen = min(limit, count)
        return _windows(self.held_out, np.arange(chosen) * count // chosen, sequence_length)

    def unigram_loss(self) -> float:
        """Return the loss in nats per token of guessing by the frequencies of training tokens.

        A model must beat it. One is added to each count.
        """
        held_out = np.bincount(self.held_out, minlength=self.vocab_size)
        counts = np.bincount(self.train, minlength=self.vocab_size) + 1.0
        return float(-(held_out * np.log(counts / counts.sum())).sum() / held_out.sum())


def _windows(ids: np.ndarray, windows: Any, sequence_length: int) -> np.ndarray:
    starts = np.array(windows) * sequence_length
    places = starts[:, None] + np.arange(sequence_length + 1)
    return ids[places].astype(np.int64)


def open_tokens(folder: str | Path) -> Tokens:
    """Open the tokens in a folder.

    Raises:
        DataError: there are none, or the file is damaged.
    """
    folder = Path(folder).resolve()
    file = folder / "tokens.npy"
    try:
        ids = np.load(file, mmap_mode="r")
        if ids.ndim != 1 or ids.dtype.kind not in "ui" or ids.min() < 0:
            raise ValueError(f"{file.name} is not one row of whole numbers from 0 on")
        vocab_size = int(ids.max()) + 1
        if (folder / "tokenizer.json").is_file():
            vocab_size = _vocab_size(folder / "tokenizer.json", vocab_size)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"Cannot use the tokens in {folder}: {error}.", _ADVICE) from error
    cut = len(ids) - len(ids) // 20
    return Tokens(ids[:cut], ids[cut:], vocab_size, digest(file))


def _vocab_size(file: Path, fewest: int) -> int:
    """Return the size of a tokenizer's vocabulary, which must be ``fewest`` at least."""
    from tokenizers import Tokenizer

    size = max(Tokenizer.from_file(str(file)).get_vocab().values()) + 1
    if size < fewest:
        raise ValueError(f"token {fewest - 1:,} is beyond its tokenizer, which has {size:,}")
    return size
