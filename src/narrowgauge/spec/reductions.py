"""Sums of gradients: over the micro-batches of a rank, and across ranks (reductions).

Floating-point addition is not associative. With few bits it also stalls: if autograd adds gradients
of micro-batches in bfloat16, a sum of equal gradients stops at 256 of them. ``float32`` and
``float64`` keep the sum in a buffer of the parameter's shape and round it at the end
(:mod:`narrowgauge.optim.accumulation`).

Across ranks the sum depends on the number of ranks, on the order of arrival, and on the
micro-batches that each rank added before. A reduction states how much a sum may lose, and whether
it depends on any of these (:mod:`narrowgauge.distributed`).
"""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.spec.formats import get_format

ACCUMULATION_DTYPES = ("float32", "bfloat16", "float64")
"""How a rank sums gradients of micro-batches: in a buffer of this format, if it is wider than the
gradient's. Otherwise autograd sums in the gradient itself.
"""


@dataclass(frozen=True, slots=True)
class Reduction:
    """How gradients are summed across ranks.

    Args:
        name: as in a recipe.
        wire: the format in which gradients travel; empty: the gradient's own.
        error: the largest error of a sum, in a few words.
        order_invariant: whether equal gradients give equal bits on any number of ranks, in any
            order.
        purpose: what it is for.
        source: the publication or library.
    """

    name: str
    wire: str
    error: str
    purpose: str
    source: str
    order_invariant: bool = False

    def bytes_per_element(self, gradient: str) -> float:
        """Return the bytes sent per element of a gradient in the format ``gradient``, each time
        that it is sent.
        """
        return get_format(self.wire or gradient).bits / 8


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
    )
}  # fmt: skip
