"""Layouts: how the codes of a storage pack into 32-bit words, so that a kernel only ever touches int32.

A loop over 32-bit values runs at full vector width; one that mixes 16- and 32-bit loads does not. So a bfloat16 tensor is
read as int32 words of two neighbours, its two *lanes* taken by shift and mask, and every state follows suit: a 16-bit
code packs like the weight, a 32-bit one lies in two *planes*, first all even elements, then all odd ones. Codes of odd
widths share a 32-bit plane. A float32 weight has one lane, and its states lie flat.

This is internal: :func:`to_parameter_order` and :func:`from_parameter_order` turn a plane into a tensor shaped like the
parameter and back without losing a bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_

import torch
from torch import Tensor

from narrowgauge.storages import STATE_NAMES, Storage


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of state: its name, bits per element, and ``(field, shift, bits)`` of what is packed into an element."""

    name: str
    bits: int
    fields: tuple[tuple[str, int, int], ...]
    dtype: torch.dtype


def num_lanes(storage: Storage) -> int:
    """How many neighbouring weights share a 32-bit word."""
    return 1 if storage.visible == "float32" else 2


@lru_cache
def planes(storage: Storage) -> tuple[Plane, ...]:
    """The planes of a storage: whole 16- and 32-bit fields alone, all others packed together into 32-bit words.

    Returns:
        Planes in the order in which the kernel takes them.
    """
    alone, narrow = [], []
    for name, bits in storage.fields:
        if bits in (16, 32):
            dtype = torch.float32 if bits == 32 else torch.int16 if name == "tail" else torch.bfloat16
            # A kernel sees either half of a 16-bit pair in the upper half of a word.
            alone.append(Plane(name, bits, ((name, 32 - bits, bits),), dtype))
        else:
            narrow.append((name, bits))
    if not narrow:
        return tuple(alone)
    # Signed codes last: the sign bit of the topmost one then lies where a float32 has it.
    narrow.sort(key=lambda field: field[0] in STATE_NAMES and getattr(storage, field[0]).signed)
    packed, shift = [], 0
    for name, bits in narrow:
        packed.append((name, shift, bits))
        shift += bits
    if shift > 32:
        raise ValueError(f"storage '{storage.name}' packs {shift} bits into a 32-bit word")
    return (*alone, Plane("packed", 32, tuple(packed), torch.int32))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a field lies: its plane, and the bit of the word where it begins."""

    plane: Plane
    shift: int


@lru_cache
def places(storage: Storage) -> Mapping[str, Place]:
    """The place of every field of the storage, by its name."""
    return {field: Place(plane, shift) for plane in planes(storage) for field, shift, _ in plane.fields}


def place_of(storage: Storage, name: str | None) -> Place | None:
    """The place of a field of the storage, ``None`` where there is no such field."""
    return None if name is None else places(storage).get(name)


def num_words(storage: Storage, num_elements: int) -> int:
    """Length of the weight read as words; an odd last element has a word of its own."""
    lanes = num_lanes(storage)
    return (num_elements + lanes - 1) // lanes


def allocate(storage: Storage, plane: Plane, num_elements: int, device: torch.device) -> Tensor:
    """Zeroed words of one plane: ``[words]`` for 16-bit codes, ``[lanes, words]`` for 32-bit ones (zero encodes 0)."""
    words = num_words(storage, num_elements)
    shape = (words,) if plane.bits == 16 else (num_lanes(storage), words)
    return torch.zeros(shape, dtype=torch.int32, device=device)


def to_parameter_order(plane: Plane, words: Tensor, shape: torch.Size) -> Tensor:
    """The plane as a tensor of the parameter's shape and the plane's own dtype (a copy)."""
    flat = words.view(plane.dtype) if plane.bits == 16 else words.t().reshape(-1).view(plane.dtype)
    return flat[: shape.numel()].reshape(shape).clone()


def from_parameter_order(storage: Storage, plane: Plane, values: Tensor) -> Tensor:
    """The inverse of :func:`to_parameter_order`; the padding of an odd length is zero."""
    words = allocate(storage, plane, values.numel(), values.device)
    flat = values.reshape(-1)
    if plane.bits == 16:
        words.view(plane.dtype)[: flat.numel()] = flat
        return words
    lanes = words.shape[0]
    raw = flat.view(torch.int32)
    for lane in range(lanes):
        part = raw[lane::lanes]
        words[lane, : part.numel()] = part
    return words


def lanes_of_pairs(words: Tensor) -> tuple[Tensor, Tensor]:
    """Both lanes of words of two bfloat16 neighbours, as float32 bits: in the upper half, the lower half zero."""
    return words << 16, words & -65536


def by_lane(planes_: Sequence[Plane], lanes: int, words: Sequence[Tensor]) -> list[list[Tensor]]:
    """For each lane, the words of every plane, from the flat list of tensors that a kernel takes."""
    result: list[list[Tensor]] = [[] for _ in range(lanes)]
    queue = list(words)
    for plane in planes_:
        if plane.bits == 16:
            pair = queue.pop(0)
            result[0].append(pair << 16)
            result[1].append(pair)
        else:
            for lane in result:
                lane.append(queue.pop(0))
    return result


def join_lanes(
    planes_: Sequence[Plane], weights: Sequence[Tensor], fields: Sequence[Mapping[str, Tensor]]
) -> list[Tensor]:
    """The words that a kernel writes, weight first: the inverse of :func:`lanes_of_pairs` and :func:`by_lane`."""
    result = [weights[0] if len(weights) == 1 else _pairs(*weights)]
    for plane in planes_:
        words = [reduce(or_, (lane[name] for name, _, _ in plane.fields)) for lane in fields]
        result.extend([_pairs(*words)] if plane.bits == 16 else words)
    return result


def _pairs(even: Tensor, odd: Tensor) -> Tensor:
    """Words of two 16-bit neighbours, each given in the upper half of a word."""
    return ((even >> 16) & 0xFFFF) | odd


def kernel_words(plane: Plane, words: Tensor) -> tuple[Tensor, ...]:
    """The tensors by which a kernel takes one plane: one for 16-bit codes, one per lane for 32-bit ones."""
    return (words,) if plane.bits == 16 else words.unbind(0)
