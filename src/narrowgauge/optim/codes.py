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
goes up: weights and tails together hold each value once, and to even an even weight would need one
tail more. :func:`narrowgauge.optim.cells.inside_cell` moves such values, one of 65,536 float32, so
that each stored weight rounds to its visible one, ties to even. A NaN loses its sign and payload. It
becomes the quiet NaN. In a code of states without NaN it becomes the largest positive value (in a
float16 weight, infinity).
"""

from __future__ import annotations

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
    cut,
    cut_to_even,
    dither,
    float_of,
    half,
    random_bits,
    reciprocal,
)
from narrowgauge.optim.planes import dropped_bits, planes_of, shares
from narrowgauge.spec.storages import VISIBLE, Code, Storage, low_parts

SIGN = -(1 << 31)
MANTISSA = 0x7FFFFF
QUIET_NAN64 = 0x7FF8 << 48


def value_dtype(storage: Storage) -> torch.dtype:
    """Return the dtype in which a rule computes."""
    if storage.arithmetic == "float64":
        return torch.float64
    return torch.float32


# ── one code: the upper bits of a float32 are a window of all its exponents ───────────────────────


def encode(
    code: Code, x: Tensor, addend: Addend, shift: int, scale: Tensor | None = None
) -> Tensor:
    """Round ``x`` to a code at ``shift`` in a word: int32, zero outside the code's bits.

    A float64 code gives int64.

    ``addend`` is added before cutting (:func:`narrowgauge.numerics.rounding.cut`). A scaled code
    takes as ``scale`` the first result of :func:`multipliers`.
    """
    if code.bits == 64:
        return torch.where(x.isnan(), QUIET_NAN64, x.double().view(torch.int64))
    dropped = dropped_bits(code)
    inside = x
    if scale is not None:
        inside = x * scale
    bits = canonical_bits(_times_power(inside, -_offset(code)))
    steps = (bits & MAGNITUDE).clamp(max=_last_step(code) << dropped)
    if dropped:
        steps = (steps + addend_of(steps, dropped, addend)) >> dropped
    if code.hold:
        # Test the unscaled x: scaling flushes the smallest float32 subnormals to zero.
        steps = steps.maximum(bits_of(x).clamp(max=1))
    if code.signed:
        steps = steps | (((bits >> 31) & 1) << code.magnitude_bits)
    return steps << shift


def decode(code: Code, word: Tensor, shift: int, scale: Tensor | None = None) -> Tensor:
    """Return the float32 values of codes at ``shift`` in words.

    ``scale`` is the second result of :func:`multipliers`.
    """
    if code.bits == 64:
        return word.view(torch.float64)
    bits = ((word >> shift) & _last_step(code)) << dropped_bits(code)
    if code.signed:
        bits = bits | ((word << (31 - code.magnitude_bits - shift)) & SIGN)
    value = _times_power(float_of(bits), _offset(code))
    if scale is not None:
        value = value * scale
    return value


def _last_step(code: Code) -> int:
    """Return the largest magnitude of a code in steps from zero.

    Larger values of a window saturate to it.
    """
    return (1 << code.magnitude_bits) - 1


def _offset(code: Code) -> int:
    """Return the offset between a code's exponents and float32's."""
    return code.lowest + 126


def _times_power(x: Tensor, exponent: int) -> Tensor:
    if exponent:
        return x * 2.0**exponent
    return x


def finite_bound(bound: Tensor) -> Tensor:
    """Return magnitudes with a large number for infinity and NaN."""
    return torch.where(bound < math.inf, bound, 3e38)


def multipliers(bound: Tensor) -> tuple[Tensor, Tensor]:
    """Return the powers of two that take rows of a scaled code below 1, and back: float32, shaped
    like ``bound``.

    The window ends at the smallest power of two not below ``bound``, the amax of a row or slightly
    more. Values up to 1.7 times that end still fit.
    """
    # Round the exponent up: everything but a power of two carries. Both results, and their products
    # with the distance of a low part, are to be normal float32 values.
    exponent = ((bits_of(finite_bound(bound)) + 0x7FFFFF) >> 23) - 127
    exponent = exponent.clamp(-112, 126)
    return float_of((127 - exponent) << 23), float_of((127 + exponent) << 23)


# ── the weight ────────────────────────────────────────────────────────────────────────────────────


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
    return in_range(storage, cut(_times_power(x, exponent), below, addend))


def in_range(storage: Storage, visible: Tensor) -> Tensor:
    """Turn NaN, and values that round past float16's largest, into its infinity."""
    if storage.visible != "float16":
        return visible
    infinity = 31 << 23
    return (visible & MAGNITUDE).clamp(max=infinity) | (visible & SIGN)


def split_weight(storage: Storage, x: Tensor, addend: Addend) -> tuple[Tensor, Tensor | None]:
    """Return the visible bits of a weight of one part, and the master's bits or the signed tail."""
    _, below, exponent = VISIBLE[storage.visible]
    if storage.master:
        visible = encode_visible(storage, x.float(), half(below))
        return visible, encode(storage.weight, x, None, 0)
    if not storage.tail_bits:
        return encode_visible(storage, x, addend), None
    bits = cut(_times_power(x, exponent), dropped_bits(storage.weight), addend)
    # Find the nearest visible value and the signed rest. Adding half of the tail's range carries
    # exactly if the rest is negative. Only NaNs are large enough to wrap, and `cut` leaves none
    # that does.
    visible = in_range(storage, (bits + half(below)) & -(1 << below))
    return visible, bits - visible


def _is_own(storage: Storage, bits: Tensor, low: Tensor) -> Tensor:
    """Return whether a low part and the visible weight together round to it."""
    total = visible_bits(storage.visible, visible_value(storage.visible, bits) + low)
    return cut_to_even(total, VISIBLE[storage.visible][1]) == bits


def encode_low(storage: Storage, bits: Tensor, rest: Tensor, shift: int) -> Tensor:
    """Encode the low part of a visible weight: toward zero where the nearest one is not its own."""
    nearest = encode(storage.weight, rest, None, shift)
    is_own = _is_own(storage, bits, decode(storage.weight, nearest, shift))
    return torch.where(is_own, nearest, encode(storage.weight, rest, 0, shift))


def place_tail(storage: Storage, tail: Tensor, shift: int) -> Tensor:
    """Return a signed tail's bits at their position in a word, zeros elsewhere."""
    steps = tail >> dropped_bits(storage.weight)
    return (steps & ((1 << storage.tail_bits) - 1)) << shift


def take_tail(storage: Storage, word: Tensor, shift: int) -> Tensor:
    """Return the signed tail at ``shift`` in a word: the inverse of :func:`place_tail`."""
    # Shift up to the sign, then down: the tail is signed.
    up = 32 - storage.tail_bits
    return (word << (up - shift)) >> up << dropped_bits(storage.weight)


# ── a weight and its states ───────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Lane:
    """Hold the inputs of a step for some elements: int32 bits of the visible weight
    (:func:`visible_value`), and the gradient in float32.

    ``fields`` maps a field to its word and first bit. ``scales`` maps each row-scaled code to its
    :func:`multipliers`.
    """

    visible: Tensor
    gradient: Tensor
    fields: Mapping[str, tuple[Tensor, int]]
    scales: Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Values:
    """Hold the values of a lane, float32 or :func:`value_dtype`.

    ``weight`` is the input of the rule: the stored weight, or the visible one if ``low`` is its
    compensation (Kahan's).
    """

    weight: Tensor
    low: Tensor | None
    states: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """Hold the outputs of a step: int32 bits of the visible weight and of every field in place, and
    the change that was intended.
    """

    visible: Tensor
    fields: dict[str, Tensor]
    intended: Tensor


def lane_of(
    storage: Storage,
    weight: Tensor,
    gradient: Tensor,
    words: Sequence[Tensor],
    scales: Mapping[str, tuple[Tensor, Tensor]],
) -> Lane:
    """Return the lane of the words of the weight and of each plane. Upper bits may be anything."""
    fields: dict[str, tuple[Tensor, int]] = {}
    for plane, word in zip(planes_of(storage), words, strict=True):
        for name, shift, _ in plane.fields:
            fields[name] = word, shift
    return Lane(weight_bits(storage.visible, weight), gradient, fields, scales)


def weight_bits(visible: str, word: Tensor) -> Tensor:
    """Return the bits of a visible weight (:func:`visible_value`) from a word of its format."""
    if visible == "float32":
        return word
    half_word = word << 16
    if visible == "bfloat16":
        return half_word
    # A float16 in the upper half of a word becomes a float32 with its sign, exponent and mantissa
    # fields.
    return ((half_word & 0x7FFF0000) >> 3) | (half_word & SIGN)


def weight_word(visible: str, bits: Tensor) -> Tensor:
    """Return the word of a visible weight: the inverse of :func:`weight_bits`."""
    if visible == "float32":
        return bits
    if visible == "float16":
        bits = ((bits << 3) & 0x7FFF0000) | (bits & SIGN)
    return bits >> 16


def gradient_mantissa(visible: str, gradient: Tensor) -> Tensor:
    """Return the mantissa of a gradient, a part of the key of random bits.

    A power of two on all gradients does not change it.
    """
    if visible == "bfloat16":
        return (bits_of(gradient) >> 16) & 0x7F
    return visible_bits(visible, gradient) & MANTISSA


def addends(storage: Storage, weight: Tensor, gradient: Tensor, seed: Tensor) -> dict[str, Addend]:
    """Return the addend of each code (weight and states) before the cut, from one hashed word per
    element.

    The hash key is the stored weight before the step and the gradient's unscaled *mantissa*. An
    exponent would make the rounding depend on a power of two on all gradients. The 32 bits are
    divided among the stochastic codes, the weight first. A code may drop more bits than it gets.
    Then it borrows its lower bits from its neighbour's upper bits. Without this, 12 bits for 18
    would lose every chance below 2^-12: at beta2 = 0.9999 a second moment would stop 2 % short.
    """
    result: dict[str, Addend] = dict.fromkeys(("weight", *dict(storage.states)))  # to nearest
    places = shares(storage)
    if not places:
        return result
    random = random_bits(bits_of(weight) ^ gradient_mantissa(storage.visible, gradient), seed)
    for name, (start, borrowed) in places.items():
        dropped = dropped_bits(storage.code(name))
        turned = random
        if borrowed:
            low = (random >> (32 - borrowed)) & ((1 << borrowed) - 1)
            turned = (random << borrowed) | low
        result[name] = dither(turned, start, dropped, dropped)
    return result


def read(storage: Storage, lane: Lane, states: Sequence[str] = ()) -> Values:
    """Decode a lane's weight and the named states.

    If the visible weight is not the rounded master, other code wrote it, and it replaces the
    master. A low part that does not belong to it is 0. A tail moves a weight that other code wrote
    by at most half an ulp. It does not move a written zero: a negative tail would make a NaN of its
    sign.
    """
    weight = visible_value(storage.visible, lane.visible)
    low = None
    if storage.beside:
        word, shift = lane.fields[storage.beside[0]]
        if storage.master:
            stored = decode(storage.weight, word, 0)
            is_current = split_weight(storage, stored, None)[0] == in_range(storage, lane.visible)
            weight = torch.where(is_current, stored, weight)
        elif storage.tail_bits:
            total = lane.visible + take_tail(storage, word, shift)
            # The exclusive or is negative where the sign changes, and turns the sum back into the
            # visible weight.
            back = (total ^ lane.visible).clamp(max=0)
            weight = visible_value(storage.visible, total ^ back)
        else:
            low = decode(storage.weight, word, shift)
            low = torch.where(_is_own(storage, lane.visible, low), low, 0.0)
    return Values(weight, low, tuple(read_state(storage, lane, name) for name in states))


def read_parts(storage: Storage, lane: Lane, name: str) -> tuple[Tensor, ...]:
    """Decode the parts of a state, or of the weight."""
    if name == "weight":
        values = read(storage, lane)
        if values.low is None:
            return (values.weight,)
        return values.weight, values.low
    code = storage.code(name)
    parts = []
    for place, part in enumerate((name, *low_parts(name, code))):
        parts.append(decode(code, *lane.fields[part], _scale(code, lane, name, place, 1)))
    return tuple(parts)


def read_state(storage: Storage, lane: Lane, name: str) -> Tensor:
    """Return a state's float32 value: the sum of its parts."""
    parts = read_parts(storage, lane, name)
    return sum(parts[1:], parts[0])


def read_weight(storage: Storage, lane: Lane) -> Tensor:
    """Return the stored weight with all its parts."""
    return read_state(storage, lane, "weight")


def write(
    storage: Storage,
    lane: Lane,
    old: Values,
    change: Tensor,
    states: Mapping[str, Tensor],
    seed: Tensor,
) -> Written:
    """Round the result of a step to the storage's formats.

    ``old`` is the lane as :func:`read` returns it, ``change`` is added to its weight, and
    ``states`` are the new states by name.
    """
    addend = addends(storage, old.weight, lane.gradient, seed)
    if old.low is None:
        visible, fields = write_weight(storage, lane, old.weight + change, addend["weight"])
    else:
        # Kahan's order: add the compensation to the change first, so that the weight absorbs
        # neither.
        total = old.low + change
        visible = encode_visible(storage, old.weight + total, None)
        rest = total - (visible_value(storage.visible, visible) - old.weight)
        fields = _low_field(storage, lane, visible, rest)
    for name, value in states.items():
        fields |= write_state(storage, lane, name, value, addend[name])
    return Written(visible, fields, change)


def write_parts(
    storage: Storage, lane: Lane, change: Tensor, parts: Mapping[str, Sequence[Tensor]]
) -> Written:
    """Round a weight and states given in parts, each part to the nearest: the inverse of
    :func:`read_parts`.
    """
    weight, low = parts["weight"]
    visible = encode_visible(storage, weight, None)
    fields = _low_field(storage, lane, visible, low)
    for name in dict(storage.states):
        names = (name, *low_parts(name, storage.code(name)))
        for place, (part, value) in enumerate(zip(names, parts[name], strict=True)):
            fields[part] = _encode_part(storage, lane, name, place, value, None)
    return Written(visible, fields, change)


def write_weight(
    storage: Storage, lane: Lane, value: Tensor, addend: Addend
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the visible bits of a float32 weight, and its fields in place."""
    if storage.weight.parts > 1 and not storage.master:
        visible = encode_visible(storage, value, None)
        rest = value - visible_value(storage.visible, visible)
        return visible, _low_field(storage, lane, visible, rest)
    visible, field = split_weight(storage, value, addend)
    if field is None:
        return visible, {}
    (name,) = storage.beside
    if storage.tail_bits:
        field = place_tail(storage, field, lane.fields[name][1])
    return visible, {name: field}


def _low_field(storage: Storage, lane: Lane, visible: Tensor, rest: Tensor) -> dict[str, Tensor]:
    (name,) = storage.beside
    return {name: encode_low(storage, visible, rest, lane.fields[name][1])}


def write_state(
    storage: Storage, lane: Lane, name: str, value: Tensor, addend: Addend
) -> dict[str, Tensor]:
    """Return a state's bits in place. Each part stores the remainder of the parts before it."""
    code = storage.code(name)
    fields = {}
    rest = value
    for place, part in enumerate((name, *low_parts(name, code))):
        fields[part] = _encode_part(storage, lane, name, place, rest, addend)
        if place + 1 < code.parts:
            back = _scale(code, lane, name, place, 0)
            if back is not None:
                back = reciprocal(back)
            rest = rest - decode(code, fields[part], lane.fields[part][1], back)
    return fields


def _encode_part(
    storage: Storage, lane: Lane, name: str, place: int, value: Tensor, addend: Addend
) -> Tensor:
    code = storage.code(name)
    shift = lane.fields[(name, *low_parts(name, code))[place]][1]
    return encode(code.part(place), value, addend, shift, _scale(code, lane, name, place, 0))


def _scale(code: Code, lane: Lane, name: str, place: int, way: int) -> Tensor | None:
    """Return the multiplier into the window of a scaled code's part (0), or out of it (1).

    Each part is finer by the bits of the one before.
    """
    if not code.scaled:
        return None
    finer = place * (code.mantissa_bits + 1)
    into, back = lane.scales[name]
    if way:
        return back * 2.0**-finer
    return into * 2.0**finer


def changes(storage: Storage, lane: Lane, written: Written) -> tuple[Tensor, Tensor, Tensor]:
    """Return the changes of a step for an audit, float32: intended, of the stored weight, of the
    visible weight.
    """
    fields = dict(lane.fields)
    for name, bits in written.fields.items():
        fields[name] = bits, lane.fields[name][1]
    after = Lane(written.visible, lane.gradient, fields, lane.scales)
    stored = read_weight(storage, after) - read_weight(storage, lane)
    old, new = [visible_value(storage.visible, bits) for bits in (lane.visible, written.visible)]
    return written.intended, stored, new - old
