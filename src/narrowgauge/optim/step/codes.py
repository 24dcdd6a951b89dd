"""Codes: float32 values rounded to the bits of a storage, and decoded.

Everything here is written once, in int32 and float32 operations. It gives the same bits eagerly,
compiled, on CPUs and on GPUs. A storage of float64 masters has int64 words and float64 values, and
is never compiled.

A *code* rounds one float32 (:class:`narrowgauge.spec.storages.Code`). Several codes share a 32-bit
word, each at its own ``shift``. Encoding returns a code's bits in place and zeros elsewhere, so
packing is an ``or``. Decoding is a shift and a mask.

A weight has two parts. The model computes with the *visible* weight: the stored one, rounded to
nearest. The rest is a *tail*, a low part, or a master of the whole. It belongs to the visible
weight if both together round to it. What does not belong is dropped, since other code has written
the weight. :func:`read` decides.

A code rounds ties to even. Where a tail or a master says more, a tie between two visible weights
goes up. A tail of ``n`` bits has 2ⁿ values. To even, the cell of an even weight holds 2ⁿ + 1 and
that of an odd one 2ⁿ - 1. So :func:`into_cell` and :func:`inside_cell` move such ties, one of 65,536
float32: what is stored and exported rounds to the visible weight, ties to even.

A NaN loses its sign and payload. It becomes the quiet NaN. In a code of states without NaN it
becomes the largest positive value (in a float16 weight, infinity).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.numerics.rounding import (
    MAGNITUDE,
    Addend,
    addend_of,
    bits_of,
    canonical_bits,
    float_of,
    half,
    random_bits,
    reciprocal,
    round_bits,
    round_bits_to_even,
)
from narrowgauge.optim.step.bit_layout import Field, dropped_bits, fields_of, roles
from narrowgauge.spec.storages import VISIBLE, Storage, low_parts

SIGN = -(1 << 31)
MANTISSA = 0x7FFFFF
QUIET_NAN64 = 0x7FF8 << 48


def value_dtype(storage: Storage) -> torch.dtype:
    """Return the dtype in which a rule computes."""
    if storage.arithmetic == "float64":
        return torch.float64
    return torch.float32


# ── one code: the upper bits of a float32 are a window of all its exponents ───────────────────────


def encode(field: Field, x: Tensor, addend: Addend, scale: Tensor | None = None) -> Tensor:
    """Round ``x`` to a field's code: int32, zero outside the field's bits.

    A float64 code gives int64.

    ``addend`` is added before cutting (:func:`narrowgauge.numerics.rounding.round_bits`). A scaled code
    takes as ``scale`` the first result of :func:`multipliers`.
    """
    code = field.code
    if code.bits == 64:
        return torch.where(x.isnan(), QUIET_NAN64, x.double().view(torch.int64))
    inside = x
    if scale is not None:
        inside = x * scale
    bits = canonical_bits(_times_power(inside, -field.exponent))
    steps = (bits & MAGNITUDE).clamp(max=field.last)
    if field.drop:
        steps = (steps + addend_of(steps, field.drop, addend)) >> field.drop
    if code.hold:
        # Test the unscaled x: scaling flushes the smallest float32 subnormals to zero.
        steps = steps.maximum(bits_of(x).clamp(max=1))
    if code.signed:
        steps = steps | (((bits >> 31) & 1) << code.magnitude_bits)
    return steps << field.shift


def decode(field: Field, word: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return the float32 values of a field in words of its plane.

    ``scale`` is the second result of :func:`multipliers`.
    """
    code = field.code
    if code.bits == 64:
        return word.view(torch.float64)
    bits = (word >> field.shift << field.drop) & field.last
    if code.signed:
        bits = bits | ((word << (31 - code.magnitude_bits - field.shift)) & SIGN)
    value = _times_power(float_of(bits), field.exponent)
    if scale is not None:
        value = value * scale
    return value


def _times_power(x: Tensor, exponent: int) -> Tensor:
    if exponent:
        return x * 2.0**exponent
    return x


def multipliers(bound: Tensor) -> tuple[Tensor, Tensor]:
    """Return the powers of two that take rows of a scaled code below 1, and back: float32, shaped
    like ``bound``.

    The window ends at the smallest power of two not below ``bound``, the amax of a row or slightly
    more. Values up to 1.7 times that end still fit.
    """
    # Round the exponent up: everything but a power of two carries. Both results, and their products
    # with the distance of a low part, are to be normal float32 values.
    finite = torch.where(bound < math.inf, bound, 3e38)
    exponent = ((bits_of(finite) + MANTISSA) >> 23) - 127
    exponent = exponent.clamp(-112, 126)
    return float_of((127 - exponent) << 23), float_of((127 + exponent) << 23)


# ── the visible weight ────────────────────────────────────────────────────────────────────────────


def visible_value(visible: str, bits: Tensor) -> Tensor:
    """Return the float32 value of a visible weight's bits.

    Float16's are those of the value times 2^-112 as float32. Its infinities and NaNs become 65536
    and more.
    """
    return _times_power(float_of(bits), -VISIBLE[visible][2])


def visible_bits(visible: str, x: Tensor) -> Tensor:
    """Return the bits of a visible weight: the inverse of :func:`visible_value`."""
    return bits_of(_times_power(x, VISIBLE[visible][2]))


def encode_visible(storage: Storage, x: Tensor, addend: Addend) -> Tensor:
    """Round ``x`` to the visible format's bits."""
    _, below, exponent = VISIBLE[storage.visible]
    return in_range(storage, round_bits(_times_power(x, exponent), below, addend))


def in_range(storage: Storage, visible: Tensor) -> Tensor:
    """Turn NaN, and values that round past float16's largest, into its infinity."""
    if storage.visible != "float16":
        return visible
    return (visible & MAGNITUDE).clamp(max=31 << 23) | (visible & SIGN)


def weight_bits(visible: str, word: Tensor) -> Tensor:
    """Return the bits of a visible weight (:func:`visible_value`) from a word of its format."""
    size, below, _ = VISIBLE[visible]
    bits = word << (32 - size)
    return ((bits & MAGNITUDE) >> (32 - size - below)) | (bits & SIGN)


def weight_word(visible: str, bits: Tensor) -> Tensor:
    """Return the word of a visible weight: the inverse of :func:`weight_bits`."""
    size, below, _ = VISIBLE[visible]
    return (((bits << (32 - size - below)) & MAGNITUDE) | (bits & SIGN)) >> (32 - size)


# ── a weight and its states ───────────────────────────────────────────────────────────────────────


Scales = Mapping[str, tuple[Tensor, Tensor]]
"""The :func:`multipliers` of each row-scaled code by name."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Hold the inputs of a step for some elements: int32 bits of the visible weight
    (:func:`visible_value`), and the gradient in float32.

    ``words`` are those of each plane; bits outside of fields may be anything.
    """

    visible: Tensor
    gradient: Tensor
    words: Sequence[Tensor]
    scales: Scales


Fields = dict[str, Tensor]
"""The int32 bits of fields by name, in place."""
Written = tuple[Tensor, Fields]
"""The bits of visible weights, and all fields."""


def addends(
    storage: Storage, weight: Tensor, gradient: Tensor, seed: Tensor | int
) -> dict[str, Addend]:
    """Return the addend of each code (weight and states) before the cut, from one hashed word per
    element.

    The hash key is the stored weight before the step and the gradient's unscaled *mantissa*. An
    exponent would make the rounding depend on a power of two on all gradients. The stochastic codes
    divide the 32 bits (:func:`narrowgauge.optim.step.bit_layout.random_slices` draws them), and
    borrow from each other. Without this, 12 bits for 18 would lose every chance below 2^-12: at beta2
    = 0.9999 a second moment would stop 2 % short.
    """
    result = dict.fromkeys(roles(storage))  # to nearest
    if not storage.is_stochastic:
        return result
    mantissa = visible_bits(storage.visible, gradient) & MANTISSA
    if storage.visible == "bfloat16":
        mantissa = mantissa >> 16
    random = random_bits(bits_of(weight) ^ mantissa, seed)
    for name in result:
        field = fields_of(storage)[name]
        if field.random_slice is None:
            continue
        start, borrowed = field.random_slice
        word = random
        if borrowed:
            word = (random << borrowed) | ((random >> (32 - borrowed)) & ((1 << borrowed) - 1))
        result[name] = (word >> start) & ((1 << field.drop) - 1)
    return result


def read(storage: Storage, lane: Lane) -> tuple[Tensor, Tensor | None]:
    """Decode the weight that a rule reads, float32 or :func:`value_dtype`, and the compensation that
    is added to its change, if there is one (Kahan's).

    If the visible weight is not the rounded master, other code wrote it, and it replaces the
    master. A low part that does not belong to it is 0. A tail moves a weight that other code wrote
    by at most half an ulp. It does not move a written zero: a negative tail would make a NaN of its
    sign.
    """
    visible = storage.visible
    weight = visible_value(visible, lane.visible)
    field = fields_of(storage)["weight"]
    if not field.name:
        return weight, None
    word = lane.words[field.plane - 1]
    if storage.master:
        stored = decode(field, word)
        seen = encode_visible(storage, stored.float(), half(VISIBLE[visible][1]))
        is_current = seen == in_range(storage, lane.visible)
        return torch.where(is_current, stored, weight), None
    if storage.tail_bits:
        up = 32 - field.bits
        tail = (word << (up - field.shift)) >> up << field.drop
        total = lane.visible + tail
        # Where the sum has another sign, take the visible weight.
        total = torch.where((total ^ lane.visible) < 0, lane.visible, total)
        return visible_value(visible, total), None
    low = decode(field, word)
    return weight, torch.where(_is_own(storage, lane.visible, low), low, 0.0)


def read_weight(storage: Storage, lane: Lane) -> Tensor:
    """Return the stored weight with all its parts."""
    weight, low = read(storage, lane)
    if low is not None:
        weight = weight + low
    return weight


def _parts_of(storage: Storage, name: str) -> list[Field]:
    """Return the fields of the parts of a state."""
    names = name, *low_parts(name, storage.code(name))
    return [fields_of(storage)[part] for part in names]


def read_parts(storage: Storage, lane: Lane, name: str) -> list[Tensor]:
    """Decode the parts of a state."""
    _, back = lane.scales.get(name, (None, None))
    parts = []
    for field in _parts_of(storage, name):
        parts.append(decode(field, lane.words[field.plane - 1], back))
    return parts


def read_state(storage: Storage, lane: Lane, name: str) -> Tensor:
    """Return the value of the weight or of a state: the sum of its parts."""
    if name == "weight":
        return read_weight(storage, lane)
    parts = read_parts(storage, lane, name)
    return sum(parts[1:], parts[0])


def at_end(storage: Storage, lane: Lane, eps: float) -> Tensor:
    """Return which elements have a state at an end of its code's window.

    The first end is the smallest second moment that is held there, if it is above ``eps²``: a
    smaller one changes no step. Elements without a gradient are not at that end.
    """
    result = torch.zeros_like(lane.visible, dtype=torch.bool)
    for name, _ in storage.states:
        field = fields_of(storage)[name]
        code = field.code
        if not code.is_window or code.scaled:
            continue
        last = (1 << code.magnitude_bits) - 1
        bits = lane.words[field.plane - 1] >> field.shift & last
        result |= bits == last
        if code.hold and 2.0 ** (code.lowest - code.mantissa_bits) > eps**2:
            result |= (bits == 1) & (lane.gradient != 0)
    return result


def write(
    storage: Storage,
    lane: Lane,
    old: tuple[Tensor, Tensor | None],
    change: Tensor,
    states: Mapping[str, Tensor],
    seed: Tensor,
) -> Written:
    """Round the result of a step to the storage's formats: the bits of the visible weight, and all
    fields.

    ``old`` is the weight as :func:`read` returns it, ``change`` is added to it, and ``states`` are
    the new states by name.
    """
    weight, low = old
    addend = addends(storage, weight, lane.gradient, seed)
    if low is None:
        visible, fields = write_weight(storage, weight + change, addend["weight"])
    else:
        # Kahan's order: add the compensation to the change first, so that the weight absorbs
        # neither.
        total = low + change
        visible = encode_visible(storage, weight + total, None)
        rest = total - (visible_value(storage.visible, visible) - weight)
        fields = write_low(storage, visible, rest)
    for name, value in states.items():
        fields |= write_state(storage, lane, name, value, addend[name])
    return visible, fields


def write_weight(storage: Storage, value: Tensor, addend: Addend) -> Written:
    """Return the visible bits of a weight, and its fields in place."""
    _, below, exponent = VISIBLE[storage.visible]
    field = fields_of(storage)["weight"]
    if storage.master:
        visible = encode_visible(storage, value.float(), half(below))
        return visible, {"master": encode(field, value, None)}
    if storage.tail_bits:
        bits = round_bits(_times_power(value, exponent), field.drop, addend)
        # Adding half of the tail's range carries exactly if the rest is negative. Only NaNs are
        # large enough to wrap, and `round_bits` leaves none that does.
        visible = in_range(storage, (bits + half(below)) & -(1 << below))
        tail = ((bits - visible) >> field.drop) & ((1 << field.bits) - 1)
        return visible, {"tail": tail << field.shift}
    visible = encode_visible(storage, value, addend)
    if not field.name:
        return visible, {}
    rest = value - visible_value(storage.visible, visible)
    return visible, write_low(storage, visible, rest)


def write_low(storage: Storage, bits: Tensor, rest: Tensor) -> Fields:
    """Encode the low part of a visible weight: toward zero where the nearest one is not its own."""
    field = fields_of(storage)["weight"]
    nearest = encode(field, rest, None)
    is_own = _is_own(storage, bits, decode(field, nearest))
    return {field.name: torch.where(is_own, nearest, encode(field, rest, 0))}


def into_cell(storage: Storage, value: Tensor) -> Tensor:
    """Return values to be stored. Move a tie that goes down to an even weight to the last value of
    its cell, or :func:`write_weight` would round it up.
    """
    _, below, exponent = VISIBLE[storage.visible]
    if not below or not (storage.tail_bits or storage.master):
        return value
    bits = canonical_bits(_times_power(value, exponent))
    nearest = round_bits_to_even(bits, below)
    last = half(below) - (1 << dropped_bits(storage.weight))
    moved = visible_value(storage.visible, nearest + last)
    return torch.where(bits - nearest > last, moved, value)


def inside_cell(storage: Storage, weight: Tensor, lane: Lane, value: Tensor) -> Tensor:
    """Return the stored values of visible weights of 16 bits. Move those that do not round to their
    weight, ties to even, to the next float32 that does.
    """
    most = half(VISIBLE[storage.visible][1]) - 1
    offset = visible_bits(storage.visible, value) - lane.visible
    moved = visible_value(storage.visible, lane.visible + offset.clamp(-most, most))
    return torch.where(value.to(weight.dtype) != weight, moved, value)


def _is_own(storage: Storage, bits: Tensor, low: Tensor) -> Tensor:
    """Return whether a low part and the visible weight together round to it."""
    total = visible_bits(storage.visible, visible_value(storage.visible, bits) + low)
    return round_bits_to_even(total, VISIBLE[storage.visible][1]) == bits


def write_state(storage: Storage, lane: Lane, name: str, value: Tensor, addend: Addend) -> Fields:
    """Return a state's bits in place. A second part stores what the first one leaves."""
    first, *second = _parts_of(storage, name)
    into, _ = lane.scales.get(name, (None, None))
    fields = {first.name: encode(first, value, addend, into)}
    for field in second:
        back = into
        if into is not None:
            back = reciprocal(into)
        rest = value - decode(first, fields[first.name], back)
        fields[field.name] = encode(field, rest, addend, into)
    return fields


def write_parts(storage: Storage, lane: Lane, name: str, parts: Sequence[Tensor]) -> Fields:
    """Return the bits of a state's parts in place, to nearest."""
    into, _ = lane.scales.get(name, (None, None))
    fields = {}
    for field, value in zip(_parts_of(storage, name), parts, strict=True):
        fields[field.name] = encode(field, value, None, into)
    return fields
