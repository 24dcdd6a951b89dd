"""Storages: how a weight and its moments are kept between steps.

A stored value is a float32 *cut* to fewer bits. A weight's upper bits, so rounded, are the bfloat16 (or float16) that the
model sees; the *tail* is the signed rest, so word and tail together give the cut value back exactly. A moment's code keeps
a few exponent and mantissa bits of the float32, of itself or relative to a power of two that its row shares. The
published baselines keep instead a second *number*, the low part of an expansion. "Nearest" means ties away from zero
everywhere in this file, but in the baselines whose sources round ties to even. A row of the table is a value that the
optimizer, tests, docs and ``narrowgauge show`` all read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

Rounding = Literal["nearest", "stochastic"]
Arithmetic = Literal["float32", "expansion"]
STATE_NAMES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Code:
    """How one float32 is cut: which exponent and mantissa bits are kept, and how the rest is rounded.

    Codes with 8 exponent bits are the upper ``bits`` bits of the float32 itself. Fewer exponent bits select a window of
    binades: a small float whose smallest normal value is ``2**lowest``, with subnormals below and saturation above.

    Args:
        name: what tables call it.
        exponent_bits: exponent bits kept.
        mantissa_bits: mantissa bits kept, the hidden one not counted.
        signed: whether a sign bit is kept.
        rounding: ``"nearest"`` (ties away from zero) or ``"stochastic"`` (unbiased).
        lowest: exponent of the smallest normal value; -126 for codes that share float32's exponent.
        hold: never cut a positive value to zero (a second moment of zero makes the next step unbounded); of an expansion, the
            leading part.
        scaled: the window is relative to a power of two that each row of a matrix has of its own.
        parts: how many such words one value has, each the rest that the ones before leave: an expansion.
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
        """Bits the code occupies, in each of its parts."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    def part(self, place: int) -> Code:
        """The code of one part of an expansion, the leading one at ``place`` 0."""
        return replace(self, hold=False) if place and self.hold else self

    @property
    def is_window(self) -> bool:
        """Whether the code keeps a window of binades instead of float32's own exponent."""
        return self.exponent_bits != 8

    @property
    def highest(self) -> int:
        """Exponent of the largest binade that the code reaches."""
        return self.lowest + 2**self.exponent_bits - 2 if self.is_window else 127


FLOAT32 = Code("float32", 8, 23)
BFLOAT16 = Code("bfloat16", 8, 7)
BFLOAT16_DITHERED = Code("bfloat16", 8, 7, rounding="stochastic")
BFLOAT16_PAIR = Code("bfloat16 + bfloat16", 8, 7, parts=2)
TAIL16 = Code("bfloat16 + 16-bit tail", 8, 23)
TAIL8 = Code("bfloat16 + 8-bit tail", 8, 15, rounding="stochastic")
FLOAT16_TAIL = Code("float16 + 13-bit tail", 8, 23)
FLOAT16 = Code("float16", 5, 10, lowest=-14)
# Held: the square of a gradient under 2^-12 would be zero, and the next step would divide by epsilon alone.
FLOAT16_HELD = Code("float16", 5, 10, signed=False, lowest=-14, hold=True)
FLOAT16_PAIR = Code("float16 + float16", 5, 10, lowest=-14, parts=2)
FLOAT16_PAIR_HELD = Code("float16 + float16", 5, 10, lowest=-14, hold=True, parts=2)
# The windows of `word`: the second moment needs twice the binades of the first, and both are centred so that gradients
# from 2^-54 to 2^9 survive; measured against other splits of the 32 bits in benchmarks/word_split.py.
MOMENT12 = Code("e6m5", 6, 5, rounding="stochastic", lowest=-54)
SECOND12 = Code("e7m5", 7, 5, signed=False, rounding="stochastic", lowest=-108, hold=True)
SECOND24 = Code("e8m15", 8, 15, rounding="stochastic")
# Windows that end at the power of two above their row's largest value; e5 spans 2^-30 of it in normal values.
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
"""Codes of a weight that is seen as bfloat16, by the names that compose a storage."""
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
"""Codes of moments, likewise; ``e7m5``, ``e5m3-row`` and ``float16-row-held`` have no sign and suit second moments only."""

# Of each visible format: its bits, the mantissa bits of a float32 that it lacks, and the exponent by which a float32 must
# be scaled for its upper bits to be the format's own.
VISIBLE: dict[str, tuple[int, int, int]] = {"float32": (32, 0, 0), "bfloat16": (16, 16, 0), "float16": (16, 13, -112)}


@dataclass(frozen=True, slots=True)
class Storage:
    """How a weight and its moments are kept between steps.

    Args:
        name: the row's name; one with a ``/`` belongs to the compute before it.
        visible: format of the weight that the model computes with (and of its gradient).
        weight: code of the stored weight; its upper part is the visible one.
        exp_avg: code of the first moment, and of whatever else a rule keeps of either sign.
        exp_avg_sq: code of the second moment, and of whatever else a rule keeps that is never negative.
        master: keep the stored weight as a second, full float32 copy instead of a tail.
        vectors: the row that 1-D parameters (norm gains, biases) use instead, ``None`` for this one.
        loses: what is lost, in a few words.
        cure: the row an alarm advises when this one loses updates.
        source: where the scheme comes from.
        arithmetic: ``"float32"``, or ``"expansion"``: every operation rounded to the visible format's precision.
        states: which states are kept, each with the code it takes; a rule has its own.
    """

    name: str
    visible: str
    weight: Code
    exp_avg: Code
    exp_avg_sq: Code
    loses: str
    source: str
    master: bool = False
    vectors: str | None = "master"
    cure: str = "word"
    arithmetic: Arithmetic = "float32"
    states: tuple[tuple[str, str], ...] = (("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"))

    @property
    def tail_bits(self) -> int:
        """Bits of the stored weight that the model does not see and neither a full copy nor a low part holds."""
        own = self.master or self.visible == "float32" or self.weight.parts > 1
        return 0 if own else VISIBLE[self.visible][1] - (23 - self.weight.mantissa_bits)

    @property
    def beside(self) -> tuple[str, ...]:
        """The names of what is kept of the weight beside the visible one: ``master``, ``tail``, low parts or nothing."""
        if self.master:
            return ("master",)
        return ("tail",) if self.tail_bits else low_parts("weight", self.weight)

    @property
    def fields(self) -> tuple[tuple[str, int], ...]:
        """Everything kept beside the visible weight: ``(name, bits)``."""
        width = 32 if self.master else self.tail_bits or self.weight.bits
        result = [(name, width) for name in self.beside]
        for state, role in self.states:
            code = self.code(role)
            result += [(name, code.bits) for name in (state, *low_parts(state, code))]
        return tuple(result)

    @property
    def packing(self) -> tuple[tuple[tuple[str, int], ...], ...]:
        """The fields as they share words; see :func:`packed`."""
        return packed(self.fields)

    @property
    def scaled(self) -> tuple[str, ...]:
        """What is kept relative to a power of two per row: ``weight``, and names of states."""
        weight = ("weight",) if self.weight.scaled else ()
        return (*weight, *(state for state, role in self.states if self.code(role).scaled))

    @property
    def bytes_per_param(self) -> float:
        """Bytes per parameter of weight, gradient (in the visible format) and all states."""
        return 2 * VISIBLE[self.visible][0] / 8 + sum(width_of(group) for group in self.packing) / 8

    @property
    def bytes_per_row(self) -> int:
        """Bytes per row of a matrix beside those per parameter: the row's scales."""
        return 4 * len(self.scaled)

    @property
    def is_stochastic(self) -> bool:
        """Whether any code of the row rounds stochastically."""
        return any(self.code(role).rounding == "stochastic" for role in ("weight", *(role for _, role in self.states)))

    def code(self, role: str) -> Code:
        """The code of ``weight``, ``exp_avg`` or ``exp_avg_sq``, or of one of the row's own states."""
        result: Code = getattr(self, dict(self.states).get(role, role))
        return result

    def keeping(self, states: tuple[tuple[str, str], ...]) -> Storage:
        """The same row for a rule that keeps other states."""
        return self if states == self.states else replace(self, states=states)


def low_parts(name: str, code: Code) -> tuple[str, ...]:
    """The names of the lower parts of an expansion called ``name``: none for a code of one part."""
    return tuple(f"{name}_low{'' if part == 1 else part}" for part in range(1, code.parts))


def width_of(group: Sequence[tuple[str, int]]) -> int:
    """Bits per element of the words in which a group of fields lies: 8, 16 or 32."""
    bits = sum(bits for _, bits in group)
    return next((width for width in (8, 16, 32) if bits <= width), bits)


@lru_cache
def packed(fields: tuple[tuple[str, int], ...]) -> tuple[tuple[tuple[str, int], ...], ...]:
    """How fields share words: 16- and 32-bit ones alone, others so that the fewest bits and then words are used.

    Args:
        fields: ``(name, bits)`` of each.
    Returns:
        Groups of fields; no group is wider than 32 bits.
    Raises:
        ValueError: a field is wider than that.
    Example:
        >>> packed((("tail", 8), ("exp_avg", 12), ("exp_avg_sq", 12)))
        ((('tail', 8), ('exp_avg', 12), ('exp_avg_sq', 12)),)
    """
    if wide := [name for name, bits in fields if bits > 32]:
        raise ValueError(f"'{wide[0]}' is wider than a 32-bit word")
    alone = tuple((field,) for field in fields if field[1] in (16, 32))
    narrow = tuple(field for field in fields if field[1] not in (16, 32))
    ways = (way for way in _partitions(narrow) if all(sum(bits for _, bits in group) <= 32 for group in way))
    # Of equals, the one that leaves the first field (the tail) alone: it is the one that others read.
    best = min(ways, key=lambda way: (sum(map(width_of, way)), len(way), len(way[0]) if way else 0))
    return (*alone, *best)


def _partitions(
    fields: tuple[tuple[str, int], ...],
) -> Iterator[tuple[tuple[tuple[str, int], ...], ...]]:
    """Every way to put the fields into groups."""
    if not fields:
        yield ()
        return
    first, rest = fields[0], fields[1:]
    for way in _partitions(rest):
        yield ((first,), *way)
        for place, group in enumerate(way):
            yield ((first, *group), *way[:place], *way[place + 1 :])


STORAGES: dict[str, Storage] = {
    row.name: row
    for row in (
        Storage(
            "float32", "float32", FLOAT32, FLOAT32, FLOAT32, vectors=None,
            loses="nothing beyond float32 rounding; with compute bfloat16 it is autocast",
            source="Kingma & Ba 2015; Loshchilov & Hutter 2019",
        ),
        Storage(
            "master", "bfloat16", FLOAT32, FLOAT32, FLOAT32, master=True,
            loses="nothing that float32 keeps; the model sees the nearest bfloat16",
            source="Micikevicius et al. 2018, mixed precision training",
        ),
        Storage(
            "exact", "bfloat16", TAIL16, FLOAT32, FLOAT32,
            loses="nothing that float32 keeps: bit-identical to master, 2 bytes less",
            source="16-bit tails: Intel's split SGD, apex's stored remainders",
        ),
        Storage(
            "split", "bfloat16", TAIL16, BFLOAT16, FLOAT32,
            loses="16 bits of the first moment, nearest; weight and second moment are float32",
            source="Narrowgauge; bytes of Collage-plus (Yu et al. 2024)",
        ),
        Storage(
            "split8", "bfloat16", TAIL8, BFLOAT16, SECOND24, cure="split",
            loses="8 bits of weight and second moment, stochastic; 16 bits of the first moment, nearest",
            source="Narrowgauge: Collage's two places for a correction, with 8 bits each",
        ),
        Storage(
            "word", "bfloat16", TAIL8, MOMENT12, SECOND12, cure="split",
            loses="8 bits of the weight, 18 of each moment, all stochastic: noise of 2^-16 per step, no bias",
            source="Narrowgauge: one 32-bit word of state beside each bfloat16 weight",
        ),
        Storage(
            "compact", "bfloat16", TAIL8, MOMENT8, SECOND8, cure="split",
            loses="8 bits of the weight, 20 of each moment, all stochastic; first moments under 2^-17 of their row's range",
            source="Narrowgauge; the bytes of FlashOptim (2602.23349)",
        ),
        Storage(
            "states8", "bfloat16", BFLOAT16_DITHERED, MOMENT8, SECOND8,
            loses="16 bits of the weight, 20 of each moment, all stochastic: no bias, noise of 2^-8 per step",
            source="Narrowgauge; the bytes that FP8 end-to-end training claims",
        ),
        Storage(
            "no-master", "bfloat16", BFLOAT16, FLOAT32, FLOAT32, vectors=None,
            loses="every update below half a spacing (2^-9 of the weight); moments are float32",
            source="what is often meant by bfloat16 training: moments in float32, no master weights",
        ),
        Storage(
            "stochastic", "bfloat16", BFLOAT16_DITHERED, BFLOAT16, BFLOAT16, vectors=None,
            loses="16 bits of the weight, stochastic: no bias, noise of 2^-8; second moments freeze at beta2 0.999",
            source="Zamirai et al. 2020 (2010.06192); Ozkara et al. 2025 (2502.20566)",
        ),
        Storage(
            "kahan", "bfloat16", BFLOAT16_PAIR, BFLOAT16, BFLOAT16, vectors=None, cure="split",
            loses="updates below 2^-17 of the weight; second moments freeze at beta2 0.999",
            source="Kahan 1965; Zamirai et al. 2020 (2010.06192); stored as torch-optimi does",
        ),
        Storage(
            "collage-light", "bfloat16", BFLOAT16_PAIR, BFLOAT16, BFLOAT16, vectors=None, cure="split",
            arithmetic="expansion",
            loses="updates below 2^-17 of the weight, 2^-9 of every operation; second moments freeze at beta2 0.999",
            source="Yu et al. 2024, Collage (2405.03637)",
        ),
        Storage(
            "collage-plus", "bfloat16", BFLOAT16_PAIR, BFLOAT16, BFLOAT16_PAIR, vectors=None, cure="split",
            arithmetic="expansion",
            loses="updates below 2^-17 of the weight, 2^-9 of every operation",
            source="Yu et al. 2024, Collage (2405.03637), with the product of expansions that it describes",
        ),
        Storage(
            "naive", "bfloat16", BFLOAT16, BFLOAT16, BFLOAT16, vectors=None,
            loses="every update below half a spacing (2^-9 of the weight); second moments freeze at beta2 0.999",
            source="what most optimizers do when given bfloat16 parameters",
        ),
        Storage(
            "float16/master", "float16", FLOAT32, FLOAT32, FLOAT32, master=True, vectors="float16/master", cure="float16/split",
            loses="nothing that float32 keeps; the model sees the nearest float16, 65504 at most",
            source="Micikevicius et al. 2018, mixed precision training",
        ),
        Storage(
            "float16/split", "float16", FLOAT16_TAIL, BFLOAT16, FLOAT32, vectors="float16/master",
            cure="float16/master",
            loses="16 bits of the first moment; of weights under 2^-14, what lies under 2^-38; none above 65504",
            source="Narrowgauge: the tail of a float16, which float16's own exponents end at 2^-24",
        ),
        Storage(
            "float16/naive", "float16", FLOAT16, FLOAT16, FLOAT16_HELD, vectors=None, cure="float16/split",
            loses="every update below half a spacing (2^-12 of the weight); second moments are held at 2^-24 or more",
            source="what most optimizers do when given float16 parameters; held here, where theirs become zero",
        ),
        Storage(
            "float16/kahan", "float16", FLOAT16_PAIR, FLOAT16, FLOAT16_HELD, vectors=None, cure="float16/split",
            loses="updates below 2^-23 of the weight, or below 2^-25; second moments are held at 2^-24 or more",
            source="Kahan 1965; Zamirai et al. 2020 (2010.06192), who find float16's range too short for it",
        ),
        Storage(
            "float16/collage-light", "float16", FLOAT16_PAIR, FLOAT16, FLOAT16_HELD, vectors=None, cure="float16/split",
            arithmetic="expansion",
            loses="2^-12 of every operation; what is below 2^-25 of weights; second moments are held at 2^-24 or more",
            source="Yu et al. 2024, Collage (2405.03637), which names half precision; held here, where theirs become zero",
        ),
        Storage(
            "float16/collage-plus", "float16", FLOAT16_PAIR, FLOAT16, FLOAT16_PAIR_HELD, vectors=None, cure="float16/split",
            arithmetic="expansion",
            loses="2^-12 of every operation; what is below 2^-25 of weights; second moments have a low part from 2^-14 on",
            source="Yu et al. 2024, Collage (2405.03637), which names half precision; held here, where theirs become zero",
        ),
        Storage(
            "float16-throughout/naive", "float16", FLOAT16, FLOAT16, FLOAT16_HELD, vectors=None, cure="float16/split",
            loses="every update below half a spacing (2^-12 of the weight); second moments are held at 2^-24 or more",
            source="what the abstract of 1911.07384 claims: no float32 copy of anything",
        ),
        # A weight's own scale would buy it no bit: float16's normal numbers begin at 2^-14, below what matters of a weight.
        Storage(
            "scalify-float16/scaled16", "float16", FLOAT16, FLOAT16_SCALED, FLOAT16_SCALED_HELD, vectors="float16/master",
            cure="float16/split",
            loses="every update below half a spacing (2^-12 of the weight); second moments stop up to 2^-11 / (1 - beta2) short",
            source="Balança et al. 2024, Scalify (2407.17353): weights and scaled moments in float16, no master; scales by row",
        ),
        Storage(
            "float8/collage-light", "bfloat16", FLOAT8_TRIPLE, FLOAT8, FLOAT8, cure="compact",
            arithmetic="expansion",
            loses="2^-5 of every operation, updates below 2^-13 of the weight; second moments freeze from beta2 0.97 on",
            source="Yu et al. 2024 say that Collage extends to 8 bits; this is that",
        ),
        Storage(
            "float8/collage-plus", "bfloat16", FLOAT8_TRIPLE, FLOAT8, FLOAT8_TRIPLE, cure="compact",
            arithmetic="expansion",
            loses="2^-5 of every operation, updates below 2^-13 of the weight",
            source="Yu et al. 2024 say that Collage extends to 8 bits; this is that",
        ),
    )
}  # fmt: skip


def for_vectors(storage: Storage) -> Storage:
    """The row that 1-D parameters use under ``storage``."""
    return STORAGES[storage.vectors] if storage.vectors else storage


def find(name: str) -> Storage | None:
    """The row of that name, or the one that it composes: ``weight+first+second``, by the names of their codes.

    Args:
        name: such as ``"word"`` or ``"tail8+bfloat16+float32"``.
    Returns:
        The row, ``None`` where the name is neither.
    Example:
        >>> find("tail8+bfloat16+float32").bytes_per_param
        11.0
    """
    if name in STORAGES:
        return STORAGES[name]
    weight, plus, moments = name.partition("+")
    first, also, second = moments.partition("+")
    known = weight in WEIGHT_CODES and first in MOMENT_CODES and second in MOMENT_CODES
    if not (plus and also and known) or not MOMENT_CODES[first].signed:
        return None
    codes = WEIGHT_CODES[weight], MOMENT_CODES[first], MOMENT_CODES[second]
    dropped = [f"{bits} bits of the {what}" for what, code in zip(_PARTS, codes, strict=True) if (bits := _cut(code))]
    return Storage(
        name, "bfloat16", *codes, loses=", ".join(dropped) or "nothing", source="composed by its codes' names"
    )


_PARTS = ("weight", "first moment", "second moment")


def _cut(code: Code) -> int:
    """Mantissa bits of a float32 that a code drops."""
    return max(0, 23 - code.parts * (code.mantissa_bits + 1) + 1)
