"""The world: the processes that train together, and small Python objects that they exchange.

Without a process group there is one process, of rank 0, and nothing to exchange: callers need not ask.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """The processes that train together, as one of them sees them.

    Args:
        rank: this process, from 0.
        size: the number of processes.
        local_rank: this process among those of its host, from 0.
        local_size: the number of processes of its host.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes files and speaks to the console."""
        return self.rank == 0


def has_group() -> bool:
    """Whether a process group exists."""
    return dist.is_available() and dist.is_initialized()


def world() -> World:
    """The processes of the default process group; one process where there is none.

    The ranks within a host are those of torchrun's ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``; without them all processes are taken
    to be of one host.

    Example:
        >>> world()
        World(rank=0, size=1, local_rank=0, local_size=1)
    """
    if not has_group():
        return World()
    rank, size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    return World(rank, size, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", size)))


def gather_objects(value: T, group: Any = None) -> list[T]:
    """The value of each rank, by rank, on every rank; all ranks of the group must call it.

    Args:
        value: what can be pickled.
        group: a process group; the default one without.
    """
    if not has_group() or dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
