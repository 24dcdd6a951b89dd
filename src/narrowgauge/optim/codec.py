"""The codec of a storage: how float32 values are cut to bits, and how those bits lie in 32-bit words.

It has three levels. Each is written once, in int32 and float32 operations that give the same bits in eager mode, compiled, on a
CPU and on a GPU.

*Codes* cut one float32 to the bits that a storage stores, and restore it (:class:`narrowgauge.spec.storages.Code` says which).
Several codes share a word, each at its own ``shift``: encoding returns a code's bits in place and zeros elsewhere, so
packing is an ``or``, and decoding takes one shift and one mask. The weight is cut in two: the *visible* weight, which the
model computes with, and its *tail*, the signed rest of the stored weight. A NaN is cut to the same bits whatever its sign and
payload: the quiet NaN where the code has one, else the largest positive value (of float16 as a weight, positive infinity).

*Lanes* are elements as a kernel steps them. :func:`read` turns a lane's bits into float32 values, :func:`write` cuts new
values.

*Layouts* say where the bits lie. A loop over 32-bit values runs at full vector width; one that mixes 16- and 32-bit loads
does not. So a bfloat16 tensor is read as int32 words of two neighbours: an even and an odd lane, taken by shift and mask. A
float32 weight has one lane. A *plane* is one state tensor: a lone field, or several fields packed into an element of 8, 16,
32 or 64 bits. A plane of 16 bits packs like the weight; one of 32 bits is stored as two tensors, first all even elements, then
all odd ones. Where a storage has an 8-bit plane, four lanes share a word of it; the weight is then read in two *parts*, its
upper and its lower half of rows: lanes 0 and 1 come from the first, 2 and 3 from the second. A storage whose codes are
scaled by row, or that has two parts, lies in a matrix of rows; any other lies flat. Layouts are internal:
:func:`to_parameter_order` and :func:`from_parameter_order` turn a plane into a tensor of the parameter's shape and back
without losing a bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from operator import or_

import torch
from torch import Tensor

from narrowgauge.numerics.rounding import (
    EXPONENT,
    MAGNITUDE,
    bits_of,
    canonical_bits64,
    cut,
    dither,
    float_of,
    half,
    random_bits,
    rounded_to_odd,
)
from narrowgauge.spec.storages import VISIBLE, WIDE, Code, Storage, low_parts, width_of

SIGN, MANTISSA = -(1 << 31), 0x7FFFFF


def dropped_bits(code: Code) -> int:
    """How many low mantissa bits of a float32 the code drops; a float64 is never cut."""
    return 0 if code.is_double else 23 - code.mantissa_bits


def value_dtype(storage: Storage) -> torch.dtype:
    """The dtype of the values that a storage's rule computes with."""
    return torch.float64 if storage.arithmetic == "float64" else torch.float32


def word_dtype(bits: int) -> torch.dtype:
    """The dtype of the words in which values of so many bits lie: int32, or int64 of float64 values."""
    return torch.int64 if bits == 64 else torch.int32


def _share(bits: int) -> int:
    """How many values of so many bits share a word."""
    return max(1, 32 // bits)


def encode(code: Code, x: Tensor, addend: Tensor | int, shift: int, scale: Tensor | None = None) -> Tensor:
    """Cut ``x`` to ``code``: int32, zero outside the code's bits.

    Args:
        addend: what to add before cutting (see :func:`narrowgauge.numerics.rounding.cut`).
        shift: where in the word the code's lowest bit goes.
        scale: of a scaled code, the first result of :func:`multipliers`.
    """
    if code.is_double:
        return canonical_bits64(x)
    if code.is_window:
        return _encode_window(code, x, addend, shift, 2.0 ** -_scale(code) if scale is None else scale)
    # The code is the upper bits of the float32, and shift = dropped is where they already are; elsewhere the copies of
    # the sign that a right shift makes, or the sign that an unsigned code leaves out, must be masked.
    moved = _moved(cut(x, dropped_bits(code), addend), shift - dropped_bits(code))
    return moved if code.signed and shift == dropped_bits(code) else moved & (((1 << code.bits) - 1) << shift)


def decode(code: Code, word: Tensor, shift: int, scale: Tensor | None = None) -> Tensor:
    """The float32 values of codes at ``shift`` in int32 words; all other bits of the words are ignored.

    ``scale`` is, of a scaled code, the second result of :func:`multipliers`.
    """
    if code.is_double:
        return word.view(torch.float64)
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
    # A NaN is stored without a sign: as integers, those that have one are the negative numbers next to 0, and their sum has none.
    sign = bits & (bits + MANTISSA) & SIGN
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
    """``x`` shifted left, or right (copying the sign) by a negative number."""
    return x << left if left > 0 else x >> -left if left < 0 else x


def multipliers(code: Code, bound: Tensor) -> tuple[Tensor, Tensor]:
    """What takes values of a row into the window of a scaled code, and back: two float32 powers of two, shaped like ``bound``.

    The window ends at the smallest power of two that is not below ``bound``, the largest magnitude of each row or somewhat more;
    what lies up to 1.7 times above that end still fits. The largest window of a code that begins at ``2**lowest`` of its end is
    at ``2**-lowest``.
    """
    # Rounding the exponent up: anything but a power of two carries. Both results must be normal float32 values.
    exponent = ((bits_of(bound.nan_to_num(nan=3e38, posinf=3e38)) + 0x7FFFFF) >> 23) - 127
    exponent = (exponent + _scale(code)).clamp(-126, 126)
    return float_of((127 - exponent) << 23), float_of((127 + exponent) << 23)


# ── the weight ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def visible_value(visible: str, bits: Tensor) -> Tensor:
    """The float32 of a visible weight's bits, the float64 where it is one.

    For float16 they are the bits of that float32 times 2^-112, whose exponents are float16's own; its infinities and NaNs
    become 65536 and more.
    """
    bits_of_format, _, exponent = VISIBLE[visible]
    if bits_of_format == 64:
        return bits.view(torch.float64)
    return float_of(bits) * 2.0**-exponent if exponent else float_of(bits)


def gradient_value(visible: str, bits: Tensor) -> Tensor:
    """:func:`visible_value` for a gradient: infinities and NaNs stay what they are."""
    value = visible_value(visible, bits)
    if VISIBLE[visible][2]:
        value = torch.where(value.abs() >= 65536.0, float_of(bits | EXPONENT), value)
    return value


def visible_bits(visible: str, x: Tensor) -> Tensor:
    """The bits of a visible weight in a kernel: the inverse of :func:`visible_value`."""
    bits_of_format, _, exponent = VISIBLE[visible]
    if bits_of_format == 64:
        return x.view(torch.int64)
    return bits_of(x * 2.0**exponent) if exponent else bits_of(x)


def encode_visible(storage: Storage, x: Tensor, addend: Tensor | int) -> Tensor:
    """Cut ``x`` to the narrow visible format's bits (see :func:`visible_value`), its infinities included.

    ``addend`` is 0 where ``x`` is a value of the format, or beyond it.
    """
    _, below, exponent = VISIBLE[storage.visible]
    return _in_range(storage, cut(x * 2.0**exponent if exponent else x, below, addend))


def encode_weight(storage: Storage, x: Tensor, addend: Tensor | int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Cut a weight of one part, not scaled by row, into the visible weight and its tail.

    Returns:
        ``(visible, field, stored)``: the visible weight's bits (see :func:`visible_value`), the signed tail or the bits
        of the master (int32, or int64 of a float64), ``None`` where there is neither, and the value that the two stand for.
    """
    if storage.weight.is_double:
        bits = canonical_bits64(x)
        kept = bits.view(torch.float64)
        if not storage.master:
            return bits, None, kept
        _, below, exponent = VISIBLE[storage.visible]
        # What is beyond float32's range is beyond that of both visible formats.
        near = rounded_to_odd(kept)
        return _in_range(storage, cut(near * 2.0**exponent if exponent else near, below, half(below))), bits, kept
    if storage.visible == "float32":
        bits = cut(x, 0, 0)
        return bits, None, float_of(bits)
    _, below, exponent = VISIBLE[storage.visible]
    scaled = x * 2.0**exponent if exponent else x
    if storage.master:
        bits = cut(x, 0, 0)
        return _in_range(storage, cut(scaled, below, half(below))), bits, float_of(bits)
    if not storage.tail_bits:
        visible = _in_range(storage, cut(scaled, below, addend))
        return visible, None, visible_value(storage.visible, visible)
    whole = cut(scaled, dropped_bits(storage.weight), addend)
    # The nearest visible value, and the signed rest: adding half of the tail's range carries exactly where the rest is
    # negative. Only NaNs are large enough to wrap, and `cut` leaves none that does.
    visible = _in_range(storage, (whole + half(below)) & -(1 << below))
    return visible, whole - visible, visible_value(storage.visible, whole)


def _in_range(storage: Storage, visible: Tensor) -> Tensor:
    """NaN, and what rounds past float16's largest value, become its infinity."""
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
        seen, stored = visible_value(storage.visible, visible), decode(storage.weight, field, 0)
        return torch.where(is_outdated(storage, visible, field), seen.to(stored.dtype), stored)
    return visible_value(storage.visible, visible if field is None else visible + field)


def is_outdated(storage: Storage, visible: Tensor, field: Tensor) -> Tensor:
    """Where the visible weight is not the rounded master."""
    return encode_weight(storage, decode(storage.weight, field, 0), 0)[0] != _in_range(storage, visible)


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


# ── lanes: the values of a weight and its states ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Lane:
    """What a step reads.

    Args:
        visible: int32 bits of the visible weight (see :func:`narrowgauge.optim.codec.visible_value`).
        gradient: int32 bits of the gradient, likewise. (Of float64 weights all bits are int64.)
        fields: for each bit field, the word that holds it and the bit where it begins.
        scales: for each code that is scaled by row, the multipliers into the code's window, for writing, and out of it, for
            reading.
    """

    visible: Tensor
    gradient: Tensor
    fields: Mapping[str, tuple[Tensor, int]]
    scales: Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Values:
    """The values of a lane in the storage's arithmetic, its states in the order in which they were requested.

    Args:
        weight: what the rule reads: the stored weight, or the visible one where ``low`` is its compensation.
        low: Kahan's compensation, ``None`` where the storage has none.
    """

    visible: Tensor
    weight: Tensor
    low: Tensor | None
    states: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """What a step writes, and what the audit reads.

    Args:
        visible: int32 bits of the new visible weight.
        fields: int32, the bits of every field in their place.
        changes: float32: the intended change, the change of the stored weight, and that of the visible one.
    """

    visible: Tensor
    fields: dict[str, Tensor]
    changes: tuple[Tensor, Tensor, Tensor]


def addends(storage: Storage, weight: Tensor, gradient_bits: Tensor, seed: Tensor) -> dict[str, Tensor | int]:
    """What each code of the storage, weight or state, adds before it cuts, from one hashed word per element.

    The key is the element's own bits: its stored weight before the step and its gradient's *mantissa* before any scaling (with
    the exponent in it, scaling all gradients by a power of two would change the rounding). The 32 bits are dealt to the
    stochastic codes, the weight first. A code that drops more bits than it was dealt borrows its lower ones from its
    neighbour's upper ones: with 12 bits for 18 a chance below 2^-12 would be none, and at beta2 = 0.9999 a second moment would
    stop short by 2 %.
    """
    table = {"weight": storage.weight, **{state: storage.code(state) for state, _ in storage.states}}
    result: dict[str, Tensor | int] = {n: half(dropped_bits(c)) for n, c in table.items()}
    stochastic = [(n, dropped_bits(c)) for n, c in table.items() if c.rounding == "stochastic"]
    if not stochastic:
        return result
    mantissa = (gradient_bits >> 16) & 0x7F if storage.visible == "bfloat16" else gradient_bits & 0x7FFFFF
    random, start = random_bits(bits_of(weight) ^ mantissa, seed), 0
    for place, (name, dropped) in enumerate(stochastic):
        start += min(dropped, (32 - start) // (len(stochastic) - place))
        missing = max(0, dropped - start)
        # The first code has no neighbour below: it borrows round the word, from the last one's upper bits.
        turned = random if not missing else (random << missing) | ((random >> (32 - missing)) & ((1 << missing) - 1))
        result[name] = dither(turned, start + missing - dropped, dropped, dropped)
    return result


def read(storage: Storage, lane: Lane, states: Sequence[str]) -> Values:
    """The float32 values of a lane's weight and of some of its states."""
    visible = visible_value(storage.visible, lane.visible)
    weight, low = _weight(storage, lane, visible)
    return Values(visible, weight, low, tuple(read_state(storage, lane, name) for name in states))


def write(
    storage: Storage, lane: Lane, old: Values, change: Tensor, states: Mapping[str, Tensor], seed: Tensor
) -> Written:
    """Cut the result of a step to the storage's formats.

    ``old`` is what :func:`read` found in the lane, ``change`` what to add to its weight, ``states`` the new ones by name. The
    lane's gradient is part of the key of the random bits.
    """
    addend = addends(storage, _told_apart(storage, lane, old.weight), lane.gradient, seed)
    fields: dict[str, Tensor] = {}
    if old.low is not None:
        # Kahan's order: the compensation is added to the change first, so that neither is lost beside the weight.
        total = old.low + change
        visible = encode_visible(storage, old.visible + total, addend["weight"])
        moved = visible_value(storage.visible, visible) - old.visible
        shift = lane.fields["weight_low"][1]
        fields["weight_low"] = encode(storage.weight, total - moved, addend["weight"], shift)
        taken = moved + (decode(storage.weight, fields["weight_low"], shift) - old.low)
    else:
        visible, fields, kept = _cut_weight(storage, lane, old.weight + change, addend["weight"])
        taken = kept - old.weight
    for name, value in states.items():
        fields |= write_state(storage, lane, name, value, addend[name])
    seen = (visible_value(storage.visible, visible) - old.visible).to(change.dtype)
    return Written(visible, fields, (change, taken, seen))


def _told_apart(storage: Storage, lane: Lane, weight: Tensor) -> Tensor:
    """The weight as part of the key of random bits: one of 8 bits has the codes of its states in the bits that it lacks.

    There are some hundred such weights, and thousands of elements would round alike. The states are read before the step, so a
    step that is taken again without decay draws the same bits.
    """
    if not storage.weight.scaled:
        return weight
    key, widths = bits_of(weight), dict(storage.fields)
    for place, (name, _) in enumerate(storage.states):
        word, shift = lane.fields[name]
        # Above the gradient's mantissa, and mostly below the weight's.
        key = key ^ (((word >> shift) & ((1 << min(widths[name], 8)) - 1)) << (7 + 5 * place))
    return float_of(key)


def _weight(storage: Storage, lane: Lane, visible: Tensor) -> tuple[Tensor, Tensor | None]:
    """The float32 that the rule reads, and Kahan's compensation where there is one."""
    if not storage.beside:
        return visible, None
    word, shift = lane.fields[storage.beside[0]]
    if storage.weight.parts > 1 and not storage.master:
        return visible, decode(storage.weight, word, shift)
    field = word if storage.master else take_tail(storage, word, shift)
    return decode_weight(storage, lane.visible, field), None


def read_parts(storage: Storage, lane: Lane, name: str) -> tuple[Tensor, ...]:
    """The float32 values of a state's parts, or of those of a weight that is an expansion."""
    code = storage.code(name)
    names = (name, *low_parts(name, code))
    if name == "weight":
        first = (visible_value(storage.visible, lane.visible),)
    else:
        first = (decode(code, *lane.fields[name], _back(code, lane.scales, name, 0)),)
    low = (decode(code, *lane.fields[part], _back(code, lane.scales, name, k)) for k, part in enumerate(names[1:], 1))
    return (*first, *low)


def read_state(storage: Storage, lane: Lane, name: str) -> Tensor:
    """A state's float32 value: the sum of its parts."""
    parts = read_parts(storage, lane, name)
    return sum(parts[1:], parts[0])


def read_weight(storage: Storage, lane: Lane) -> Tensor:
    if storage.weight.parts > 1:
        return read_state(storage, lane, "weight")
    return _weight(storage, lane, visible_value(storage.visible, lane.visible))[0]


def write_weight(storage: Storage, lane: Lane, value: Tensor, addend: Tensor | int) -> tuple[Tensor, dict[str, Tensor]]:
    """The visible bits and the fields in their places of a float32 weight; each part takes what the ones before leave."""
    if storage.weight.parts > 1:
        code, zero = storage.weight, torch.zeros((), dtype=torch.int32, device=value.device)
        alone = replace(lane, fields={**lane.fields, "weight": (zero, 32 - code.bits if not code.is_window else 0)})
        fields = write_state(storage, alone, "weight", value, addend)
        shift, into = alone.fields["weight"][1], _into(code, lane.scales, "weight", 0)
        first = decode(code, fields.pop("weight"), shift, _inverse(into))
        return encode_visible(storage, first, 0), fields
    return _cut_weight(storage, lane, value, addend)[:2]


def _cut_weight(
    storage: Storage, lane: Lane, value: Tensor, addend: Tensor | int
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The visible bits of a weight of one part, its field in its place, and the float32 value that they stand for."""
    if storage.weight.scaled:
        # Few bits, all of them visible: a value of the code in its row is one of the visible format too.
        into = _into(storage.weight, lane.scales, "weight", 0)
        kept = decode(storage.weight, encode(storage.weight, value, addend, 0, into), 0, _inverse(into))
        return encode_visible(storage, kept, 0), {}, kept
    visible, field, kept = encode_weight(storage, value, addend)
    return visible, {} if field is None else _placed(storage, lane, field), kept


def _placed(storage: Storage, lane: Lane, field: Tensor) -> dict[str, Tensor]:
    """The tail or master of a weight, in its place."""
    name = storage.beside[0]
    return {name: field if storage.master else place_tail(storage, field, lane.fields[name][1])}


def _inverse(into: Tensor | None) -> Tensor | None:
    return None if into is None else 1.0 / into


def write_state(storage: Storage, lane: Lane, name: str, value: Tensor, addend: Tensor | int) -> dict[str, Tensor]:
    """A state's bits in their places; each part takes what the ones before leave."""
    code, fields, rest = storage.code(name), {}, value
    names = (name, *low_parts(name, code))
    for place, part in enumerate(names):
        shift = lane.fields[part][1]
        into = _into(code, lane.scales, name, place)
        fields[part] = encode(code.part(place), rest, addend, shift, into)
        if part != names[-1]:
            rest = rest - decode(code, fields[part], shift, _inverse(into))
    return fields


def write_parts(
    storage: Storage, lane: Lane, old: Sequence[Tensor], change: Tensor, parts: Mapping[str, Sequence[Tensor]]
) -> Written:
    """Cut a weight and states that are given in parts, each part to the nearest: the inverse of :func:`read_parts`.

    For storages in whose arithmetic every operation is rounded. ``old`` holds the parts of the weight before the step, ``change``
    what was to be added to it, ``parts`` those of the weight and of each state, by name; all are float32.
    """
    fields: dict[str, Tensor] = {}
    kept: list[Tensor] = []
    for name, values in parts.items():
        code = storage.code(name)
        for place, (part, value) in enumerate(zip((name, *low_parts(name, code)), values, strict=True)):
            shift = lane.fields[part][1] if part in lane.fields else 0
            into = _into(code, lane.scales, name, place)
            bits = encode(code.part(place), value, half(dropped_bits(code)), shift, into)
            if name == "weight":
                kept.append(decode(code, bits, shift, _inverse(into)))
            if part != "weight":
                fields[part] = bits
    visible = encode_visible(storage, kept[0], 0)
    moved = [new - before for new, before in zip(kept, old, strict=True)]
    return Written(visible, fields, (change, sum(moved[1:], moved[0]), moved[0]))


def _back(code: Code, scales: Mapping[str, tuple[Tensor, Tensor]], name: str, place: int) -> Tensor | None:
    """The multiplier out of the window of a scaled code's part: each is finer by the bits of the one before."""
    return scales[name][1] * 2.0 ** -(place * (code.mantissa_bits + 1)) if code.scaled else None


def _into(code: Code, scales: Mapping[str, tuple[Tensor, Tensor]], name: str, place: int) -> Tensor | None:
    return scales[name][0] * 2.0 ** (place * (code.mantissa_bits + 1)) if code.scaled else None


# ── layouts: planes, lanes and words ────────────────────────────────────────────────────────────────────────────────────

INTEGER = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of state: its name, bits per element, and ``(field, shift, bits)`` of what is packed into an element."""

    name: str
    bits: int
    fields: tuple[tuple[str, int, int], ...]
    dtype: torch.dtype


@lru_cache
def planes(storage: Storage) -> tuple[Plane, ...]:
    """The planes of a storage in kernel order, as :func:`narrowgauge.spec.storages.packed` groups its fields."""
    result: list[Plane] = []
    for group in storage.packing:
        width = width_of(group)
        if len(group) == 1:
            ((name, bits),) = group
            result.append(Plane(name, width, ((name, 0, bits),), _dtype(storage, name, width)))
            continue
        # Signed codes last: the sign bit of the topmost one then lies where a float32 has it.
        ordered = sorted(group, key=lambda field: _is_signed_state(storage, field[0]))
        fields, shift = [], 0
        for name, bits in ordered:
            fields.append((name, shift, bits))
            shift += bits
        number = sum(plane.name.startswith("packed") for plane in result)
        name = f"packed{number + 1}" if number else "packed"
        result.append(Plane(name, width, tuple(fields), INTEGER[width]))
    return tuple(result)


def _is_signed_state(storage: Storage, name: str) -> bool:
    return name in dict(storage.states) and storage.code(name).signed


def _dtype(storage: Storage, name: str, width: int) -> torch.dtype:
    """A lone field has the dtype of PyTorch with the same bits, where there is one."""
    if width >= 32:
        return torch.float32 if width == 32 else torch.float64
    codes = {state: storage.code(state) for state in ("weight", *dict(storage.states))}
    parts = {part: code for state, code in codes.items() for part in (state, *low_parts(state, code))}
    code = parts.get(name)  # a tail and a master copy have none
    plain = width == 16 and code is not None and not code.is_window and code.signed
    return torch.bfloat16 if plain else INTEGER[width]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a field is stored: its plane, and the lowest of its bits in an element of the plane."""

    plane: Plane
    shift: int


@lru_cache
def places(storage: Storage) -> Mapping[str, Place]:
    """The place of every field of the storage, by name."""
    return {field: Place(plane, shift) for plane in planes(storage) for field, shift, _ in plane.fields}


# ── extents: what shape the words have ──────────────────────────────────────────────────────────────────────────────────


def per_word(storage: Storage) -> int:
    """How many neighbouring weights share a 32-bit word."""
    return _share(VISIBLE[storage.visible][0])


@lru_cache
def num_lanes(storage: Storage) -> int:
    """How many weights one place of the kernel's loop steps."""
    return max(per_word(storage), *(32 // plane.bits for plane in planes(storage)), 1)


def num_parts(storage: Storage) -> int:
    """Into how many halves the weight's rows are cut."""
    return num_lanes(storage) // per_word(storage)


def by_rows(storage: Storage) -> bool:
    """Whether the layout of the storage is a matrix of rows."""
    return bool(storage.scaled) or num_parts(storage) > 1


def matrix_of(storage: Storage, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape in which a parameter's elements are taken: ``(rows, columns)`` or flat."""
    if not by_rows(storage):
        return (math.prod(shape),)
    columns = shape[-1] if shape else 1
    return (math.prod(shape[:-1]), columns)


def extent(storage: Storage, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of each tensor of words that a kernel takes for a parameter of ``shape``; odd ends are padded."""
    matrix = matrix_of(storage, shape)
    words = (*matrix[:-1], -(-matrix[-1] // per_word(storage)))
    return (-(-words[0] // num_parts(storage)), *words[1:])


def fits(storage: Storage, shape: Sequence[int]) -> bool:
    """Whether a parameter of ``shape`` fills its words without padding."""
    whole = extent(storage, shape)
    return math.prod(whole) * num_lanes(storage) == math.prod(shape)


def num_tensors(storage: Storage, bits: int) -> int:
    """The number of tensors of words in which a kernel takes a plane with this many bits per element."""
    return num_lanes(storage) // _share(bits)


def allocate(storage: Storage, plane: Plane, shape: Sequence[int], device: torch.device) -> Tensor:
    """Zeroed words of one plane, ``[tensors, *extent]``, for a parameter of ``shape`` (zero encodes 0)."""
    full = (num_tensors(storage, plane.bits), *extent(storage, shape))
    return torch.zeros(full, dtype=word_dtype(plane.bits), device=device)


def to_parameter_order(storage: Storage, plane: Plane, words: Tensor, shape: Sequence[int]) -> Tensor:
    """The plane as a tensor of the parameter's shape and the plane's own dtype (a copy)."""
    lanes, group = num_lanes(storage), words.shape[1:]
    neighbours, parts = per_word(storage), num_parts(storage)
    # [tensors, *extent] of words → a lane for each tensor and each place in its words → parts and neighbours.
    # (Flattened before the view: a dim of one element may have any stride.)
    small = words.reshape(-1).view(INTEGER[plane.bits]).view(len(words), *group, _share(plane.bits))
    elements = small.movedim(-1, 1).reshape(lanes, *group)
    apart = elements.reshape(parts, neighbours, *group).movedim(1, -1)
    rows = apart.reshape(parts * group[0], group[1] * neighbours) if len(group) == 2 else apart.reshape(-1)
    matrix = matrix_of(storage, shape)
    for dim, size in enumerate(matrix):
        rows = rows.narrow(dim, 0, size)
    return rows.reshape(-1).view(plane.dtype).view(tuple(shape)).clone()


def from_parameter_order(storage: Storage, plane: Plane, values: Tensor) -> Tensor:
    """The inverse of :func:`to_parameter_order`; padding is zero."""
    words = allocate(storage, plane, values.shape, values.device)
    group, neighbours, parts = words.shape[1:], per_word(storage), num_parts(storage)
    whole = (parts * group[0], *group[1:-1], group[-1] * neighbours) if len(group) == 2 else (group[0] * neighbours,)
    matrix = matrix_of(storage, values.shape)
    filled = torch.zeros(whole, dtype=INTEGER[plane.bits], device=values.device)
    target = filled
    for dim, size in enumerate(matrix):
        target = target.narrow(dim, 0, size)
    target.copy_(values.reshape(-1).view(INTEGER[plane.bits]).view(matrix))
    lanes = filled.reshape(parts, *group, neighbours).movedim(-1, 1).reshape(len(words), _share(plane.bits), *group)
    return lanes.movedim(1, -1).reshape(-1).view(words.dtype).view(words.shape)


def fields_of(storage: Storage, words: Mapping[str, Tensor], shape: Sequence[int]) -> dict[str, tuple[Tensor, int]]:
    """The fields of a parameter's state, as a :class:`Lane` has them, in the parameter's order.

    Returns:
        For each field the int32 bits of its plane, in the shape of :func:`matrix_of`, and the bit where the field begins.
    """
    fields = {}
    for plane in planes(storage):
        bits = _bits_of_plane(storage, plane, words, shape).reshape(matrix_of(storage, shape))
        fields.update({name: (bits, shift) for name, shift, _ in plane.fields})
    return fields


def set_fields(
    storage: Storage, words: Mapping[str, Tensor], shape: Sequence[int], fields: Mapping[str, Tensor]
) -> None:
    """Overwrite some fields of a state's words, given in the parameter's order and at their bits of a word."""
    for plane in planes(storage):
        mine = [(name, shift, bits) for name, shift, bits in plane.fields if name in fields]
        if not mine:
            continue
        raw = _bits_of_plane(storage, plane, words, shape)
        for name, shift, bits in mine:
            mask = ((1 << bits) - 1) << shift if bits < 32 else -1
            raw = (raw & ~mask) | (fields[name].reshape(shape) & mask)
        value = raw.to(INTEGER[plane.bits]).view(plane.dtype)
        words[plane.name].copy_(from_parameter_order(storage, plane, value))


def _bits_of_plane(storage: Storage, plane: Plane, words: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
    values = to_parameter_order(storage, plane, words[plane.name], shape)
    return values.view(INTEGER[plane.bits]).to(word_dtype(plane.bits))


# ── in the kernel ───────────────────────────────────────────────────────────────────────────────────────────────────────


def lanes_of_weight(visible: str, words: Sequence[Tensor]) -> list[Tensor]:
    """The bits of every lane of a visible tensor (see :func:`narrowgauge.optim.codec.visible_value`), from its parts."""
    if visible in WIDE:
        return list(words)
    if visible == "bfloat16":
        return [lane for word in words for lane in (word << 16, word & -65536)]
    return [lane for word in words for lane in (_float16_bits(word << 16), _float16_bits(word))]


def words_of_weight(visible: str, lanes: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of :func:`lanes_of_weight`."""
    if visible in WIDE:
        return list(lanes)
    if visible == "float16":
        lanes = [((lane << 3) & 0x7FFF0000) | (lane & SIGN) for lane in lanes]
    return [_pair(even, odd) for even, odd in zip(lanes[::2], lanes[1::2], strict=True)]


def _float16_bits(word: Tensor) -> Tensor:
    """From a float16 in the upper half of a word, a float32 with its sign, exponent and mantissa fields."""
    return ((word & 0x7FFF0000) >> 3) | (word & SIGN)


def _pair(even: Tensor, odd: Tensor) -> Tensor:
    """Words of two 16-bit neighbours, each given in the upper half of a word."""
    return ((even >> 16) & 0xFFFF) | odd


def by_lane(storage: Storage, words: Sequence[Tensor]) -> list[dict[str, tuple[Tensor, int]]]:
    """For each lane, the word and the shift in it of every field, from the flat list of tensors that a kernel takes."""
    lanes: list[dict[str, tuple[Tensor, int]]] = [{} for _ in range(num_lanes(storage))]
    queue = iter(words)
    for plane in planes(storage):
        tensors = [next(queue) for _ in range(num_tensors(storage, plane.bits))]
        share = _share(plane.bits)
        for lane, fields in enumerate(lanes):
            for name, shift, _ in plane.fields:
                fields[name] = tensors[lane // share], shift + plane.bits * (lane % share)
    return lanes


def join_lanes(storage: Storage, fields: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
    """The words of the planes that a kernel writes, from each lane's fields in their places: the inverse of :func:`by_lane`."""
    result = []
    for plane in planes(storage):
        share = _share(plane.bits)
        for first in range(0, len(fields), share):
            together = [lane[name] for lane in fields[first : first + share] for name, _, _ in plane.fields]
            result.append(reduce(or_, together))
    return result
