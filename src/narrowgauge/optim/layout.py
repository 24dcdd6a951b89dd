"""Layout: where the bits of live states are in memory. All other code sees tensors in the parameter's shape.

A loop over 32-bit values runs at full vector width. A loop that mixes 16- and 32-bit loads does not. So a bfloat16 tensor is
read as int32 *words* of two neighbours. Shift and mask give an even and an odd *lane*. A float32 weight has one lane.

A *plane* is one state tensor. It holds one field, or several fields packed into an element of 8, 16 or 32 bits. A 16-bit
plane has the weight's order. Beside a 16-bit weight, a 32-bit plane is stored as two tensors: all even elements, then all odd
ones. So is a plane of float64 values, in 64-bit words. An 8-bit plane packs four lanes into a word. With such a plane the weight
is read in two *parts*, the upper and the lower half of its rows. Lanes 0 and 1 come from the first part, 2 and 3 from the second.

A storage with two parts, or with codes scaled by row, is a matrix of rows. Other storages are flat, and their small parameters
share a :class:`Bucket`. :func:`to_parameter_order` and :func:`from_parameter_order` convert without losing a bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from narrowgauge.optim.codes import INTEGER, SIGN
from narrowgauge.spec.storages import VISIBLE, Storage, low_parts, width_of


def _share(bits: int) -> int:
    return max(1, 32 // bits)


# ── planes ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Plane:
    """Describe one state tensor: its name, bits per element, and the packed ``(field, shift, bits)``."""

    name: str
    bits: int
    fields: tuple[tuple[str, int, int], ...]
    dtype: torch.dtype


@lru_cache
def planes(storage: Storage) -> tuple[Plane, ...]:
    """Return the planes of a storage in the kernel's order."""
    result: list[Plane] = []
    for group in storage.packing:
        width = width_of(group)
        if len(group) == 1:
            ((name, bits),) = group
            result.append(Plane(name, width, ((name, 0, bits),), _dtype(storage, name, width)))
            continue
        # Signed codes come last. Then the topmost sign bit is where a float32 has it.
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
    """Return PyTorch's dtype with the bits of a lone field, if there is one."""
    if width >= 32:
        return torch.float32 if width == 32 else torch.float64
    codes = {state: storage.code(state) for state in ("weight", *dict(storage.states))}
    parts = {part: code for state, code in codes.items() for part in (state, *low_parts(state, code))}
    code = parts.get(name)  # a tail and a master copy have none
    plain = width == 16 and code is not None and not code.is_window and code.signed
    return torch.bfloat16 if plain else INTEGER[width]


# ── lanes and extents ───────────────────────────────────────────────────────────────────────────────────────────────────


def per_word(storage: Storage) -> int:
    """Return the number of neighbouring weights in a 32-bit word."""
    return _share(VISIBLE[storage.visible][0])


@lru_cache
def num_lanes(storage: Storage) -> int:
    """Return the number of weights that one iteration of the kernel's loop steps."""
    return max(per_word(storage), *(32 // plane.bits for plane in planes(storage)), 1)


def num_parts(storage: Storage) -> int:
    """Return the number of parts into which the weight's rows are split."""
    return num_lanes(storage) // per_word(storage)


@lru_cache
def by_rows(storage: Storage) -> bool:
    """Return whether the storage is a matrix of rows."""
    return bool(storage.scaled) or num_parts(storage) > 1


def matrix_of(storage: Storage, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape in which a parameter's elements are read: ``(rows, columns)`` or flat."""
    if not by_rows(storage):
        return (math.prod(shape),)
    return (math.prod(shape[:-1]), shape[-1] if shape else 1)


def extent(storage: Storage, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of each word tensor for a parameter of ``shape``. Odd ends are padded."""
    matrix = matrix_of(storage, shape)
    words = (*matrix[:-1], -(-matrix[-1] // per_word(storage)))
    return (-(-words[0] // num_parts(storage)), *words[1:])


def num_tensors(storage: Storage, bits: int) -> int:
    """Return the number of word tensors of a plane with so many bits per element."""
    return num_lanes(storage) // _share(bits)


def allocate(storage: Storage, plane: Plane, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return zeroed words of one plane, ``[tensors, *extent]``, for a parameter of ``shape``. Zero encodes 0."""
    full = (num_tensors(storage, plane.bits), *extent(storage, shape))
    return torch.zeros(full, dtype=INTEGER[max(32, plane.bits)], device=device)


# ── the translation ─────────────────────────────────────────────────────────────────────────────────────────────────────


def to_parameter_order(storage: Storage, plane: Plane, words: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a copy of a plane in the parameter's shape and the plane's own dtype."""
    lanes, group = num_lanes(storage), words.shape[1:]
    neighbours, parts = per_word(storage), num_parts(storage)
    # [tensors, *extent] of words → one lane per tensor and position in its words → parts and neighbours.
    # (Flatten before the view: a dim of one element may have any stride.)
    small = words.reshape(-1).view(INTEGER[plane.bits]).view(len(words), *group, _share(plane.bits))
    elements = small.movedim(-1, 1).reshape(lanes, *group)
    by_part = elements.reshape(parts, neighbours, *group).movedim(1, -1)
    rows = by_part.reshape(parts * group[0], group[1] * neighbours) if len(group) == 2 else by_part.reshape(-1)
    for dim, size in enumerate(matrix_of(storage, shape)):
        rows = rows.narrow(dim, 0, size)
    return rows.reshape(-1).view(plane.dtype).view(tuple(shape)).clone()


def from_parameter_order(storage: Storage, plane: Plane, values: Tensor) -> Tensor:
    """Return the words of a plane: the inverse of :func:`to_parameter_order`. Padding is zero."""
    words = allocate(storage, plane, values.shape, values.device)
    group, neighbours, parts = words.shape[1:], per_word(storage), num_parts(storage)
    padded = (parts * group[0], *group[1:-1], group[-1] * neighbours) if len(group) == 2 else (group[0] * neighbours,)
    matrix = matrix_of(storage, values.shape)
    filled = torch.zeros(padded, dtype=INTEGER[plane.bits], device=values.device)
    target = filled
    for dim, size in enumerate(matrix):
        target = target.narrow(dim, 0, size)
    target.copy_(values.reshape(-1).view(INTEGER[plane.bits]).view(matrix))
    lanes = filled.reshape(parts, *group, neighbours).movedim(-1, 1).reshape(len(words), _share(plane.bits), *group)
    return lanes.movedim(1, -1).reshape(-1).view(words.dtype).view(words.shape)


def fields_of(storage: Storage, words: Mapping[str, Tensor], shape: Sequence[int]) -> dict[str, tuple[Tensor, int]]:
    """Return the fields of a parameter's state in the parameter's order, as in a :class:`narrowgauge.optim.codes.Lane`."""
    fields = {}
    for plane in planes(storage):
        bits = _bits_of_plane(storage, plane, words, shape).reshape(matrix_of(storage, shape))
        fields.update({name: (bits, shift) for name, shift, _ in plane.fields})
    return fields


def set_fields(
    storage: Storage, words: Mapping[str, Tensor], shape: Sequence[int], fields: Mapping[str, Tensor]
) -> None:
    """Overwrite fields of a state's words. They are given in the parameter's order, in place in a word."""
    for plane in planes(storage):
        present = [(name, shift, bits) for name, shift, bits in plane.fields if name in fields]
        if not present:
            continue
        raw = _bits_of_plane(storage, plane, words, shape)
        for name, shift, bits in present:
            mask = ((1 << bits) - 1) << shift if bits < 32 else -1
            raw = (raw & ~mask) | (fields[name].reshape(shape) & mask)
        value = raw.to(INTEGER[plane.bits]).view(plane.dtype)
        words[plane.name].copy_(from_parameter_order(storage, plane, value))


def _bits_of_plane(storage: Storage, plane: Plane, words: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
    values = to_parameter_order(storage, plane, words[plane.name], shape)
    return values.view(INTEGER[plane.bits]).to(INTEGER[max(32, plane.bits)])


# ── tensors in memory ───────────────────────────────────────────────────────────────────────────────────────────────────


def as_words(tensor: Tensor) -> Tensor | None:
    """Return a contiguous tensor as words in place, or ``None`` if its length or address does not allow it."""
    size = tensor.element_size()
    if not tensor.is_contiguous() or tensor.numel() * size % 4 or tensor.storage_offset() * size % 4:
        return None
    return tensor.view(-1).view(torch.int32)


def parts_of(storage: Storage, tensor: Tensor) -> list[Tensor] | None:
    """Return a weight or gradient in place as the kernel's words, or ``None`` if it has odd ends or strides."""
    shape = extent(storage, tensor.shape)
    is_whole = math.prod(shape) * num_lanes(storage) == tensor.numel()
    flat = as_words(tensor) if is_whole else None
    if flat is None or not by_rows(storage):
        return None if flat is None else [flat]
    return list(flat.view(num_parts(storage), *shape).unbind(0))


def copied_words(storage: Storage, tensor: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Copy a parameter-shaped tensor; return the copy and its memory as the kernel's words, padded with zeros."""
    shape, parts = extent(storage, tensor.shape), num_parts(storage)
    buffer = torch.zeros(parts * shape[0], *shape[1:], dtype=torch.int32, device=tensor.device)
    matrix = matrix_of(storage, tensor.shape)
    copy = buffer.view(tensor.dtype)[tuple(map(slice, matrix))]
    copy.copy_(tensor.reshape(matrix))
    return copy, list(buffer.view(parts, *shape).unbind(0))


def is_aligned(tensor: Tensor) -> bool:
    """Return whether compiled code may write a tensor in place. On a GPU it needs 16-byte alignment."""
    return tensor.is_cpu or tensor.data_ptr() % 16 == 0


def scales_of_rows(storage: Storage, shape: Sequence[int], device: torch.device) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return ones for a multiplier per row, float32 ``[rows, 1]``, and the same memory as the kernel reads it, part by part."""
    group, parts = extent(storage, shape)[0], num_parts(storage)
    memory = torch.ones(parts * group, 1, dtype=torch.float32, device=device)
    return memory[: matrix_of(storage, shape)[0]], memory.view(parts, group, 1).unbind(0)


def tensors_of_planes(storage: Storage, words: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the words of each plane as the kernel's list of tensors."""
    return [tensor for plane in planes(storage) for tensor in words[plane.name].unbind(0)]


# ── in the kernel ───────────────────────────────────────────────────────────────────────────────────────────────────────


def lanes_of_weight(visible: str, words: Sequence[Tensor]) -> list[Tensor]:
    """Return the bits of every lane of a visible tensor (:func:`narrowgauge.optim.codes.visible_value`) from its parts."""
    if visible == "float32":
        return list(words)
    if visible == "bfloat16":
        return [lane for word in words for lane in (word << 16, word & -65536)]
    return [lane for word in words for lane in (_float16_bits(word << 16), _float16_bits(word))]


def words_of_weight(visible: str, lanes: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a visible tensor: the inverse of :func:`lanes_of_weight`."""
    if visible == "float32":
        return list(lanes)
    if visible == "float16":
        lanes = [((lane << 3) & 0x7FFF0000) | (lane & SIGN) for lane in lanes]
    return [_pair(even, odd) for even, odd in zip(lanes[::2], lanes[1::2], strict=True)]


def _float16_bits(word: Tensor) -> Tensor:
    """Convert a float16 in the upper half of a word to a float32 with its sign, exponent and mantissa fields."""
    return ((word & 0x7FFF0000) >> 3) | (word & SIGN)


def _pair(even: Tensor, odd: Tensor) -> Tensor:
    """Join two 16-bit neighbours, each in the upper half of a word."""
    return ((even >> 16) & 0xFFFF) | odd


def by_lane(storage: Storage, words: Sequence[Tensor]) -> list[dict[str, tuple[Tensor, int]]]:
    """Return for each lane the word and the shift of every field, from the kernel's flat list of tensors."""
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
    """Return the kernel's output words from each lane's fields in place: the inverse of :func:`by_lane`."""
    result = []
    for plane in planes(storage):
        share = _share(plane.bits)
        for first in range(0, len(fields), share):
            together = [lane[name] for lane in fields[first : first + share] for name, _, _ in plane.fields]
            result.append(reduce(or_, together))
    return result


def with_fields(storage: Storage, lanes: Sequence[Any], fields: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
    """Return the kernel's words of lanes (:class:`narrowgauge.optim.codes.Lane`), with some fields replaced."""
    merged = []
    for lane, replaced in zip(lanes, fields, strict=True):
        every = dict(replaced)
        for name, bits in storage.fields:
            word, shift = lane.fields[name]
            every.setdefault(name, word & (((1 << bits) - 1) << shift) if bits < 8 * word.itemsize else word)
        merged.append(every)
    return join_lanes(storage, merged)


# ── buckets ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

SMALL = 1 << 14
"""Parameters of at most this many elements share buckets."""
BUCKET_WORDS = 1 << 16
"""A bucket with this many words takes no more members."""
ALIGNMENT = 16
"""Every member of a bucket starts at a multiple of this many words: a full vector register."""


class Bucket:
    """Step small parameters of one storage in one kernel call: 300 norm gains cost one call.

    The members are states (:mod:`narrowgauge.optim.state`) with contiguous words. Weights and gradients are copied in before a
    step, and weights out after it. A member may come from another bucket: its words move here.
    """

    def __init__(self, members: Sequence[Any]) -> None:
        storage, device = members[0].storage, members[0].parameter.device
        self.members, self.segments, total = list(members), [], 0
        for member in members:
            count = extent(storage, member.parameter.shape)[0]
            self.segments.append(slice(total, total + count))
            total += -(-count // ALIGNMENT) * ALIGNMENT
        length = (total * num_lanes(storage),)
        words = {plane.name: allocate(storage, plane, length, device) for plane in planes(storage)}
        weights, gradients = (torch.zeros(total, dtype=torch.int32, device=device) for _ in range(2))
        self.tensors = [weights, gradients, *tensors_of_planes(storage, words)]
        self._weights: list[Tensor] = []
        self._gradients: list[Tensor] = []
        for member, segment in zip(members, self.segments, strict=True):
            member.move_words({name: plane[:, segment] for name, plane in words.items()})
            member.bucket = self
            shape = member.parameter.shape
            for source, views in ((weights, self._weights), (gradients, self._gradients)):
                views.append(source[segment].view(getattr(torch, storage.visible))[: shape.numel()].view(shape))

    def gather(self) -> None:
        """Copy the members' weights and gradients in. Call it under ``torch.no_grad()``."""
        sources = [*(m.parameter for m in self.members), *(m.gradient for m in self.members)]
        torch._foreach_copy_([*self._weights, *self._gradients], sources)

    def scatter(self) -> None:
        """Copy the weights out. Call it under ``torch.no_grad()``."""
        torch._foreach_copy_([m.parameter for m in self.members], self._weights)


def allocate_all(states: Sequence[Any], *, joined: bool) -> None:
    """Allocate zeroed words for states of one storage and device. Small ones share buckets if ``joined``."""
    small = []
    for state in states:
        parameter, storage = state.parameter, state.storage
        is_odd = parameter.numel() <= BUCKET_WORDS and as_words(parameter) is None
        if joined and not by_rows(storage) and (parameter.numel() <= SMALL or is_odd):
            small.append(state)
        else:
            state.words = {p.name: allocate(storage, p, parameter.shape, parameter.device) for p in planes(storage)}
    buckets_of(small)


def buckets_of(states: Sequence[Any]) -> list[Bucket]:
    """Return the buckets of small states that step together. Make those that do not exist: members may have changed.

    States that a bucket loses others from get a bucket of their own: an old one would hold memory for all.
    """
    buckets: list[Bucket] = []
    before = {id(state.bucket): state.bucket for state in states if state.bucket is not None}
    members: list[Any] = []
    total = 0
    for state in states:
        members.append(state)
        total += extent(state.storage, state.parameter.shape)[0]
        if total >= BUCKET_WORDS or state is states[-1]:
            bucket = members[0].bucket
            buckets.append(bucket if bucket is not None and bucket.members == members else Bucket(members))
            members, total = [], 0
    for bucket in before.values():
        rest = [state for state in bucket.members if state.bucket is bucket]
        if rest and len(rest) < len(bucket.members):
            Bucket(rest)
    return buckets
