"""Delayed scales: the largest magnitudes of earlier steps decide, so that no tensor is read twice.

Each operand of a layer has a ring of as many largest magnitudes as its cast looks back on, each with the step it was seen
in. A step writes its own and scales by the others, whatever it meets itself: what lies beyond saturates and is counted.
The ring is state beside the graph: neither a compiler, autograd nor activation checkpointing sees it, and computing an operand
a second time in a step changes neither its scale nor the ring: it has one place more than steps are looked back on.

What happens to special values: an operand with a NaN or an infinity gets the scale NaN, as everywhere, and leaves nothing in
the ring; steps that saw only zeros count as not seen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.spec.computes import Cast

OPERANDS = 3
"""Input, weight, gradient."""
_AMAX, _STEP, _OVERFLOWS = range(3)


def new_history(length: int, device: torch.device) -> Tensor:
    """An empty history of ``length`` steps: float64 ``[operand, (amax, step, overflows), length + 1]``; step −1 is none."""
    history = torch.zeros(OPERANDS, 3, length + 1, dtype=torch.float64, device=device)
    history[:, _STEP] = -1
    return history


def delayed_amax(
    x: Tensor, cast: Cast, history: Tensor | None, operand: int, step: Tensor, record: bool
) -> Tensor | None:
    """The largest magnitude to scale by, float32 ``[1, 1]``; ``None`` where the cast looks at the tensor itself.

    Law: where no earlier step saw anything but zeros, the tensor's own.

    Args:
        x: the operand.
        cast: how it is cast.
        history: the layer's, changed in place where ``record`` is true.
        operand: which of the layer's.
        step: 0-d, of the optimizer.
        record: write this step's largest magnitude down: in training only.
    """
    if cast.scaling != "delayed" or history is None or not x.numel():
        return None
    # Not a change that autograd counts: it would forbid going backward through a layer used twice.
    ring = history.data[operand]
    magnitudes = x.detach().abs()
    own = magnitudes.amax().double()
    age = step - ring[_STEP]
    usable = (ring[_STEP] >= 0) & (age > 0) & (age <= cast.history)
    seen = torch.where(usable, ring[_AMAX], 0.0).amax()
    amax = torch.where(seen > 0, seen * 2.0**cast.margin, own)
    if record:
        _record(ring, step, own, (magnitudes > amax).sum().double())
    return torch.where(own.isfinite(), amax, torch.nan).float().view(1, 1)


def _record(ring: Tensor, step: Tensor, own: Tensor, overflows: Tensor) -> None:
    """Write a step down: of its micro-batches, the largest magnitude and the most overflows."""
    place = (step % ring.shape[1]).long().view(1)
    before = ring.index_select(1, place)[:, 0]
    before = torch.where(before[_STEP] == step, before, 0.0)
    # A NaN or an infinity would stay in the ring for as long as it is looked back on.
    kept = torch.where(own.isfinite(), own, 0.0)
    written = (torch.maximum(before[_AMAX], kept), step.double(), torch.maximum(before[_OVERFLOWS], overflows))
    ring.index_copy_(1, place, torch.stack(written)[:, None])


def count_overflows(history: Tensor, step: int | None = None) -> Tensor:
    """How many values saturated, in the worst micro-batch of each step: int64 ``[operand]``.

    Args:
        history: a layer's.
        step: of that step alone; ``None``: of all that the history still holds.
    """
    counts = history[:, _OVERFLOWS]
    return (counts if step is None else torch.where(history[:, _STEP] == step, counts, 0.0)).sum(1).long()
