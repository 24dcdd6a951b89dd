"""What the backward passes of a step computed of one parameter, also where something sums it outside ``p.grad``.

Autograd adds the gradient of each micro-batch to the tensor that ``p.grad`` is. A loop that sums them elsewhere, in a wider
format (:class:`narrowgauge.GradientAccumulator`, Megatron's ``main_grad``), takes that tensor away after each pass, and puts the
sum back before the step. A loop with ``zero_grad`` in the wrong place takes it away, too, and the step gets the last pass alone.
What arrives at the step tells the two apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from narrowgauge.numerics.shards import is_sharded, local_of
from narrowgauge.recompute.capture import spread, sum_of_squares


@dataclass(frozen=True)
class LeftByBackward:
    """The gradient after the newest backward pass of a step.

    Args:
        sample: some of its elements, 1-D.
        squares: the sum of squares of all of them, float64; ``None`` where ranks hold parts.
        storage: of the tensor that ``p.grad`` was.
        taken: the sum of samples of earlier gradients of this step that were taken away, float64; ``None`` where none was.
    """

    sample: Tensor
    squares: Tensor | None
    storage: StorageWeakRef
    taken: Tensor | None = None

    @classmethod
    def of(cls, gradient: Tensor, before: LeftByBackward | None) -> LeftByBackward:
        """``before`` is what the pass before left, if there was one in this step."""
        storage = StorageWeakRef(local_of(gradient.detach()).untyped_storage())
        taken = None if before is None else before.taken
        if before is not None and before.storage != storage:
            taken = before.sample.double() + (0.0 if taken is None else taken)
        squares = None if is_sharded(gradient) else sum_of_squares(gradient)
        return cls(spread(gradient), squares, storage, taken)

    def up_to(self, gradient: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What the step's passes computed together, and the sum of its squares.

        Args:
            gradient: as the step finds it, perhaps scaled or clipped: in the direction of the sum over all passes, or of the
                last one alone.
        """
        if self.taken is None or gradient is None or gradient.layout is not torch.strided:
            return self.sample, self.squares
        found, total = spread(gradient).double(), self.taken + self.sample.double()
        if _off(found, total) >= _off(found, self.sample.double()):
            return self.sample, self.squares
        factor = float(found @ total / total.square().sum().clamp_min(1e-300))
        squares = None if is_sharded(gradient) or not factor else sum_of_squares(gradient) / factor**2
        return total.to(self.sample.dtype), squares


def _off(one: Tensor, other: Tensor) -> float:
    """The sine of the angle between two vectors; 1 where one is zero."""
    lengths = float(one.norm() * other.norm())
    cosine = float(one @ other) / lengths if lengths else 0.0
    return max(0.0, 1.0 - cosine**2)
