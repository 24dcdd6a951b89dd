"""Counted memory: the bytes of live tensors that training takes, which a process's resident memory cannot show.

The resident memory of a process on a CPU is mostly libraries, compiled code and what the allocator keeps, and hardly depends on
the format of a small model. So the bytes are counted: *state* from the tensors that weights, gradients and the optimizer take
(``Optimizer.bytes_per_param``), *activations* and *peak* from every allocation and free of one step
(:mod:`narrowgauge._torch.allocations`), compiled code's included. What a step begins with is its state without gradients, and the
model's buffers. Memory that PyTorch takes for good in earlier steps, such as a CPU's buffers for widened operands, is not in it.

Counting observes and changes no bit. It takes some 50 ms in two steps of a run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from narrowgauge._torch.allocations import Allocations, counted_allocations
from narrowgauge.numerics.shards import local_of
from narrowgauge.runs.schema import Row
from narrowgauge.trainer.session import Session

FORWARD = "narrowgauge: forward"
"""The profiler's name of a micro-batch's forward pass."""
COUNTED_STEPS = (3, 4)
"""Which steps since a process began are counted. The first ones compile, and of two in a row at most one is audited for the first
time or sampled; a run's figures are those of its smaller peak."""


class CountedSteps:
    """Counts the memory of :data:`COUNTED_STEPS` of a session's steps."""

    def __init__(self, session: Session) -> None:
        self._session, self._num_steps = session, 0

    def take(self, step: Callable[[], Row]) -> Row:
        """Take a step; its row has ``activation_bytes`` and ``peak_tensor_bytes`` if it was counted."""
        self._num_steps += 1
        # With --offload a step moves its state between host and device, and is in neither alone.
        if self._num_steps not in COUNTED_STEPS or self._session.config.offload:
            return step()
        with counted_allocations(self._session.device) as found:
            row = step()
        return row if found is None else row | self._columns(found)

    def _columns(self, found: Allocations) -> Row:
        kept = found.at_end_of(FORWARD)
        return {
            **({} if kept is None else {"activation_bytes": kept}),
            "peak_tensor_bytes": between_steps(self._session) + found.peak,
        }


def state_bytes(session: Session) -> int:
    """Bytes of weights, gradients, optimizer states and sums of micro-batches on this rank."""
    return round(bytes_per_param(session) * sum(local_of(p).numel() for p in session.model.parameters()))


def bytes_per_param(session: Session) -> float:
    """:func:`state_bytes` per parameter that this rank holds."""
    sums = (session.accumulator, session.reduction)
    return session.optimizer.bytes_per_param() + sum(each.bytes_per_param() for each in sums if each is not None)


def between_steps(session: Session) -> int:
    """Bytes that are there when a step begins: the state without gradients, and the model's buffers."""
    gradients = sum(_size(local_of(p)) for p in session.model.parameters())
    return state_bytes(session) - gradients + sum(_size(local_of(buffer)) for buffer in session.model.buffers())


def of_run(rows: list[Row]) -> Row:
    """The counted columns of a run's summary, from those of its steps: of the step with the smallest peak."""
    counted = [row for row in rows if row.get("peak_tensor_bytes") is not None]
    least = min(counted, key=lambda row: row["peak_tensor_bytes"], default={})
    return {name: least[name] for name in ("activation_bytes", "peak_tensor_bytes") if least.get(name) is not None}


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
