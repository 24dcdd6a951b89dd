"""Planes: the state tensors of a storage, in the parameter's order.

A *plane* holds one field of each weight, or several packed fields::

    weight   [ a  b  c  d ]     bfloat16, in the parameter's own memory
    packed   [ a  b  c  d ]     32 bits: tail, first and second moment

Planes have the shape of the parameter and its order in memory. So a step walks over all of them
alike, and a checkpoint holds them as they are. Scaled codes have a *bound* for each block: 256
elements of a row, which is the last dimension, or several joined. The last block of a row may be
shorter. The definition and both kernels read where fields lie, and how they are rounded, from
:func:`fields_of`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from narrowgauge.spec.storages import FLOAT32, Code, Storage, width_of

INTEGER = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
BLOCK = 256
"""Elements of a row that share the scale of a code."""
LEAST_ROW = 64
"""Trailing dimensions are joined until a row has so many values, such as those of a convolution's
kernel.
"""


@dataclass(frozen=True, slots=True)
class Field:
    """Say where a code lies, and which bits of a float32 it drops, and how.

    Attributes:
        name: as in the storage's fields; empty if it is not stored.
        code: of the weight, of a state, or of a part of one.
        plane: from 1; 0 if it is not stored.
        shift: its lowest bit in a word of the plane.
        bits: of the field.
        random_slice: the random bits that are added before the cut (:func:`random_slices`).
            ``None`` rounds to nearest.
    """

    name: str = ""
    code: Code = FLOAT32
    plane: int = 0
    shift: int = 0
    bits: int = 32
    random_slice: tuple[int, int] | None = None

    @property
    def drop(self) -> int:
        """Return how many mantissa bits of a float32 it drops."""
        return dropped_bits(self.code)

    @property
    def last(self) -> int:
        """Return the largest magnitude as bits of a float32. Larger values of a window stop there."""
        return ((1 << self.code.magnitude_bits) - 1) << self.drop

    @property
    def exponent(self) -> int:
        """Return the offset between the exponents of the code and of a float32."""
        return self.code.lowest + 126


@dataclass(frozen=True, slots=True)
class Plane:
    """Describe one state tensor: its name, its dtype and the fields of each element."""

    name: str
    dtype: torch.dtype
    fields: tuple[Field, ...]


@lru_cache
def planes_of(storage: Storage) -> tuple[Plane, ...]:
    """Return the planes of a storage, in the order of its step."""
    planes = []
    states = dict(storage.states)
    slices = random_slices(storage)
    for number, group in enumerate(storage.packing, 1):
        # Signed codes come last. Then the topmost sign bit is where a float32 has it.
        ordered = sorted(group, key=lambda x: x[0] in states and storage.code(x[0]).signed)
        fields = []
        shift = 0
        for name, bits in ordered:
            role = "weight" if name in storage.extra_fields else name.removesuffix("_low")
            code = storage.code(role).part(int(name == f"{role}_low"))
            fields.append(Field(name, code, number, shift, bits, slices.get(role)))
            shift += bits
        width = width_of(group)
        title, dtype = "packed", INTEGER[width]
        if len(group) == 1:
            title, dtype = _lone(fields[0], width)
        planes.append(Plane(title, dtype, tuple(fields)))
    return tuple(planes)


def _lone(field: Field, width: int) -> tuple[str, torch.dtype]:
    """Return the name of a plane of one field, and PyTorch's dtype of its bits, if there is one.

    It has torch's name only as a whole float.
    """
    dtype = {32: torch.float32, 64: torch.float64}.get(width, INTEGER[width])
    title = field.name
    if title in ("tail", "master"):  # which have no code
        return title, dtype
    if width == 16 and field.code.signed and not field.code.is_window:
        dtype = torch.bfloat16
    if field.code.parts > 1 and not title.endswith("_low"):
        title = f"{title}_high"
    if not dtype.is_floating_point:
        title = f"{title}_bits"
    return title, dtype


def roles(storage: Storage) -> tuple[str, ...]:
    """Return what has a code: the weight and each state."""
    return ("weight", *dict(storage.states))


# ── the layout ────────────────────────────────────────────────────────────────────────────────────


@lru_cache
def fields_of(storage: Storage) -> dict[str, Field]:
    """Return the fields of a storage by name. ``"weight"`` is what lies beside the visible weight."""
    fields = {
        "weight": Field(code=storage.weight, random_slice=random_slices(storage).get("weight"))
    }
    for plane in planes_of(storage):
        for field in plane.fields:
            fields["weight" if field.name in storage.extra_fields else field.name] = field
    return fields


def dropped_bits(code: Code) -> int:
    """Return how many low mantissa bits of a float32 a code drops."""
    return max(0, 23 - code.mantissa_bits)


def random_slices(storage: Storage) -> dict[str, tuple[int, int]]:
    """Return which bits of an element's 32 random ones each stochastic code adds before its cut: the
    lowest one, after the bits were turned up by the second number.

    Each code owns a part, from the lowest bit on. One that drops more bits borrows its lowest from
    the part below. In ``word`` the weight (w) drops 8 bits, and both moments (m, v) drop 18::

        owned         vvvvvvvvvvvvmmmmmmmmmmmmwwwwwwww   bits 31 to 0
        weight                                ^^^^^^^^   (0, 0)
        exp_avg                   ^^^^^^^^^^^^^^^^^^     (2, 0)
        exp_avg_sq    ^^^^^^^^^^^^^^^^^^                 (14, 0)

    The first code has no part below, and borrows the highest bits. In ``states8`` the weight owns 10
    bits and drops 16. So the bits are turned up by 6, and it takes the lowest 16: (0, 6)::

        owned         vvvvvvvvvvvmmmmmmmmmmmwwwwwwwwww
        weight        ^^^^^^                ^^^^^^^^^^
        turned up     vvvvvmmmmmmmmmmmwwwwwwwwwwvvvvvv
        weight                        ^^^^^^^^^^^^^^^^
    """
    drops = {}
    for name in roles(storage):
        if storage.code(name).rounding == "stochastic":
            drops[name] = dropped_bits(storage.code(name))
    result = {}
    start = 0
    for place, (name, dropped) in enumerate(drops.items()):
        start += min(dropped, (32 - start) // (len(drops) - place))
        borrowed = max(0, dropped - start)
        result[name] = start + borrowed - dropped, borrowed
    return result


# ── blocks ────────────────────────────────────────────────────────────────────────────────────────


@lru_cache
def row_dims(shape: tuple[int, ...]) -> int:
    """Return how many trailing dimensions of a whole parameter are one row.

    The first dimension never joins.
    """
    count = min(1, len(shape))
    while count < len(shape) - 1 and math.prod(shape[-count:]) < LEAST_ROW:
        count += 1
    return count


def bounds_shape(shape: Sequence[int], num_row_dims: int) -> tuple[int, ...]:
    """Return the shape of the bounds of a parameter: one of the dimensions of a row counts blocks."""
    first = len(shape) - num_row_dims
    blocks = -(-math.prod(shape[first:]) // BLOCK)
    return (*shape[:first], blocks, *[1] * (num_row_dims - 1))


def block_peaks(values: Tensor) -> Tensor:
    """Return the largest magnitude of each block of ``[rows, columns]``, float32. A NaN is the
    largest.
    """
    rows, columns = values.shape
    width = min(BLOCK, max(1, columns))
    padded = torch.nn.functional.pad(values, (0, -columns % width))
    return padded.view(rows, -(-columns // BLOCK), width).abs().amax(2).float()
