"""Count the bytes of live tensors that training takes, which a process's resident memory cannot show.

On a CPU the resident memory of a process is mostly libraries, compiled code and what the allocator keeps. So the bytes are
counted: *state* from the tensors that weights, gradients and the optimizer take (``Optimizer.bytes_per_param``), *activations*
and *peak* from every allocation and free of one step, compiled code's included, which PyTorch's profiler lists one by one
(``profiler.kineto_results.events()``, private: the public summary adds them up by operator, which loses the peak).

Counting changes no bit. It takes some 50 ms in two steps of a run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from narrowgauge.numerics.dtensor import local_of
from narrowgauge.runs.schema import Row
from narrowgauge.trainer.session import Session

FORWARD = "narrowgauge: forward"
"""The profiler's name of a micro-batch's forward pass."""
COUNTED_STEPS = (3, 4)
"""Which steps since a process began are counted. The first ones compile, and of two in a row at most one is audited for the first
time or sampled; a run's figures are those of its smaller peak."""


@dataclass
class Allocations:
    """What tensors took and gave back in a block of code, in the order of time.

    Args:
        changes: nanoseconds and bytes of each; negative where memory was freed. Memory of before the block that is freed in it is
            missing, since the profiler does not know its size.
        ends: by name of a ``torch.profiler.record_function``, the nanoseconds at which it first ended.
    """

    changes: list[tuple[int, int]] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """Return the most bytes at once above those of before.

        Example:
            >>> Allocations([(1, 8), (2, 4), (3, -8), (4, 6)]).peak
            12
        """
        live = most = 0
        for _, size in self.changes:
            live += size
            most = max(most, live)
        return most

    def at_end_of(self, name: str) -> int | None:
        """Return bytes above those of before when a range first ended; ``None`` without such a range."""
        return sum(size for when, size in self.changes if when <= self.ends[name]) if name in self.ends else None


@contextlib.contextmanager
def counted_allocations(device: torch.device) -> Iterator[Allocations | None]:
    """Count allocations of tensors on a device within the block; the result is filled in when the block ends.

    Yields ``None``, and counts nothing, where another profiler is active or PyTorch was built without one.

    Cost: about 10 µs for each operation and 50 ms for the block.

    Example:
        >>> with counted_allocations(torch.device("cpu")) as allocations:
        ...     x = torch.zeros(1000, dtype=torch.float32)
        ...     del x
        >>> allocations.peak, sum(size for _, size in allocations.changes)
        (4000, 0)
    """
    if not torch.profiler.kineto_available() or torch._C._autograd._profiler_enabled():
        yield None
        return
    allocations = Allocations()
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "99"
    )  # Kineto reads it at its first use, and prints that it begins otherwise
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with profile:
        yield allocations
    results = getattr(profile.profiler, "kineto_results", None)
    for event in results.events() if results is not None else ():
        name = event.name()
        if name == "[memory]":
            if event.device_type().name == device.type.upper():
                allocations.changes.append((event.start_ns(), event.nbytes()))
        elif event.device_type().name == "CPU":
            allocations.ends[name] = min(event.end_ns(), allocations.ends.get(name, event.end_ns()))
    allocations.changes.sort(key=lambda change: change[0])


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
        with counted_allocations(self._session.device) as allocations:
            row = step()
        if allocations is None:
            return row
        activations = allocations.at_end_of(FORWARD)
        columns = {} if activations is None else {"activation_bytes": activations}
        return {**row, **columns, "peak_tensor_bytes": between_steps(self._session) + allocations.peak}


def state_bytes(session: Session) -> int:
    """Return bytes of weights, gradients, optimizer states and sums of micro-batches on this rank."""
    return round(bytes_per_param(session) * sum(local_of(p).numel() for p in session.model.parameters()))


def bytes_per_param(session: Session) -> float:
    """Return :func:`state_bytes` per parameter that this rank holds."""
    sums = (session.accumulator, session.reduction)
    return session.optimizer.bytes_per_param() + sum(each.bytes_per_param() for each in sums if each is not None)


def between_steps(session: Session) -> int:
    """Return bytes that are there when a step begins: the state without gradients, and the model's buffers."""
    gradients = sum(local_of(p).nbytes for p in session.model.parameters())
    return state_bytes(session) - gradients + sum(local_of(buffer).nbytes for buffer in session.model.buffers())


def of_run(rows: list[Row]) -> Row:
    """Return the counted columns of a run's summary: those of the step with the smallest peak."""
    counted = [row for row in rows if row.get("peak_tensor_bytes") is not None]
    least = min(counted, key=lambda row: row["peak_tensor_bytes"], default={})
    return {name: least[name] for name in ("activation_bytes", "peak_tensor_bytes") if least.get(name) is not None}
