"""Operands: a matrix cast to what a matmul kernel takes.

The arithmetic is :mod:`narrowgauge.numerics.quantization`, compiled once per cast and dimension for any shape. The result depends
on the kernel: int8, float8 and four-bit *codes* where it takes them or where they are kept for backward, else bfloat16 *values*,
code times the scale of its block, which is exact in bfloat16. The scale of a row or a tensor is returned separately and is
applied after the matmul; so are the scales of blocks beside codes, which the kernel multiplies into its sums.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.numerics import quantization
from narrowgauge.numerics.code_layouts import four_bit_codes, four_bit_values, packed_pairs, unpacked_pairs
from narrowgauge.numerics.fusion import fused
from narrowgauge.numerics.quantization import blocked, padded, random_signs, sides_of, smoothing, spread, words_of
from narrowgauge.numerics.rounding import random_bits
from narrowgauge.spec.computes import PLACES, Cast, Rotation

Words = tuple[Tensor, Tensor]
PAIRS = torch.uint8
"""The dtype of four-bit codes, two to a byte."""
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2, PAIRS)
_SCALE_DTYPES = {"float8_e8m0fnu": torch.float8_e8m0fnu, "float8_e4m3fn": torch.float8_e4m3fn}


class Operand(NamedTuple):
    """One side of a matmul, not transposed; it stands for ``data * inner * outer``.

    Attributes:
        data: ``[rows, columns]``, padded to whole blocks: int8 or float8 codes, or values in a wider dtype; or four-bit codes in
            pairs along the dimension that is contracted, which is half as long.
        outer: float32 ``[rows, 1]``, ``[1, columns]`` (of a smooth cast too) or ``[1, 1]``; ``None`` without such a scale.
        inner: the scales of blocks ``[row blocks, column blocks]``, in their own format, where ``data`` are the codes of a cast
            in blocks; ``None`` otherwise.
    """

    data: Tensor
    outer: Tensor | None
    inner: Tensor | None = None


def cast_matrix(
    x: Tensor,
    cast: Cast,
    dim: int,
    dtype: torch.dtype,
    *,
    words: Words | None = None,
    fold: Tensor | None = None,
    amax: Tensor | None = None,
) -> Operand:
    """Cast a matrix for a matmul that contracts its dimension ``dim``.

    Invariant: the same bits compiled and not (int8 codes of a group whose scale is NaN are unspecified).

    Args:
        dtype: of the result: int8, a float8 or ``PAIRS`` for codes, else a dtype that holds the values.
        words: for stochastic casts, see :func:`narrowgauge.numerics.quantization.random_words`; for the padded shape.
        fold: float32, broadcastable: multiplied into ``x`` first.
        amax: float32 ``[1, 1]``: the amax to scale by instead of the tensor's own.
    """
    if cast.is_wide and cast.format != "tfloat32":
        return Operand(x.detach().to(dtype), None)
    x = padded(x.detach(), cast, dim)
    if not x.numel():
        return _nothing(x, cast, dim, dtype)
    if cast.smooth:
        fold, amax = fused(x.numel(), _smoothing(cast), x)
    if cast.block is None:
        data, scale = fused(x.numel(), _whole(cast, dim, dtype), x, *(words or (None, None)), fold, amax)
        return Operand(data, scale / fold if cast.smooth else scale)
    if fold is not None:
        x = x.float() * fold
    if cast.rotation != "none":
        x = fused(x.numel(), _rotation(dim, cast.rotation), x)
    sides = sides_of(cast, dim)
    chances = (None, None) if words is None else (blocked(words[0], (sides[0], 1)), blocked(words[1], (1, sides[1])))
    data, outer, inner, _ = fused(x.numel(), _blocks(cast, dtype), blocked(x, sides), *chances, amax)
    data = data.view(x.shape)
    if dtype not in _CODES:
        return Operand(data, outer)
    data = packed_pairs(data, dim) if dtype == PAIRS else data
    return Operand(data, outer, inner.flatten(0, 1).flatten(1, 2).to(_SCALE_DTYPES.get(cast.scale, torch.float32)))


def block_values(operand: Operand, dim: int) -> Tensor:
    """``data * inner`` of the codes of a cast in blocks, in bfloat16, where it is exact."""
    assert operand.inner is not None
    codes = four_bit_values(unpacked_pairs(operand.data, dim)) if operand.data.dtype == PAIRS else operand.data.float()
    return (
        (codes * spread(operand.inner.float(), codes.shape)).to(torch.bfloat16) if codes.numel() else codes.bfloat16()
    )


def has_outer_scale(cast: Cast) -> bool:
    return not (cast.is_wide or cast.scaling == "static" or (cast.block is not None and cast.scale != "float8_e4m3fn"))


def outer_dim(cast: Cast, dim: int) -> int | None:
    """The dimension of the matrix along which the outer scale has a value for each index; ``None`` for a single value."""
    return 1 if cast.smooth else {"row": 1 - dim, "column": dim}.get(cast.granularity)


def outer_shape(shape: torch.Size, cast: Cast, dim: int) -> tuple[int, int] | None:
    """The shape of the outer scale of an operand, whose ``shape`` is padded to whole blocks; ``None`` without a scale."""
    if not has_outer_scale(cast):
        return None
    along = outer_dim(cast, dim)
    return (shape[0] if along == 0 else 1, shape[1] if along == 1 else 1)


def empty_operand(x: Tensor, cast: Cast, dim: int, dtype: torch.dtype) -> Operand:
    """What a cast of ``x`` returns, without values."""
    shape = padded(x, cast, dim).shape
    data_shape, outer, inner = list(shape), outer_shape(shape, cast, dim), None
    if dtype == PAIRS:
        data_shape[dim] //= 2
    if cast.block is not None and dtype in _CODES:
        blocks = [size // side for size, side in zip(shape, sides_of(cast, dim), strict=True)]
        inner = x.new_empty(blocks, dtype=_SCALE_DTYPES.get(cast.scale, torch.float32))
    return Operand(
        x.new_empty(data_shape, dtype=dtype), None if outer is None else x.new_empty(outer, dtype=torch.float32), inner
    )


def _nothing(x: Tensor, cast: Cast, dim: int, dtype: torch.dtype) -> Operand:
    operand = empty_operand(x, cast, dim, dtype)
    return operand._replace(outer=None if operand.outer is None else torch.ones_like(operand.outer))


@lru_cache(None)
def _whole(cast: Cast, dim: int, dtype: torch.dtype) -> Callable[..., Any]:
    def cast_whole(
        x: Tensor, by_row: Tensor | None, by_column: Tensor | None, fold: Tensor | None, amax: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        words = None if by_row is None or by_column is None else (by_row, by_column)
        codes, outer = quantization.quantize_whole(x, cast, dim, words, fold, amax)
        return codes.to(dtype), outer

    return cast_whole


@lru_cache(None)
def _smoothing(cast: Cast) -> Callable[..., Any]:
    def channel_factors(x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return smoothing(x, cast)

    return channel_factors


@lru_cache(None)
def _rotation(dim: int, rotation: Rotation) -> Callable[..., Any]:
    def rotate_blocks(x: Tensor) -> Tensor:
        return quantization.rotate(x, dim, rotation)

    return rotate_blocks


@lru_cache(None)
def _blocks(cast: Cast, dtype: torch.dtype) -> Callable[..., Any]:
    def cast_blocks(
        x: Tensor, by_row: Tensor | None, by_column: Tensor | None, amax: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        words = None if by_row is None or by_column is None else (by_row, by_column)
        codes, inner, inverse, outer = quantization.quantize_blocks(x, cast, words, amax)
        if dtype == PAIRS:
            return four_bit_codes(codes), outer, inner, inverse
        return (codes if dtype in _CODES else codes * inner).to(dtype), outer, inner, inverse

    return cast_blocks


# ── random bits of stochastic casts ────────────────────────────────────────────────────────────────────────────────────
#
# A pure function of seed, step, layer, operand and logical position. Equal gradients must not round equally, so the bits cannot
# come from the values, as the optimizer's do; they come from counters. The row counter counts tokens of the whole batch,
# wherever they are computed: a layer's state holds the index of the first sequence of the micro-batch.


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
    """The random words of a cast of ``x [rows, columns]``; ``None`` where it rounds to nearest.

    ``operand`` is the slot's ``random_key``, ``sequence_length`` the number of rows per sequence.
    """
    if cast.rounding == "nearest":
        return None
    rows, columns = (-(-size // side) * side for size, side in zip(x.shape, sides_of(cast, dim), strict=True))
    row, column = _counters(rows, x.device), _counters(columns, x.device)
    other, length = _number(operand, x.device), _number(sequence_length, x.device)
    words: Words = fused(x.numel(), state_words, row, column, state, other, length)
    return words


def drawn_signs(cast: Cast, size: int, dim: int, state: Tensor | None, matmul: str) -> Tensor | None:
    """The signs that a rotation takes anew in each step, along ``size`` places; ``None`` for rotations that draw none.

    They belong to the step and the matmul, not to the layer: layers that share a weight share its cast.
    """
    if cast.rotation != "hadamard-drawn" or state is None:
        return None
    return random_signs(size, dim, random_bits(_number(PLACES.index(matmul), state.device), state[STEP_SEED]))


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
