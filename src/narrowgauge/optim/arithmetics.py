"""Arithmetics: one step of one lane, from the bits that are kept to the bits that will be.

``decode -> rule -> encode`` in float32 registers is ours: the rule sees float32 values, and only what is kept is cut. The
published Collage computes otherwise, every operation rounded to the visible format and errors carried as expansions; a
storage says which (``Storage.arithmetic``). Both are pure functions of a lane's words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from narrowgauge.numerics.expansions import Expansion, nearest_even_bits
from narrowgauge.numerics.rounding import bits_of, dither, half, random_bits
from narrowgauge.optim import encoding
from narrowgauge.optim.rules.collage import expanded
from narrowgauge.optim.rules.elementwise import Rule, Scalars
from narrowgauge.spec.storages import Code, Storage, low_parts


@dataclass(frozen=True, slots=True)
class Lane:
    """What a step reads.

    Args:
        seen: int32 bits of the visible weight (see :func:`narrowgauge.optim.encoding.seen_value`).
        gradient: int32 bits of the gradient, likewise.
        fields: the word of every field, and the bit where it begins.
        scales: of what is kept relative to its row, the multipliers into the code's window, after the step, and back out
            of it, before.
    """

    seen: Tensor
    gradient: Tensor
    fields: Mapping[str, tuple[Tensor, int]]
    scales: Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a step writes, and what the audit reads.

    Args:
        seen: int32 bits of the new visible weight.
        fields: int32, every field's bits in their place.
        changes: float32: the intended change, the change of the stored weight, and that of the visible one.
    """

    seen: Tensor
    fields: dict[str, Tensor]
    changes: tuple[Tensor, Tensor, Tensor]


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


def in_float32(rule: Rule, storage: Storage, lane: Lane, scalars: Scalars, seed: Tensor) -> Stepped:
    """The rule in float32; what is kept is cut.

    Args:
        rule, storage: what to do and how to keep it.
        lane: what is kept.
        scalars: 0-d float32 tensors, ``gradient_scale`` and the rule's.
        seed: 0-d int32 tensor.
    Returns:
        The new bits and the changes.
    """
    gradient = encoding.gradient_value(storage.visible, lane.gradient) * scalars["gradient_scale"]
    visible = encoding.seen_value(storage.visible, lane.seen)
    weight, low = _weight(storage, lane, visible)
    states = [read_state(storage, lane, name) for name in rule.states]
    change, *new_states = rule.update(weight, gradient, *states, scalars)
    addend = addends(storage, weight, lane.gradient, seed)
    fields: dict[str, Tensor] = {}
    if low is not None:
        # Kahan's order: what was left over before goes with the change, so that neither is lost beside the weight.
        total = low + change
        seen = encoding.encode_visible(storage, visible + total, addend["weight"])
        moved = encoding.seen_value(storage.visible, seen) - visible
        shift = lane.fields["weight_low"][1]
        fields["weight_low"] = encoding.encode(storage.weight, total - moved, addend["weight"], shift)
        taken = moved + (encoding.decode(storage.weight, fields["weight_low"], shift) - low)
    else:
        seen, field, kept = encoding.encode_weight(storage, weight + change, addend["weight"])
        if field is not None:
            fields = _placed(storage, lane, field)
        taken = kept - weight
    for name, value in zip(rule.states, new_states, strict=True):
        fields |= write_state(storage, lane, name, value, addend[name])
    return Stepped(seen, fields, (change, taken, encoding.seen_value(storage.visible, seen) - visible))


def _weight(storage: Storage, lane: Lane, visible: Tensor) -> tuple[Tensor, Tensor | None]:
    """The float32 that the rule sees, and the low part beside it where there is one."""
    if not storage.beside:
        return visible, None
    word, shift = lane.fields[storage.beside[0]]
    if storage.weight.parts > 1 and not storage.master:
        return visible, encoding.decode(storage.weight, word, shift)
    field = word if storage.master else encoding.take_tail(storage, word, shift)
    return encoding.decode_weight(storage, lane.seen, field), None


def read_parts(storage: Storage, lane: Lane, name: str) -> tuple[Tensor, ...]:
    """The float32 values of a state's parts, or of those of a weight that is an expansion."""
    code = storage.code(name)
    names = (name, *low_parts(name, code))
    if name == "weight":
        first = (encoding.seen_value(storage.visible, lane.seen),)
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
    return _weight(storage, lane, encoding.seen_value(storage.visible, lane.seen))[0]


def write_weight(storage: Storage, lane: Lane, value: Tensor, addend: Tensor | int) -> tuple[Tensor, dict[str, Tensor]]:
    """The visible bits and the fields in their places of a float32 weight; each part takes what the ones before leave."""
    if storage.weight.parts > 1:
        code, zero = storage.weight, torch.zeros((), dtype=torch.int32, device=value.device)
        alone = replace(lane, fields={**lane.fields, "weight": (zero, 32 - code.bits if not code.is_window else 0)})
        fields = write_state(storage, alone, "weight", value, addend)
        shift, into = alone.fields["weight"][1], _into(code, lane.scales, "weight", 0)
        first = encoding.decode(code, fields.pop("weight"), shift, _inverse(into))
        return encoding.encode_visible(storage, first, 0), fields
    seen, field, _ = encoding.encode_weight(storage, value, addend)
    return seen, {} if field is None else _placed(storage, lane, field)


def _placed(storage: Storage, lane: Lane, field: Tensor) -> dict[str, Tensor]:
    """The tail or master of a weight, in its place."""
    name = storage.beside[0]
    return {name: field if storage.master else encoding.place_tail(storage, field, lane.fields[name][1])}


def _inverse(into: Tensor | None) -> Tensor | None:
    """Out of the window that ``into`` leads into: as what is written now will be read."""
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


def in_expansions(rule: Rule, storage: Storage, lane: Lane, scalars: Scalars, seed: Tensor) -> Stepped:
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
    seen = encoding.encode_visible(storage, kept[0], 0)
    moved = [new - old for new, old in zip(kept, weight.parts, strict=True)]
    return Stepped(seen, fields, (change, sum(moved[1:], moved[0]), moved[0]))


ARITHMETICS: dict[str, Callable[..., Stepped]] = {"float32": in_float32, "expansion": in_expansions}
