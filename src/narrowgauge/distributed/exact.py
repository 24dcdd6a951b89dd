"""The reproducible reduction: every micro-batch's gradient travels as it is, and whoever keeps an element sums it exactly.

A ring adds while it passes on, in an order of its own and in the gradient's format. Here each rank sends every other the piece
that the other keeps (*all-to-all*), the same bytes as a ring's reduce-scatter, and adds what it has received in exact sums: these
know no order, and so neither how many ranks there are nor which of them computed what. With replicas each keeps a piece of a
shard, and the rounded pieces are gathered once a step:

    ranks 0 1 2 3 as 2 replicas of 2 shards       0 │ s0 r0   1 │ s1 r0
    (s: shard, r: the replica's piece of it)      2 │ s0 r1   3 │ s1 r1
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.distributed.exchanges import SAME_PARAMETERS, Exchange, Parties, all_gather
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.exact_sums import ExactSums, sum_rows


class ExactExchange(Exchange):
    """Exact sums over ranks and micro-batches; see :class:`~narrowgauge.numerics.exact_sums.ExactSums`.

    Cost: on the wire each micro-batch's gradient once, and with replicas the sum once a step; with several micro-batches in a
        step 16 bytes for each element that this rank keeps.
    """

    sums_leaves = True

    def __init__(self, parties: Parties, *arguments: Any, **options: Any) -> None:
        super().__init__(parties, *arguments, **options)
        self._sums: ExactSums | None = None
        self._has_begun = False

    def add(self, gradient: Tensor, output: Tensor, *, is_last: bool = True) -> None:
        rows = self._received(gradient)
        part = output if self.parties.replicas == 1 else output.new_empty(rows.shape[1])
        divisor = self.parties.size if self.average else 1
        if is_last and not self._has_begun:
            sum_rows(rows, part, divisor)
        else:
            sums = self._sums_of(rows)
            sums.add_(rows)
            self._has_begun = not is_last
            if is_last:
                sums.total(part, divisor)
                sums.clear_()
            else:
                output.zero_()  # FSDP2 shows it as a gradient
        if is_last and self.parties.replicas > 1:
            whole = part.new_empty(self.parties.replicas * part.numel())
            all_gather(whole, part, self.parties.replica_group)
            output.copy_(whole[: output.numel()])

    def discard(self) -> None:
        self._has_begun = False
        if self._sums is not None:
            self._sums.clear_()

    def num_bytes(self) -> int:
        return 0 if self._sums is None else self._sums.num_bytes

    def _received(self, gradient: Tensor) -> Tensor:
        """The piece that this rank keeps, of every rank's gradient: shape [ranks, piece]."""
        parties = self.parties
        if parties.size == 1:
            return gradient.view(1, -1)
        sent = self._pieces(gradient)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=parties.group)
        return received.view(parties.size, -1)

    def _pieces(self, gradient: Tensor) -> Tensor:
        """The gradient as a piece for each rank of the group, in its order."""
        parties = self.parties
        shards = gradient.view(parties.shards, -1)
        size = -(-shards.shape[1] // parties.replicas)
        if shards.shape[1] != size * parties.replicas:
            shards = torch.nn.functional.pad(shards, (0, size * parties.replicas - shards.shape[1]))
        places = [shard * parties.replicas + replica for replica, shard in parties.places]
        pieces = shards.reshape(parties.size, size)
        if places != list(range(parties.size)):
            pieces = pieces[places]
        return pieces.reshape(-1)

    def _sums_of(self, rows: Tensor) -> ExactSums:
        if self._sums is not None and self._sums.numel == rows.shape[1]:
            return self._sums
        if self._has_begun and self._sums is not None:
            raise RecipeError(
                f"{self._sums.numel} elements had gradients in the micro-batches before, and {rows.shape[1]} have them in this.",
                SAME_PARAMETERS,
            )
        self._sums = ExactSums(rows.shape[1], rows.device)
        return self._sums
