"""Codes: pure functions that cut float32 values to the bits that a storage stores, and restore them.

:class:`narrowgauge.spec.storages.Code` says which bits are stored. This file implements it, element by element, in int32 and
float32 operations that give the same bits in eager mode, compiled, on a CPU and on a GPU. Several codes share an int32
word, each at its own ``shift``: encoding returns a code's bits in place and zeros elsewhere, so packing is an ``or``, and
decoding takes one shift and one mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.numerics.rounding import MAGNITUDE, bits_of, cut, float_of, half
from narrowgauge.spec.codes import VISIBLE, Code
from narrowgauge.spec.storages import Storage

SIGN = -(1 << 31)


def dropped_bits(code: Code) -> int:
    """How many low mantissa bits of a float32 the code drops."""
    return 23 - code.mantissa_bits


def encode(code: Code, x: Tensor, addend: Tensor | int, shift: int, scale: Tensor | None = None) -> Tensor:
    """Cut ``x`` to ``code``.

    Args:
        code: the code.
        x: float32 tensor.
        addend: what to add before cutting (see :func:`narrowgauge.numerics.rounding.cut`).
        shift: where in the word the code's lowest bit goes.
        scale: of a scaled code, the first result of :func:`multipliers`.
    Returns:
        int32 tensor, zero outside the code's bits.
    """
    if code.is_window:
        return _encode_window(code, x, addend, shift, 2.0 ** -_scale(code) if scale is None else scale)
    if not dropped_bits(code):
        return bits_of(x)
    # The code is the upper bits of the float32, and shift = dropped is where they already are; elsewhere the copies of
    # the sign that a right shift makes, or the sign that an unsigned code leaves out, must be masked.
    moved = _moved(cut(x, dropped_bits(code), addend), shift - dropped_bits(code))
    return moved if code.signed and shift == dropped_bits(code) else moved & (((1 << code.bits) - 1) << shift)


def decode(code: Code, word: Tensor, shift: int, scale: Tensor | None = None) -> Tensor:
    """The float32 values of codes at ``shift`` in int32 words; all other bits of the words are ignored.

    ``scale`` is, of a scaled code, the second result of :func:`multipliers`.
    """
    if code.is_window:
        return _decode_window(code, word, shift, 2.0 ** _scale(code) if scale is None else scale)
    kept = -(1 << dropped_bits(code)) & (-1 if code.signed else MAGNITUDE)
    left = _moved(word, dropped_bits(code) - shift)
    return float_of(left & kept if code.bits < 32 else left)


def _encode_window(code: Code, x: Tensor, addend: Tensor | int, shift: int, scale: Tensor | float) -> Tensor:
    """A small float with subnormals: scaled by a power of two, its exponent field begins at zero like float32's own."""
    bits, dropped = bits_of(x * scale), dropped_bits(code)
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


def _decode_window(code: Code, word: Tensor, shift: int, scale: Tensor | float) -> Tensor:
    steps = _last_step(code) << dropped_bits(code)
    moved = _moved(word, dropped_bits(code) - shift)
    place = shift + code.bits - 1
    if code.signed and place == 31:
        bits = moved & (steps | SIGN)  # a right shift of an int32 leaves its sign where it is
    elif code.signed:
        bits = (moved & steps) | ((word << (31 - place)) & SIGN)
    else:
        bits = moved & steps
    return float_of(bits) * scale


def _last_step(code: Code) -> int:
    """The largest magnitude a window code holds, counted in steps from zero; it also stands for all that is larger."""
    return (1 << (code.exponent_bits + code.mantissa_bits)) - 1


def _scale(code: Code) -> int:
    """The difference between the window's exponents and float32's."""
    return code.lowest + 126


def _moved(x: Tensor, left: int) -> Tensor:
    """``x`` shifted left, or right by a negative number (copying the sign), or untouched by zero."""
    return x << left if left > 0 else x >> -left if left < 0 else x


def multipliers(code: Code, bound: Tensor) -> tuple[Tensor, Tensor]:
    """What takes values of a row into the window of a scaled code, and back.

    The window ends at the smallest power of two that is not below ``bound``; what lies up to 1.7 times above it still fits.
    The largest window of a code that begins at ``2**lowest`` of its end is at ``2**-lowest``.

    Args:
        code: a scaled code.
        bound: float32, the largest magnitude of each row, or somewhat more.
    Returns:
        ``(into, back)``: powers of two, float32, shaped like ``bound``.
    """
    # Rounding the exponent up: anything but a power of two carries. Both results must be normal float32 values.
    exponent = ((bits_of(bound.nan_to_num(nan=3e38, posinf=3e38)) + 0x7FFFFF) >> 23) - 127
    exponent = (exponent + _scale(code)).clamp(-126, 126)
    return float_of((127 - exponent) << 23), float_of((127 + exponent) << 23)


# ── the weight ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def visible_value(visible: str, bits: Tensor) -> Tensor:
    """The float32 of a visible weight's bits.

    Args:
        visible: the visible format.
        bits: int32, the bits of a float32; for float16, of that float32 times 2^-112, whose exponents are float16's own.
    Returns:
        float32 tensor; float16's infinities and NaNs are 65536 and more.
    """
    exponent = VISIBLE[visible][2]
    return float_of(bits) * 2.0**-exponent if exponent else float_of(bits)


def gradient_value(visible: str, bits: Tensor) -> Tensor:
    """:func:`visible_value` for a gradient: infinities and NaNs stay what they are."""
    value = visible_value(visible, bits)
    if VISIBLE[visible][2]:
        value = torch.where(value.abs() >= 65536.0, value * float("inf"), value)
    return value


def visible_bits(visible: str, x: Tensor) -> Tensor:
    """The bits of a visible weight in a kernel: the inverse of :func:`visible_value`."""
    exponent = VISIBLE[visible][2]
    return bits_of(x * 2.0**exponent) if exponent else bits_of(x)


def encode_visible(storage: Storage, x: Tensor, addend: Tensor | int) -> Tensor:
    """Cut ``x`` to the visible format's bits (see :func:`visible_value`), its infinities included.

    Args:
        storage: a row whose visible format is narrow.
        x: float32 tensor.
        addend: what to add before cutting; 0 where ``x`` is a value of the format, or beyond it.
    Returns:
        int32 tensor.
    """
    _, below, exponent = VISIBLE[storage.visible]
    return _in_range(storage, cut(x * 2.0**exponent if exponent else x, below, addend))


def encode_weight(storage: Storage, x: Tensor, addend: Tensor | int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Cut a weight into the visible weight and its tail.

    Args:
        storage: the storage; its weight has one part.
        x: float32 tensor, the weight after the step.
        addend: what to add before cutting.
    Returns:
        ``(visible, field, stored)``: the visible weight's bits (see :func:`visible_value`), the signed tail or the bits
        of the master (int32), ``None`` where there is neither, and the float32 value that the two stand for.
    """
    if storage.visible == "float32":
        return bits_of(x), None, x
    _, below, exponent = VISIBLE[storage.visible]
    scaled = x * 2.0**exponent if exponent else x
    if storage.master:
        return _in_range(storage, cut(scaled, below, half(below))), bits_of(x), x
    if not storage.tail_bits:
        visible = _in_range(storage, cut(scaled, below, addend))
        return visible, None, visible_value(storage.visible, visible)
    whole = cut(scaled, dropped_bits(storage.weight), addend)
    # The nearest visible value, and the signed rest: adding half of the tail's range carries exactly where the rest is
    # negative. Only NaNs are large enough to wrap, and `cut` leaves none that does.
    visible = _in_range(storage, (whole + half(below)) & -(1 << below))
    return visible, whole - visible, visible_value(storage.visible, whole)


def _in_range(storage: Storage, visible: Tensor) -> Tensor:
    """What rounds past float16's largest value, or is no number, becomes its infinity."""
    if storage.visible != "float16":
        return visible
    infinity = 31 << 23
    return (visible & MAGNITUDE).clamp(max=infinity) | (visible & SIGN)


def decode_weight(storage: Storage, visible: Tensor, field: Tensor | None) -> Tensor:
    """The stored float32 weight from its visible bits and its field: the inverse of :func:`encode_weight`.

    Where the visible weight is not the rounded master, it was modified outside the optimizer and replaces the master.
    """
    if storage.master:
        assert field is not None
        return torch.where(
            is_outdated(storage, visible, field), visible_value(storage.visible, visible), float_of(field)
        )
    return visible_value(storage.visible, visible if field is None else visible + field)


def is_outdated(storage: Storage, visible: Tensor, field: Tensor) -> Tensor:
    """Where the visible weight is not the rounded master."""
    return encode_weight(storage, float_of(field), 0)[0] != _in_range(storage, visible)


def place_tail(storage: Storage, tail: Tensor, shift: int) -> Tensor:
    """A signed tail's bits at their place in a word, zeros elsewhere."""
    dropped = dropped_bits(storage.weight)
    return _moved(tail, shift - dropped) & (((1 << storage.tail_bits) - 1) << shift)


def take_tail(storage: Storage, word: Tensor, shift: int) -> Tensor:
    """The signed tail at ``shift`` in a word: the inverse of :func:`place_tail`."""
    # Up to the sign, then down: the tail is signed, and its lowest bit belongs where the cut ended. What lies below it in
    # the word is cleared; below bit 0 there is nothing.
    dropped = dropped_bits(storage.weight)
    tail = _moved(word, 32 - storage.tail_bits - shift) >> (32 - storage.tail_bits - dropped)
    return tail & -(1 << dropped) if dropped and shift else tail
