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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import CorruptionError
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.numerics.hashing import tensor_hash


class _Difference(NamedTuple):
    """A tensor that ranks do not hold alike.

    Attributes:
        wrong: the ranks outside the largest set of equal ranks.
        others: the number of the other ranks.
    """

    name: str
    wrong: list[int]
    others: int


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
    hashes: dict[Any, dict[str, Tensor]] = {}
    for name, tensor, owner in tensors:
        for group in replica_groups(owner):
            hashes.setdefault(group, {})[name] = tensor_hash(tensor).to(all_ranks().device)
    differences: list[_Difference] = []
    for group, hashes_by_name in hashes.items():
        differences += _differences(group, hashes_by_name)
    everywhere: list[_Difference] = []
    for of_rank in all_ranks().gather(differences):
        everywhere += of_rank
    if not everywhere:
        return
    # A difference with a majority comes first: it names the machine.
    name, wrong, others = min(everywhere, key=lambda item: len(item.wrong) >= item.others)
    culprit = None
    ranks = " and ".join(f"rank {rank}" for rank in wrong)
    message = f"{name} differs between {ranks} after step {step}."
    advice = "Test the memory of these machines"
    if len(wrong) < others:
        culprit = wrong[0]
        message = f"{name} of {ranks} differs from that of {others} other ranks after step {step}."
        advice = f"Take the machine of rank {culprit} out of service"
    advice += ", and resume: the last checkpoint was saved before the damage."
    raise CorruptionError(message, advice, culprit, name)


def _differences(group: Any, hashes: dict[str, Tensor]) -> list[_Difference]:
    """Gather the hashes of a group's ranks. Return the tensors whose hashes differ."""
    own_hashes = torch.stack(list(hashes.values()))
    gathered = [torch.empty_like(own_hashes) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own_hashes, group=group)
    ranks = dist.get_process_group_ranks(group)
    differences = []
    for name, values in zip(hashes, torch.stack(gathered, 1).tolist(), strict=True):
        most = max(values, key=values.count)
        wrong = [rank for rank, value in zip(ranks, values, strict=True) if value != most]
        others = len(ranks) - len(wrong)
        if len(wrong) >= others:  # no majority: all of them are suspects
            wrong = ranks
        if wrong:
            differences.append(_Difference(name, wrong, others))
    return differences


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
