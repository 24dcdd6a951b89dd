"""Reductions: how gradients are summed across ranks.

Floating-point addition is not associative: a sum depends on the number of ranks, on the order of
arrival, and on the micro-batches that each rank added before. A reduction states how much a sum may
lose, and whether it depends on any of these (:mod:`narrowgauge.distributed`).
"""

from dataclasses import dataclass

from narrowgauge.spec.formats import get_format
from narrowgauge.spec.toml import load_rows


@dataclass(frozen=True, slots=True)
class Reduction:
    """How gradients are summed across ranks.

    Args:
        name: as in a recipe.
        error: the largest error of a sum, in a few words.
        purpose: what it is for.
        source: the publication or library.
        wire: the format in which gradients travel; empty: the gradient's own.
        order_invariant: whether equal gradients give equal bits on any number of ranks, in any
            order.
    """

    name: str
    error: str
    purpose: str
    source: str
    wire: str = ""
    order_invariant: bool = False

    def bytes_per_element(self, gradient: str) -> float:
        """Return the bytes sent per element of a gradient in the format ``gradient``, each time
        that it is sent.
        """
        return get_format(self.wire or gradient).bits / 8


REDUCTIONS = load_rows(Reduction, "reductions")
