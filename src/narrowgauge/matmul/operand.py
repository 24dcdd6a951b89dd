"""Operands: a matrix cast for a matmul kernel, and the random bits of stochastic casts.

:mod:`narrowgauge.numerics.quantization` does the arithmetic. In eager mode it is compiled once per
cast and dimension. Under ``torch.compile`` its operations are part of the model's graph. The result
is int8 or float8 *codes* with a scale for each row or for the tensor, or bfloat16 *values*: code times
its block's scale, which is exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache, partial, update_wrapper
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.numerics.hashing import signed
from narrowgauge.numerics.quantization import (
    blocked,
    padded,
    quantize_blocks,
    quantize_whole,
    random_words,
    rotate,
    sides_of,
)
from narrowgauge.numerics.rounding import power_below, random_bits
from narrowgauge.spec.computes import Cast
from narrowgauge.torch_support.compile import call_compiled

CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes of codes that only some kernels multiply."""


class Operand(NamedTuple):
    """One side of a matmul, ``[side, contraction]``: it represents ``data * outer``.

    Attributes:
        data: padded to whole blocks: int8 or float8 codes, or values in a wider dtype.
        outer: float32 ``[side, 1]``, ``[1, contraction]`` or ``[1, 1]``; ``None`` without one.
    """

    data: Tensor
    outer: Tensor | None = None

    def transposed(self) -> Operand:
        """Return the operand of a matmul that contracts the other dimension."""
        outer = self.outer
        if outer is not None:
            outer = outer.reshape(outer.shape[::-1])  # in one piece
        return Operand(self.data.t(), outer)


def cast_matrix(
    x: Tensor,
    cast: Cast,
    dim: int,
    dtype: torch.dtype,
    key: Tensor | None = None,
    fold: Tensor | None = None,
) -> Operand:
    """Cast a matrix for a matmul that contracts its dimension ``dim``.

    Invariant: compiled and eager bits are equal. The int8 codes of a group with the scale NaN are
    0.

    Args:
        dtype: of the result: int8 or a float8 for codes, or a dtype that holds the values.
        key: int32, one number, of the random bits of a stochastic cast. Their words are hashed
            within it.
        fold: float32, broadcastable: multiplied into ``x`` first.
    """
    x = padded(x.detach(), cast, dim)
    size = x.numel()
    is_whole = cast.block is None and not cast.is_wide
    if fold is not None and not (is_whole and cast.rotation == "none"):
        x = x.float() * fold
        fold = None
    if cast.rotation != "none":
        x = call_compiled(size, bound(rotate, dim=dim), x)
    if cast.is_wide:
        operand = Operand(x.to(dtype))
    elif is_whole:
        function = bound(_cast_whole, cast=cast, dim=dim, dtype=dtype)
        operand = Operand(*call_compiled(size, function, x, key, fold))
    else:
        function = bound(_cast_blocks, cast=cast, dtype=dtype)
        data, _, _, outer = call_compiled(size, function, blocked(x, sides_of(cast, dim)), key)
        operand = Operand(data.view(x.shape), outer)
    if dim == 0:
        return operand.transposed()
    return operand


def without_outer(operand: Operand) -> Tensor:
    """Return ``data`` in a dtype that all processors multiply: int8 and wide data as they are, other
    codes in bfloat16, where they are exact.
    """
    data = operand.data
    return data.to(torch.bfloat16) if data.dtype in CODES else data


def values_of(operand: Operand) -> Tensor:
    """Return the padded matrix that an operand represents, in float32."""
    values = without_outer(operand).float()
    return values if operand.outer is None else values * operand.outer


# Functions that casts are compiled from. Their settings are bound.


@cache
def bound(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """Return one function object for equal settings, so that it is compiled once."""
    return update_wrapper(partial(function, **settings), function)


def _cast_whole(
    x: Tensor, key: Tensor | None, fold: Tensor | None, *, cast: Cast, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Cast a matrix with a scale for all of it or for each row: codes in a dtype, and the scales."""
    words = unit = None
    if key is not None:
        words = random_words(x.shape[0], x.shape[1], key)
    if fold is not None:  # near one, so that small scales make no subnormal numbers: a power of two
        largest = fold.amax()
        unit = torch.where(largest < torch.inf, power_below(largest), torch.nan)
        fold = fold / unit
    codes, outer = quantize_whole(x, cast, dim, words, fold)
    if outer is not None and unit is not None:
        outer = outer * unit
    if dtype == torch.int8:
        codes = codes.nan_to_num(0.0)  # processors convert NaN differently
    codes = codes.to(dtype)
    if dtype in CODES and dim == 0:
        codes = codes.t().contiguous().t()  # as kernels read them; compiled, in the cast's loop
    return codes, outer


def _cast_blocks(
    x: Tensor, key: Tensor | None, *, cast: Cast, dtype: torch.dtype
) -> tuple[Tensor | None, ...]:
    """Cast a matrix in blocks: values in a dtype; scales and their inverses, and the tensor's scale."""
    words = None
    if key is not None:
        row_blocks, rows, column_blocks, columns = x.shape
        by_row, by_column = random_words(row_blocks * rows, column_blocks * columns, key)
        words = blocked(by_row, (rows, 1)), blocked(by_column, (1, columns))
    codes, inner, inverse, outer = quantize_blocks(x, cast, words)
    # A compiler computes scales that are returned once, not at each value.
    return (codes * inner).to(dtype), inner, inverse, outer


# ── random bits of stochastic casts ───────────────────────────────────────────────────────────────
#
# All stochastic casts round gradients. Their bits are a hash of the layer's key, of the operand, and
# of the content of the gradient and of the matrices that it is multiplied with. So two micro-batches,
# two steps and two ranks round independently, also where their gradients are equal. A pass that is
# recomputed, or a run that is resumed, has its first bits. Nothing counts steps.


def layer_keys(names: Sequence[str], seed: int, device: torch.device | None = None) -> Tensor:
    """Return the keys of layers by name, int32 ``[names]``."""
    keys = []
    for name in names:
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        keys.append(int.from_bytes(digest[:4], "little", signed=True))
    return torch.tensor(keys, dtype=torch.int32, device=device)


def mixed(key: Tensor, number: int) -> Tensor:
    """Return a key of a part of what another key belongs to."""
    return key + signed(number * 0x3C6EF372, 32)


_ROWS = 64
_COLUMNS = 16


def content_key(key: Tensor, *matrices: Tensor) -> Tensor:
    """Return a layer's key for the content of some matrices, a sample of each."""
    plain = [matrix.detach() for matrix in matrices]
    return call_compiled(_ROWS * _COLUMNS, _content_key, key, *plain)


def _content_key(key: Tensor, *matrices: Tensor) -> Tensor:
    row = torch.arange(_ROWS, device=key.device)[:, None]
    column = torch.arange(_COLUMNS, device=key.device)
    factors = torch.arange(1, 2 * _ROWS * _COLUMNS, 2, device=key.device).view(_ROWS, _COLUMNS)
    for matrix in matrices:
        rows = row * matrix.shape[0] // _ROWS
        columns = column * matrix.shape[1] // _COLUMNS
        bits = matrix[rows, columns].float().view(torch.int32)
        key = random_bits((bits * factors).sum(dtype=torch.int32), key)
    return key
