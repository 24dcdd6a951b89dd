"""Layout: where the bits of live states are in memory. All other code sees tensors in the parameter's shape.

A loop over 32-bit values runs at full vector width. A loop that mixes 16- and 32-bit loads does not. So a kernel reads all
tensors as 32-bit *words*. In ``word``, a word of the weight holds two neighbours, an even and an odd *lane*::

    weight   [ a | b ] [ c | d ]     bfloat16 a, b, c, d, in the parameter's own memory
    packed   [   a   ] [   c   ]     32 bits of tail and states: a tensor of all even elements
             [   b   ] [   d   ]     and one of all odd elements

An 8-bit plane packs four lanes into a word. Then the weight is read in two *parts*, the upper and the lower half of its rows.
In ``compact``, with a and b in an upper row and p and q in a lower row::

    weight   [ a | b ]  [ p | q ]    a tensor for each part
    tail     [ a  b  p  q ]          8 bits each
    packed   [ a | b ]  [ p | q ]    two moments in 16 bits

A *plane* is one state tensor, of one field or several packed fields. A storage with two parts, or with codes scaled by row, is a
matrix of rows. Other storages are flat. Odd ends are padded with zeros. Small parameters share a :class:`Bucket`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from narrowgauge.numerics.dtensor import split_groups
from narrowgauge.optim.codes import INTEGER, SIGN
from narrowgauge.spec.storages import VISIBLE, Storage, low_parts, width_of

ALIGNMENT = 64
"""Every member of a flat bucket starts at a multiple of this many words, and an audit reads so many at a time."""


@dataclass(frozen=True, slots=True)
class Plane:
    """Describe one state tensor: its name, bits per element, and the packed ``(field, shift, bits)``."""

    name: str
    bits: int
    fields: tuple[tuple[str, int, int], ...]
    dtype: torch.dtype

    @property
    def per_word(self) -> int:
        return max(1, 32 // self.bits)


@dataclass(frozen=True, eq=False)
class Layout:
    """Describe how a storage's tensors are read as words. ``planes`` are the state tensors, in the kernel's order.

    A word has ``per_word`` neighbouring weights. One iteration of the kernel's loop steps ``num_lanes`` weights, of ``num_parts``
    parts. With ``by_rows`` the words are a matrix of rows.
    """

    storage: Storage
    planes: tuple[Plane, ...]
    per_word: int
    num_lanes: int
    num_parts: int
    by_rows: bool

    def matrix(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape in which a parameter's elements are read: ``(rows, columns)`` or flat."""
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

    def rows(self, words: Tensor) -> Tensor:
        """Return words as a matrix of rows. The rows of flat words have ``ALIGNMENT`` words; what remains is left out."""
        return (
            words
            if words.ndim == 2
            else words[: len(words) // ALIGNMENT * ALIGNMENT].view(-1, ALIGNMENT)
        )

    def audit(self, shape: Sequence[int], row_words: int = ALIGNMENT) -> tuple[int, int]:
        """Return how many audits it takes to read each row of a parameter once, and the number of elements in a row.

        An audit reads at least 256 words, a 16th of the first 65,536 words, and a 32nd of all. The first result is a power of
        two. Flat words are read in rows of ``row_words``.
        """
        num_rows, *columns = self.extent(shape)
        num_words, num_elements = num_rows, row_words * self.per_word
        if self.by_rows:
            num_words, num_elements = (
                num_rows * self.num_parts * columns[0],
                self.num_parts * self.matrix(shape)[1],
            )
        period = max(min(num_words // 256, 16), min(num_words // 4096, 32))
        period = max(1, min(period, num_rows if self.by_rows else num_rows // row_words))
        return 1 << (period.bit_length() - 1), num_elements

    def allocate(self, extent: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """Return zeroed words of each plane, ``[tensors, *extent]``. Zero encodes 0."""
        return {
            plane.name: torch.zeros(
                self.num_tensors(plane), *extent, dtype=INTEGER[max(32, plane.bits)], device=device
            )
            for plane in self.planes
        }

    def allocate_scales(self, num_rows: int, device: torch.device) -> dict[str, Tensor]:
        """Return for each code scaled by row bounds and the factors into its window and back, float32 ``[3, parts, rows, 1]``."""
        ends = torch.tensor([0.0, 1.0, 1.0], device=device).view(3, 1, 1, 1)
        return {name: ends.repeat(1, self.num_parts, num_rows, 1) for name in self.storage.scaled}

    def in_order(self, words: Mapping[str, Tensor], scales: Mapping[str, Tensor]) -> list[Tensor]:
        """Return a state's words and factors of rows as the kernel's list of tensors."""
        pairs = [pair for name in self.storage.scaled for pair in scales[name][1:].unbind(1)]
        tensors = [*(words[plane.name] for plane in self.planes), *pairs]
        return [tensor for several in tensors for tensor in several.unbind(0)]

    # ── tensors in the parameter's order ────────────────────────────────────────────────────────────────────────────

    def to_parameter_order(self, plane: Plane, words: Tensor, shape: Sequence[int]) -> Tensor:
        """Return a copy of a plane in the parameter's shape and the plane's own dtype."""
        extent = words.shape[1:]
        # [tensors, *extent] of words → one lane per tensor and position in its words → parts and neighbours.
        # (Flatten before the view: a dim of one element may have any stride.)
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
        """Return the words of a plane: the inverse of :meth:`to_parameter_order`. Padding is zero."""
        _, elements = self.padded(values.view(INTEGER[plane.bits]))
        lanes = elements.unflatten(-1, (-1, self.per_word)).movedim(-1, 1)
        tensors = lanes.reshape(self.num_tensors(plane), plane.per_word, *lanes.shape[2:]).movedim(
            1, -1
        )
        words: Tensor = tensors.reshape(-1).view(INTEGER[max(32, plane.bits)])
        return words.view(len(tensors), *lanes.shape[2:])

    def padded(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Copy a parameter-shaped tensor. Return the copy as a matrix, and its memory with padding, ``[parts, …]``."""
        extent, matrix = self.extent(values.shape), self.matrix(values.shape)
        *rows, columns = (self.num_parts, *extent)
        memory = values.new_zeros(*rows, columns * self.per_word)
        copy = memory.flatten(0, 1)[tuple(map(slice, matrix))]
        copy.copy_(values.reshape(matrix))
        return copy, memory

    def lanes(self, values: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return a contiguous tensor and its lanes, each of :meth:`extent`: views of its memory, or of a padded copy."""
        matrix, memory = values, values
        if math.prod(self.extent(values.shape)) * self.num_lanes != values.numel():
            matrix, memory = self.padded(values)
        parts = memory.view(self.num_parts, *self.extent(values.shape), self.per_word)
        return matrix, [lane for part in parts for lane in part.unbind(-1)]

    def fields_of(
        self, words: Mapping[str, Tensor], shape: Sequence[int]
    ) -> dict[str, tuple[Tensor, int]]:
        """Return the fields of a state in the parameter's order, as in a :class:`narrowgauge.optim.codes.Lane`."""
        fields = {}
        for plane in self.planes:
            bits = self._bits(plane, words, shape).reshape(self.matrix(shape))
            fields.update({name: (bits, shift) for name, shift, _ in plane.fields})
        return fields

    def set_fields(
        self, words: Mapping[str, Tensor], shape: Sequence[int], fields: Mapping[str, Tensor]
    ) -> None:
        """Overwrite fields of a state's words. They are in the parameter's order, in place in a word."""
        for plane in self.planes:
            present = [field for field in plane.fields if field[0] in fields]
            if not present:
                continue
            raw = self._bits(plane, words, shape)
            for name, shift, bits in present:
                mask = ((1 << bits) - 1) << shift if bits < 32 else -1
                raw = (raw & ~mask) | (fields[name].reshape(shape) & mask)
            value = raw.to(INTEGER[plane.bits]).view(plane.dtype)
            words[plane.name].copy_(self.from_parameter_order(plane, value))

    def _bits(self, plane: Plane, words: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        values = self.to_parameter_order(plane, words[plane.name], shape)
        return values.view(INTEGER[plane.bits]).to(INTEGER[max(32, plane.bits)])

    # ── weights and gradients in memory ─────────────────────────────────────────────────────────────────────────────

    def in_place(self, tensor: Tensor) -> list[Tensor] | None:
        """Return a weight or gradient in place as the kernel's words, or ``None`` if it has odd ends, strides or address."""
        extent, offset = self.extent(tensor.shape), tensor.storage_offset() * tensor.element_size()
        if (
            math.prod(extent) * self.num_lanes != tensor.numel()
            or not tensor.is_contiguous()
            or offset % 4
        ):
            return None
        return list(tensor.view(-1).view(torch.int32).view(self.num_parts, *extent).unbind(0))

    def copied(self, tensor: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Copy a weight or gradient. Return the copy as a matrix, and its memory as the kernel's words."""
        copy, memory = self.padded(tensor)
        words = memory.view(-1).view(torch.int32)  # flat: a dim of no element may have any stride
        return copy, list(words.view(self.num_parts, *self.extent(tensor.shape)).unbind(0))

    # ── in the kernel ───────────────────────────────────────────────────────────────────────────────────────────────

    def by_lane(self, words: Sequence[Tensor]) -> list[dict[str, tuple[Tensor, int]]]:
        """Return for each lane the word and the shift of every field, from the kernel's tensors of planes."""
        lanes: list[dict[str, tuple[Tensor, int]]] = [{} for _ in range(self.num_lanes)]
        queue = iter(words)
        for plane in self.planes:
            tensors = [next(queue) for _ in range(self.num_tensors(plane))]
            for lane, fields in enumerate(lanes):
                tensor, place = (
                    tensors[lane // plane.per_word],
                    plane.bits * (lane % plane.per_word),
                )
                fields.update({name: (tensor, shift + place) for name, shift, _ in plane.fields})
        return lanes

    def join_lanes(self, fields: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Return the kernel's output words from each lane's fields in place: the inverse of :meth:`by_lane`."""
        result = []
        for plane in self.planes:
            for first in range(0, len(fields), plane.per_word):
                lanes = fields[first : first + plane.per_word]
                result.append(
                    reduce(or_, [lane[name] for lane in lanes for name, _, _ in plane.fields])
                )
        return result

    def with_fields(
        self, lanes: Sequence[Any], fields: Sequence[Mapping[str, Tensor]]
    ) -> list[Tensor]:
        """Return the kernel's words of lanes (:class:`narrowgauge.optim.codes.Lane`), with some fields replaced."""
        merged = []
        for lane, replaced in zip(lanes, fields, strict=True):
            every = dict(replaced)
            for name, bits in self.storage.fields:
                word, shift = lane.fields[name]
                every.setdefault(
                    name, word & (((1 << bits) - 1) << shift) if bits < 8 * word.itemsize else word
                )
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
            planes.append(Plane(name, width, ((name, 0, bits),), _dtype(storage, name, width)))
            continue
        # Signed codes come last. Then the topmost sign bit is where a float32 has it.
        states = dict(storage.states)
        ordered = sorted(
            group, key=lambda field: field[0] in states and storage.code(field[0]).signed
        )
        shifts = [sum(bits for _, bits in ordered[:place]) for place in range(len(ordered))]
        number = sum(plane.name.startswith("packed") for plane in planes)
        fields = tuple(
            (name, shift, bits) for (name, bits), shift in zip(ordered, shifts, strict=True)
        )
        planes.append(
            Plane(f"packed{number + 1}" if number else "packed", width, fields, INTEGER[width])
        )
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
    codes = {state: storage.code(state) for state in ("weight", *dict(storage.states))}
    parts = {
        part: code for state, code in codes.items() for part in (state, *low_parts(state, code))
    }
    code = parts.get(name)  # a tail and a master copy have none
    plain = width == 16 and code is not None and not code.is_window and code.signed
    return torch.bfloat16 if plain else INTEGER[width]


def lanes_of_weight(visible: str, words: Sequence[Tensor]) -> list[Tensor]:
    """Return the bits of every lane of a visible tensor (:func:`narrowgauge.optim.codes.visible_value`) from its parts."""
    if visible == "float32":
        return list(words)
    if visible == "bfloat16":
        return [lane for word in words for lane in (word << 16, word & -65536)]
    # A float16 in the upper half of a word becomes a float32 with its sign, exponent and mantissa fields.
    halves = [half for word in words for half in (word << 16, word)]
    return [((half & 0x7FFF0000) >> 3) | (half & SIGN) for half in halves]


def words_of_weight(visible: str, lanes: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a visible tensor: the inverse of :func:`lanes_of_weight`."""
    if visible == "float32":
        return list(lanes)
    if visible == "float16":
        lanes = [((lane << 3) & 0x7FFF0000) | (lane & SIGN) for lane in lanes]
    return [
        ((even >> 16) & 0xFFFF) | odd for even, odd in zip(lanes[::2], lanes[1::2], strict=True)
    ]


# ── buckets ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

SMALL = 1 << 14
"""Parameters of at most this many elements share buckets."""
BUCKET_WORDS = 1 << 20
"""A bucket with this many words takes no more members."""


class Bucket:
    """Step small parameters of one storage in one kernel call: 300 norm gains cost one call. It has the interface of a state.

    The members are states with contiguous words and rows of equal length. Weights and gradients are copied in before a step, and
    weights out after it. A member may come from another bucket: its words move here.
    """

    column_groups = ()

    def __init__(self, members: Sequence[Any]) -> None:
        layout, device = members[0].layout, members[0].parameter.device
        self.kernel, self.layout, self.members = members[0].kernel, layout, list(members)
        self.segments, total, unit = [], 0, 1 if layout.by_rows else ALIGNMENT
        extents = [layout.extent(member.parameter.shape) for member in members]
        for count, *_ in extents:
            self.segments.append(slice(total, total + count))
            total += -(-count // unit) * unit
        extent, dtype = (total, *extents[0][1:]), getattr(torch, layout.storage.visible)
        words, self.scales = layout.allocate(extent, device), layout.allocate_scales(total, device)
        memory = torch.zeros(2, layout.num_parts, *extent, dtype=torch.int32, device=device)
        self.tensors = [*memory.flatten(0, 1).unbind(0), *layout.in_order(words, self.scales)]
        self.parameter, self.gradient = memory.view(dtype).unbind(0)
        # The members' weights and gradients in this memory.
        self._copies: tuple[list[Tensor], list[Tensor]] = [], []
        for member, segment in zip(members, self.segments, strict=True):
            member.move(
                {name: plane[:, segment] for name, plane in words.items()},
                {name: rows[:, :, segment] for name, rows in self.scales.items()},
            )
            member.bucket = self
            shape, columns = list(member.parameter.shape), layout.matrix(member.parameter.shape)[-1]
            if layout.num_parts > 1:
                shape[:1] = layout.num_parts, shape[0] // layout.num_parts
            for copies, words_of_all in zip(self._copies, memory, strict=True):
                copies.append(words_of_all[:, segment].view(dtype)[..., :columns].view(shape))

    @property
    def step(self) -> int:
        """Return the number of steps that each member has taken."""
        return int(self.members[0].step)

    @cached_property
    def _rows(self) -> tuple[Tensor, ...]:
        """Return for each audited row its member, its place in the member, its turn, and how many elements it has."""
        device = self.parameter.device
        unit = 1 if self.layout.by_rows else ALIGNMENT
        row = [
            (-(-m.extent[0] // unit), m.parameter.numel(), *self.layout.audit(m.parameter.shape))
            for m in self.members
        ]
        counts, sizes, periods, widths = torch.tensor(row, device=device).unbind(1)
        owner = torch.arange(len(row), device=device).repeat_interleave(counts)
        place = torch.arange(len(owner), device=device) - (counts.cumsum(0) - counts)[owner]
        left = sizes[owner] - place * widths[owner]
        return owner, place, periods[owner] - 1, left.clamp(min=0).minimum(widths[owner])

    def audited_rows(self, turn: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return which rows of words audit number ``turn`` reads, and their members and numbers of elements."""
        owner, place, mask, elements = self._rows
        rows = ((place - turn) & mask == 0).nonzero().view(-1)
        return rows, owner.index_select(0, rows), elements.index_select(0, rows)

    def gather(self) -> None:
        """Copy the members' weights and gradients in, without gradients."""
        weights, gradients = self._copies
        torch._foreach_copy_(weights, self._by_part([member.parameter for member in self.members]))
        torch._foreach_copy_(gradients, self._by_part([member.gradient for member in self.members]))

    def kernel_tensors(self) -> tuple[list[Tensor], Tensor | None]:
        """Return the tensors that a kernel steps, and the copy of the weights for :meth:`write_back`."""
        return self.tensors, self.parameter

    def write_back(self, weight: Tensor | None) -> None:
        """Copy the weights out, without gradients."""
        torch._foreach_copy_(
            self._by_part([member.parameter for member in self.members]), self._copies[0]
        )

    def _by_part(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return views whose first dimension is the part, if there are several."""
        parts = self.layout.num_parts
        if parts == 1:
            return tensors
        pairs = zip(tensors, self._copies[0], strict=True)
        return [
            x.view_as(copy) if x.is_contiguous() else x.unflatten(0, (parts, -1))
            for x, copy in pairs
        ]


def joins_bucket(state: Any) -> bool:
    """Return whether a state is small, or has odd ends that would need a copy. Ranks do not share its rows."""
    layout, parameter = state.layout, state.parameter
    if layout.by_rows:
        has_halves = layout.num_parts == 1 or (
            parameter.ndim > 1 and len(parameter) % layout.num_parts == 0
        )
        return (
            0 < parameter.numel() <= SMALL
            and has_halves
            and not split_groups(state.owner, columns=True)
        )
    is_odd = parameter.numel() <= 4 * SMALL and layout.in_place(parameter) is None
    return parameter.numel() <= SMALL or is_odd


def buckets_of(states: Sequence[Any]) -> list[Bucket]:
    """Return the buckets of small states that step together. Make those that do not exist: members may have changed.

    States that a bucket loses others from get a bucket of their own: an old one would hold memory for all.
    """
    buckets: list[Bucket] = []
    before = dict.fromkeys(state.bucket for state in states if state.bucket is not None)
    alike: dict[Any, list[Any]] = {}
    for state in states:
        alike.setdefault((state.kind, state.step), []).append(state)
    for group in alike.values():
        members: list[Any] = []
        total = 0
        for state in group:
            members.append(state)
            total += state.num_words
            if total >= BUCKET_WORDS or state is group[-1]:
                bucket = members[0].bucket
                buckets.append(
                    bucket if bucket is not None and bucket.members == members else Bucket(members)
                )
                members, total = [], 0
    for bucket in before:
        rest = [state for state in bucket.members if state.bucket is bucket]
        if rest and len(rest) < len(bucket.members):
            Bucket(rest)
    return buckets
