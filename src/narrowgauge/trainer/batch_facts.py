"""What the tokens of a step say by themselves, whatever the model is: which they are, and how usual.

Both are recorded for every step. A batch that comes again has the same checksum; a batch of tokens that mean nothing, or of one
token again and again, has another loss under the frequencies of single tokens than all others.
"""

from __future__ import annotations

import hashlib

import numpy as np

NUM_BLOCKS, BLOCK_TOKENS = 64, 1 << 14
"""Parts of the data, evenly spread, in which tokens are counted: all of it up to a million tokens."""


def checksum(batch: np.ndarray) -> str:
    """The checksum of a step's tokens, 64 bits: two batches that have it in common are the same.

    Example:
        >>> checksum(np.zeros((2, 3), dtype=np.int64)) == checksum(np.ones((2, 3), dtype=np.int64))
        False
    """
    return hashlib.blake2b(batch.astype(np.uint32).tobytes(), digest_size=8).hexdigest()


def unigram_losses(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """What each token costs a model that knows how often each occurs, and nothing of the tokens before it.

    Invariant: a function of the data alone, so that a resumed run goes on with the same.

    Args:
        tokens: of the training data.
        vocab_size: number of different tokens.
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
