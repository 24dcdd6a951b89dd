"""Delayed scaling: a cast takes its scale from the amax of earlier steps.

Each operand of a layer has an amax ring buffer of ``HISTORY`` steps. Each entry holds its step. A step writes its own amax and
scales by earlier ones. Values beyond that scale saturate and are counted. The buffer is state outside the graph: compilers,
autograd and activation checkpointing do not see it. Casting an operand twice in a step changes neither its scale nor the
buffer, which has one entry more than a cast reads.

Special values: an operand with a NaN or an infinity gets the scale NaN, as in every cast, and writes no amax. Steps with only
zeros count as not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from narrowgauge.spec.computes import HISTORY, TENSORS, Cast

_AMAX, _STEP, _OVERFLOWS = range(3)


def new_history(device: torch.device, num_experts: int = 1) -> Tensor:
    """Return an empty history: float64 ``[tensor, (amax, step, overflows), experts * (HISTORY + 1)]``. Step −1 means empty."""
    history = torch.zeros(len(TENSORS), 3, num_experts * (HISTORY + 1), dtype=torch.float64, device=device)
    history[:, _STEP] = -1
    return history


def delayed_amax(
    x: Tensor, cast: Cast, history: Tensor | None, operand: int, step: Tensor, record: bool
) -> Tensor | None:
    """Return the amax to scale by, float32 ``[1, 1]``; ``None`` if the cast measures the tensor itself.

    If earlier steps saw only zeros, return the tensor's own amax.

    Args:
        history: the layer's history, changed in place if ``record`` is true.
        operand: index of the tensor, see :data:`narrowgauge.spec.computes.TENSORS`.
        step: 0-d, of the optimizer.
        record: write this step's amax into the history; in training only.
    """
    if cast.scaling != "delayed" or history is None:
        return None
    # .data: autograd must not count the write, or it refuses backward through a layer that is used twice.
    buffer = history.data[operand]
    magnitudes = x.detach().abs()
    current = magnitudes.amax().double()
    age = step - buffer[_STEP]
    usable = (buffer[_STEP] >= 0) & (age > 0) & (age <= HISTORY)
    seen = torch.where(usable, buffer[_AMAX], 0.0).amax()
    amax = torch.where(seen > 0, seen, current)
    if record:
        _record(buffer, step, current, (magnitudes > amax).sum().double())
    return torch.where(current.isfinite(), amax, torch.nan).float().view(1, 1)


def _record(buffer: Tensor, step: Tensor, current: Tensor, overflows: Tensor) -> None:
    """Write a step's entry: the largest amax and the most overflows of its micro-batches."""
    index = (step % buffer.shape[1]).long().view(1)
    before = buffer.index_select(1, index)[:, 0]
    before = torch.where(before[_STEP] == step, before, 0.0)
    # A NaN or an infinity would spoil the scale for HISTORY steps.
    finite = torch.where(current.isfinite(), current, 0.0)
    written = (torch.maximum(before[_AMAX], finite), step.double(), torch.maximum(before[_OVERFLOWS], overflows))
    buffer.index_copy_(1, index, torch.stack(written)[:, None])


def count_overflows(history: Tensor, step: int | None = None) -> Tensor:
    """Return the number of saturated values in the worst micro-batch of each step: int64 ``[tensor]``.

    ``step`` counts that step alone. ``None`` counts all steps in the history.
    """
    counts = history[:, _OVERFLOWS]
    return (counts if step is None else torch.where(history[:, _STEP] == step, counts, 0.0)).sum(1).long()


def join_histories(histories: Sequence[Tensor], largest: Callable[[Tensor], Tensor]) -> None:
    """Max-reduce amax histories in place over the ranks that train together. All ranks have the same number of histories.

    ``largest`` returns the elementwise maximum over ranks of a float64 vector.
    """
    steps = torch.cat([history[:, _STEP].reshape(-1) for history in histories])
    newest = largest(steps)
    # A newer step on another rank overwrites an older one here: an expert may have no token on one rank.
    fields = [torch.cat([history[:, field].reshape(-1) for history in histories]) for field in (_AMAX, _OVERFLOWS)]
    joined = largest(torch.cat([torch.where(steps == newest, field, 0.0) for field in fields]))
    sizes = [history[:, _STEP].numel() for history in histories]
    for field, values in zip((_STEP, _AMAX, _OVERFLOWS), (newest, *joined.chunk(2)), strict=True):
        for history, part in zip(histories, values.split(sizes), strict=True):
            history[:, field] = part.view_as(history[:, field])
