"""Planes: the state tensors of a storage, in the parameter's order.

A *plane* holds one field of each weight, or several packed fields::

    weight   [ a  b  c  d ]     bfloat16, in the parameter's own memory
    packed   [ a  b  c  d ]     32 bits: tail, first and second moment

Planes have the shape of the parameter and its order in memory. So a step walks over all of them
alike, and a checkpoint holds them as they are. Codes scaled by row have a *bound* for each row. A
row is the last dimension, or several joined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from narrowgauge.spec.storages import Storage, low_parts, width_of

INTEGER = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
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
    if width >= 32:
        return torch.float32 if width == 32 else torch.float64
    # A tail and a master copy have no code.
    for state in ("weight", *dict(storage.states)):
        code = storage.code(state)
        if name in (state, *low_parts(state, code)) and width == 16:
            return torch.bfloat16 if code.signed and not code.is_window else torch.int16
    return INTEGER[width]


def row_dims(shape: Sequence[int]) -> int:
    """Return how many trailing dimensions of a whole parameter are one row.

    The first dimension never joins.
    """
    count = min(1, len(shape))
    size = shape[-1] if shape else 1
    while count < len(shape) - 1 and size < LEAST_ROW:
        count += 1
        size *= shape[-count]
    return count


def as_rows(shape: Sequence[int], num_row_dims: int) -> tuple[int, int]:
    """Return rows and columns of a parameter in memory order. Without bounds it is one row."""
    if not num_row_dims and shape:
        return 1, math.prod(shape)
    first = len(shape) - num_row_dims
    return math.prod(shape[:first]), math.prod(shape[first:])
