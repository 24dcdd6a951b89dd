"""Storages: how a weight and its moments are kept between steps.

A stored value is a float32 *cut* to fewer bits. A weight's upper 16 bits, so rounded, are the bfloat16 that the model
sees; the *tail* is the signed rest, so word and tail together give the cut value back exactly. A moment's code keeps a
few exponent and mantissa bits of the float32. "Nearest" means ties away from zero everywhere in this file. A row of the
table is a value that the optimizer, tests, docs and ``narrowgauge show`` all read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Rounding = Literal["nearest", "stochastic"]
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
        hold: never cut a positive value to zero (a second moment of zero makes the next step unbounded).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    signed: bool = True
    rounding: Rounding = "nearest"
    lowest: int = -126
    hold: bool = False

    @property
    def bits(self) -> int:
        """Bits the code occupies."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

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
TAIL16 = Code("bfloat16 + 16-bit tail", 8, 23)
TAIL8 = Code("bfloat16 + 8-bit tail", 8, 15, rounding="stochastic")
# The windows of `word`: the second moment needs twice the binades of the first, and both are centred so that gradients
# from 2^-54 to 2^9 survive; measured against other splits of the 32 bits in benchmarks/word_split.py.
MOMENT12 = Code("e6m5", 6, 5, rounding="stochastic", lowest=-54)
SECOND12 = Code("e7m5", 7, 5, signed=False, rounding="stochastic", lowest=-108, hold=True)


@dataclass(frozen=True, slots=True)
class Storage:
    """How a weight and its moments are kept between steps.

    Args:
        name: the row's name.
        visible: format of the weight that the model computes with (and of its gradient).
        weight: code of the stored weight; its upper part is the visible one.
        exp_avg: code of the first moment.
        exp_avg_sq: code of the second moment.
        master: keep the stored weight as a second, full float32 copy instead of a tail.
        vectors: the row that 1-D parameters (norm gains, biases) use instead, ``None`` for this one.
        loses: what is lost, in a few words.
        cure: the row an alarm advises when this one loses updates.
        source: where the scheme comes from.
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

    @property
    def tail_bits(self) -> int:
        """Bits of the stored weight that the model does not see and no full copy holds."""
        return 0 if self.master or self.visible == "float32" else self.weight.bits - 16

    @property
    def beside(self) -> str | None:
        """The name of what is kept of the weight beside the visible one: ``"master"``, ``"tail"`` or nothing."""
        return "master" if self.master else "tail" if self.tail_bits else None

    @property
    def fields(self) -> tuple[tuple[str, int], ...]:
        """Everything kept beside the visible weight: ``(name, bits)``."""
        beside = ((self.beside, 32 if self.master else self.tail_bits),) if self.beside else ()
        return (*beside, ("exp_avg", self.exp_avg.bits), ("exp_avg_sq", self.exp_avg_sq.bits))

    @property
    def bytes_per_param(self) -> float:
        """Bytes per parameter of weight, gradient (in the visible format) and all states."""
        visible = 4 if self.visible == "float32" else 2
        return 2 * visible + sum(bits for _, bits in self.fields) / 8

    @property
    def is_stochastic(self) -> bool:
        """Whether any code of the row rounds stochastically."""
        return any(code.rounding == "stochastic" for code in (self.weight, self.exp_avg, self.exp_avg_sq))


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
            "word", "bfloat16", TAIL8, MOMENT12, SECOND12, cure="split",
            loses="8 bits of the weight, 18 of each moment, all stochastic: noise of 2^-16 per step, no bias",
            source="Narrowgauge: one 32-bit word of state beside each bfloat16 weight",
        ),
        Storage(
            "naive", "bfloat16", BFLOAT16, BFLOAT16, BFLOAT16, vectors=None,
            loses="every update below half a spacing (2^-9 of the weight); second moments freeze at beta2 0.999",
            source="what most optimizers do when given bfloat16 parameters",
        ),
    )
}  # fmt: skip


def for_vectors(storage: Storage) -> Storage:
    """The row that 1-D parameters use under ``storage``."""
    return STORAGES[storage.vectors] if storage.vectors else storage
