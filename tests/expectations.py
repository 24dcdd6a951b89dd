"""What each row of a table must give, stated a second time and by hand: an entry per format,
storage, compute, reduction.

Tests compare the tables of ``narrowgauge.spec`` with these entries, and read from them what they
expect of a row. So a new row and its entry here are all that an addition takes (CONTRIBUTING.md). A
row without an entry fails, and so does an entry without a row.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

# ── formats ───────────────────────────────────────────────────────────────────────────────────────

# name: exponent bits, mantissa bits, bias, number of codes at the top of the magnitudes that are
# not finite numbers.
FLOATS = {
    "float16": (5, 10, 15, 1024),
    "bfloat16": (8, 7, 127, 128),
    "tfloat32": (8, 10, 127, 1024),
    "float8_e4m3fn": (4, 3, 7, 1),
    "float8_e5m2": (5, 2, 15, 4),
    "float4_e2m1fn": (2, 1, 1, 0),
}
INTEGERS = {"int8": (-128, 127)}
ELSEWHERE = ("float64", "float32", "float8_e8m0fnu")
"""Formats without an entry: NumPy and ml_dtypes define them."""


# ── storages ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Storage:
    """What a storage must give.

    Args:
        bytes_per_param: of weight, gradient and states.
        stall: in the stall case (``optim.scenarios.stall``): the largest relative error of the
            stored displacement; ``"noisy"``: updates arrive on average only; ``"lost"``: they do
            not arrive, and an alarm names the fallback.
        block_bytes: bytes of scales per block of a matrix; where there are any, planes lie in rows.
        tail_bits, beside: bits of the tail, and what is stored beside the visible weight.
        vectors_whole: 1-D parameters lose nothing; otherwise they are stored as matrices are.
        dealt: of each code that rounds stochastically: at which bit of the hash its addend begins,
            and how many it has. A code that drops more bits than it is dealt shares its lower ones
            with the code below, and the first with the last.
        stands_for: the lines of the optimizer that this storage alone of all representatives takes;
            empty for the others.
    """

    bytes_per_param: float
    stall: float | Literal["noisy", "lost"]
    block_bytes: int = 0
    tail_bits: int = 0
    beside: tuple[str, ...] = ()
    vectors_whole: bool = True
    dealt: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    stands_for: str = ""


_WORD = {"weight": (0, 8), "exp_avg": (2, 18), "exp_avg_sq": (14, 18)}
_COMPACT = {"weight": (0, 8), "exp_avg": (0, 20), "exp_avg_sq": (12, 20)}
_STATES8 = {"weight": (26, 16), "exp_avg": (1, 20), "exp_avg_sq": (12, 20)}
_LOW = ("weight_low",)

STORAGES: dict[str, Storage] = {
    "float32": Storage(16, 0.002, stands_for="a lane for each word, and nothing is cut"),
    "master": Storage(16, 0.002, beside=("master",), stands_for="a full copy beside what the model sees"),
    "exact": Storage(14, 0.002, tail_bits=16, beside=("tail",)),
    "split": Storage(12, 0.01, tail_bits=16, beside=("tail",), stands_for="a 16-bit tail, and planes of 16 and of 32 bits"),
    "word": Storage(8, 0.1, 0, 8, ("tail",), dealt=_WORD, stands_for="three fields in one word, stochastic, flat"),
    "compact": Storage(7, 0.15, 8, 8, ("tail",), dealt=_COMPACT, stands_for="four lanes, scales by block, stochastic"),
    "states8": Storage(6, "noisy", 8, dealt=_STATES8, stands_for="scales by block, and nothing beside the weight"),
    "float32-states8": Storage(
        10, 0.15, 8, dealt={"exp_avg": (28, 20), "exp_avg_sq": (12, 20)},
        stands_for="two halves of blocks of whole words, scales by block",
    ),
    "no-master": Storage(12, "lost", vectors_whole=False),
    "stochastic": Storage(
        8, "noisy", vectors_whole=False, dealt={"weight": (0, 16)}, stands_for="nothing beside the weight, flat, stochastic"
    ),
    "kahan": Storage(
        10, 0.08, beside=_LOW, vectors_whole=False, stands_for="a second part of the weight, added in float32"
    ),
    "collage-light": Storage(10, 0.08, beside=_LOW, vectors_whole=False),
    "collage-plus": Storage(12, 0.08, beside=_LOW, vectors_whole=False, stands_for="the arithmetic of expansions, two parts"),
    "naive": Storage(8, "lost", vectors_whole=False, stands_for="nothing beside the weight, to the nearest"),
    "float64": Storage(
        32, 1e-13, beside=("master",), vectors_whole=False, stands_for="words of 64 bits, a full copy beside a float32"
    ),
    "float16/master": Storage(16, 0.002, beside=("master",), stands_for="float16 with a full copy"),
    "float16/split": Storage(12, 0.01, tail_bits=13, beside=("tail",), stands_for="float16 with a tail"),
    "float16/naive": Storage(8, "lost", vectors_whole=False, stands_for="float16, and nothing beside it"),
    "float16/collage-light": Storage(10, 0.003, 8, beside=_LOW, vectors_whole=False),
    "float16/collage-plus": Storage(
        12, 0.002, 8, beside=_LOW, vectors_whole=False, stands_for="the arithmetic of expansions in float16"
    ),
    "float16/stochastic": Storage(
        8, "noisy", 8, vectors_whole=False, dealt={"weight": (0, 13)}, stands_for="float16 with scales by block, stochastic"
    ),
    "scalify-float16/scaled16": Storage(8, "lost", 8, stands_for="float16 with scales by block"),
}  # fmt: skip


# ── computes ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Compute:
    """What a compute must give.

    Args:
        kept_bytes: saved for backward per element of the input.
        reused: which casts serve a second matmul: ``input`` (its codes are what is saved),
            ``weight``, ``gradient``.
        default_storage: of a recipe that names none.
        has: ``stochastic`` casts, a ``scaled loss``; ``gathered``: FSDP2 gathers its weights as
            codes; ``served``: its layers can be quantized for inference.
    """

    kept_bytes: float
    reused: Collection[Literal["input", "weight", "gradient"]] = ()
    default_storage: str = "word"
    has: Collection[Literal["stochastic", "scaled loss", "served"]] = ()


_ALL: tuple[Literal["input", "weight", "gradient"], ...] = ("input", "weight", "gradient")

COMPUTES: dict[str, Compute] = {
    "float32": Compute(4, default_storage="float32"),
    "bfloat16": Compute(2),
    "float16": Compute(2, default_storage="split", has=("scaled loss",)),
    "float8-tensor": Compute(1, _ALL, has=("served",)),
    "float8-row": Compute(2, has=("served",)),
    "float8-block": Compute(2, ("weight",)),
    "int8-row": Compute(1, ("input", "weight"), has=("stochastic", "served")),
    "int8-outlier-codes": Compute(2, ("gradient",), has=("served",)),
    "mxfp8": Compute(2),
    "mxfp4": Compute(2, has=("stochastic",)),
    "nvfp4": Compute(2, reused=("weight",), has=("stochastic",)),
    "scalify": Compute(1, _ALL),
    "scalify-float16": Compute(2),
}


# ── reductions ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Reduction:
    """What a reduction must give.

    Args:
        wire_bytes: per element of a float32 and of a bfloat16 gradient, each time that it travels.
        tolerance: of a sum of float32 gradients, relative to the sum.
        order_invariant: equal gradients give equal bits on any number of ranks, in any order.
    """

    wire_bytes: tuple[float, float]
    tolerance: float = 1e-4
    order_invariant: bool = False


REDUCTIONS: dict[str, Reduction] = {
    "native": Reduction((4, 2)),
    "float32": Reduction((4, 4)),
    "reproducible": Reduction((4, 2), order_invariant=True),
}
