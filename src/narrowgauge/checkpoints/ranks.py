"""What ranks must agree on about a folder: each looks, all learn the same.

A checkpoint that one rank can read and another cannot is no checkpoint; an error on one rank is an error on all, or those
without it would wait for the others for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from narrowgauge.checkpoints.manifest import file_damage, read_manifest

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that read or write one folder together; one without a process group.

    Args:
        rank: number of this one, from 0.
        size: how many there are.
        group: their process group, whose objects may be on the CPU.

    Example:
        >>> Ranks().gather(7), Ranks().of_first(lambda: 7)
        ([7], 7)
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank; what can be pickled."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def of_first(self, function: Callable[[], Result]) -> Result:
        """What a function returns on the first rank, on every rank; or what it raises there."""
        if self.size == 1:
            return function()
        import torch.distributed as dist

        sent: list[Any] = [_attempt(function) if self.rank == 0 else None]
        dist.broadcast_object_list(sent, group=self.group, group_src=0)
        value, error = sent[0]
        if error is not None:
            raise error
        result: Result = value
        return result

    def together(self, function: Callable[[], Result]) -> Result:
        """What a function returns here; where it raises on any rank, all raise the error of the first of those."""
        if self.size == 1:
            return function()
        value, error = _attempt(function)
        for found in self.gather(error):
            if found is not None:
                raise found
        result: Result = value
        return result


def all_ranks() -> Ranks:
    """All ranks of the default process group, with a group of their own that sends objects from the CPU; all call this."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks()
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo"))


def shared_damage(path: Path, ranks: Ranks, *, is_renamed: bool = False) -> str:
    """Why a checkpoint is damaged, or an empty string, the same on all ranks; each of them reads some of the files.

    Args:
        path: the folder of the checkpoint.
        ranks: which look together; all call this.
        is_renamed: whether it may have another name than its step's.
    Raises:
        OSError: a file cannot be read by one of them.
    """
    reason, files = ranks.of_first(lambda: read_manifest(path, is_renamed=is_renamed))
    if reason:
        return reason
    mine = list(files)[ranks.rank :: ranks.size]
    found = ranks.together(lambda: next(filter(None, (file_damage(path / name, files[name]) for name in mine)), ""))
    return next(filter(None, ranks.gather(found)), "")


def _attempt(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return function(), None
    except Exception as error:  # raised again by all ranks
        return None, error
