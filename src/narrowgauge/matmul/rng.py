"""Random bits of matmul casts: a pure function of seed, step, layer, operand and logical place.

Equal gradients must not round alike, so the bits cannot come from the values, as the optimizer's do; they come from
counters. The row counter counts tokens of the whole batch, wherever they are computed: a micro-batch is told which
sequence it begins with.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from narrowgauge.matmul.operand import COMPILE_ELEMENTS, Words, can_compile, compiled
from narrowgauge.numerics.quantization import sides_of, words_of
from narrowgauge.numerics.rounding import random_bits
from narrowgauge.spec.computes import Cast

# What a layer's int32 state holds: seed of the step, step, first sequence of the batch, the layer's own number.
STEP_SEED, STEP, FIRST_SEQUENCE, LAYER = range(4)


def random_words(cast: Cast, x: Tensor, dim: int, state: Tensor, operand: int, sequence_length: int) -> Words | None:
    """The words of a cast of ``x``, or ``None`` where it rounds to the nearest.

    Args:
        cast: how ``x [rows, columns]`` is cast.
        x: the operand.
        dim: the dimension that the matmul contracts.
        state: the layer's.
        operand: which operand, a small number.
        sequence_length: rows of a sequence.
    """
    if cast.rounding == "nearest":
        return None
    rows, columns = (-(-size // side) * side for size, side in zip(x.shape, sides_of(cast, dim), strict=True))
    row, column = _counters(rows, x.device), _counters(columns, x.device)
    other, length = _number(operand, x.device), _number(sequence_length, x.device)
    if x.numel() < COMPILE_ELEMENTS or not can_compile():
        return state_words(row, column, state, other, length)
    words: Words = compiled(state_words, row, column, state, other, length)
    return words


def state_words(row: Tensor, column: Tensor, state: Tensor, operand: Tensor, sequence_length: Tensor) -> Words:
    """Words for counters of rows and columns; everything is int32."""
    key = random_bits(state[LAYER] + operand * 0x3C6EF372, state[STEP_SEED])
    return words_of(row, column, key, state[FIRST_SEQUENCE] * sequence_length)


@lru_cache(64)
def _counters(size: int, device: torch.device) -> Tensor:
    return torch.arange(size, dtype=torch.int32, device=device)


@lru_cache(64)
def _number(value: int, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.int32, device=device)
