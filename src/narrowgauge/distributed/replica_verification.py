"""Detect silent corruption (bits that flip in memory or in arithmetic) of tensors that several
ranks hold.

A replicated model, the replicas of a shard and vectors that stay whole must have equal hashes on
all their ranks. They are compared every few steps. A difference stays until it is found. The
majority is right. The error is the same on all ranks, and is raised before damage enters a
checkpoint. It names the rank and the tensor.

Damage of a shard without a replica cannot be detected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import CorruptionError
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.numerics.hashing import tensor_hash


@torch.no_grad()
def verify_replicas(tensors: Iterable[tuple[str, Tensor, Tensor]], step: int) -> None:
    """Compare replicas across ranks. All ranks call it at the same place.

    Args:
        tensors: name, tensor and parameter of everything that this rank holds between steps, in the
            same order on all ranks. A DTensor parameter determines which other ranks hold the same.
        step: optimizer steps done, for the message.
    Raises:
        CorruptionError: on all ranks.
    Cost: one read of the replicas, and 8 bytes for each tensor and rank.
    """
    replicas: dict[Any, list[tuple[str, Tensor]]] = {}
    for name, tensor, owner in tensors:
        for group in replica_groups(owner):
            replicas.setdefault(group, []).append((name, tensor_hash(tensor)))
    errors: list[CorruptionError] = []
    for group, hashes in replicas.items():
        errors += _compare(group, dict(hashes), step)
    ranks = all_ranks()
    if not ranks.largest(len(errors)):
        return
    everywhere: list[CorruptionError] = []
    for some in ranks.gather(errors):
        everywhere += some
    raise min(everywhere, key=lambda error: error.rank is None)  # rather one that names a rank


def replica_groups(owner: Any) -> list[Any]:
    """Return the process groups of ranks that hold the same shard of a parameter as this rank.

    Empty without replicas.
    """
    if not is_sharded(owner):
        return [dist.group.WORLD]
    mesh = owner.device_mesh
    groups = []
    for axis, placement in enumerate(owner.placements):
        if placement.is_replicate() and mesh.size(axis) > 1:
            groups.append(mesh.get_group(axis))
    return groups


def unlike(of_ranks: Sequence[Mapping[str, float]]) -> set[str]:
    """Return the names whose numbers differ between ranks, or that a rank lacks.

    Example:
        >>> sorted(unlike([{"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 4}]))
        ['b', 'c']
    """
    names = set[str]().union(*of_ranks)
    return {name for name in names if len({numbers.get(name) for numbers in of_ranks}) > 1}


def possible_parts(weights: Sequence[Mapping[str, float]]) -> set[str]:
    """Return the names of parameters whose parts, without a DTensor, may lie on several ranks, as in
    Megatron.

    Their weights differ between ranks before the first step, where other weights are equal. Their
    gradients differ too; if not, the first weights were not sent to all ranks.

    Args:
        weights: hashes or sums by name, of each rank.
    Example:
        >>> possible_parts([{"norm": 1, "up": 2}, {"norm": 1, "up": 3}]), possible_parts([{"up": 2}, {"up": 3}])
        ({'up'}, set())
    """
    names = set[str]().union(*weights)
    differing = unlike(weights)
    return set() if differing == names else differing


def _compare(group: Any, hashes: dict[str, Tensor], step: int) -> list[CorruptionError]:
    """Return an error for each tensor whose hashes differ.

    It names the ranks outside the majority, if there is one.
    """
    mine = torch.stack([number.to(all_ranks().device) for number in hashes.values()])
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    ranks = dist.get_process_group_ranks(group)
    errors = []
    for name, values in zip(hashes, torch.stack(rows, 1).tolist(), strict=True):
        most = max(values, key=values.count)
        wrong = [rank for rank, value in zip(ranks, values, strict=True) if value != most]
        if not wrong:
            continue
        culprit = wrong[0] if 2 * len(wrong) < len(ranks) else None
        if culprit is None:
            message = f"{name} differs between {_names(ranks)} after step {step}."
            advice = "Test the memory of these machines"
        else:
            num_right = len(ranks) - len(wrong)
            message = f"{name} of {_names(wrong)} differs from that of {num_right} other ranks after step {step}."
            advice = f"Take the machine of rank {culprit} out of service"
        advice += ", and resume: the last checkpoint was saved before the damage."
        errors.append(CorruptionError(message, advice, culprit, name))
    return errors


def _names(ranks: list[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in ranks)
