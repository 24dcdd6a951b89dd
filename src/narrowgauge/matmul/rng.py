"""Random bits of matmul casts: a pure function of seed, step, layer, operand and logical position.

Equal gradients must not round alike, so the bits cannot come from the values, as the optimizer's do; they come from counters. The
row counter counts tokens of the whole batch, wherever they are computed: a layer's state holds the index of the first
sequence of the micro-batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from narrowgauge.matmul.operand import Words
from narrowgauge.numerics.fusion import fused
from narrowgauge.numerics.quantization import sides_of, words_of
from narrowgauge.numerics.rounding import random_bits
from narrowgauge.spec.computes import Cast

# Rows of a layer's int32 state: seed of the step, step, index of the batch's first sequence, key of the layer.
STEP_SEED, STEP, FIRST_SEQUENCE, LAYER = range(4)


def new_state(names: Sequence[str], device: torch.device | None = None) -> Tensor:
    """Int32 ``[4, names]`` at step 0 and seed 0; a layer's key comes from its name."""
    state = torch.zeros(4, len(names), dtype=torch.int32)
    digests = [hashlib.sha256(name.encode()).digest()[:4] for name in names]
    keys = [int.from_bytes(digest, "little", signed=True) for digest in digests]
    state[LAYER] = torch.tensor(keys, dtype=torch.int32)
    return state.to(device)


def random_words(cast: Cast, x: Tensor, dim: int, state: Tensor, operand: int, sequence_length: int) -> Words | None:
    """The random words of a cast of ``x``; ``None`` where it rounds to nearest.

    Args:
        cast: how ``x [rows, columns]`` is cast.
        x: the operand.
        dim: the dimension that the matmul contracts.
        state: the layer's.
        operand: the slot's ``random_key``.
        sequence_length: rows per sequence.
    """
    if cast.rounding == "nearest":
        return None
    rows, columns = (-(-size // side) * side for size, side in zip(x.shape, sides_of(cast, dim), strict=True))
    row, column = _counters(rows, x.device), _counters(columns, x.device)
    other, length = _number(operand, x.device), _number(sequence_length, x.device)
    words: Words = fused(x.numel(), state_words, row, column, state, other, length)
    return words


def state_words(row: Tensor, column: Tensor, state: Tensor, operand: Tensor, sequence_length: Tensor) -> Words:
    """Random words from row and column counters; everything is int32."""
    key = random_bits(state[LAYER] + operand * 0x3C6EF372, state[STEP_SEED])
    return words_of(row, column, key, state[FIRST_SEQUENCE] * sequence_length)


@lru_cache(64)
def _counters(size: int, device: torch.device) -> Tensor:
    return torch.arange(size, dtype=torch.int32, device=device)


@lru_cache(64)
def _number(value: int, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.int32, device=device)
