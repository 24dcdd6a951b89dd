"""Reductions: how gradients are summed across ranks, and the format in which they travel.

Floating-point addition is not associative: the sum of the same gradients differs with the number of ranks, with the order in
which they arrive, and with the micro-batches that each rank has added before. A reduction states what a sum may lose, and whether
it depends on any of these. :mod:`narrowgauge.distributed` implements them.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.spec.formats import get_format


@dataclass(frozen=True, slots=True)
class Reduction:
    """How gradients are summed across ranks.

    Args:
        name: its name.
        wire: the format in which gradients travel; empty: the gradient's own.
        sums: the format in which they are added.
        error: the largest error of a sum, in a few words.
        keeps: what is kept between steps, in a few words.
        order_free: whether equal gradients give equal bits on any number of ranks, in any order.
        purpose: what it is for.
        source: the publication or library.
        scale_bits: bits per element that scales add to the wire's format.
    """

    name: str
    wire: str
    sums: str
    error: str
    keeps: str
    order_free: bool
    purpose: str
    source: str
    scale_bits: float = 0.0

    @property
    def is_stochastic(self) -> bool:
        """Whether what travels is rounded stochastically: codes with scales of their own."""
        return self.scale_bits > 0

    def bytes_per_element(self, gradient: str) -> float:
        """Bytes on the wire per element of a gradient in the format ``gradient``, each time that it travels.

        Example:
            >>> REDUCTIONS["float32"].bytes_per_element("bfloat16")
            4.0
        """
        return (get_format(self.wire or gradient).bits + self.scale_bits) / 8


REDUCTIONS: dict[str, Reduction] = {
    reduction.name: reduction
    for reduction in (
        Reduction(
            "native", "", "the gradient's own",
            error="one rounding of the gradient's format per addition; overflow at its largest value",
            keeps="nothing",
            order_free=False,
            purpose="the backend's own sum, followed by one division",
            source="PyTorch's FSDP2 and DDP; their AVG multiplies by a rounded 1 / ranks, up to 0.2 % off in bfloat16",
        ),
        Reduction(
            "float32", "float32", "float32",
            error="2^-24 of the sum per addition; one rounding to the gradient's format",
            keeps="nothing",
            order_free=False,
            purpose="16-bit gradients that overflow, or lose their smaller addends, in their own format",
            source="Megatron-LM's grad_reduce_in_fp32; FSDP2's reduce_dtype",
        ),
        Reduction(
            "reproducible", "", "two float64 words on a fixed grid",
            error="2^-75 per addend; the sum is rounded once",
            keeps="nothing",
            order_free=True,
            purpose="the same bits on any number of ranks",
            source="exact sums in fixed point: Kulisch 1971; Demmel and Nguyen 2015",
        ),
        Reduction(
            "compressed8", "int8", "float32",
            error="of each rank's gradient at most 1/112 of the largest of 32 neighbours; zero on average",
            keeps="nothing",
            order_free=False,
            purpose="a quarter of float32's bytes: each rank sends codes once, their owner adds them in float32",
            source="ZeRO++ (2306.10209), section 4.3; stochastic rounding: QSGD (1610.02132); scales of two levels as in nvfp4",
            scale_bits=8 / 32 + 8 / 256,
        ),
        Reduction(
            "compressed4", "int4", "float32",
            error="of each rank's gradient at most 1/6 of the largest of 16 neighbours; zero on average",
            keeps="nothing: error feedback would keep a residual of the whole model on every rank, which FSDP2 cannot share out",
            order_free=False,
            purpose="a seventh of float32's bytes, where the link is the limit: noise of 13 % of each rank's gradient",
            source="as compressed8; not built: 1-bit methods, which need that residual; 1911.07384, known by its abstract alone",
            scale_bits=8 / 16 + 8 / 256,
        ),
    )
}  # fmt: skip
