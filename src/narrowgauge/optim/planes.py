"""Planes: the state tensors of a storage, in the parameter's order.

A *plane* holds one field of each weight, or several packed fields::

    weight   [ a  b  c  d ]     bfloat16, in the parameter's own memory
    packed   [ a  b  c  d ]     32 bits: tail, first and second moment

Planes have the shape of the parameter and its order in memory. So a step walks over all of them
alike, and a checkpoint holds them as they are. Codes scaled by row have a *bound* for each row. A
row is the last dimension, or several joined. The definition and both kernels read where fields lie,
and how they are rounded, from :func:`layout_of`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from narrowgauge.spec.storages import FLOAT32, VISIBLE, Code, Storage, low_parts, width_of

INTEGER = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
NUMBERS = ("bfloat16", "float16", "float32")
"""Visible formats, and those of gradients, by their numbers in the table of a step."""
LEAST_ROW = 64
"""Trailing dimensions are joined until a row has so many values, such as those of a convolution's
kernel.
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


@lru_cache
def planes_of(storage: Storage) -> tuple[Plane, ...]:
    """Return the planes of a storage, in the order of its step."""
    planes: list[Plane] = []
    for group in storage.packing:
        width = width_of(group)
        if len(group) == 1:
            ((name, bits),) = group
            dtype = _dtype(storage, name, width)
            title = _title(storage, name, dtype)
            planes.append(Plane(title, width, ((name, 0, bits),), dtype))
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
    return tuple(planes)


def _title(storage: Storage, name: str, dtype: torch.dtype) -> str:
    """Return the name of a lone field: that of torch only for a whole float."""
    title = name
    if name in dict(storage.states) and storage.code(name).parts > 1:
        title = f"{name}_high"
    if not dtype.is_floating_point and name != "tail":
        title = f"{title}_bits"
    return title


def _dtype(storage: Storage, name: str, width: int) -> torch.dtype:
    """Return PyTorch's dtype with the bits of a lone field, if there is one."""
    if width == 32:
        return torch.float32
    if width == 64:
        return torch.float64
    # A tail and a master copy have no code.
    for state in ("weight", *dict(storage.states)):
        code = storage.code(state)
        if name in (state, *low_parts(state, code)) and width == 16:
            return torch.bfloat16 if code.signed and not code.is_window else torch.int16
    return INTEGER[width]


# ── the layout ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Field:
    """Say where a code lies, and which bits of a float32 it drops, and how.

    Attributes:
        name: as in the storage's fields; empty if it is not stored.
        code: of one part.
        plane: from 1; 0 if it is not stored.
        shift: its lowest bit in a word of the plane.
        bits: of the field.
        drop: the mantissa bits of a float32 that it drops.
        share: the random bits that drop them: the first one, after the word was turned up by so
            many bits. ``None`` rounds to nearest.
    """

    name: str = ""
    code: Code = FLOAT32
    plane: int = 0
    shift: int = 0
    bits: int = 32
    drop: int = 0
    share: tuple[int, int] | None = None

    @property
    def last(self) -> int:
        """Return the largest magnitude as bits of a float32. Larger values of a window stop there."""
        return ((1 << self.code.magnitude_bits) - 1) << self.drop

    @property
    def exponent(self) -> int:
        """Return the offset between the exponents of the code and of a float32."""
        return self.code.lowest + 126


@dataclass(frozen=True, slots=True)
class Visible:
    """Say where bits of a visible weight lie in a float32.

    Attributes:
        name, number: of the format, and its place in the table of a step.
        bytes: of a word.
        below: the mantissa bits of a float32 that the format lacks.
        exponent: the bits are those of a float32 times 2 to it.
    """

    name: str
    number: int
    bytes: int
    below: int
    exponent: int

    @property
    def gap(self) -> int:
        """Return by how many bits a word is moved to the top of 32."""
        return 32 - 8 * self.bytes

    @property
    def up(self) -> int:
        """Return by how many bits less the exponent and mantissa are moved up."""
        return self.gap - self.below

    @property
    def end(self) -> int:
        """Return the magnitude at which the format ends."""
        return 31 << 23 if self.name == "float16" else 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class Layout:
    """Say where a storage has its fields.

    Attributes:
        visible: the format of the weight that the model sees.
        bytes: of the weight and of each plane.
        fields: of what lies beside the weight, of two states, and of a second part of the last one.
        num_scaled: states with a scale for each row.
    """

    visible: Visible
    bytes: tuple[int, ...]
    fields: tuple[Field, Field, Field, Field]
    num_scaled: int


@lru_cache
def layout_of(storage: Storage) -> Layout:
    """Return the layout of a storage whose rule has two states at most."""
    fields = fields_of(storage)
    names = ["weight", *dict(storage.states), "", ""][:3]
    names.append(f"{names[2]}_low")
    size, below, exponent = VISIBLE[storage.visible]
    number = NUMBERS.index(storage.visible)
    sizes = [size // 8]
    for plane in planes_of(storage):
        sizes.append(plane.bits // 8)
    weight, first, second, second_low = [fields.get(name, Field()) for name in names]
    return Layout(
        Visible(storage.visible, number, size // 8, below, exponent),
        tuple(sizes), (weight, first, second, second_low), len(storage.scaled),
    )  # fmt: skip


@lru_cache
def fields_of(storage: Storage) -> dict[str, Field]:
    """Return the field of what lies beside the weight, and of each part of each state."""
    places = {}
    for number, plane in enumerate(planes_of(storage), 1):
        for name, shift, bits in plane.fields:
            places[name] = number, shift, bits
    random = shares(storage)
    fields = {}
    for name in ("weight", *dict(storage.states)):
        code = storage.code(name)
        if name == "weight":
            beside = (*storage.beside, "")[0]
            place = places.get(beside, (0, 0, 0))
            fields[name] = Field(beside, code.part(1), *place, dropped_bits(code), random.get(name))
            continue
        for number, part in enumerate((name, *low_parts(name, code))):
            share = random.get(part)
            place = places[part]
            fields[part] = Field(part, code.part(number), *place, dropped_bits(code), share)
    return fields


def dropped_bits(code: Code) -> int:
    """Return how many low mantissa bits of a float32 a code drops."""
    return max(0, 23 - code.mantissa_bits)


@lru_cache
def shares(storage: Storage) -> dict[str, tuple[int, int]]:
    """Return the random bits of each stochastic code: its first one, after the word was turned up
    by so many bits.

    The first code has no neighbour below. It wraps around and borrows the last code's upper bits.
    """
    drops = {}
    for name in ("weight", *dict(storage.states)):
        if storage.code(name).rounding == "stochastic":
            drops[name] = dropped_bits(storage.code(name))
    result = {}
    start = 0
    for place, (name, dropped) in enumerate(drops.items()):
        start += min(dropped, (32 - start) // (len(drops) - place))
        borrowed = max(0, dropped - start)
        result[name] = start + borrowed - dropped, borrowed
    return result


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────


@lru_cache
def row_dims(shape: tuple[int, ...]) -> int:
    """Return how many trailing dimensions of a whole parameter are one row.

    The first dimension never joins.
    """
    count = min(1, len(shape))
    size = shape[-1] if shape else 1
    while count < len(shape) - 1 and size < LEAST_ROW:
        count += 1
        size *= shape[-count]
    return count


@lru_cache
def as_rows(shape: tuple[int, ...], num_row_dims: int) -> tuple[int, int]:
    """Return rows and columns of a parameter in memory order. Without bounds it is one row."""
    if not num_row_dims and shape:
        return 1, math.prod(shape)
    first = len(shape) - num_row_dims
    return math.prod(shape[:first]), math.prod(shape[first:])
