"""Operands: a matrix cast for a matmul kernel, and the random bits of stochastic casts.

:mod:`narrowgauge.numerics.quantization` does the arithmetic. In eager mode it is compiled once per cast and dimension. Under
``torch.compile`` its operations are part of the model's graph. The result is int8, float8 or four-bit *codes* if a kernel takes
codes or backward needs them. Otherwise it is bfloat16 *values*: code times its block's scale, which is exact.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial, update_wrapper
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.compile import fused
from narrowgauge.numerics import quantization
from narrowgauge.numerics.hashing import step_seed
from narrowgauge.numerics.quantization import (
    blocked,
    four_bit_codes,
    four_bit_values,
    packed_pairs,
    padded,
    sides_of,
    spread,
    unpacked_pairs,
)
from narrowgauge.numerics.rounding import random_bits
from narrowgauge.spec.computes import Cast
from narrowgauge.torch_hooks import after_every_step
from narrowgauge.torch_names import calls_of_step

Words = tuple[Tensor, Tensor]
PAIRS = torch.uint8
"""The dtype of four-bit codes, two to a byte."""
CODES = (torch.float8_e4m3fn, torch.float8_e5m2, PAIRS)
"""Dtypes of codes that only some kernels multiply."""
SCALE_DTYPES = {"float8_e8m0fnu": torch.float8_e8m0fnu, "float8_e4m3fn": torch.float8_e4m3fn}


class Operand(NamedTuple):
    """One side of a matmul, not transposed. It represents ``data * inner * outer``.

    Attributes:
        data: ``[rows, columns]``, padded to whole blocks: int8 or float8 codes, or values in a wider dtype. Four-bit codes are
            in pairs along the contracted dimension, which is half as long.
        outer: float32 ``[rows, 1]``, ``[1, columns]`` or ``[1, 1]``; ``None`` without such a scale.
        inner: block scales ``[row blocks, column blocks]``, in their own format, for codes of a cast in blocks; else ``None``.
    """

    data: Tensor
    outer: Tensor | None = None
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

    Invariant: compiled and eager bits are equal. The int8 codes of a group with the scale NaN are 0.

    Args:
        dtype: of the result: int8, a float8 or ``PAIRS`` for codes, or a dtype that holds the values.
        words: for stochastic casts, for the padded shape; see :func:`narrowgauge.numerics.quantization.random_words`.
        fold: float32, broadcastable: multiplied into ``x`` first.
        amax: float32 ``[1, 1]``: scale by this instead of the tensor's own amax.
    """
    if cast.is_wide:
        x = x.detach() if fold is None else x.detach() * fold
        return Operand(
            (x if cast.rotation == "none" else _rotate(dim, padded(x, cast, dim))).to(dtype)
        )
    x = padded(x.detach(), cast, dim)
    size = x.numel()
    if cast.block is None:
        data, *scale = fused(
            size, _bound(_cast_whole, cast, dim, dtype), x, *(words or (None, None)), fold, amax
        )
        return Operand(data, scale[0] if scale else None)
    if fold is not None:
        x = x.float() * fold
    if cast.rotation != "none":
        x = fused(size, _bound(_rotate, dim), x)
    sides = sides_of(cast, dim)
    chances = (
        (None, None)
        if words is None
        else (blocked(words[0], (sides[0], 1)), blocked(words[1], (1, sides[1])))
    )
    data, inner, _, *scale = fused(
        size, _bound(_cast_blocks, cast, dtype), blocked(x, sides), *chances, amax
    )
    data, outer = data.view(x.shape), scale[0] if scale else None
    if dtype not in CODES:
        return Operand(data, outer)
    data = _along_contraction(packed_pairs(data, dim) if dtype == PAIRS else data, dim)
    return Operand(
        data,
        outer,
        inner.flatten(0, 1).flatten(1, 2).to(SCALE_DTYPES.get(cast.scale, torch.float32)),
    )


def _along_contraction(codes: Tensor, dim: int) -> Tensor:
    """Lay codes out as kernels read them. A compiler writes them so in the loop of the cast."""
    return codes.t().contiguous().t() if dim == 0 else codes


def block_values(operand: Operand, dim: int) -> Tensor:
    """Return ``data * inner`` in bfloat16, for codes of a cast in blocks. It is exact."""
    assert operand.inner is not None
    codes = (
        four_bit_values(unpacked_pairs(operand.data, dim))
        if operand.data.dtype == PAIRS
        else operand.data.float()
    )
    return (codes * spread(operand.inner.float(), codes.shape)).to(torch.bfloat16)


# Functions that casts are compiled from. Their first arguments are bound.


@lru_cache(None)
def _bound(function: Callable[..., Any], *settings: Any) -> Callable[..., Any]:
    """Return one function object for equal settings, so that it is compiled once."""
    return update_wrapper(partial(function, *settings), function)


def _words(by_row: Tensor | None, by_column: Tensor | None) -> Words | None:
    return None if by_row is None or by_column is None else (by_row, by_column)


def _cast_whole(
    cast: Cast, dim: int, dtype: torch.dtype,
    x: Tensor, by_row: Tensor | None, by_column: Tensor | None, fold: Tensor | None, amax: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    codes, outer = quantization.quantize_whole(x, cast, dim, _words(by_row, by_column), fold, amax)
    if dtype == torch.int8:
        codes = torch.where(codes == codes, codes, 0.0)  # processors convert NaN differently
    codes = codes.to(dtype)
    codes = _along_contraction(codes, dim) if dtype in CODES else codes
    return (codes,) if outer is None else (codes, outer)


def _rotate(dim: int, x: Tensor) -> Tensor:
    return quantization.rotate(x, dim)


def _cast_blocks(
    cast: Cast,
    dtype: torch.dtype,
    x: Tensor,
    by_row: Tensor | None,
    by_column: Tensor | None,
    amax: Tensor | None,
) -> tuple[Tensor, ...]:
    codes, inner, inverse, outer = quantization.quantize_blocks(
        x, cast, _words(by_row, by_column), amax
    )
    data = (
        four_bit_codes(codes)
        if dtype == PAIRS
        else (codes if dtype in CODES else codes * inner).to(dtype)
    )
    return (data, inner, inverse) if outer is None else (data, inner, inverse, outer)


# ── random bits of stochastic casts ────────────────────────────────────────────────────────────────────────────────────
#
# A pure function of seed, step, layer, operand and logical position. Equal gradients must not round equally. So the bits come
# from counters, and not from the values as the optimizer's do. The row counter counts tokens of the whole batch on all ranks.
# The clock holds the index of the micro-batch's first sequence, or of its first token.

STEP_SEED, FIRST_SEQUENCE, FIRST_TOKEN = range(3)
"""Places in the words of a clock."""


class Keys(NamedTuple):
    """The keys of a layer's random bits.

    Attributes:
        clock: int32 ``[4]``: seed of the step, step, index of the batch's first sequence or token; see :class:`Clock`.
        layer: int32 ``[]``: from the layer's name.
    """

    clock: Tensor
    layer: Tensor


class Clock:
    """The seed, the step and the place of a micro-batch in the batch, shared by the narrow layers of a model.

    The place is the index of the first sequence or of the first token. The other index is 0.
    A change is written to each device once for all layers, and only if a layer reads it.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.step, self.first_sequence, self.first_token = seed, 0, 0, 0
        self._words: dict[torch.device, Tensor] = {}

    def set(self, **numbers: int) -> None:
        """Set some of seed, step, first sequence and first token."""
        before = self._numbers()
        vars(self).update(numbers)
        if self._words and self._numbers() != before:
            with torch.inference_mode(False):
                for words in self._words.values():
                    words.copy_(
                        torch.tensor(self._numbers(), dtype=torch.int32, device="cpu"),
                        non_blocking=True,
                    )

    def words(self, device: torch.device) -> Tensor:
        """Return the tensor on a device that always holds these numbers, see :attr:`Keys.clock`."""
        if device not in self._words:
            with torch.inference_mode(False):
                self._words[device] = torch.tensor(
                    self._numbers(), dtype=torch.int32, device=device
                )
        return self._words[device]

    def _numbers(self) -> list[int]:
        return [step_seed(self.seed, self.step), self.first_sequence, self.first_token]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_words": {}}  # a copy of a layer asks for them again

    def advance(self, optimizer: Any, *_: Any) -> None:
        """Count a step of an optimizer, one alone if its ``step`` calls that of its base class."""
        if calls_of_step(optimizer) <= 1:
            self.set(step=self.step + 1)

    def count_every_step(self) -> None:
        """Count the steps of every optimizer, until :meth:`stop_counting`."""
        after_every_step(_advance_all)
        _COUNTING.add(self)

    def stop_counting(self) -> None:
        """Count no more steps."""
        _COUNTING.discard(self)


_COUNTING: weakref.WeakSet[Clock] = weakref.WeakSet()


def _advance_all(optimizer: Any, *_: Any) -> None:
    for clock in list(_COUNTING):
        clock.advance(optimizer)


def layer_keys(names: Sequence[str], device: torch.device | None = None) -> Tensor:
    """Return the keys of layers by name, int32 ``[names]``."""
    digests = [hashlib.sha256(name.encode()).digest()[:4] for name in names]
    keys = [int.from_bytes(digest, "little", signed=True) for digest in digests]
    return torch.tensor(keys, dtype=torch.int32, device=device)


def random_words(
    cast: Cast, x: Tensor, dim: int, keys: Keys, operand: int, length: int | None
) -> Words | None:
    """Return the random words for a cast of ``x [rows, columns]``; ``None`` if it rounds to nearest.

    ``operand`` is the slot's ``random_key``. ``length`` is the number of rows per sequence; ``None`` for a weight.
    """
    if cast.rounding == "nearest":
        return None
    rows, columns = (
        -(-size // side) * side for size, side in zip(x.shape, sides_of(cast, dim), strict=True)
    )
    first_row = (
        0 if length is None else keys.clock[FIRST_SEQUENCE] * length + keys.clock[FIRST_TOKEN]
    )
    return quantization.random_words(rows, columns, key_of(keys, operand), first_row)


def key_of(keys: Keys, operand: int) -> Tensor:
    """Mix seed, step, layer and operand into the key of a cast's random bits: int32 ``[]``."""
    salt = (operand * 0x3C6EF372 + (1 << 31)) % (1 << 32) - (1 << 31)
    return random_bits(keys.layer + salt, keys.clock[STEP_SEED])
