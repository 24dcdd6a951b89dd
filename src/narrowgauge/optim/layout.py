"""Layout: where the bits of live states are in memory. All other code sees tensors in the
parameter's shape.

A loop over 32-bit values runs at full vector width. A loop that mixes 16- and 32-bit loads does
not. So a kernel reads all tensors as 32-bit *words*. In ``word``, a word of the weight holds two
neighbours, an even and an odd *lane*::

    weight   [ a | b ] [ c | d ]     bfloat16 a, b, c, d, in the parameter's own memory
    packed   [   a   ] [   c   ]     32 bits of tail and states: a tensor of all even elements
             [   b   ] [   d   ]     and one of all odd elements

An 8-bit plane packs four lanes into a word. Then the weight is read in two *parts*, the upper and
the lower half of its rows. In ``compact``, with a and b in an upper row and p and q in a lower
row::

    weight   [ a | b ]  [ p | q ]    a tensor for each part
    tail     [ a  b  p  q ]          8 bits each
    packed   [ a | b ]  [ p | q ]    two moments in 16 bits

A *plane* is one state tensor, of one field or several packed fields. A storage with two parts, or
with codes scaled by row, is a matrix of rows. Other storages are flat. Odd ends are padded with
zeros.
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

LEAST_ROW = 64
"""Trailing dimensions are joined until a row has so many values, such as those of a convolution's
kernel.
"""
LARGE_BYTES = 1 << 22
STAGGERED_BYTES = 153 * 64
"""Tensors of so many bytes begin so many bytes apart: 153 lines, modulo 4 KiB and 64 KiB a fresh
place for each.
"""


@dataclass(frozen=True, slots=True)
class Plane:
    """Describe one state tensor: its name, bits per element, and the packed ``(field, shift,
    bits)``.
    """

    name: str
    bits: int
    fields: tuple[tuple[str, int, int], ...]
    dtype: torch.dtype

    @property
    def per_word(self) -> int:
        return max(1, 32 // self.bits)


@dataclass(frozen=True, eq=False)
class Layout:
    """Describe how a storage's tensors are read as words. ``planes`` are the state tensors, in the
    kernel's order.

    A word has ``per_word`` neighbouring weights. One iteration of the kernel's loop steps
    ``num_lanes`` weights, of ``num_parts`` parts. With ``by_rows`` the words are a matrix of rows.
    """

    storage: Storage
    planes: tuple[Plane, ...]
    per_word: int
    num_lanes: int
    num_parts: int
    by_rows: bool

    def matrix(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape in which elements of a flat tensor or a matrix are read: ``(rows,
        columns)`` or flat.
        """
        if not self.by_rows:
            return (math.prod(shape),)
        return (math.prod(shape[:-1]), shape[-1] if shape else 1)

    def extent(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of each word tensor for a parameter of ``shape``."""
        matrix = self.matrix(shape)
        words = (*matrix[:-1], -(-matrix[-1] // self.per_word))
        return (-(-words[0] // self.num_parts), *words[1:])

    def num_tensors(self, plane: Plane) -> int:
        """Return the number of word tensors of a plane."""
        return self.num_lanes // plane.per_word

    def row_dims(self, shape: Sequence[int]) -> int:
        """Return how many trailing dimensions of a whole parameter are one row.

        The first dimension never joins.
        """
        count = min(1, len(shape))
        size = shape[-1] if shape else 1
        while count < len(shape) - 1 and size < LEAST_ROW:
            count += 1
            size *= shape[-count]
        return count

    def allocate(self, extent: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """Return zeroed words of each plane, ``[tensors, *extent]``. Zero encodes 0.

        Large tensors would begin at the same place of a page. Then their lines meet in the same
        sets of the caches, and a step that walks over seven of them takes up to 1.6 times as long.
        So each begins some lines later than the one before.
        """
        words = {}
        place = 2  # weight and gradient come first
        for plane in self.planes:
            count = self.num_tensors(plane)
            dtype = INTEGER[max(32, plane.bits)]
            size = math.prod(extent)
            step = STAGGERED_BYTES // dtype.itemsize if size * dtype.itemsize >= LARGE_BYTES else 0
            total = count * (size + step) + place * step
            memory = torch.zeros(total, dtype=dtype, device=device)[place * step :]
            rows = memory.view(count, size + step)[:, :size]
            words[plane.name] = rows.unflatten(1, tuple(extent))
            place += count
        return words

    def allocate_bounds(self, num_rows: int, device: torch.device) -> dict[str, Tensor]:
        """Return a zero bound of each row for each code scaled by row: float32 ``[parts, rows,
        1]``.
        """
        bounds = {}
        for name in self.storage.scaled:
            bounds[name] = torch.zeros(
                self.num_parts, num_rows, 1, device=device, dtype=torch.float32
            )
        return bounds

    def in_order(self, words: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the words of planes as the kernel's list of tensors."""
        tensors: list[Tensor] = []
        for plane in self.planes:
            tensors += words[plane.name].unbind(0)
        return tensors

    # ── tensors in the parameter's order ──────────────────────────────────────────────────────────

    def to_parameter_order(self, plane: Plane, words: Tensor, shape: Sequence[int]) -> Tensor:
        """Return a copy of a plane in the parameter's shape and the plane's own dtype."""
        extent = words.shape[1:]
        # [tensors, *extent] of words → one lane per tensor and position in its words → parts and
        # neighbours. (Flatten before the view: a dim of one element may have any stride.)
        small = (
            words.reshape(-1).view(INTEGER[plane.bits]).view(len(words), *extent, plane.per_word)
        )
        elements = (
            small.movedim(-1, 1).reshape(self.num_parts, self.per_word, *extent).movedim(1, -1)
        )
        rows = elements.flatten(-2).flatten(0, 1)[tuple(map(slice, self.matrix(shape)))]
        result: Tensor = rows.reshape(-1).view(plane.dtype).view(tuple(shape)).clone()
        return result

    def from_parameter_order(self, plane: Plane, values: Tensor) -> Tensor:
        """Return the words of a plane: the inverse of :meth:`to_parameter_order`.

        Padding is zero.
        """
        _, elements = self.padded(values.view(INTEGER[plane.bits]))
        lanes = elements.unflatten(-1, (-1, self.per_word)).movedim(-1, 1)
        tensors = lanes.reshape(self.num_tensors(plane), plane.per_word, *lanes.shape[2:]).movedim(
            1, -1
        )
        words: Tensor = tensors.reshape(-1).view(INTEGER[max(32, plane.bits)])
        return words.view(len(tensors), *lanes.shape[2:])

    def padded(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Copy a parameter-shaped tensor.

        Return the copy as a matrix, and its memory with padding, ``[parts, …]``.
        """
        extent = self.extent(values.shape)
        matrix = self.matrix(values.shape)
        *rows, columns = (self.num_parts, *extent)
        memory = values.new_zeros(*rows, columns * self.per_word)
        copy = memory.flatten(0, 1)[tuple(map(slice, matrix))]
        copy.copy_(values.reshape(matrix))
        return copy, memory

    def memory(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return a contiguous tensor as a matrix, and its memory ``[parts, *extent of elements]``:
        its own, or that of a padded copy where ends or the address are odd.
        """
        extent = self.extent(values.shape)
        offset = values.storage_offset() * values.element_size()
        if math.prod(extent) * self.num_lanes != values.numel() or offset % 4:
            return self.padded(values)
        return values, values

    def lanes(self, values: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return a contiguous tensor as a matrix, and its lanes, each of :meth:`extent`."""
        matrix, memory = self.memory(values)
        lanes: list[Tensor] = []
        for part in memory.view(self.num_parts, *self.extent(values.shape), self.per_word):
            lanes += part.unbind(-1)
        return matrix, lanes

    def words(self, values: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return a contiguous weight or gradient as a matrix, and as the kernel's words."""
        matrix, memory = self.memory(values)
        words = memory.view(-1).view(torch.int32)  # flat: a dim of no element may have any stride
        return matrix, list(words.view(self.num_parts, *self.extent(values.shape)).unbind(0))

    # ── in the kernel ─────────────────────────────────────────────────────────────────────────────

    def by_lane(self, words: Sequence[Tensor]) -> list[dict[str, tuple[Tensor, int]]]:
        """Return for each lane the word and the shift of every field, from the kernel's tensors of
        planes.
        """
        lanes: list[dict[str, tuple[Tensor, int]]] = [{} for _ in range(self.num_lanes)]
        queue = iter(words)
        for plane in self.planes:
            tensors = [next(queue) for _ in range(self.num_tensors(plane))]
            for lane, fields in enumerate(lanes):
                tensor = tensors[lane // plane.per_word]
                place = lane % plane.per_word
                for name, shift, _ in plane.fields:
                    fields[name] = tensor, shift + plane.bits * place
        return lanes

    def join_lanes(self, fields: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Return the kernel's output words from each lane's fields in place: the inverse of
        :meth:`by_lane`.
        """
        result = []
        for plane in self.planes:
            for first in range(0, len(fields), plane.per_word):
                present = []
                for lane in fields[first : first + plane.per_word]:
                    present += [lane[name] for name, _, _ in plane.fields]
                result.append(reduce(or_, present))
        return result

    def with_fields(
        self, lanes: Sequence[Any], fields: Sequence[Mapping[str, Tensor]]
    ) -> list[Tensor]:
        """Return the kernel's words of lanes (:class:`narrowgauge.optim.codes.Lane`), with some
        fields replaced.
        """
        merged = []
        for lane, replaced in zip(lanes, fields, strict=True):
            every = dict(replaced)
            for name, bits in self.storage.fields:
                word, shift = lane.fields[name]
                if bits < 8 * word.itemsize:
                    word = word & (((1 << bits) - 1) << shift)
                every.setdefault(name, word)
            merged.append(every)
        return self.join_lanes(merged)


@lru_cache
def layout_of(storage: Storage) -> Layout:
    """Return the layout of a storage."""
    planes: list[Plane] = []
    for group in storage.packing:
        width = width_of(group)
        if len(group) == 1:
            ((name, bits),) = group
            dtype = _dtype(storage, name, width)
            planes.append(Plane(name, width, ((name, 0, bits),), dtype))
            continue
        # Signed codes come last. Then the topmost sign bit is where a float32 has it.
        states = dict(storage.states)
        ordered = sorted(
            group, key=lambda field: field[0] in states and storage.code(field[0]).signed
        )
        fields = []
        shift = 0
        for name, bits in ordered:
            fields.append((name, shift, bits))
            shift += bits
        number = sum(plane.name.startswith("packed") for plane in planes)
        title = f"packed{number + 1}" if number else "packed"
        planes.append(Plane(title, width, tuple(fields), INTEGER[width]))
    per_word = 32 // VISIBLE[storage.visible][0]
    num_lanes = max(per_word, *(plane.per_word for plane in planes), 1)
    num_parts = num_lanes // per_word
    return Layout(
        storage,
        tuple(planes),
        per_word,
        num_lanes,
        num_parts,
        bool(storage.scaled) or num_parts > 1,
    )


def _dtype(storage: Storage, name: str, width: int) -> torch.dtype:
    """Return PyTorch's dtype with the bits of a lone field, if there is one."""
    if width >= 32:
        return torch.float32 if width == 32 else torch.float64
    # A tail and a master copy have no code.
    for state in ("weight", *dict(storage.states)):
        code = storage.code(state)
        if name in (state, *low_parts(state, code)) and width == 16:
            return torch.bfloat16 if code.signed and not code.is_window else torch.int16
    return INTEGER[width]


def lanes_of_weight(visible: str, words: Sequence[Tensor]) -> list[Tensor]:
    """Return the bits of every lane of a visible tensor
    (:func:`narrowgauge.optim.codes.visible_value`) from its parts.
    """
    if visible == "float32":
        return list(words)
    if visible == "bfloat16":
        lanes = []
        for word in words:
            lanes += [word << 16, word & -65536]
        return lanes
    # A float16 in the upper half of a word becomes a float32 with its sign, exponent and mantissa
    # fields.
    halves = []
    for word in words:
        halves += [word << 16, word]
    return [((half & 0x7FFF0000) >> 3) | (half & SIGN) for half in halves]


def words_of_weight(visible: str, lanes: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a visible tensor: the inverse of :func:`lanes_of_weight`."""
    if visible == "float32":
        return list(lanes)
    if visible == "float16":
        lanes = [((lane << 3) & 0x7FFF0000) | (lane & SIGN) for lane in lanes]
    words = []
    for even, odd in zip(lanes[::2], lanes[1::2], strict=True):
        words.append(((even >> 16) & 0xFFFF) | odd)
    return words
