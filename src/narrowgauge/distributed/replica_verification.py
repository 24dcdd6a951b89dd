"""Detect silent corruption: bits that flip in the memory of one rank, in tensors that several ranks hold.

These are a replicated model, the replicas of a shard, and vectors that stay whole. Their hashes must be equal, and are compared
every few steps. A difference stays until it is detected. The majority is right; of two ranks neither is accused. A difference
raises the same error on all ranks, before damage enters a checkpoint. It names the rank and the tensor.

It cannot detect damage of a shard without a replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import CorruptionError
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.numerics.hashing import tensor_hash


class Damage(NamedTuple):
    """A tensor whose replicas differ. ``rank`` is ``None`` if ranks only disagree."""

    message: str
    rank: int | None
    tensor: str


class Verifier:
    """Verify that ranks hold the same.

    Invariant: it changes no value. All ranks call each method at the same place.

    Args:
        list_tensors: returns name, tensor and parameter of everything that this rank holds between steps, in the same order on
            all ranks. A DTensor parameter determines which other ranks hold the same.
        every: steps between verifications, see :meth:`is_due`; 0 verifies nothing.
    Cost: a verification reads all replicated tensors once. Other steps cost nothing.
    """

    def __init__(self, list_tensors: Callable[[], Iterable[tuple[str, Tensor, Tensor]]], every: int) -> None:
        self._list_tensors, self.every, self.size = list_tensors, every, all_ranks().size

    def is_due(self, step: int) -> bool:
        """Return whether to verify the step with this number, from 1."""
        return self.size > 1 and self.every > 0 and step % self.every == 0

    @torch.no_grad()
    def verify_state(self, step: int) -> None:
        """Compare replicas across ranks.

        Raises:
            CorruptionError: on all ranks.
        Cost: one read of the replicas, and 8 bytes for each tensor and rank.
        """
        if self.size == 1 or self.every == 0:
            return
        replicas: dict[Any, list[tuple[str, Tensor]]] = {}
        for name, tensor, owner in self._list_tensors():
            for group in replica_groups(owner):
                replicas.setdefault(group, []).append((name, memory_hash(tensor)))
        _agree([damage for group, hashes in replicas.items() for damage in _compare(group, dict(hashes), step)])


def _agree(damages: Sequence[Damage]) -> None:
    """Raise the first damage of any rank on all ranks."""
    ranks = all_ranks()
    if not ranks.largest(len(damages)):
        return
    of_all = [damage for some in ranks.gather(list(damages)) for damage in some]
    worst = min(of_all, key=lambda damage: damage.rank is None)
    num_others = len({damage.tensor for damage in of_all} - {worst.tensor})
    more = f"; so do {num_others} more tensors" if num_others > 1 else "; so does one more tensor" if num_others else ""
    who = (
        "Test the memory of these machines"
        if worst.rank is None
        else f"Take the machine of rank {worst.rank} out of service"
    )
    advice = f"{who}, and resume: the last checkpoint was saved before the damage."
    raise CorruptionError(f"{worst.message}{more}.", advice, worst.rank, worst.tensor)


def replica_groups(owner: Any) -> list[Any]:
    """Return the process groups of ranks that hold the same shard of a parameter as this rank. Empty without replicas."""
    if not is_sharded(owner):
        return [dist.group.WORLD]
    mesh = owner.device_mesh
    axes = [axis for axis, placement in enumerate(owner.placements) if placement.is_replicate()]
    return [mesh.get_group(axis) for axis in axes if mesh.size(axis) > 1]


def memory_hash(tensor: Tensor) -> Tensor:
    """Return a hash of a tensor's bytes, int64 0-d on its device, without waiting for the device."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if len(flat) % 8 or flat.storage_offset() % 8 or flat.data_ptr() % 8:
        flat = torch.cat([flat, flat.new_zeros(-len(flat) % 8)])
    return tensor_hash(flat.view(torch.int64))


def _compare(group: Any, hashes: dict[str, Tensor], step: int) -> list[Damage]:
    mine = torch.stack([number.to(all_ranks().device) for number in hashes.values()])
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    ranks = dist.get_process_group_ranks(group)
    damages = []
    for name, values in zip(hashes, torch.stack(rows, 1).tolist(), strict=True):
        if wrong := _minority(values):
            who = " and ".join(f"rank {ranks[place]}" for place in wrong)
            text = f"{name} of {who} differs from that of {len(ranks) - len(wrong)} other ranks after step {step}"
            damages.append(Damage(text, ranks[wrong[0]], name))
        elif len(set(values)) > 1:
            who = " and ".join(f"rank {rank}" for rank in ranks)
            damages.append(Damage(f"{name} differs between {who} after step {step}", None, name))
    return damages


def _minority(values: Sequence[Any]) -> list[int]:
    """Return the indices of values that differ from the majority. Empty without a majority."""
    most = max(values, key=values.count)
    return [k for k, value in enumerate(values) if value != most] if 2 * values.count(most) > len(values) else []
