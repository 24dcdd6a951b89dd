"""Codes: how one float32 is rounded to fewer bits, and how the fields of a parameter share words.

A stored value is a float32 rounded to fewer bits. The upper bits of a weight are the bfloat16 (or float16) that the model sees;
its *tail* is the signed remainder, so that both together give the stored value back exactly. A code of a moment keeps a few
exponent and mantissa bits of the float32, or of the float32 divided by a power of two that its row shares. The published
baselines store a second *number* instead, the low part of an expansion.

"Nearest" means ties away from zero, except in the baselines whose sources round ties to even.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True, slots=True)
class Code:
    """How one float32 is rounded: which exponent and mantissa bits are stored, and the rounding mode.

    Codes with 8 exponent bits are the upper ``bits`` bits of the float32 itself. Fewer exponent bits select a window of
    binades: a small float whose smallest normal value is ``2**lowest``, with subnormals below and saturation above.

    Args:
        name: its name in tables.
        exponent_bits: exponent bits stored.
        mantissa_bits: mantissa bits stored, without the hidden one.
        signed: whether a sign bit is stored.
        rounding: ``"nearest"`` (ties away from zero) or ``"stochastic"`` (unbiased).
        lowest: exponent of the smallest normal value; -126 for codes that share float32's exponent.
        hold: never round a positive value to zero, since a second moment of zero makes the next step unbounded; in an
            expansion this holds for the leading part.
        scaled: the window is relative to a power of two, one per row of a matrix.
        parts: number of words per value, each the remainder that the previous ones leave: an expansion.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    signed: bool = True
    rounding: Rounding = "nearest"
    lowest: int = -126
    hold: bool = False
    scaled: bool = False
    parts: int = 1

    @property
    def bits(self) -> int:
        """Bits of each part."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    def part(self, place: int) -> Code:
        """The code of one part of an expansion; the leading part is at ``place`` 0."""
        return replace(self, hold=False) if place and self.hold else self

    @property
    def is_window(self) -> bool:
        """Whether the code stores a window of binades instead of float32's own exponent."""
        return self.exponent_bits != 8

    @property
    def highest(self) -> int:
        """Exponent of the largest binade in range."""
        return self.lowest + 2**self.exponent_bits - 2 if self.is_window else 127


FLOAT32 = Code("float32", 8, 23)
BFLOAT16 = Code("bfloat16", 8, 7)
BFLOAT16_DITHERED = Code("bfloat16", 8, 7, rounding="stochastic")
BFLOAT16_PAIR = Code("bfloat16 + bfloat16", 8, 7, parts=2)
TAIL16 = Code("bfloat16 + 16-bit tail", 8, 23)
TAIL8 = Code("bfloat16 + 8-bit tail", 8, 15, rounding="stochastic")
FLOAT16_TAIL = Code("float16 + 13-bit tail", 8, 23)
FLOAT16 = Code("float16", 5, 10, lowest=-14)
# Held: otherwise the square of a gradient under 2^-12 is zero, and the next step divides by epsilon alone.
FLOAT16_HELD = Code("float16", 5, 10, signed=False, lowest=-14, hold=True)
FLOAT16_PAIR = Code("float16 + float16", 5, 10, lowest=-14, parts=2)
FLOAT16_PAIR_HELD = Code("float16 + float16", 5, 10, lowest=-14, hold=True, parts=2)
# The windows of `word`: the second moment needs twice the binades of the first, and both are centred so that gradients
# from 2^-54 to 2^9 survive. benchmarks/word_split.py compares other splits of the 32 bits.
MOMENT12 = Code("e6m5", 6, 5, rounding="stochastic", lowest=-54)
SECOND12 = Code("e7m5", 7, 5, signed=False, rounding="stochastic", lowest=-108, hold=True)
SECOND24 = Code("e8m15", 8, 15, rounding="stochastic")
# Windows that end at the power of two above their row's amax; the normal values of e5 reach down to 2^-30 of it.
MOMENT8 = Code("e4m3", 4, 3, rounding="stochastic", lowest=-14, scaled=True)
SECOND8 = Code("e5m3", 5, 3, signed=False, rounding="stochastic", lowest=-30, hold=True, scaled=True)
FLOAT16_SCALED = Code("float16 of its row", 5, 10, lowest=-30, scaled=True)
FLOAT16_SCALED_HELD = Code("float16 of its row", 5, 10, signed=False, lowest=-30, hold=True, scaled=True)
FLOAT8 = Code("float8_e4m3fn", 4, 3, lowest=-14, scaled=True)
FLOAT8_TRIPLE = Code("float8_e4m3fn × 3", 4, 3, lowest=-14, scaled=True, parts=3)

WEIGHT_CODES: dict[str, Code] = {
    "bfloat16": BFLOAT16,
    "bfloat16-stochastic": BFLOAT16_DITHERED,
    "bfloat16-pair": BFLOAT16_PAIR,
    "tail8": TAIL8,
    "tail16": TAIL16,
}
"""Codes of a weight that the model sees as bfloat16, by the names that compose a storage."""
MOMENT_CODES: dict[str, Code] = {
    "float32": FLOAT32,
    "bfloat16": BFLOAT16,
    "bfloat16-stochastic": BFLOAT16_DITHERED,
    "bfloat16-pair": BFLOAT16_PAIR,
    "e8m15": SECOND24,
    "e6m5": MOMENT12,
    "e7m5": SECOND12,
    "e4m3-row": MOMENT8,
    "e5m3-row": SECOND8,
    "float16-row": FLOAT16_SCALED,
    "float16-row-held": FLOAT16_SCALED_HELD,
}
"""Codes of moments, likewise. ``e7m5``, ``e5m3-row`` and ``float16-row-held`` have no sign bit: for second moments only."""

VISIBLE: dict[str, tuple[int, int, int]] = {"float32": (32, 0, 0), "bfloat16": (16, 16, 0), "float16": (16, 13, -112)}
"""Per format that a model sees: its bits, the float32 mantissa bits that it lacks, and the exponent by which a float32 is scaled
so that its upper bits are the format's."""


def low_parts(name: str, code: Code) -> tuple[str, ...]:
    """The names of the low parts of ``name``; none for a code of one part."""
    return tuple(f"{name}_low{'' if part == 1 else part}" for part in range(1, code.parts))


def width_of(group: Sequence[tuple[str, int]]) -> int:
    """Bits of the word that holds a group of fields: 8, 16 or 32."""
    bits = sum(bits for _, bits in group)
    return next((width for width in (8, 16, 32) if bits <= width), bits)


@lru_cache
def packed(fields: tuple[tuple[str, int], ...]) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Pack fields into words: those of 16 and 32 bits alone, the others in the fewest bits, then in the fewest words.

    Args:
        fields: ``(name, bits)`` of each.
    Returns:
        Groups of fields, each of at most 32 bits.
    Raises:
        ValueError: a field has more than 32 bits.
    Example:
        >>> packed((("tail", 8), ("exp_avg", 12), ("exp_avg_sq", 12)))
        ((('tail', 8), ('exp_avg', 12), ('exp_avg_sq', 12)),)
    """
    if wide := [name for name, bits in fields if bits > 32]:
        raise ValueError(f"'{wide[0]}' is wider than a 32-bit word")
    alone = tuple((field,) for field in fields if field[1] in (16, 32))
    narrow = tuple(field for field in fields if field[1] not in (16, 32))
    ways = (way for way in _partitions(narrow) if all(sum(bits for _, bits in group) <= 32 for group in way))
    # Among equals, leave the first field (the tail) alone, since other kernels read it.
    best = min(ways, key=lambda way: (sum(map(width_of, way)), len(way), len(way[0]) if way else 0))
    return (*alone, *best)


def _partitions(
    fields: tuple[tuple[str, int], ...],
) -> Iterator[tuple[tuple[tuple[str, int], ...], ...]]:
    """All partitions of the fields into groups."""
    if not fields:
        yield ()
        return
    first, rest = fields[0], fields[1:]
    for way in _partitions(rest):
        yield ((first,), *way)
        for place, group in enumerate(way):
            yield ((first, *group), *way[:place], *way[place + 1 :])
