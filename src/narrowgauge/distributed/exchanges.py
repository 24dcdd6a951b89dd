"""Sums of flat gradients over ranks: whose parts are summed, who keeps which part, and by which collectives.

One picture covers every kind of sharding. The ranks form a table of ``replicas`` rows and ``shards`` columns; each has the
gradient of the whole, cut into ``shards`` parts, and is given the sum of the part of its column:

    FSDP2                    one row
    replicated, and DDP      one column
    FSDP2 with replicas      both (HSDP)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.distributed.ranks import has_group
from narrowgauge.spec.reductions import Reduction

SAME_PARAMETERS = (
    "Use the same parameters in every micro-batch, times 0 where one leaves them out, or keep those that some leave out whole on "
    "every rank: ignored_params=… of fully_shard."
)
"""What to do where micro-batches use other parameters of what FSDP2 shards."""


@dataclass(frozen=True)
class Parties:
    """The ranks that sum a gradient, as a table of replicas and shards.

    Args:
        shards: into how many parts the gradient is cut.
        replicas: how many ranks keep each part.
        group: the process group of all of them; ``None`` for a process on its own.
        shard_group: the ranks of this rank's row, in the order of the parts.
        replica_group: the ranks of this rank's column.
        places: of each rank of ``group``, in its order: the row and the column.
    """

    shards: int = 1
    replicas: int = 1
    group: Any = None
    shard_group: Any = None
    replica_group: Any = None
    places: tuple[tuple[int, int], ...] = ((0, 0),)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.shards * self.replicas


ALONE = Parties()


def replicated(group: Any = None) -> Parties:
    """The ranks of a process group, each of which keeps the whole; those of the default group without.

    Args:
        group: a process group.
    """
    if not has_group() or dist.get_world_size(group) == 1:
        return ALONE
    group = group if group is not None else dist.group.WORLD
    size = dist.get_world_size(group)
    return Parties(1, size, group, None, group, tuple((replica, 0) for replica in range(size)))


def of_mesh(mesh: Any, shard_dim: int, replicate_dim: int | None) -> Parties:
    """The ranks of a DeviceMesh.

    Args:
        mesh: of one or two dims.
        shard_dim: the dim along which parameters are sharded.
        replicate_dim: the dim along which they are replicated, if there is one.
    """
    table = mesh.mesh.reshape(1, -1) if replicate_dim is None else mesh.mesh.permute(replicate_dim, shard_dim)
    replicas, shards = table.shape
    place_of = {int(table[r, s]): (r, s) for r in range(replicas) for s in range(shards)}
    # Without replicas FSDP2's own group: on CUDA each group has a communicator, and queues of its own.
    group = mesh.get_group(shard_dim) if replicate_dim is None else group_of(table.flatten().tolist())
    ranks = dist.get_process_group_ranks(group)
    replica_group = None if replicate_dim is None else mesh.get_group(replicate_dim)
    return Parties(
        shards, replicas, group, mesh.get_group(shard_dim), replica_group, tuple(place_of[rank] for rank in ranks)
    )


_groups: dict[tuple[int, ...], tuple[Any, Any]] = {}


def group_of(ranks: Sequence[int]) -> Any:
    """A process group of these ranks, made once; only they need to call it."""
    key, everyone = tuple(sorted(ranks)), dist.group.WORLD
    if len(key) == dist.get_world_size():
        return everyone
    if key not in _groups or _groups[key][0] is not everyone:  # a program may end its groups and begin anew
        _groups[key] = everyone, dist.new_group(list(key), use_local_synchronization=True)
    return _groups[key][1]


class Exchange:
    """The sum of one flat gradient over ranks, again and again.

    Args:
        parties: the ranks.
        row: the reduction.
        average: divide the sum by the number of ranks.
        seed: of random bits, where the reduction takes some.

    Attributes:
        sums_leaves: whether it also sums micro-batches, so that each one's gradient must be given to it by itself.
        step, place: optimizer steps done, and this exchange's number among a model's; they seed random bits.
        on_gradient: takes what this rank is about to send, where somebody looks at it.
    """

    sums_leaves = False
    step = 0
    place = 0
    on_gradient: Callable[[Tensor], None] | None = None

    def __init__(self, parties: Parties, row: Reduction, average: bool, seed: int) -> None:
        self.parties, self.row, self.average, self.seed = parties, row, average, seed

    def take(self, gradient: Tensor, output: Tensor, *, is_last: bool = True) -> None:
        """:meth:`add`, and show the gradient to whoever looks at what ranks send."""
        if self.on_gradient is not None:
            self.on_gradient(gradient)
        self.add(gradient, output, is_last=is_last)

    def add(self, gradient: Tensor, output: Tensor, *, is_last: bool = True) -> None:
        """Take in a gradient, and put this rank's part of the sum over ranks into ``output``.

        Args:
            gradient: shape [shards * n], of this rank's micro-batch; it may be overwritten.
            output: shape [n], of the same dtype; may be left as it is, if the exchange sums micro-batches and others follow.
            is_last: whether this is the step's last micro-batch.
        """
        raise NotImplementedError

    def discard(self) -> None:
        """Forget the micro-batches since the last step."""

    def num_bytes(self) -> int:
        """Bytes that are kept between micro-batches and steps, counted from live tensors."""
        return 0


class BackendSum(Exchange):
    """The backend's own sum, in the gradient's format or a wider one, followed by one division."""

    def add(self, gradient: Tensor, output: Tensor, *, is_last: bool = True) -> None:
        parties = self.parties
        wide = gradient.to(getattr(torch, self.row.wire)) if self.row.wire else gradient
        part = wide
        if parties.shards > 1:
            part = wide.new_empty(output.shape)
            reduce_scatter(part, wide, parties.shard_group)
        if parties.replicas > 1:
            dist.all_reduce(part, group=parties.replica_group)
        if self.average and parties.size > 1:
            part = part.div_(parties.size)
        output.copy_(part)


# PyTorch 2.13 renames these two; 2.11 knows the old names only.
def reduce_scatter(output: Tensor, gradient: Tensor, group: Any) -> None:
    """This rank's part of the sum over the ranks of a group."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(output, gradient, group=group)


def all_gather(output: Tensor, part: Tensor, group: Any) -> None:
    """The parts of all ranks of a group, one after the other."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, part, group=group)
