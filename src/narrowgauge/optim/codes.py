"""Codes: the pure functions that turn float32 values into the bits a storage keeps, and back.

:class:`narrowgauge.recipes.Code` says *which* bits are kept; this file obeys it, element by element, in int32 and float32
operations that give the same bits in eager mode, compiled, on a CPU and on a GPU. A code lives in an int32 word at some
``shift``, among others; encoding gives its bits in that place and zeros elsewhere, so packing is an ``or``, and decoding
reads it from there with one shift and one mask.
"""

from __future__ import annotations

from torch import Tensor

from narrowgauge.numerics.rounding import MAGNITUDE, bits_of, cut, float_of, half
from narrowgauge.storages import Code, Storage

SIGN = -(1 << 31)
UPPER = -65536
"""The mask of a word's upper half, where the visible bfloat16 lies as a float32's own upper bits."""


def dropped_bits(code: Code) -> int:
    """How many low mantissa bits of a float32 the code drops."""
    return 23 - code.mantissa_bits


def encode(code: Code, x: Tensor, addend: Tensor | int, shift: int) -> Tensor:
    """Cut ``x`` to ``code``.

    Args:
        code: the code.
        x: float32 tensor.
        addend: what to add before cutting (see :func:`narrowgauge.numerics.rounding.cut`).
        shift: where in the word the code's lowest bit goes.
    Returns:
        int32 tensor, zero outside the code's place.
    """
    if code.is_window:
        return _encode_window(code, x, addend, shift)
    if not dropped_bits(code):
        return bits_of(x)
    # The code is the upper bits of the float32, and shift = dropped is where they already are; elsewhere the copies of
    # the sign that a right shift makes, or the sign that an unsigned code leaves out, lie beside its place.
    moved = _moved(cut(x, dropped_bits(code), addend), shift - dropped_bits(code))
    return moved if code.signed and shift == dropped_bits(code) else moved & (((1 << code.bits) - 1) << shift)


def decode(code: Code, word: Tensor, shift: int) -> Tensor:
    """The float32 values of codes lying at ``shift`` in int32 words, whatever else lies in them."""
    if code.is_window:
        return _decode_window(code, word, shift)
    kept = -(1 << dropped_bits(code)) & (-1 if code.signed else MAGNITUDE)
    left = _moved(word, dropped_bits(code) - shift)
    return float_of(left & kept if code.bits < 32 else left)


def _encode_window(code: Code, x: Tensor, addend: Tensor | int, shift: int) -> Tensor:
    """A small float with subnormals: scaled by a power of two, its exponent field begins at zero like float32's own."""
    bits, dropped = bits_of(x * 2.0 ** -_scale(code)), dropped_bits(code)
    magnitude = bits & MAGNITUDE  # of unsigned codes too: -0 and a negative NaN would fill the word
    step = (magnitude.clamp(max=_last_step(code) << dropped) + addend) >> dropped
    if code.hold:
        # Of x itself: scaled, the smallest of float32's own subnormals are zero already.
        step = step.maximum(bits_of(x).clamp(max=1))
    step = _moved(step, shift)
    if not code.signed:
        return step
    sign = bits & SIGN
    place = shift + code.bits - 1
    return step | (sign if place == 31 else (sign >> (31 - place)) & (1 << place))


def _decode_window(code: Code, word: Tensor, shift: int) -> Tensor:
    steps = _last_step(code) << dropped_bits(code)
    moved = _moved(word, dropped_bits(code) - shift)
    place = shift + code.bits - 1
    if code.signed and place == 31:
        bits = moved & (steps | SIGN)  # a right shift of an int32 leaves its sign where it is
    elif code.signed:
        bits = (moved & steps) | ((word << (31 - place)) & SIGN)
    else:
        bits = moved & steps
    return float_of(bits) * 2.0 ** _scale(code)


def _last_step(code: Code) -> int:
    """The largest magnitude a window code holds, counted in steps from zero; it also stands for all that is larger."""
    return (1 << (code.exponent_bits + code.mantissa_bits)) - 1


def _scale(code: Code) -> int:
    """How far the window's exponents lie above float32's."""
    return code.lowest + 126


def _moved(x: Tensor, left: int) -> Tensor:
    """``x`` shifted left, or right by a negative number (copying the sign), or untouched by zero."""
    return x << left if left > 0 else x >> -left if left < 0 else x


def encode_weight(
    storage: Storage, x: Tensor, addend: Tensor | int, shift: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Cut a weight into what the model sees and what is kept beside it.

    Args:
        storage: the row.
        x: float32 tensor, the weight after the step.
        addend: what to add before cutting.
        shift: where the tail goes in its word.
    Returns:
        ``(seen, field, kept)``: the visible value's bits as a float32's (int32), the bits of the field ``tail`` or
        ``master`` in its place, ``None`` where there is no such field, and the float32 that the two hold together.
    """
    if storage.visible == "float32":
        return bits_of(x), None, x
    if storage.master:
        return cut(x, 16, half(16)), bits_of(x), x
    if not storage.tail_bits:
        seen = cut(x, 16, addend)
        return seen, None, float_of(seen)
    whole = cut(x, dropped_bits(storage.weight), addend)
    # The nearest bfloat16, and the signed rest: adding half of the tail's range carries exactly where the rest is
    # negative. Only NaNs are large enough to wrap, and `cut` leaves none that does.
    seen = (whole + half(16)) & UPPER
    tail = _moved(whole - seen, shift - (16 - storage.tail_bits))
    return seen, tail & (((1 << storage.tail_bits) - 1) << shift), float_of(whole)


def decode_weight(storage: Storage, seen: Tensor, word: Tensor | None, shift: int) -> Tensor:
    """The stored float32 weight from its visible bits and the word that holds its field: undoes :func:`encode_weight`."""
    if word is None:
        return float_of(seen)
    if storage.master:
        return float_of(word)
    # Up to the sign, then down: the tail is signed, and its lowest bit belongs at 16 - tail_bits.
    tail = _moved(word, 32 - storage.tail_bits - shift) >> 16
    if storage.tail_bits < 16:
        tail = tail & -(1 << (16 - storage.tail_bits))
    return float_of(seen + tail)
