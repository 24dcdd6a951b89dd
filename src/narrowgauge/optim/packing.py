"""Layouts: how the codes of a storage pack into 32-bit words, so that a kernel only ever touches int32.

A loop over 32-bit values runs at full vector width; one that mixes 16- and 32-bit loads does not. So a bfloat16 tensor is
read as int32 words of two neighbours. A *lane* is one element of such a group: a bfloat16 weight has an even and an odd
lane, taken by shift and mask; a float32 weight has one. A *plane* is one state tensor: a lone field, or several fields
packed into an element of 8, 16 or 32 bits. A plane of 16 bits packs like the weight; one of 32 bits is stored as two
tensors, first all even elements, then all odd ones. Where a storage has an 8-bit plane, four lanes share a word of it; the
weight is then read in two *parts*, its upper and its lower half of rows: lanes 0 and 1 come from the first, 2 and 3 from
the second. A *tail* is the signed rest of the stored weight below the visible one.

A storage whose codes are scaled by row, or that has two parts, lies in a matrix of rows; any other lies flat.

This layout is internal: :func:`to_parameter_order` and :func:`from_parameter_order` turn a plane into a tensor of the
parameter's shape and back without losing a bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_

import torch
from torch import Tensor

from narrowgauge.spec.codes import VISIBLE, width_of
from narrowgauge.spec.storages import Storage

INTEGER = {8: torch.int8, 16: torch.int16, 32: torch.int32}


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of state: its name, bits per element, and ``(field, shift, bits)`` of what is packed into an element."""

    name: str
    bits: int
    fields: tuple[tuple[str, int, int], ...]
    dtype: torch.dtype


@lru_cache
def planes(storage: Storage) -> tuple[Plane, ...]:
    """The planes of a storage, as :func:`narrowgauge.spec.codes.packed` groups its fields.

    Returns:
        Planes in the order in which the kernel takes them.
    """
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
    if width == 32:
        return torch.float32
    state = name.split("_low")[0]
    code = None if name in ("tail", "master") else storage.code(state)
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
    return 32 // VISIBLE[storage.visible][0]


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
    return num_lanes(storage) * bits // 32


def allocate(storage: Storage, plane: Plane, shape: Sequence[int], device: torch.device) -> Tensor:
    """Zeroed words of one plane, ``[tensors, *extent]``, for a parameter of ``shape`` (zero encodes 0)."""
    full = (num_tensors(storage, plane.bits), *extent(storage, shape))
    return torch.zeros(full, dtype=torch.int32, device=device)


def to_parameter_order(storage: Storage, plane: Plane, words: Tensor, shape: Sequence[int]) -> Tensor:
    """The plane as a tensor of the parameter's shape and the plane's own dtype (a copy)."""
    lanes, group = num_lanes(storage), words.shape[1:]
    neighbours, parts = per_word(storage), num_parts(storage)
    # [tensors, *extent] of words → a lane for each tensor and each place in its words → parts and neighbours.
    # (Flattened before the view: a dim of one element may have any stride.)
    small = words.reshape(-1).view(INTEGER[plane.bits]).view(len(words), *group, 32 // plane.bits)
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
    lanes = filled.reshape(parts, *group, neighbours).movedim(-1, 1).reshape(len(words), 32 // plane.bits, *group)
    return lanes.movedim(1, -1).reshape(-1).view(torch.int32).view(words.shape)


# ── in the kernel ───────────────────────────────────────────────────────────────────────────────────────────────────────


def lanes_of_weight(visible: str, words: Sequence[Tensor]) -> list[Tensor]:
    """The bits of every lane of a visible tensor (see :func:`narrowgauge.optim.encoding.visible_value`), from its parts."""
    if visible == "float32":
        return list(words)
    if visible == "bfloat16":
        return [lane for word in words for lane in (word << 16, word & -65536)]
    return [lane for word in words for lane in (_float16_bits(word << 16), _float16_bits(word))]


def words_of_weight(visible: str, lanes: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of :func:`lanes_of_weight`."""
    if visible == "float32":
        return list(lanes)
    if visible == "float16":
        lanes = [((lane << 3) & 0x7FFF0000) | (lane & -(1 << 31)) for lane in lanes]
    return [_pair(even, odd) for even, odd in zip(lanes[::2], lanes[1::2], strict=True)]


def _float16_bits(word: Tensor) -> Tensor:
    """From a float16 in the upper half of a word, a float32 with its sign, exponent and mantissa fields."""
    return ((word & 0x7FFF0000) >> 3) | (word & -(1 << 31))


def _pair(even: Tensor, odd: Tensor) -> Tensor:
    """Words of two 16-bit neighbours, each given in the upper half of a word."""
    return ((even >> 16) & 0xFFFF) | odd


def by_lane(storage: Storage, words: Sequence[Tensor]) -> list[dict[str, tuple[Tensor, int]]]:
    """For each lane, the word and the shift in it of every field, from the flat list of tensors that a kernel takes."""
    lanes: list[dict[str, tuple[Tensor, int]]] = [{} for _ in range(num_lanes(storage))]
    queue = iter(words)
    for plane in planes(storage):
        tensors = [next(queue) for _ in range(num_tensors(storage, plane.bits))]
        share = 32 // plane.bits
        for lane, fields in enumerate(lanes):
            for name, shift, _ in plane.fields:
                fields[name] = tensors[lane // share], shift + plane.bits * (lane % share)
    return lanes


def join_lanes(storage: Storage, fields: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
    """The words of the planes that a kernel writes, from each lane's fields in their places: the inverse of :func:`by_lane`."""
    result = []
    for plane in planes(storage):
        share = 32 // plane.bits
        for first in range(0, len(fields), share):
            together = [lane[name] for lane in fields[first : first + share] for name, _, _ in plane.fields]
            result.append(reduce(or_, together))
    return result
