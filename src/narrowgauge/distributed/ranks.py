"""The processes that train together, and how one asks the others.

Ranks exchange small Python objects. What the first one finds out, all learn; and what fails on one fails on all, or those without
the error would wait forever. Without a process group there is one process, of rank 0, and nothing to exchange: callers need not
check.
"""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.errors import NarrowgaugeError, ReportedError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes of a group, as one of them sees them; all of them make each call, in the same order.

    Args:
        group: their process group; ``None`` for the default one.
    Example:
        >>> Ranks().gather(7), Ranks().of_first(lambda: 7), Ranks().together(lambda: 7), Ranks().largest(7)
        ([7], 7, 7, 7)
    """

    rank: int = 0
    size: int = 1
    group: Any = field(default=None, repr=False)

    @property
    def is_first(self) -> bool:
        """Return whether this is the process that writes files and speaks to the console."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Return where small messages lie: the CPU, unless the group can only communicate GPU tensors."""
        on_cpu = self.size == 1 or "gloo" in str(dist.get_backend_config(self.group))
        return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())

    def gather(self, value: T) -> list[T]:
        """Return the value of each rank, by rank, on every rank; it is pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def largest(self, number: int) -> int:
        """Return the largest number of any rank, on every rank."""
        if self.size == 1:
            return number
        largest = torch.tensor(number, dtype=torch.int64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return int(largest)

    def of_first(self, function: Callable[[], T]) -> T:
        """Return what a function returns on the first rank, on every rank; the others do not call it. The result is pickled.

        Raises:
            NarrowgaugeError, OSError: what it raises, on every rank.
            ReportedError: on the others, where it raises anything else: the first has the traceback.
        """
        if self.size == 1:
            return function()
        sent: list[Any] = [None, None]
        try:
            if self.is_first:
                sent[0] = function()
        except BaseException as error:
            sent[1] = _told(error)
            raise
        finally:
            dist.broadcast_object_list(sent, group=self.group, group_src=0)
        result, failure = sent
        if failure is not None:
            raise failure
        value: T = result
        return value

    def together(self, function: Callable[[], T]) -> T:
        """Return what a function returns here, if it fails on no rank.

        Raises:
            Exception: the error of the first rank that has one, on every rank; passed on as in :meth:`of_first`.
        """
        if self.size == 1:
            return function()
        results: list[T] = []
        failure: Exception | None = None
        try:
            results.append(function())
        except Exception as error:
            failure = error
        failures = self.gather(None if failure is None else _told(failure))
        first = next((rank for rank, error in enumerate(failures) if error is not None), None)
        if failure is not None and first == self.rank:
            raise failure
        if first is not None and (theirs := failures[first]) is not None:
            raise theirs
        return results[0]

    def close(self) -> None:
        """Destroy the group that :meth:`apart` made; the default one stays."""
        if self.group is not None:
            dist.destroy_process_group(self.group)

    def apart(self) -> Ranks:
        """Return the same ranks in a process group of their own, which sends objects from the CPU."""
        return self if self.size == 1 else Ranks(self.rank, self.size, dist.new_group(backend="gloo"))


def _told(error: BaseException) -> NarrowgaugeError | OSError:
    """Return what the other ranks raise for an error of one: the same, if its message says what is wrong."""
    return error if isinstance(error, (NarrowgaugeError, OSError)) else ReportedError(status=1)


ALONE = Ranks()
"""A process on its own."""


def has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def all_ranks() -> Ranks:
    """Return the ranks of the default process group; without one, a single process.

    Example:
        >>> all_ranks()
        Ranks(rank=0, size=1)
    """
    if not has_group():
        return ALONE
    _pause_at_exit()
    return Ranks(dist.get_rank(), dist.get_world_size())


@functools.cache
def _pause_at_exit() -> None:
    """Let the threads of gloo drop the tensors of the last collectives before the interpreter shuts down.

    A thread needs the interpreter's lock to drop a tensor. Where the shutdown comes first, PyTorch 2.13 aborts the process:
    "terminate called without an active exception".
    """
    atexit.register(time.sleep, 0.2)


def largest_of_ranks(values: Tensor) -> Tensor:
    """Return the elementwise maximum over all ranks of the default group, as a new tensor."""
    values = values.clone()
    if has_group():
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values
