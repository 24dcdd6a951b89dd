"""Detect silent corruption (bits that flip in memory or in arithmetic) of tensors that several
ranks hold.

A replicated model, the replicas of a shard and vectors that stay whole must have equal hashes on
all their ranks. A difference stays until it is found. The
majority is right. The error is the same on all ranks, and is raised before damage enters a
checkpoint. It names the rank and the tensor.

Damage of a shard without a replica cannot be detected.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.sharding import split_axes
from narrowgauge.errors import CorruptionError
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.numerics.hashing import tensor_hash


@torch.no_grad()
def verify_replicas(tensors: Iterable[tuple[str, Tensor, Tensor]], step: int) -> None:
    """Compare replicas across ranks. All ranks call it at the same place.

    Args:
        tensors: name, tensor and parameter of everything that this rank holds between steps. A
            DTensor parameter determines which other ranks hold the same.
        step: optimizer steps done, for the message.
    Raises:
        CorruptionError: on all ranks.
    Cost: one read of the replicas, and some bytes for each tensor and rank.
    """
    hashes = {}
    for name, tensor, owner in tensors:
        hashes[name, _part_of(owner)] = int(tensor_hash(tensor))
    holders: dict[Any, dict[int, list[int]]] = {}
    for rank, hashes_of_rank in enumerate(all_ranks().gather(hashes)):
        for key, value in hashes_of_rank.items():
            holders.setdefault(key, {}).setdefault(value, []).append(rank)
    for (name, _), ranks_by_hash in holders.items():
        *others, largest = sorted(ranks_by_hash.values(), key=len)
        wrong = list(chain(*others))
        if not wrong:
            continue
        advice = "Test the memory of these machines"
        if len(wrong) < len(largest):
            advice = f"Take the machine of rank {wrong[0]} out of service"
        ranks = ", ".join(map(str, wrong))
        majority = ", ".join(map(str, largest))
        raise CorruptionError(
            f"{name} of rank {ranks} differs from that of rank {majority} after step {step}.",
            f"{advice}, and resume: the last checkpoint was saved before the damage.",
        )


def _part_of(owner: Any) -> tuple[int, ...]:
    """Return which part of a parameter this rank holds."""
    if not is_sharded(owner):
        return ()
    return tuple(map(owner.device_mesh.get_local_rank, split_axes(owner)))
