"""Sums of gradients: over the micro-batches of a rank, and across ranks (reductions).

Floating-point addition is not associative. With few bits it also stalls: if autograd adds gradients
of micro-batches in bfloat16, a sum of equal gradients stops at 256 of them. ``float32`` and
``float64`` keep the sum in a buffer of the parameter's shape and round it at the end
(:mod:`narrowgauge.optim.accumulation`).

Across ranks the sum depends on the number of ranks, on the order of arrival, and on the
micro-batches that each rank added before. A reduction states how much a sum may lose, and whether
it depends on any of these (:mod:`narrowgauge.distributed`).
"""

from dataclasses import dataclass

from narrowgauge.spec.formats import get_format
from narrowgauge.spec.toml import load_rows

ACCUMULATION_DTYPES = ("float32", "bfloat16", "float64")
"""How a rank sums gradients of micro-batches: in a buffer of this format, if it is wider than the
gradient's. Otherwise autograd sums in the gradient itself.
"""


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

    def __post_init__(self) -> None:
        get_format(self.wire or "float32")

    def bytes_per_element(self, gradient: str) -> float:
        """Return the bytes sent per element of a gradient in the format ``gradient``, each time
        that it is sent.
        """
        return get_format(self.wire or gradient).bits / 8


REDUCTIONS = load_rows(Reduction, "reductions")
