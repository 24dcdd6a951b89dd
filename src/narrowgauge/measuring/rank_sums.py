"""The ranks of a loop: gradients that were not summed over them, and weights that differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from narrowgauge.distributed.ranks import Ranks
from narrowgauge.measuring.samples import bits
from narrowgauge.numerics.dtensor import is_sharded


class RankSums:
    """Compare sums of bits of tensors that all ranks hold whole. All ranks make all calls.

    Tensors that differ at first are parts of one, unless their first gradients are equal.

    Args:
        names: of the parameters.

    Attributes:
        whole: the compared parameters, by name.
        apart: in the first step in which gradients ("unsummed") or weights ("apart") differed, the ranks
            whose first such tensor was not that of most ranks.
    """

    def __init__(self, here: Ranks, names: Mapping[Tensor, str]) -> None:
        self._here = here
        self.whole: dict[str, Tensor] = {}
        self.apart: dict[str, list[int]] = {}
        for p, name in names.items():
            if p.requires_grad and p.numel() and not is_sharded(p):
                self.whole[name] = p
        shapes = {name: tuple(p.shape) for name, p in self.whole.items()}
        if any(map(shapes.__ne__, here.gather(shapes))):
            self.whole = {}
        self._sums = torch.zeros(2, len(self.whole), dtype=torch.float64, device=here.device)
        if self.whole:
            self.take_weights()
        self._parts = self._unlike(self._sums)[1]

    def add_gradients(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Sum the bits of an optimizer's gradients."""
        sums = []
        for p in self.whole.values():
            is_dense = p in gradients and not gradients[p].is_sparse
            sums.append(bits(gradients[p]) if is_dense else p.new_zeros((), dtype=torch.float64))
        self._sums[0] += torch.stack(sums).to(self._sums.device)

    def take_weights(self) -> None:
        """Sum the bits of the weights."""
        self._sums[1] = torch.stack([*map(bits, self.whole.values())])

    def compare(self, is_broken: bool, number: int) -> dict[str, Tensor]:
        """Return which gradients and which weights differ between ranks, in one call of all ranks.
        After an error on one of them nothing differs.

        Args:
            is_broken: this rank has nothing to compare, after an error.
            number: steps that are done.
        """
        errors = torch.full_like(self._sums[:, :1], float(is_broken))
        unlike = self._unlike(torch.cat([self._sums, errors], 1))
        unsummed, differing = unlike[:, :-1] & ~unlike[:, -1:]
        if number == 0:
            self._parts &= unsummed
        flags = {"unsummed": unsummed & ~self._parts, "apart": differing & ~self._parts}
        if self._sums.device.type == "cpu":  # a GPU would be waited for
            for place, what in enumerate(flags):
                if what not in self.apart and bool(flags[what].any()):
                    first = int(flags[what].int().argmax())
                    self.apart[what] = self._minority(float(self._sums[place, first]))
        self._sums.zero_()
        return flags

    def _minority(self, value: float) -> list[int]:
        """Return the ranks whose value is not that of more than half of all ranks."""
        values = self._here.gather(value)
        [(usual, count)] = Counter(values).most_common(1)
        if count <= len(values) / 2:
            return []
        return [rank for rank, x in enumerate(values) if x != usual]

    def _unlike(self, values: Tensor) -> Tensor:
        """Return which values differ between ranks: their largest and their smallest do."""
        extremes = torch.stack([values, -values])
        torch.distributed.all_reduce(extremes, torch.distributed.ReduceOp.MAX)
        largest, smallest = extremes
        differs: Tensor = largest != -smallest
        return differs
