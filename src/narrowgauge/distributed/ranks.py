"""The processes that train together, and how they exchange small Python objects.

Rank 0 shares its findings with all ranks. An error on one rank is raised on all ranks; otherwise
the others would wait forever. Without a process group there is one process, rank 0, with nothing to
exchange. Callers need not check.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from narrowgauge.errors import NarrowgaugeError, ReportedError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes of a group, seen from one of them.

    All processes make each call, in the same order.

    Example:
        >>> Ranks().gather(7), Ranks().of_first(lambda: 7), Ranks().together(lambda: 7)
        ([7], 7, 7)
    """

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Return the device of small messages: the CPU, unless the group can only communicate GPU
        tensors.
        """
        on_cpu = self.size == 1 or "gloo" in str(dist.get_backend_config())
        if on_cpu:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank, on every rank. Values are pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def of_first(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0 only, and return its result, pickled, on every rank.

        Raise as :meth:`together`.
        """
        results: list[Any] = self.gather(
            self.together(lambda: function() if self.is_first else None)
        )
        return results[0]

    def together(self, function: Callable[[], T]) -> T:
        """Call a function on every rank, and return its result if no rank fails.

        Raises:
            NarrowgaugeError, OSError: of the first failed rank, on every rank.
            ReportedError: on the other ranks, for any other error. The failed rank has the
                traceback.
            KeyboardInterrupt: on each rank that was interrupted; the others raise
                :class:`ReportedError`.
        """
        if self.size == 1:
            return function()
        results = []
        failure = None
        try:
            results.append(function())
        except BaseException as error:
            failure = error
        is_clear = failure is None or isinstance(failure, (NarrowgaugeError, OSError))
        failures = self.gather(failure if is_clear else ReportedError(status=1))
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        for rank, theirs in enumerate(failures):
            if theirs is not None:
                if rank == self.rank and failure is not None:
                    raise failure
                raise theirs
        return results[0]


ALONE = Ranks()
"""A process on its own."""


def has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def all_ranks() -> Ranks:
    """Return the ranks of the default process group. Without a group, return a single process."""
    if not has_group():
        return ALONE
    return Ranks(dist.get_rank(), dist.get_world_size())


def unlike(values: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the named values that differ between ranks, each by rank. All ranks call it."""
    by_rank = all_ranks().gather(values)
    differing = {}
    for name in dict.fromkeys(chain.from_iterable(by_rank)):
        row = [part.get(name) for part in by_rank]
        if any(value != row[0] for value in row):
            differing[name] = row
    return differing
