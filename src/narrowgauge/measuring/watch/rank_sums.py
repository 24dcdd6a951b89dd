"""The ranks of a loop: gradients that were not summed over them, weights that differ, and data that do
not.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.distributed.ranks import Ranks, unlike
from narrowgauge.measuring.check.dispatch import tensors_in
from narrowgauge.measuring.samples import decoded
from narrowgauge.measuring.watch.device_scalars import DeviceScalars
from narrowgauge.numerics.dtensor import is_sharded


class RankSums:
    """Compare sums of all bits of tensors that all ranks hold whole. All ranks make all calls.

    Tensors that differ at first are parts of one, unless their first gradients are equal.

    Args:
        names: of the parameters.

    Attributes:
        whole: the compared parameters, by name.
    """

    def __init__(self, ranks: Ranks, names: Mapping[Tensor, str]) -> None:
        self._ranks = ranks
        self.whole = {
            name: p
            for p, name in names.items()
            if p.requires_grad and p.numel() and not is_sharded(p)
        }
        if unlike({name: tuple(p.shape) for name, p in self.whole.items()}):
            self.whole = {}
        # Gradients and, last, the data; weights and, last, whether this rank has an error.
        self._sums = torch.zeros(2, len(self.whole) + 1, dtype=torch.int64, device=ranks.device)
        self._has_data = self._has_parts = False
        if self.whole:
            self.take_weights()
        self._parts = self._unlike(self._sums)[1, :-1] != 0

    def add_data(self, inputs: Any) -> None:
        """Sum the bits of the inputs of a forward pass."""
        for x in tensors_in(inputs):
            self._sums[0, -1] += bits(x).to(self._sums.device)
            self._has_data = True

    def add_gradients(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Sum the bits of an optimizer's dense gradients."""
        sums = []
        for p in self.whole.values():
            sums.append(bits(gradients[p]) if p in gradients else self._sums.new_zeros(()))
        self._sums[0, :-1] += torch.stack(sums).to(self._sums.device)

    def take_weights(self) -> None:
        """Sum the bits of the weights."""
        self._sums[1, :-1] = torch.stack([*map(bits, self.whole.values())])

    def compare(self, is_broken: bool, number: int, numbers: DeviceScalars) -> None:
        """Add to the numbers which gradients and which weights differ between ranks: 0 for alike, the
        only other rank, counted from 1, or -1. After an error on one rank nothing differs. Add whether
        the data are alike; parts of a tensor may have the same.

        Args:
            is_broken: this rank has nothing to compare, after an error.
            number: steps that are done.
        """
        self._sums[1, -1] = is_broken
        differing = self._unlike(self._sums)
        self._sums.zero_()
        is_same = (differing[:, -1] == 0).all()  # the data, without an error
        unsummed, apart = differing[:, :-1].masked_fill(differing[1, -1] != 0, 0)
        if number == 0:
            self._parts &= unsummed != 0
            self._has_parts = bool(self._parts.any())
        numbers.set("unsummed", self.whole, unsummed.masked_fill(self._parts, 0))
        numbers.set("apart", self.whole, apart.masked_fill(self._parts, 0))
        if self._has_data and not self._has_parts:
            numbers.set("same_data", [""], is_same)
        self._has_data = False

    def _unlike(self, values: Tensor) -> Tensor:
        """Return which values differ between ranks, as :meth:`compare` says: their largest and their
        smallest do. No device is waited for, and what is sent does not grow with the ranks.
        """
        extremes = torch.stack([values, ~values])
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        largest, smallest = extremes[0], ~extremes[1]
        holds = torch.stack([values == largest, values == smallest]).long()
        held = torch.stack([holds, holds * (self._ranks.rank + 1)])
        dist.all_reduce(held)
        counts, ranks = held
        is_lone = counts.flip(0) == self._ranks.size - 1
        lone = (is_lone * ranks).sum(0)
        is_shared = (lone == 0) | is_lone.all(0)  # of two ranks, each is the other
        return lone.masked_fill(is_shared, -1).masked_fill(largest == smallest, 0)


def bits(x: Tensor) -> Tensor:
    """Return the sum of all bits of a tensor, in words of 64: exact in any order."""
    parts = decoded(x).flatten().view(torch.uint8)
    words = torch.nn.functional.pad(parts, (0, -parts.numel() % 8))  # a copy, which is aligned
    return words.view(torch.int64).sum()
