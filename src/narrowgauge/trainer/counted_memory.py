"""Count the bytes of live tensors in training. A process's resident memory cannot show them.

On a CPU the resident memory of a process is mostly libraries, compiled code and the allocator's cache. So the bytes are
counted. *State* comes from the weights, gradients and optimizer tensors (``Optimizer.bytes_per_param``). *Activations*
and *peak* come from every allocation and free of one step, compiled code included. PyTorch's profiler lists each of them
(``profiler.kineto_results.events()``, private: the public summary adds them up by operator, which loses the peak).

Counting changes no bit. It takes some 50 ms in two steps of a run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from narrowgauge.numerics.dtensor import local_of
from narrowgauge.runs.schema import Row
from narrowgauge.trainer.session import Session

FORWARD = "narrowgauge: forward"
"""The profiler's name of a micro-batch's forward pass."""
COUNTED_STEPS = (3, 4)
"""The counted steps since a process began. The first steps compile. Of two in a row at most one is audited for the first
time or sampled. A run's figures come from the smaller peak."""


@dataclass
class Allocations:
    """The memory that a block of code allocated and freed, in the order of time.

    Args:
        changes: nanoseconds and bytes of each; negative for frees. Frees of memory from before the block are
            missing, since the profiler does not know its size.
        forward_end: end of the first range :data:`FORWARD`, in nanoseconds.
    """

    changes: list[tuple[int, int]] = field(default_factory=list)
    forward_end: int | None = None

    @property
    def peak(self) -> int:
        """Return the largest number of bytes above the bytes at the start.

        Example:
            >>> Allocations([(1, 8), (2, 4), (3, -8), (4, 6)]).peak
            12
        """
        live = most = 0
        for _, size in self.changes:
            live += size
            most = max(most, live)
        return most

    def columns(self, session: Session) -> Row:
        """Return ``activation_bytes`` and ``peak_tensor_bytes`` of a step; none where nothing was counted."""
        if not self.changes:
            return {}
        columns = {"peak_tensor_bytes": between_steps(session) + self.peak}
        if self.forward_end is not None:
            columns["activation_bytes"] = sum(size for when, size in self.changes if when <= self.forward_end)
        return columns


@contextlib.contextmanager
def counted_allocations(device: torch.device, is_counted: bool = True) -> Iterator[Allocations]:
    """Count allocations of tensors on a device within the block. The result is filled in when the block ends.

    Count nothing if another profiler is active, or PyTorch was built without one.

    Cost: about 10 µs for each operation and 50 ms for the block.

    Example:
        >>> with counted_allocations(torch.device("cpu")) as allocations:
        ...     x = torch.zeros(1000, dtype=torch.float32)
        ...     del x
        >>> allocations.peak, sum(size for _, size in allocations.changes)
        (4000, 0)
    """
    allocations = Allocations()
    if not is_counted or not torch.profiler.kineto_available() or torch._C._autograd._profiler_enabled():
        yield allocations
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read at Kineto's first use, which prints a line otherwise
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with profile:
        yield allocations
    results = getattr(profile.profiler, "kineto_results", None)
    for event in results.events() if results is not None else ():
        if event.name() == "[memory]" and event.device_type().name == device.type.upper():
            allocations.changes.append((event.start_ns(), event.nbytes()))
        elif event.name() == FORWARD and event.device_type().name == "CPU":
            allocations.forward_end = min(event.end_ns(), allocations.forward_end or event.end_ns())
    allocations.changes.sort(key=lambda change: change[0])


def state_bytes(session: Session) -> int:
    """Return the bytes of this rank's weights, gradients, optimizer states and sums of micro-batches."""
    return round(bytes_per_param(session) * sum(local_of(p).numel() for p in session.model.parameters()))


def bytes_per_param(session: Session) -> float:
    """Return :func:`state_bytes` per parameter that this rank holds."""
    sums = (session.accumulator, session.reduction)
    return session.optimizer.bytes_per_param() + sum(part.bytes_per_param() for part in sums if part is not None)


def between_steps(session: Session) -> int:
    """Return the bytes at the start of a step: the state without gradients, and the model's buffers."""
    gradients = sum(local_of(p).nbytes for p in session.model.parameters())
    return state_bytes(session) - gradients + sum(local_of(buffer).nbytes for buffer in session.model.buffers())


def of_run(rows: list[Row]) -> Row:
    """Return the counted columns of a run's summary, from the step with the smallest peak."""
    counted = [row for row in rows if row.get("peak_tensor_bytes") is not None]
    least = min(counted, key=lambda row: row["peak_tensor_bytes"], default={})
    return {name: least[name] for name in ("activation_bytes", "peak_tensor_bytes") if least.get(name) is not None}
