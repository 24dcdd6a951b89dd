"""Accumulations: the format in which gradients of micro-batches are summed.

A batch that does not fit into memory is split into micro-batches. When autograd adds their gradients in bfloat16, a sum of equal
gradients stops at 256 of them. The other accumulations keep the sum in one or two buffers (*planes*) of the parameter's shape and
round it once, at the end. :mod:`narrowgauge.optim.accumulation` implements them.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.spec.formats import get_format
from narrowgauge.spec.storages import STORAGES


@dataclass(frozen=True, slots=True)
class Accumulation:
    """How the gradients of micro-batches are summed.

    Args:
        name: its name.
        planes: formats of the buffers besides the gradient; without, autograd adds into the gradient itself.
        gradients: the 16-bit gradient formats that it supports.
        addition: the largest error of one addition, relative to its result.
        loses: what is lost, in a few words.
        source: the publication or library.
    """

    name: str
    planes: tuple[str, ...]
    gradients: tuple[str, ...]
    addition: float
    loses: str
    source: str

    @property
    def bytes_per_param(self) -> float:
        """Bytes per parameter of the buffers."""
        return sum(get_format(plane).bits for plane in self.planes) / 8

    def bound(self, num_micro_batches: int) -> float:
        """The largest error of a sum before the final rounding, relative to the sum of magnitudes."""
        return float((1 + self.addition) ** (num_micro_batches - 1) - 1)


ACCUMULATIONS: dict[str, Accumulation] = {
    accumulation.name: accumulation
    for accumulation in (
        Accumulation(
            "float32", ("float32",), ("bfloat16", "float16"), 2.0**-24,
            loses="2^-24 of the sum per addition; one rounding at the end",
            source="Micikevicius et al. 2018; Megatron's and DeepSpeed's float32 gradient buffers",
        ),
        Accumulation(
            "bfloat16", (), ("bfloat16",), 2.0**-8,
            loses="2^-8 of the sum per addition, always in the same direction: 256 ones and any number more sum to 256",
            source="PyTorch's autograd, which adds into the gradient itself",
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
    )
}  # fmt: skip


def naive_limit() -> int:
    """The number of micro-batches from which a sum in bfloat16 loses more than the storage does.

    ``word`` stores the first moment with 5 mantissa bits, so a gradient error of 2^-5 is within its spacing. The k - 1 roundings
    of a sum, each up to 2^-8 of it, exceed that at k = 10.
    """
    return 1 + int(2.0 ** -STORAGES["word"].exp_avg.mantissa_bits / ACCUMULATIONS["bfloat16"].addition)
