"""Storages: how a weight and its moments are stored between optimizer steps, and the codes that
they are rounded to.

A :class:`Code` rounds a float32 to fewer bits. The upper bits of a weight are the bfloat16 (or
float16) that the model sees. Its *tail* is the signed remainder: both together give the stored
value back exactly. A code of a moment keeps a few exponent and mantissa bits of the float32, or of
the float32 divided by a power of two that its block shares. The published baselines store a second
*number* instead, the low part of an expansion. A NaN loses its sign and payload, which differ
between processors. It is stored as the positive quiet NaN. A code without NaN stores its largest
positive value (a float16 weight infinity).

"Nearest" means ties to even. A :class:`Storage` names a code for the weight and for each moment.
The optimizer, tests, documentation and ``narrowgauge show`` read the same table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

Rounding = Literal["nearest", "stochastic"]
Word = tuple[tuple[str, int], ...]
"""Fields of a word: names and bits."""
Words = tuple[Word, ...]


@dataclass(frozen=True, slots=True)
class Code:
    """How one float32 is rounded: which exponent and mantissa bits are stored, and the rounding
    mode.

    Codes with 8 exponent bits are the upper ``bits`` bits of the float32 itself. Fewer exponent
    bits select a window of binades: a small float whose smallest normal value is ``2**lowest``,
    with subnormals below and saturation above. The code of 64 bits is a float64, which is not
    rounded.

    Args:
        name: in tables.
        mantissa_bits: stored, without the hidden one.
        signed: whether a sign bit is stored.
        rounding: ``"nearest"`` (ties to even) or ``"stochastic"`` (unbiased).
        lowest: exponent of the smallest normal value; -126 for codes that share float32's exponent.
        hold: never round a positive value to zero, since a second moment of zero makes the next
            step unbounded. In an expansion this holds for the leading part.
        scaled: the window is relative to a power of two, one per block of 256 in a row of a matrix.
        parts: number of words per value, one or two: the second is the remainder that the first
            leaves.
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

    def __str__(self) -> str:
        """Write a code: ``e6m5 (12 bits), stochastic``."""
        bits = f" ({self.bits} bits)" * self.is_window
        return self.name + bits + ", stochastic" * (self.rounding == "stochastic")

    @property
    def bits(self) -> int:
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def magnitude_bits(self) -> int:
        return self.exponent_bits + self.mantissa_bits

    def part(self, place: int) -> Code:
        """Return the code of one part of an expansion. The leading part is at ``place`` 0.

        In a block, the second part begins lower by the bits of the first.
        """
        if not place:
            return self
        lowest = self.lowest - (self.mantissa_bits + 1 if self.scaled else 0)
        return replace(self, hold=False, lowest=lowest)

    @property
    def spacings(self) -> float:
        """Return the least number of ulps in a normal value.

        For an expansion, count ulps of its last part.
        """
        return float(2 ** (self.parts * (self.mantissa_bits + 1) - 1))

    @property
    def is_window(self) -> bool:
        """Tell whether the code stores a window of binades instead of float32's own exponent."""
        return self.exponent_bits < 8

    @property
    def highest(self) -> int:
        """Exponent of the largest binade in range."""
        return self.lowest + (1 << self.exponent_bits) - 3 + self.is_window


CODES: dict[str, Code] = {
    "float64": Code("float64", 11, 52, lowest=-1022),
    "float32": Code("float32", 8, 23),
    "bfloat16": Code("bfloat16", 8, 7),
    "bfloat16-stochastic": Code("bfloat16", 8, 7, rounding="stochastic"),
    "bfloat16-pair": Code("bfloat16 + bfloat16", 8, 7, parts=2),
    "tail16": Code("bfloat16 + 16-bit tail", 8, 23),
    "tail8": Code("bfloat16 + 8-bit tail", 8, 15, rounding="stochastic"),
    "float16-tail": Code("float16 + 13-bit tail", 8, 23),
    "float16": Code("float16", 5, 10, lowest=-14),
    "float16-stochastic": Code("float16", 5, 10, rounding="stochastic", lowest=-14),
    # Held: otherwise the square of a gradient under 2^-12 is zero, and the next step divides by
    # epsilon alone.
    "float16-held": Code("float16", 5, 10, signed=False, lowest=-14, hold=True),
    "float16-pair": Code("float16 + float16", 5, 10, lowest=-14, parts=2),
    # The windows of `word`: the second moment needs twice the binades of the first, and both are
    # placed so that gradients from 2^-38 to 2^24 survive.
    "e6m5": Code("e6m5", 6, 5, rounding="stochastic", lowest=-38),
    "e7m5": Code("e7m5", 7, 5, signed=False, rounding="stochastic", lowest=-76, hold=True),
    # Windows that end at the power of two above their block's amax. Normal values of e5 reach down to
    # 2^-30 of it.
    "e4m3-block": Code("e4m3", 4, 3, rounding="stochastic", lowest=-14, scaled=True),
    "e5m3-block": Code(
        "e5m3", 5, 3, signed=False, rounding="stochastic", lowest=-30, hold=True, scaled=True
    ),
    "float16-block": Code("float16 of its block", 5, 10, lowest=-30, scaled=True),
    "float16-block-held": Code(
        "float16 of its block", 5, 10, signed=False, lowest=-30, hold=True, scaled=True
    ),
    "float16-block-pair-held": Code(
        "float16 + float16 of its block", 5, 10, lowest=-30, hold=True, scaled=True, parts=2
    ),
}
"""Codes by name. A row of the table writes ``weight+first moment+second moment``."""
WINDOW = CODES["e6m5"].lowest
"""Where the windows of `word` begin: a first moment's at ``2**WINDOW``, a second one's at its square.
Saved states name it.
"""
FLOAT32 = CODES["float32"]
BFLOAT16 = CODES["bfloat16"]

VISIBLE: dict[str, tuple[int, int, int]] = {
    "float32": (32, 0, 0),
    "bfloat16": (16, 16, 0),
    "float16": (16, 13, -112),
}
"""Per format that a model sees: its bits, the float32 mantissa bits that it lacks, and the exponent
by which a float32 is scaled so that its upper bits are the format's.
"""


def low_parts(name: str, code: Code) -> tuple[str, ...]:
    """Return the name of the second part of ``name``; empty for a code of one part."""
    return (f"{name}_low",) if code.parts == 2 else ()


def width_of(group: Word) -> int:
    """Return the bits of the word that holds a group of fields: 8, 16 or 32.

    A float64 has a word of 64.
    """
    total = sum(bits for _, bits in group)
    return next(width for width in (8, 16, 32, 64) if total <= width)


def packed(fields: Word) -> Words:
    """Pack fields, ``(name, bits)`` each, into words: those of 16, 32, 64 bits alone. The others
    share one word, if they fill it. Otherwise the first (the tail) is alone, since other kernels
    read it, and the rest share one, if it holds them: those of a user's rule may have more bits.
    """
    words = [(field,) for field in fields if field[1] in (16, 32, 64)]
    narrow = tuple(field for field in fields if field[1] not in (16, 32, 64))
    total = sum(bits for _, bits in narrow)
    parts = [narrow[:1], narrow[1:]]
    if total in (8, 16, 32):
        parts = [narrow]
    elif sum(bits for _, bits in narrow[1:]) > 32:
        parts = [(field,) for field in narrow]
    return (*words, *filter(None, parts))


# ── storages ──────────────────────────────────────────────────────────────────────────────────────


Arithmetic = Literal["float32", "expansion", "float64"]
STATE_NAMES = ("exp_avg", "exp_avg_sq")
# A second moment with fewer mantissa bits does not move at a beta2 of 0.999, which changes it by
# 2^-10.
_FROZEN_MANTISSA = 10


@dataclass(frozen=True, slots=True)
class Storage:
    """How a weight and its moments are stored between steps.

    Args:
        name: as in a recipe; a storage with a ``/`` belongs to the compute before it.
        visible: format of the weight that the model computes with (and of its gradient).
        weight: code of the stored weight; its upper part is the visible one.
        exp_avg: code of the first moment, and of every other state of either sign.
        exp_avg_sq: code of the second moment, and of every other state that is never negative.
        master: store a full copy of the weight, float32 or float64, instead of a tail.
        vectors: the storage of 1-D parameters (norm gains, biases); ``None`` for this one.
        loses: what is lost, in a few words.
        fallback: the storage that an alarm recommends when this one loses updates.
        source: the publication or library.
        arithmetic: of the update: ``"float32"``, ``"float64"``, or ``"expansion"``: Collage's
            AdamW, with every operation rounded to the weight's precision.
        states: the optimizer states, each with its code; every update rule has its own.
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
    fallback: str = "word"
    arithmetic: Arithmetic = "float32"
    states: tuple[tuple[str, str], ...] = (("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"))

    def __hash__(self) -> int:
        # Hashing all fields takes a quarter of a step of many small tensors.
        return hash((self.name, self.states))

    @property
    def owner(self) -> str:
        """Return the name of the compute that owns it; empty for none."""
        return self.name.rpartition("/")[0]

    @property
    def short_name(self) -> str:
        """Return its name without that compute."""
        return self.name.rpartition("/")[2]

    @property
    def tail_bits(self) -> int:
        """Return the bits of the tail: stored weight bits outside the visible weight, master copy
        and low parts.
        """
        if self.master or self.visible == "float32" or self.weight.parts > 1:
            return 0
        return max(0, VISIBLE[self.visible][1] - (23 - self.weight.mantissa_bits))

    @property
    def beside(self) -> tuple[str, ...]:
        """Return the names of the weight's fields next to the visible weight: ``master``, ``tail``,
        low parts or none.
        """
        if self.master:
            return ("master",)
        if self.tail_bits:
            return ("tail",)
        return low_parts("weight", self.weight)

    @property
    def fields(self) -> Word:
        """Return all fields except the visible weight: ``(name, bits)``."""
        width = self.tail_bits or self.weight.bits
        result = dict.fromkeys(self.beside, width)
        for state, role in self.states:
            code = self.code(role)
            result |= dict.fromkeys((state, *low_parts(state, code)), code.bits)
        return tuple(result.items())

    @property
    def packing(self) -> Words:
        return packed(self.fields)

    @property
    def scaled(self) -> tuple[str, ...]:
        """Return the states stored relative to a power of two per block."""
        return tuple(name for name, role in self.states if self.code(role).scaled)

    @property
    def bytes_per_param(self) -> float:
        """Bytes per parameter of weight, gradient (in the visible format) and all states."""
        return (2 * VISIBLE[self.visible][0] + sum(map(width_of, self.packing))) / 8

    @property
    def keeps_updates(self) -> bool:
        """Return whether small updates survive.

        They do not if few-bit weights or second moments round to nearest.

        A tail, master copy or low part keeps small updates of the weight. It does not help second
        moments.
        """
        weight = self.weight
        moment = self.exp_avg_sq
        is_short = self.visible != "float32" and not self.beside and weight.rounding == "nearest"
        is_frozen = (
            moment.parts == 1
            and moment.rounding == "nearest"
            and moment.mantissa_bits < _FROZEN_MANTISSA
        )
        return not is_short and not is_frozen

    @property
    def is_stochastic(self) -> bool:
        roles = ["weight", *dict(self.states).values()]
        return any(self.code(role).rounding == "stochastic" for role in roles)

    @property
    def gradients(self) -> tuple[float, float]:
        """Return the smallest and the largest gradient whose moments a storage holds.

        A code that follows its block, or has float32's own exponents, holds all.
        """
        least, most = 0.0, math.inf
        for code, power in ((self.exp_avg, 1), (self.exp_avg_sq, 2)):
            if code.is_window and not code.scaled:
                least = max(least, 2.0 ** ((code.lowest + 3) / power))
                most = min(most, 2.0 ** (code.highest / power))
        return least, most

    def code(self, role: str) -> Code:
        """Return the code of ``weight``, ``exp_avg``, ``exp_avg_sq`` or one of ``states``."""
        result: Code = getattr(self, dict(self.states).get(role, role))
        return result

    def keeping(self, states: tuple[tuple[str, str], ...]) -> Storage:
        """Return the same storage for a rule with other states."""
        if states == self.states:
            return self
        return replace(self, states=states)


def _row(name: str, visible: str, codes: str, **fields: Any) -> Storage:
    weight, first, second = (CODES[code] for code in codes.split("+"))
    return Storage(name, visible, weight, first, second, **fields)


STORAGES: dict[str, Storage] = {
    storage.name: storage
    for storage in (
        _row(
            "float32", "float32", "float32+float32+float32", vectors=None,
            loses="nothing beyond float32 rounding; with compute bfloat16 it is autocast",
            source="Kingma & Ba 2015; Loshchilov & Hutter 2019",
        ),
        _row(
            "master", "bfloat16", "float32+float32+float32", master=True,
            loses="nothing that float32 keeps; the model sees the nearest bfloat16",
            source="Micikevicius et al. 2018, mixed precision training",
        ),
        _row(
            "exact", "bfloat16", "tail16+float32+float32",
            loses="nothing that float32 keeps: bit-identical to master, 2 bytes less",
            source="16-bit tails: Intel's split SGD, apex's stored remainders",
        ),
        _row(
            "split", "bfloat16", "tail16+bfloat16+float32",
            loses="16 bits of the first moment, nearest; weight and second moment are float32",
            source="Narrowgauge; bytes of Collage-plus (Yu et al. 2024)",
        ),
        _row(
            "word", "bfloat16", "tail8+e6m5+e7m5", fallback="split",
            loses="8 bits of the weight, 18 of each moment, all stochastic: noise of 2^-16 per step, no bias",
            source="Narrowgauge: one 32-bit word of state per bfloat16 weight",
        ),
        _row(
            "compact", "bfloat16", "tail8+e4m3-block+e5m3-block", fallback="split",
            loses="8 bits of the weight, 20 of each moment, all stochastic; first moments under 2^-17 of their block's range",
            source="Narrowgauge; the bytes of FlashOptim (2602.23349)",
        ),
        _row(
            "states8", "bfloat16", "bfloat16-stochastic+e4m3-block+e5m3-block",
            loses="16 bits of the weight, 20 of each moment, all stochastic: no bias, noise of 2^-8 per step",
            source="Narrowgauge; the bytes that FP8 end-to-end training claims",
        ),
        _row(
            "float32-states8", "float32", "float32+e4m3-block+e5m3-block", vectors="float32", fallback="float32",
            loses="20 bits of each moment, stochastic; nothing of the weight, which the model sees in float32",
            source="Narrowgauge; what 8-bit optimizers store beside float32 weights (Dettmers et al. 2022, 2110.02861)",
        ),
        _row(
            "no-master", "bfloat16", "bfloat16+float32+float32", vectors=None,
            loses="every update below half an ulp (2^-9 of the weight); moments are float32",
            source="a common meaning of bfloat16 training: moments in float32, no master weights",
        ),
        _row(
            "stochastic", "bfloat16", "bfloat16-stochastic+bfloat16+bfloat16", vectors=None,
            loses="16 bits of the weight, stochastic: no bias, noise of 2^-8; second moments freeze at beta2 0.999",
            source="Zamirai et al. 2020 (2010.06192); Ozkara et al. 2025 (2502.20566)",
        ),
        _row(
            "kahan", "bfloat16", "bfloat16-pair+bfloat16+bfloat16", vectors=None, fallback="split",
            loses="updates below 2^-17 of the weight; second moments freeze at beta2 0.999",
            source="Kahan 1965; Zamirai et al. 2020 (2010.06192); stored as torch-optimi does",
        ),
        _row(
            "collage-light", "bfloat16", "bfloat16-pair+bfloat16+bfloat16", vectors=None, fallback="split",
            arithmetic="expansion",
            loses="updates below 2^-17 of the weight, 2^-9 of every operation; second moments freeze at beta2 0.999",
            source="Yu et al. 2024, Collage (2405.03637)",
        ),
        _row(
            "collage-plus", "bfloat16", "bfloat16-pair+bfloat16+bfloat16-pair", vectors=None, fallback="split",
            arithmetic="expansion",
            loses="updates below 2^-17 of the weight, 2^-9 of every operation",
            source="Yu et al. 2024, Collage (2405.03637), with the product of expansions described there",
        ),
        _row(
            "naive", "bfloat16", "bfloat16+bfloat16+bfloat16", vectors=None,
            loses="every update below half an ulp (2^-9 of the weight); second moments freeze at beta2 0.999",
            source="torch.optim.AdamW(fused=True) on bfloat16 weights; torch's default also loses decay under 2^-9",
        ),
        _row(
            "float64", "float32", "float64+float64+float64", master=True, arithmetic="float64", vectors=None,
            loses="2^-53 of every operation of the update; the model sees float32, and gradients are float32",
            source="IEEE 754: the reference for what float32 loses itself",
        ),
        _row(
            "float16/master", "float16", "float32+float32+float32", master=True, vectors="float16/master",
            fallback="float16/split",
            loses="nothing that float32 keeps; the model sees the nearest float16, 65504 at most",
            source="Micikevicius et al. 2018, mixed precision training",
        ),
        _row(
            "float16/split", "float16", "float16-tail+bfloat16+float32", vectors="float16/master",
            fallback="float16/master",
            loses="16 bits of the first moment; of weights under 2^-14, what lies under 2^-38; none above 65504",
            source="Narrowgauge: the tail of a float16, which float16's own exponents end at 2^-24",
        ),
        _row(
            "float16/naive", "float16", "float16+float16+float16-held", vectors=None, fallback="float16/split",
            loses="every update below half an ulp (2^-12 of the weight); second moments are held at 2^-24 or more",
            source="what most optimizers do when given float16 parameters; held here, where theirs become zero",
        ),
        _row(
            "float16/collage-light", "float16", "float16-pair+float16-block+float16-block-held",
            vectors=None, fallback="float16/split",
            arithmetic="expansion",
            loses="2^-12 of every operation; weights below 2^-24; second moments are at least 2^-40 of their block's largest",
            source="Yu et al. 2024, Collage (2405.03637), which names half precision",
        ),
        _row(
            "float16/collage-plus", "float16", "float16-pair+float16-block+float16-block-pair-held",
            vectors=None, fallback="float16/split",
            arithmetic="expansion",
            loses="2^-12 of every operation; weights below 2^-24; second moments are at least 2^-40 of their block's largest",
            source="Yu et al. 2024, Collage (2405.03637), which names half precision",
        ),
        _row(
            "float16/stochastic", "float16", "float16-stochastic+float16-block+float16-block-held", vectors=None,
            fallback="float16/split",
            loses="13 bits of the weight, stochastic: no bias, noise of 2^-11; 13 bits of each moment, relative to its block",
            source="Narrowgauge; stochastic rounding as in Ozkara et al. 2025 (2502.20566), in float16",
        ),
        # A scale for the weight would not gain a bit: normal float16 numbers begin at 2^-14, below
        # relevant weights.
        _row(
            "scalify-float16/scaled16", "float16", "float16+float16-block+float16-block-held", vectors="float16/master",
            fallback="float16/split",
            loses="every update below half an ulp (2^-12 of the weight); second moments stop up to 2^-11 / (1 - beta2) short",
            source="Balança et al. 2024, Scalify (2407.17353): weights and scaled moments in float16, no master; scales by block",
        ),
    )
}  # fmt: skip


def for_vectors(storage: Storage) -> Storage:
    """Return the storage of 1-D parameters under ``storage``."""
    return STORAGES[storage.vectors] if storage.vectors else storage


def for_format(storage: Storage, visible: str) -> Storage:
    """Return ``storage``, or its counterpart for a parameter in another visible format.

    A storage of float32 has none.

    Example:
        >>> for_format(STORAGES["word"], "float32").name, for_format(STORAGES["word"], "float16").name
        ('float32', 'float16/split')
    """
    if storage.visible == "float32" or visible not in VISIBLE:
        return storage
    name = storage.name.rpartition("/")[2]
    names = (storage.name, name, f"float16/{name}", visible, "word", "float16/split")
    return next(STORAGES[n] for n in names if n in STORAGES and STORAGES[n].visible == visible)
