"""What the backward passes of a step computed of one parameter, also where something sums it outside ``p.grad``.

Autograd adds the gradient of each micro-batch to the tensor that ``p.grad`` is. A loop that sums them elsewhere, in a wider
format (:class:`narrowgauge.GradientAccumulator`, Megatron's ``main_grad``), takes that tensor away after each pass, and puts the
sum back before the step. A loop with ``zero_grad`` in the wrong place takes it away, too, and the step gets the last pass alone.
What arrives at the step tells the two apart.

``DistributedDataParallel`` puts the mean over ranks into ``p.grad`` after each pass outside of ``no_sync()``, and the next pass
adds to that. What a rank computed itself is told by how far the mean moved it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from narrowgauge.numerics.shards import local_of
from narrowgauge.recompute.capture import spread, sum_of_squares


@dataclass(frozen=True)
class LeftByBackward:
    """The gradient after the newest backward pass of a step.

    Args:
        sample: some of its elements, 1-D.
        squares: the sum of squares of all of those that this rank holds, float64.
        storage: of the tensor that ``p.grad`` was.
        taken: the sum of samples of earlier gradients of this step that were taken away, float64; ``None`` where none was.
        apart: what means over ranks between the passes took from this rank's own sum, float64; ``None`` where there were none.
    """

    sample: Tensor
    squares: Tensor
    storage: StorageWeakRef
    taken: Tensor | None = None
    apart: Tensor | None = None

    @classmethod
    def of(cls, gradient: Tensor, before: LeftByBackward | None) -> LeftByBackward:
        """``before`` is what the pass before left, if there was one in this step."""
        storage, sample, squares = _storage_of(gradient), spread(gradient), sum_of_squares(gradient)
        if before is None or before.storage == storage:
            taken, apart = (None, None) if before is None else (before.taken, before.apart)
            return cls(sample, squares, storage, taken, apart)
        return cls(sample, squares, storage, before.total.double())

    @property
    def last(self) -> Tensor:
        """What this rank's passes left in ``p.grad``."""
        return self.sample if self.apart is None else (self.sample.double() + self.apart).to(self.sample.dtype)

    @property
    def total(self) -> Tensor:
        """The same with what was taken away before."""
        return self.last if self.taken is None else (self.taken + self.last.double()).to(self.sample.dtype)

    def averaged(self, gradient: Tensor | None) -> LeftByBackward:
        """The same after ``p.grad`` became a mean over ranks, to which the next pass adds; a cleared one is none."""
        if gradient is None or self.storage != _storage_of(gradient):
            return self
        mean = spread(gradient)
        return replace(self, apart=self.last.double() - mean.double()) if bool(mean.any()) else self

    def up_to(self, gradient: Tensor | None) -> tuple[Tensor, Tensor]:
        """What the step's passes computed together, and the sum of its squares.

        Args:
            gradient: as the step finds it, perhaps scaled or clipped: in the direction of the sum over all passes, or of the
                last one alone.
        """
        if self.taken is None or gradient is None or gradient.layout is not torch.strided:
            return self.last, self.squares
        found, total = spread(gradient).double(), self.total.double()
        if not is_nearer(found, total, self.last.double()):
            return self.last, self.squares
        factor = float(found @ total / total.square().sum().clamp_min(1e-300))
        return self.total, sum_of_squares(gradient) / factor**2 if factor else self.squares


def _storage_of(gradient: Tensor) -> StorageWeakRef:
    return StorageWeakRef(local_of(gradient.detach()).untyped_storage())


def is_nearer(found: Tensor, one: Tensor, other: Tensor) -> bool:
    """Whether the direction of a vector is nearer to that of one other than to that of a second; all 1-D float64."""
    return _off(found, one) < _off(found, other)


def _off(one: Tensor, other: Tensor) -> float:
    """The sine of the angle between two vectors; 1 where one is zero."""
    lengths = float(one.norm() * other.norm())
    cosine = float(one @ other) / lengths if lengths else 0.0
    return max(0.0, 1.0 - cosine**2)
