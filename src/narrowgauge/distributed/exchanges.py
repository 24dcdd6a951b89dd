"""Sum flat gradients over ranks: which shards are summed, who keeps which, and by which
collectives.

One picture covers every kind of sharding. The ranks form a table of ``replicas`` rows and
``shards`` columns. Each rank has a whole gradient, in ``shards`` pieces, and gets the sum of its
column's piece:

    FSDP2                    one row
    replicated, and DDP      one column
    FSDP2 with replicas      both (HSDP)
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.distributed.ranks import has_group
from narrowgauge.numerics.exact_sums import (
    LARGEST,
    ExactSums,
    exceeds_two_words,
    on_cpu,
    sum_rows,
)
from narrowgauge.spec.sums import Reduction


@dataclass(frozen=True)
class RankGrid:
    """Describe the ranks that sum a gradient, as a table of replicas and shards."""

    shards: int = 1  # pieces of the gradient
    replicas: int = 1  # ranks that keep each piece
    group: Any = None  # all of them; None for a single process
    shard_group: Any = None  # this rank's row, in the order of the pieces
    replica_group: Any = None  # this rank's column
    places: tuple[tuple[int, int], ...] = (
        (0, 0),
    )  # row and column of each rank of the group, in its order

    @property
    def size(self) -> int:
        return self.shards * self.replicas


ONE_RANK = RankGrid()


def replicated(group: Any = None) -> RankGrid:
    """Return the ranks of a process group, which all keep the whole sum. ``None``: all ranks."""
    if not has_group() or dist.get_world_size(group) == 1:
        return ONE_RANK
    group = group if group is not None else dist.group.WORLD
    size = dist.get_world_size(group)
    return RankGrid(1, size, group, None, group, tuple((replica, 0) for replica in range(size)))


def of_mesh(mesh: Any, shard_dim: int, replicate_dim: int | None) -> RankGrid:
    """Return the ranks of a DeviceMesh. ``replicate_dim`` is ``None`` without replicas."""
    # Without replicas FSDP2's own group: on CUDA each group has a communicator, and queues of its
    # own.
    table = mesh.mesh.reshape(1, -1)
    group = shard_group = mesh.get_group(shard_dim)
    replica_group = None
    if replicate_dim is not None:
        table = mesh.mesh.permute(replicate_dim, shard_dim)
        group = group_of(table.flatten().tolist())
        replica_group = mesh.get_group(replicate_dim)
    replicas, shards = table.shape
    place_of = {rank: divmod(i, shards) for i, rank in enumerate(table.flatten().tolist())}
    places = tuple(place_of[rank] for rank in dist.get_process_group_ranks(group))
    return RankGrid(shards, replicas, group, shard_group, replica_group, places)


_groups: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()
"""Groups made of some ranks, by the group of all ranks, which a program may destroy."""


def group_of(ranks: Sequence[int]) -> Any:
    """Return a process group of these ranks, made once. Only they need to call it."""
    key = tuple(sorted(ranks))
    everyone = dist.group.WORLD
    if len(key) == dist.get_world_size():
        return everyone
    groups = _groups.setdefault(everyone, {})
    if key not in groups:
        groups[key] = dist.new_group(list(key), use_local_synchronization=True)
    return groups[key]


def _now(device: torch.device) -> Any:
    # A GPU's queue runs behind the host.
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


# PyTorch 2.13 renames these two; 2.11 knows the old names only.
def reduce_scatter(output: Tensor, gradient: Tensor, group: Any) -> None:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(output, gradient, group=group)


def all_gather(output: Tensor, part: Tensor, group: Any = None) -> None:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, part, group=group)


# ── the exact sum ─────────────────────────────────────────────────────────────────────────────────
#
# A ring adds while it passes on, in an order of its own and in the gradient's format. Here each
# rank sends every other the piece that the other keeps (*all-to-all*), the same bytes as a ring's
# reduce-scatter, and adds what it has received in exact sums. These depend neither on the order nor
# on how many ranks there are or which computed what. With replicas each keeps a piece of a shard,
# and the rounded pieces are gathered once a step:
#
#     ranks 0 1 2 3 as 2 replicas of 2 shards       0 │ s0 r0   1 │ s1 r0
#     (s: shard, r: the replica's piece of it)      2 │ s0 r1   3 │ s1 r1


FIRST_MARGIN = 256.0
"""A GPU's sums are wide if the first gradient is within this factor of what narrow sums hold."""


class Exchange:
    """Sum one flat gradient over ranks, and divide the sum once: by the backend, in the gradient's
    format or a wider one, or exactly (:class:`~narrowgauge.numerics.exact_sums.ExactSums`).

    Exact sums are over micro-batches too. They become wide, for all of float32's range, when a
    value needs it. A CPU sees that before it adds. A GPU would have to wait for the values, so it
    looks once, in the first sum, and then with a margin. Later it keeps a flag, see
    :meth:`has_lost`.

    Attributes:
        piece: of an exact sum over replicas, this rank's piece until it is gathered.
        spans: when each sum of this step began and ended: seconds, or events of a GPU.
    Cost: an exact sum sends each micro-batch's gradient once, and with replicas the sum once a step. Several micro-batches in a
        step take 16 bytes for each element that this rank keeps, 40 in wide sums.
    """

    piece: Tensor | None = None
    _sums: ExactSums | None = None
    _has_begun = False
    _is_wide = False
    _is_beyond: Tensor | None = (
        None  # on a GPU: a value since the last step did not fit narrow sums
    )

    def __init__(self, grid: RankGrid, row: Reduction, average: bool) -> None:
        self.grid = grid
        self.row = row
        self.divisor = grid.size if average else 1
        self.spans: list[tuple[Any, Any]] = []

    def take(
        self, gradient: Tensor, output: Tensor, *, is_last: bool = True, gathers: bool = True
    ) -> None:
        """Add a gradient, and write this rank's piece of the sum over ranks to ``output``.

        Args:
            gradient: shape [shards * n], of this rank's micro-batch. It may be overwritten.
            output: shape [n], of the same dtype. It may stay unset until the last micro-batch.
            is_last: whether this is the step's last micro-batch.
            gathers: whether to gather the pieces of replicas at once; else see :meth:`gather`.
        """
        began = _now(gradient.device)
        if self.row.order_invariant:
            self._add_exactly(gradient, output, is_last)
        else:
            self._add(gradient, output)
        self.spans.append((began, _now(gradient.device)))
        if self.piece is not None and gathers:
            output.copy_(self.gather()[: output.numel()])

    def _add(self, gradient: Tensor, output: Tensor) -> None:
        grid = self.grid
        part = wide = gradient.to(getattr(torch, self.row.wire)) if self.row.wire else gradient
        if grid.shards > 1:
            part = wide.new_empty(output.shape)
            reduce_scatter(part, wide, grid.shard_group)
        if grid.replicas > 1:
            dist.all_reduce(part, group=grid.replica_group)
        if self.divisor > 1:
            part = part.div_(self.divisor)
        output.copy_(part)

    def _add_exactly(self, gradient: Tensor, output: Tensor, is_last: bool) -> None:
        rows = self._received(gradient)
        if not self._is_wide:
            self._look(rows)
        if self.grid.replicas == 1:
            part = output
        else:
            part = output.new_empty(rows.shape[1])
        if is_last and not self._has_begun:
            sum_rows(rows, part, self.divisor, is_wide=self._is_wide)
        else:
            if self._sums is None or self._sums.numel != rows.shape[1]:
                self._sums = ExactSums(rows.shape[1], rows.device)
            if self._is_wide:
                self._sums.widen_()
            self._sums.add_(rows)
            self._has_begun = not is_last
            if is_last:
                self._sums.total(part, self.divisor)
                self._sums.clear_()
            else:
                output.zero_()  # FSDP2 shows it as a gradient
        if is_last and self.grid.replicas > 1:
            self.piece = part

    def gather(self) -> Tensor:
        """Return the pieces of all replicas, padded to equal lengths."""
        piece, self.piece = self.piece, None
        assert piece is not None
        began = _now(piece.device)
        gathered = piece.new_empty(self.grid.replicas * piece.numel())
        all_gather(gathered, piece, self.grid.replica_group)
        self.spans.append((began, _now(piece.device)))
        return gathered

    def _look(self, rows: Tensor) -> None:
        """Widen the sums if the first values ask for it.

        Later keep a flag of values that do not fit.
        """
        if on_cpu(rows):
            return
        if self._is_beyond is None:
            self._is_wide = bool(exceeds_two_words(rows, LARGEST / FIRST_MARGIN))
            self._is_beyond = torch.zeros((), dtype=torch.bool, device=rows.device)
            return
        self._is_beyond |= exceeds_two_words(rows)

    def has_lost(self) -> bool:
        """Return whether a sum since the last call lost a finite value, and make the next sums wide
        if so.
        """
        if self._is_wide or self._is_beyond is None or not self._is_beyond:
            return False
        self._is_wide = True
        return True

    def discard(self) -> None:
        """Forget the micro-batches since the last step."""
        self._has_begun = False
        self.piece = None
        if self._is_beyond is not None:
            self._is_beyond.zero_()
        if self._sums is not None:
            self._sums.clear_()

    def num_bytes(self) -> int:
        return 0 if self._sums is None else self._sums.num_bytes

    def _received(self, gradient: Tensor) -> Tensor:
        """Return this rank's piece of every rank's gradient: a row of a replica's part of a shard
        for each rank.
        """
        grid = self.grid
        if grid.size == 1:
            return gradient.view(1, -1)
        shards = gradient.view(grid.shards, -1)
        if missing := -shards.shape[1] % grid.replicas:
            shards = F.pad(shards, (0, missing))
        pieces = shards.reshape(grid.size, -1)
        places = [shard * grid.replicas + replica for replica, shard in grid.places]
        if places == list(range(grid.size)):
            sent = pieces
        else:
            sent = pieces[places]
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=grid.group)
        return received
