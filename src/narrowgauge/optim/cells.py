"""Where a stored weight lies: in the cell of values that round to its visible one."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.numerics.rounding import (
    EXPONENT,
    MAGNITUDE,
    canonical_bits,
    cut_to_even,
    float_of,
    half,
)
from narrowgauge.optim.codes import (
    Lane,
    encode,
    encode_visible,
    in_range,
    place_tail,
    visible_value,
)
from narrowgauge.optim.planes import dropped_bits, fields_of
from narrowgauge.spec.storages import VISIBLE, Storage


def into_cell(storage: Storage, value: Tensor) -> Tensor:
    """Return values to be stored, so moved that the visible weight is the nearest one, ties to
    even.

    A tail holds less than half an ulp upward, and a kernel rounds ties up.
    """
    if not (storage.tail_bits or storage.master) or storage.visible == "float32":
        return value
    _, below, exponent = VISIBLE[storage.visible]
    bits = canonical_bits(value.float() * 2.0**exponent)
    nearest = cut_to_even(bits, below)
    last = half(below) - (1 << dropped_bits(storage.weight))
    moved = float_of(nearest + (bits - nearest).clamp(-half(below), last)) * 2.0**-exponent
    if storage.tail_bits:
        return moved
    is_off = encode_visible(storage, value.float(), half(below)) != in_range(storage, nearest)
    return torch.where(is_off, moved.to(value.dtype), value)


def inside_cell(storage: Storage, bits: Tensor, value: Tensor) -> Tensor:
    """Return stored weights, those that do not round to their visible ``bits`` moved to the next
    float32 that does.

    Such a weight lies between two visible ones, or so near that a kernel's rounding put it there.
    """
    dtype = getattr(torch, storage.visible)
    most = half(VISIBLE[storage.visible][1])
    seen = visible_value(storage.visible, bits)
    rounded = value.to(dtype).float()
    if storage.visible == "float16":
        rounded = rounded.clamp(-65536.0, 65536.0)  # what infinity is in `seen`
    is_above = value.abs() > seen.abs()
    steps = torch.where(is_above, most, -most).to(torch.int32)
    middle = visible_value(storage.visible, bits + steps)
    moved = torch.nextafter(middle, seen).to(value.dtype)
    return torch.where((rounded != seen) & (value == value), moved, value)


def random_offset(visible: str, bits: Tensor, random: Tensor) -> Tensor:
    """Return a random distance from visible weights within their cells, in :func:`visible_bits`.

    ``random`` are 32 bits.

    It is uniform and odd, so never between two visible weights. It is 0 for zeros, infinities and
    NaN.
    """
    magnitude = bits & MAGNITUDE
    infinity = EXPONENT if visible == "bfloat16" else 31 << 23
    offset = (random >> (32 - VISIBLE[visible][1])) | 1
    return offset.masked_fill((magnitude == 0) | (magnitude >= infinity), 0)


def random_low_bits(
    storage: Storage, lane: Lane, random: Tensor, keeps_ones: bool = False
) -> dict[str, Tensor]:
    """Return the fields beside a visible weight in place, with random low bits that belong to it.

    Those of 1 and -1 are zero if ``keeps_ones``.
    """
    offset = random_offset(storage.visible, lane.visible, random)
    if keeps_ones:
        offset = offset.masked_fill(visible_value(storage.visible, lane.visible).abs() == 1, 0)
    field = fields_of(storage)["weight"]
    if storage.tail_bits:
        return {field.name: place_tail(field, offset)}
    value = visible_value(storage.visible, lane.visible + offset)
    if not storage.master:
        # Toward zero, since a low part of half an ulp would be a tie.
        value = value - visible_value(storage.visible, lane.visible)
    return {field.name: encode(field, value, 0)}
