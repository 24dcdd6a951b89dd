"""Sums of gradients: over the micro-batches of a rank (accumulations), and across ranks (reductions).

Floating-point addition is not associative. With few bits it also stalls: if autograd adds gradients of micro-batches in
bfloat16, a sum of equal gradients stops at 256 of them. The other accumulations keep the sum in one or two buffers of the
parameter's shape and round it once, at the end (:mod:`narrowgauge.optim.accumulation`).

Across ranks the sum depends on the number of ranks, on the order of arrival, and on the micro-batches that each rank added
before. A reduction states how much a sum may lose, and whether it depends on any of these (:mod:`narrowgauge.distributed`).
"""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.spec.formats import get_format
from narrowgauge.spec.storages import STORAGES, Code

SHARDINGS = ("full", "none")
"""How ranks hold a model: ``full`` shards parameters, gradients and states over them, ``none`` keeps all on every rank."""


@dataclass(frozen=True, slots=True)
class Accumulation:
    """How the gradients of micro-batches are summed.

    Args:
        planes: formats of the buffers, in addition to the gradient. If empty, autograd adds into the gradient itself.
        gradients: formats of gradients that it sums. Autograd adds float32 gradients unless they are listed.
        addition: the largest error of one addition, relative to its result.
        loses: what is lost, in a few words.
        source: the publication or library.
        stalls_at: the sum of equal gradients, in units of one, that one more does not change; 0 if it never stalls.
        code: of a buffer that is relative to a power of two, one per tensor; ``None`` if buffers hold plain numbers.
    """

    name: str
    planes: tuple[str, ...]
    gradients: tuple[str, ...]
    addition: float
    loses: str
    source: str
    stalls_at: int = 0
    code: Code | None = None

    @property
    def bytes_per_param(self) -> float:
        """Return the bytes per parameter of the buffers. Scales add 4 bytes per tensor."""
        return sum(get_format(plane).bits for plane in self.planes) / 8

    def keeps_sums(self, gradient: str) -> bool:
        """Return whether it has buffers for gradients of a format. Autograd sums other gradients.

        Example:
            >>> [ACCUMULATIONS[name].keeps_sums("float32") for name in ("float32", "float64")]
            [False, True]
        """
        return bool(self.planes) and gradient in self.gradients

    def bound(self, num_micro_batches: int) -> float:
        """Return the largest error of a sum before the final rounding, relative to the sum of magnitudes.

        A buffer smaller than the gradient also rounds the first gradient. A scaled buffer also loses up to 2^-32 of the
        tensor's largest sum per addition.
        """
        return float((1 + self.addition) ** (num_micro_batches - (self.code is None)) - 1)

    @property
    def most_micro_batches(self) -> int | None:
        """Return how many micro-batches make a stalling sum lose more than the storage does; ``None`` for any number.

        ``word`` stores the first moment with 5 mantissa bits, so a gradient error of 2^-5 is within its ulp. The k - 1
        roundings of a sum in bfloat16, each up to 2^-8 of it, exceed that at k = 10.
        """
        spacing = 2.0 ** -STORAGES["word"].exp_avg.mantissa_bits
        return 1 + int(spacing / self.addition) if self.stalls_at else None


FLOAT8_E5M2 = Code("float8_e5m2", 5, 2, lowest=-30, scaled=True)
FLOAT8_E5M2_DITHERED = Code("float8_e5m2", 5, 2, rounding="stochastic", lowest=-30, scaled=True)


ACCUMULATIONS: dict[str, Accumulation] = {
    accumulation.name: accumulation
    for accumulation in (
        Accumulation(
            "float64", ("float64",), ("bfloat16", "float16", "float32"), 2.0**-53,
            loses="2^-53 of the sum per addition; one rounding at the end",
            source="IEEE 754: for reference runs, and for the error that a batch's rounded micro-batches leave",
        ),
        Accumulation(
            "float32", ("float32",), ("bfloat16", "float16"), 2.0**-24,
            loses="2^-24 of the sum per addition; one rounding at the end",
            source="Micikevicius et al. 2018; Megatron-LM's buffers for bf16, and DeepSpeed's where grad_accum_dtype is fp32",
        ),
        Accumulation(
            "bfloat16", (), ("bfloat16",), 2.0**-8,
            loses="2^-8 of the sum per addition, always in the same direction: 256 ones and any number more sum to 256",
            source="PyTorch's autograd, which adds into the gradient itself",
            stalls_at=256,
        ),
        Accumulation(
            "bfloat16-stochastic", ("bfloat16",), ("bfloat16",), 2.0**-7 + 2.0**-23,
            loses="up to 2^-7 of the sum per addition, at random and without bias",
            source="stochastic rounding: Croci et al. 2022; bits hashed as in the storages",
        ),
        Accumulation(
            "kahan", ("bfloat16", "bfloat16"), ("bfloat16",), 2.0**-17 + 2.0**-22,
            loses="2^-17 of the sum per addition: float32's bytes and 128 times its error",
            source="Kahan 1965: a bfloat16 sum and a bfloat16 compensation",
        ),
        # The release of FP8-LM (MS-AMP) adds to a sum in e4m3; e5m2 reaches down to 2^-32 of the largest instead of 2^-17.
        Accumulation(
            "float8_e5m2", ("float8_e5m2",), ("bfloat16",), 2.0**-3,
            loses="2^-3 of each gradient and of the sum per addition, always in the same direction: 16 ones and more sum to 16",
            source="FP8-LM, Peng et al. 2023 (2310.18313), section 2.1: gradients kept in 8 bits with a scale per tensor",
            stalls_at=16, code=FLOAT8_E5M2,
        ),
        Accumulation(
            "float8_e5m2-stochastic", ("float8_e5m2",), ("bfloat16",), 2.0**-2 + 2.0**-23,
            loses="up to 2^-2 of each gradient and of the sum per addition, at random and without bias",
            source="as float8_e5m2, with the rounding of bfloat16-stochastic",
            code=FLOAT8_E5M2_DITHERED,
        ),
    )
}  # fmt: skip


# ── reductions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Reduction:
    """How gradients are summed across ranks.

    Args:
        name: as in a recipe.
        wire: the format in which gradients travel; empty: the gradient's own.
        error: the largest error of a sum, in a few words.
        order_invariant: whether equal gradients give equal bits on any number of ranks, in any order.
        purpose: what it is for.
        source: the publication or library.
        scale_bits: bits per element that scales add to the wire's format.
    """

    name: str
    wire: str
    error: str
    purpose: str
    source: str
    order_invariant: bool = False
    scale_bits: float = 0.0

    @property
    def is_stochastic(self) -> bool:
        """Tell whether what travels is rounded stochastically: codes with scales of their own."""
        return self.scale_bits > 0

    def bytes_per_element(self, gradient: str) -> float:
        """Return the bytes sent per element of a gradient in the format ``gradient``, each time that it is sent.

        Example:
            >>> REDUCTIONS["float32"].bytes_per_element("bfloat16")
            4.0
        """
        return (get_format(self.wire or gradient).bits + self.scale_bits) / 8


REDUCTIONS: dict[str, Reduction] = {
    reduction.name: reduction
    for reduction in (
        Reduction(
            "native", "",
            error="one rounding of the gradient's format per addition; overflow at its largest value",
            purpose="the backend's own sum, followed by one division",
            source="PyTorch's FSDP2 and DDP; FSDP2's AVG (NCCL) multiplies by a rounded 1 / ranks, up to 0.2 % off in bfloat16",
        ),
        Reduction(
            "float32", "float32",
            error="2^-24 of the sum per addition; one rounding to the gradient's format",
            purpose="16-bit gradients that overflow, or lose their smaller addends, in their own format",
            source="Megatron-LM's grad_reduce_in_fp32, its command's default for bf16; FSDP2's reduce_dtype",
        ),
        Reduction(
            "reproducible", "",
            error="2^-75 per addend; the sum is rounded once",
            order_invariant=True,
            purpose="the same bits on any number of ranks",
            source="exact sums in fixed point: Kulisch 1971; Demmel and Nguyen 2015",
        ),
        Reduction(
            "compressed8", "int8",
            error="of each rank's gradient at most 1/112 of the largest of 32 neighbours; zero on average",
            purpose="a quarter of float32's bytes: each rank sends codes once, their owner adds them in float32",
            source="ZeRO++ (2306.10209), section 4.3; stochastic rounding: QSGD (1610.02132); scales of two levels as in nvfp4",
            scale_bits=8 / 32 + 8 / 256,
        ),
        Reduction(
            "compressed4", "int4",
            error="of each rank's gradient at most 1/6 of the largest of 16 neighbours; zero on average",
            # No error feedback: its residual covers the whole model on every rank, and FSDP2 cannot shard it.
            purpose="a seventh of float32's bytes, where the link is the limit: noise of 13 % of each rank's gradient",
            source="as compressed8; not built: 1-bit methods, which need that residual; 1911.07384, known by its abstract alone",
            scale_bits=8 / 16 + 8 / 256,
        ),
    )
}  # fmt: skip
