"""One element-wise update: read the stored values, apply the rule, write the result in the storage's formats.

A *lane* is one tensor of elements as a kernel steps them: the bits of the visible weight, those of the gradient, and the
words in which the states are packed. :func:`read` turns a lane into float32 values, :func:`write` turns a change and new
states into the lane's new bits. An element-wise rule runs between the two in one kernel; a matrix rule runs outside of
the kernel, on whole matrices, and only its result is written (:func:`write_decided`).

The published Collage computes otherwise: it rounds every operation to the visible format and carries errors as
expansions (:func:`in_expansions`). ``Storage.arithmetic`` says which of the two a storage uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from narrowgauge.numerics.expansions import Expansion, nearest_even_bits
from narrowgauge.numerics.rounding import bits_of, dither, half, random_bits
from narrowgauge.optim import encoding
from narrowgauge.optim.rules.collage import expanded
from narrowgauge.optim.rules.elementwise import Rule, Scalars
from narrowgauge.spec.codes import Code, low_parts
from narrowgauge.spec.storages import Storage


@dataclass(frozen=True, slots=True)
class Lane:
    """What a step reads.

    Args:
        visible: int32 bits of the visible weight (see :func:`narrowgauge.optim.encoding.visible_value`).
        gradient: int32 bits of the gradient, likewise.
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
    """The float32 values of a lane.

    Args:
        visible: the visible weight.
        weight: the weight that the rule reads: the stored one, or the visible one where ``low`` is its compensation.
        low: Kahan's compensation, ``None`` where the storage has none.
        states: the states, in the order in which they were requested.
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


Advance = Callable[[Lane, Sequence[Tensor], Scalars, Tensor], Written]
"""A step of one lane: ``(lane, decided, scalars, seed) -> written``. ``decided`` are the float32 tensors that were computed
before the kernel: none for an element-wise rule, the change and the new states for a matrix rule."""


def addends(storage: Storage, weight: Tensor, gradient_bits: Tensor, seed: Tensor) -> dict[str, Tensor | int]:
    """What each code of the storage adds before it cuts, from one hashed word per element.

    The key is the element's own bits: its stored weight and its gradient's *mantissa* (with the exponent in it, scaling
    all gradients by a power of two would change the rounding). The 32 bits are dealt to the stochastic codes, the weight
    first. A code that drops more bits than it was dealt borrows its lower ones from its neighbour's upper ones: with
    12 bits for 18 a chance below 2^-12 would be none, and at beta2 = 0.9999 a second moment would stop short by 2 %.

    Args:
        storage: the row.
        weight: float32, the stored weights before the step.
        gradient_bits: int32, the gradients' float32 bits before any scaling.
        seed: 0-d int32 tensor of this step.
    Returns:
        One addend for ``weight`` and for each state.
    """
    table = {"weight": storage.weight, **{state: storage.code(state) for state, _ in storage.states}}
    result: dict[str, Tensor | int] = {n: half(encoding.dropped_bits(c)) for n, c in table.items()}
    stochastic = [(n, encoding.dropped_bits(c)) for n, c in table.items() if c.rounding == "stochastic"]
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
    visible = encoding.visible_value(storage.visible, lane.visible)
    weight, low = _weight(storage, lane, visible)
    return Values(visible, weight, low, tuple(read_state(storage, lane, name) for name in states))


def write(
    storage: Storage, lane: Lane, old: Values, change: Tensor, states: Mapping[str, Tensor], seed: Tensor
) -> Written:
    """Cut the result of a step to the storage's formats.

    Args:
        storage: the storage.
        lane: where to write; its gradient is part of the key of the random bits.
        old: what :func:`read` found there.
        change: float32, what to add to the weight.
        states: float32, the new states by name.
        seed: 0-d int32 tensor of this step.
    """
    addend = addends(storage, old.weight, lane.gradient, seed)
    fields: dict[str, Tensor] = {}
    if old.low is not None:
        # Kahan's order: the compensation is added to the change first, so that neither is lost beside the weight.
        total = old.low + change
        visible = encoding.encode_visible(storage, old.visible + total, addend["weight"])
        moved = encoding.visible_value(storage.visible, visible) - old.visible
        shift = lane.fields["weight_low"][1]
        fields["weight_low"] = encoding.encode(storage.weight, total - moved, addend["weight"], shift)
        taken = moved + (encoding.decode(storage.weight, fields["weight_low"], shift) - old.low)
    else:
        visible, field, kept = encoding.encode_weight(storage, old.weight + change, addend["weight"])
        if field is not None:
            fields = _placed(storage, lane, field)
        taken = kept - old.weight
    for name, value in states.items():
        fields |= write_state(storage, lane, name, value, addend[name])
    return Written(visible, fields, (change, taken, encoding.visible_value(storage.visible, visible) - old.visible))


def in_float32(rule: Rule, storage: Storage, lane: Lane, scalars: Scalars, seed: Tensor) -> Written:
    """The rule in float32; only what is stored is cut.

    Args:
        rule, storage: what to do and how to store it.
        lane: what is stored.
        scalars: 0-d float32 tensors, ``gradient_scale`` and the rule's.
        seed: 0-d int32 tensor.
    Returns:
        The new bits and the changes.
    """
    gradient = encoding.gradient_value(storage.visible, lane.gradient) * scalars["gradient_scale"]
    old = read(storage, lane, rule.states)
    change, *new = rule.update(old.weight, gradient, *old.states, scalars)
    return write(storage, lane, old, change, dict(zip(rule.states, new, strict=True)), seed)


def write_decided(storage: Storage, states: Sequence[str]) -> Advance:
    """The step of a rule that has run already: it writes the change and the new states that it is given.

    Args:
        storage: how to store them.
        states: names of the states among ``decided``, after the change.
    """

    def advance(lane: Lane, decided: Sequence[Tensor], scalars: Scalars, seed: Tensor) -> Written:
        change, *new = decided
        return write(storage, lane, read(storage, lane, ()), change, dict(zip(states, new, strict=True)), seed)

    return advance


def advance_by(rule: Rule, storage: Storage) -> Advance:
    """The step of an element-wise rule, in the arithmetic of the storage."""
    step = ARITHMETICS[storage.arithmetic]
    return lambda lane, decided, scalars, seed: step(rule, storage, lane, scalars, seed)


def _weight(storage: Storage, lane: Lane, visible: Tensor) -> tuple[Tensor, Tensor | None]:
    """The float32 that the rule reads, and Kahan's compensation where there is one."""
    if not storage.beside:
        return visible, None
    word, shift = lane.fields[storage.beside[0]]
    if storage.weight.parts > 1 and not storage.master:
        return visible, encoding.decode(storage.weight, word, shift)
    field = word if storage.master else encoding.take_tail(storage, word, shift)
    return encoding.decode_weight(storage, lane.visible, field), None


def read_parts(storage: Storage, lane: Lane, name: str) -> tuple[Tensor, ...]:
    """The float32 values of a state's parts, or of those of a weight that is an expansion."""
    code = storage.code(name)
    names = (name, *low_parts(name, code))
    if name == "weight":
        first = (encoding.visible_value(storage.visible, lane.visible),)
    else:
        first = (encoding.decode(code, *lane.fields[name], _back(code, lane.scales, name, 0)),)
    low = (
        encoding.decode(code, *lane.fields[part], _back(code, lane.scales, name, k))
        for k, part in enumerate(names[1:], 1)
    )
    return (*first, *low)


def read_state(storage: Storage, lane: Lane, name: str) -> Tensor:
    """A state's float32 value: the sum of its parts."""
    parts = read_parts(storage, lane, name)
    return sum(parts[1:], parts[0])


def read_weight(storage: Storage, lane: Lane) -> Tensor:
    """The stored weight as float32."""
    if storage.weight.parts > 1:
        return read_state(storage, lane, "weight")
    return _weight(storage, lane, encoding.visible_value(storage.visible, lane.visible))[0]


def write_weight(storage: Storage, lane: Lane, value: Tensor, addend: Tensor | int) -> tuple[Tensor, dict[str, Tensor]]:
    """The visible bits and the fields in their places of a float32 weight; each part takes what the ones before leave."""
    if storage.weight.parts > 1:
        code, zero = storage.weight, torch.zeros((), dtype=torch.int32, device=value.device)
        alone = replace(lane, fields={**lane.fields, "weight": (zero, 32 - code.bits if not code.is_window else 0)})
        fields = write_state(storage, alone, "weight", value, addend)
        shift, into = alone.fields["weight"][1], _into(code, lane.scales, "weight", 0)
        first = encoding.decode(code, fields.pop("weight"), shift, _inverse(into))
        return encoding.encode_visible(storage, first, 0), fields
    visible, field, _ = encoding.encode_weight(storage, value, addend)
    return visible, {} if field is None else _placed(storage, lane, field)


def _placed(storage: Storage, lane: Lane, field: Tensor) -> dict[str, Tensor]:
    """The tail or master of a weight, in its place."""
    name = storage.beside[0]
    return {name: field if storage.master else encoding.place_tail(storage, field, lane.fields[name][1])}


def _inverse(into: Tensor | None) -> Tensor | None:
    """The multiplier out of the window into which ``into`` scales."""
    return None if into is None else 1.0 / into


def write_state(storage: Storage, lane: Lane, name: str, value: Tensor, addend: Tensor | int) -> dict[str, Tensor]:
    """A state's bits in their places; each part takes what the ones before leave."""
    code, fields, rest = storage.code(name), {}, value
    names = (name, *low_parts(name, code))
    for place, part in enumerate(names):
        shift = lane.fields[part][1]
        into = _into(code, lane.scales, name, place)
        fields[part] = encoding.encode(code.part(place), rest, addend, shift, into)
        if part != names[-1]:
            rest = rest - encoding.decode(code, fields[part], shift, _inverse(into))
    return fields


def _back(code: Code, scales: Mapping[str, tuple[Tensor, Tensor]], name: str, place: int) -> Tensor | None:
    """The multiplier out of the window of a scaled code's part: each is finer by the bits of the one before."""
    return scales[name][1] * 2.0 ** -(place * (code.mantissa_bits + 1)) if code.scaled else None


def _into(code: Code, scales: Mapping[str, tuple[Tensor, Tensor]], name: str, place: int) -> Tensor | None:
    return scales[name][0] * 2.0 ** (place * (code.mantissa_bits + 1)) if code.scaled else None


def in_expansions(rule: Rule, storage: Storage, lane: Lane, scalars: Scalars, seed: Tensor) -> Written:
    """The published arithmetic: every operation rounded to nearest even at the weight's precision.

    Arguments and result as of :func:`in_float32`.
    """
    rounding = nearest_even_bits(encoding.dropped_bits(storage.weight), quiet=True)
    weight = Expansion(read_parts(storage, lane, "weight"), rounding)
    states = [Expansion(read_parts(storage, lane, name), rounding) for name in rule.states]
    gradient = encoding.gradient_value(storage.visible, lane.gradient) * scalars["gradient_scale"]
    advance = rule.expanded or expanded(rule.update)
    change, new_weight, *new_states = advance(weight, gradient, *states, scalars)
    fields: dict[str, Tensor] = {}
    kept: list[Tensor] = []
    for name, value in zip(("weight", *rule.states), (new_weight, *new_states), strict=True):
        code = storage.code(name)
        for place, part in enumerate(value.parts):
            own = name if place == 0 else low_parts(name, code)[place - 1]
            shift = lane.fields[own][1] if own in lane.fields else 0
            into = _into(code, lane.scales, name, place)
            bits = encoding.encode(code.part(place), part, half(encoding.dropped_bits(code)), shift, into)
            if name == "weight":
                kept.append(encoding.decode(code, bits, shift, _inverse(into)))
            if own != "weight":
                fields[own] = bits
    visible = encoding.encode_visible(storage, kept[0], 0)
    moved = [new - old for new, old in zip(kept, weight.parts, strict=True)]
    return Written(visible, fields, (change, sum(moved[1:], moved[0]), moved[0]))


ARITHMETICS: dict[str, Callable[..., Written]] = {"float32": in_float32, "expansion": in_expansions}
