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
The optimizer, tests, documentation and ``narrowgauge show`` read the same table,
``data/storages.toml``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.spec.require import require_choice
from narrowgauge.spec.toml import load_data

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
    rounding: str = "nearest"
    lowest: int = -126
    hold: bool = False
    scaled: bool = False
    parts: int = 1

    def __post_init__(self) -> None:
        require_choice("rounding", self.rounding, ("nearest", "stochastic"))
        require_choice("parts", self.parts, (1, 2))

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
    def is_window(self) -> bool:
        """Tell whether the code stores a window of binades instead of float32's own exponent."""
        return self.exponent_bits < 8

    @property
    def highest(self) -> int:
        """Exponent of the largest binade in range."""
        return self.lowest + (1 << self.exponent_bits) - 3 + self.is_window


_ROWS = load_data("storages")
CODES = {name: Code(**row) for name, row in _ROWS["codes"].items()}
"""Codes by name."""
WINDOW = CODES["e6m5"].lowest
"""Where the windows of `word` begin: a first moment's at ``2**WINDOW``, a second one's at its square.
Saved states name it.
"""
FLOAT32 = CODES["float32"]

VISIBLE = {
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
        vectors: the storage of 1-D parameters (norm gains, biases); empty for this one.
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
    vectors: str = "master"
    fallback: str = "word"
    arithmetic: str = "float32"
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
    def extra_fields(self) -> tuple[str, ...]:
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
        result = dict.fromkeys(self.extra_fields, width)
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
        is_short = (
            self.visible != "float32" and not self.extra_fields and weight.rounding == "nearest"
        )
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

    def __post_init__(self) -> None:
        require_choice("arithmetic", self.arithmetic, ("float32", "expansion", "float64"))
        require_choice("visible", self.visible, VISIBLE)
        if self.vectors:
            require_choice("vectors", self.vectors, _ROWS["storages"])
        if self.exp_avg.scaled != self.exp_avg_sq.scaled:
            raise RecipeError(
                f"Cannot store {self.name}: one moment has a scale for each block, the other has none.",
                "Take two codes with scales, or two without.",
            )

    def code(self, role: str) -> Code:
        """Return the code of ``weight``, ``exp_avg``, ``exp_avg_sq`` or one of ``states``."""
        return getattr(self, dict(self.states).get(role, role))

    def with_states(self, states: Iterable[tuple[str, str]]) -> Storage:
        """Return the same storage for a rule with other states."""
        pairs = tuple(states)
        if pairs == self.states:
            return self
        return replace(self, states=pairs)


def _storages() -> dict[str, Storage]:
    storages = {}
    for name, row in _ROWS["storages"].items():
        for role in ("weight", *STATE_NAMES):
            row[role] = CODES[row[role]]
        storages[name] = Storage(name=name, **row)
    return storages


STORAGES = _storages()


def get_storage(name: str) -> Storage:
    """Return the storage of that name.

    Raises:
        RecipeError: no storage has that name.
    """
    if name not in STORAGES:
        raise RecipeError(
            f"no storage is named {name!r}.",
            f"{suggestion(str(name), STORAGES)} A recipe such as bfloat16/word is a compute and a "
            "storage. narrowgauge show storages lists all.".strip(),
        )
    return STORAGES[name]


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
