"""Accumulations: in which format the gradients of micro-batches are summed.

A batch too large for the memory is computed in parts. Where autograd adds their gradients in bfloat16, a sum of equal ones
stops at 256 of them; the other rows keep it in one or two *planes* shaped like the parameter, and round it once, at the
end. :mod:`narrowgauge.optim.accumulation` obeys them and says how far each may be off.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.spec.formats import get_format
from narrowgauge.spec.storages import STORAGES


@dataclass(frozen=True, slots=True)
class Accumulation:
    """How the gradients of micro-batches are summed.

    Args:
        name: what recipes call it.
        planes: formats of what is kept beside the gradient; none: autograd adds into the gradient itself.
        gradients: the gradient formats it is for, among those of 16 bits.
        addition: the most that one addition loses, as a share of its result.
        loses: what is lost, in a few words.
        source: where it comes from.
    """

    name: str
    planes: tuple[str, ...]
    gradients: tuple[str, ...]
    addition: float
    loses: str
    source: str

    @property
    def bytes_per_param(self) -> float:
        """Bytes per parameter beside the gradient."""
        return sum(get_format(plane).bits for plane in self.planes) / 8

    def bound(self, num_micro_batches: int) -> float:
        """The most that a sum is off before the last rounding, as a share of the sum of magnitudes."""
        return float((1 + self.addition) ** (num_micro_batches - 1) - 1)


ACCUMULATIONS: dict[str, Accumulation] = {
    row.name: row
    for row in (
        Accumulation(
            "float32", ("float32",), ("bfloat16", "float16"), 2.0**-24,
            loses="2^-24 of the sum per addition; one rounding at the end",
            source="Micikevicius et al. 2018; Megatron's and DeepSpeed's float32 gradient buffers",
        ),
        Accumulation(
            "bfloat16", (), ("bfloat16",), 2.0**-8,
            loses="2^-8 of the sum per addition, alike each time: 256 ones and any number more are 256",
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
            source="Kahan 1965: a bfloat16 sum and a bfloat16 of what it rounded off",
        ),
    )
}  # fmt: skip


def naive_limit() -> int:
    """How many micro-batches may be summed in bfloat16 itself before the sum loses more than the storage does.

    The rule: ``word`` keeps a first moment with 5 mantissa bits, so there a gradient may be off by a spacing of 2^-5
    anyway. The k - 1 roundings of a sum, each up to 2^-8 of it, pass that at k = 10.
    """
    return 1 + int(2.0 ** -STORAGES["word"].exp_avg.mantissa_bits / ACCUMULATIONS["bfloat16"].addition)
