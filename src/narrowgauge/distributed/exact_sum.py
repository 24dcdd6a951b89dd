"""The exact sum of a flat gradient over ranks and micro-batches.

A ring adds while it passes on, in an order of its own and in the gradient's format. Here each rank
sends every other the piece that the other owns (*all-to-all*), the same bytes as a ring's
reduce-scatter. The owner adds what it gets in :class:`~narrowgauge.numerics.exact_sums.ExactSums`,
which depend neither on the order nor on which rank computed what. Replicas own a part of a shard
each, and gather the rounded parts once a step.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.numerics.exact_sums import ExactSums, sum_rows


class ExactSum:
    """Sum one flat gradient exactly, and divide the sum once.

    Args:
        groups: process groups that split the gradient, one after the other.
        num_cut: the number of groups, at the beginning, whose ranks keep the sum of their own piece.
            The ranks of the others get the sums of all pieces.
    Attributes:
        spans: when each sum of this step began and ended: seconds, or events of a GPU.
    Cost: each group sends a gradient once for each micro-batch. Several micro-batches in a step
        take 40 bytes for each element that this rank owns.
    """

    def __init__(self, groups: Sequence[Any], num_cut: int, divisor: int) -> None:
        self.groups = groups
        self.num_cut = num_cut
        self.divisor = divisor
        self.spans: list[tuple[Any, Any]] = []
        self._sums: ExactSums | None = None
        self._has_begun = False

    def add(self, gradient: Tensor, *, is_last: bool = True) -> Tensor | None:
        """Add a micro-batch's gradient ``[n]``. After the last one, return this rank's part of the
        sum.
        """
        began = _now(gradient.device)
        rows = gradient.view(1, -1)
        pieces = []
        for group in self.groups:
            pieces.append((group, rows.shape[1]))
            rows = _exchanged(rows, group)
        total = self._sum(rows, is_last)
        if total is not None:
            for group, size in reversed(pieces[self.num_cut :]):
                total = _gathered(total, group)[:size]
        self.spans.append((began, _now(gradient.device)))
        return total

    def _sum(self, rows: Tensor, is_last: bool) -> Tensor | None:
        """Add the rows. Return the total after the last micro-batch."""
        total = rows.new_empty(rows.shape[1])
        if is_last and not self._has_begun:
            return sum_rows(rows, total, self.divisor)
        if self._sums is None:
            self._sums = ExactSums(rows.shape[1], rows.device)
        self._sums.add_(rows)
        self._has_begun = not is_last
        if not is_last:
            return None
        self._sums.total(total, self.divisor)
        self._sums.clear_()
        return total

    def discard(self) -> None:
        """Forget the micro-batches since the last step."""
        self._has_begun = False
        if self._sums is not None:
            self._sums.clear_()

    def seconds(self) -> float:
        """Return how long this step's sums took: to send, to wait for other ranks, and to add."""
        total = 0.0
        for began, ended in self.spans:
            if isinstance(ended, float):
                total += ended - began
            else:
                ended.synchronize()
                total += began.elapsed_time(ended) / 1000
        return total


def _exchanged(rows: Tensor, group: Any) -> Tensor:
    """Return this rank's piece of the rows ``[rows, n]`` of every rank: ``[ranks * rows, n / ranks]``."""
    size = group.size()
    extra = -rows.shape[1] % size
    if extra:  # it copies also if nothing is to pad
        rows = F.pad(rows, (0, extra))
    sent = rows.view(len(rows), size, -1).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.flatten(0, 1)


def _gathered(shard: Tensor, group: Any) -> Tensor:
    """Return the pieces of every rank, one after the other."""
    # PyTorch 2.13 renames it; 2.11 knows the old name only.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    pieces = shard.new_empty(group.size() * shard.numel())
    gather(pieces, shard, group=group)
    return pieces


def _now(device: torch.device) -> Any:
    # A GPU's queue runs behind the host.
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
