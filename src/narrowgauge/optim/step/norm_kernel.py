"""The exact sum of squares of many tensors: one call, whatever the tensors and their dtypes.

The definition is :mod:`narrowgauge.numerics.exact_sums`. The kernels stand beside the step, in
``cpp/norm.h`` and :mod:`narrowgauge.optim.step.step_triton`, and read the same table. Integers are added
atomically: their sum does not depend on the order.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.numerics.dtensor import by_group, local_of
from narrowgauge.numerics.exact_sums import WORDS, exact_squares, total_over_ranks
from narrowgauge.optim.step.launch import FORMATS, KernelLaunch, addresses_of
from narrowgauge.optim.step.step_cpp import TILE, norm_functions
from narrowgauge.torch_support.proof import draw, first_difference, why_not

SLOTS = 16
"""Partial sums: additions to one address wait for each other."""


class SquaresTable:
    """Sum the squares of tensors of ``FORMATS`` on one device, by a kernel.

    Attributes:
        ranks: that add up the sums of each group of tensors.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.ranks = []
        numbers: dict[int, int] = {}
        for number, (ranks, members) in enumerate(by_group(tensors)):
            self.ranks.append(ranks)
            numbers |= dict.fromkeys(map(id, members), number)
        forms = [(1, local_of(tensor).numel()) for tensor in tensors]
        self.table = KernelLaunch(local_of(tensors[0]).device, norm_functions, 2, forms)
        self.table.rows["format"] = [FORMATS[tensor.dtype] for tensor in tensors]
        self.table.rows["number"] = [numbers[id(tensor)] for tensor in tensors]

    def words_at(self, addresses: Any) -> Tensor:
        """Return the words of each group of tensors at addresses, int64 ``[groups, WORDS]``."""
        self.table.rows["addresses"][:, 1] = addresses
        shape = len(self.ranks), SLOTS, WORDS
        words = torch.zeros(shape, dtype=torch.int64, device=self.table.device)
        self.table.call("squares", words, SLOTS, WORDS=WORDS)
        return words.sum(1)


def squares_by_kernel(tensors: Sequence[Tensor]) -> Tensor:
    """Return :func:`~narrowgauge.numerics.exact_sums.exact_squares` of tensors of ``FORMATS``."""
    table = SquaresTable(tensors)
    memory = [local_of(tensor).contiguous() for tensor in tensors]
    return total_over_ranks(table.words_at(addresses_of(memory)), table.ranks)


def sums_on(device: torch.device) -> bool:
    """Return whether a :class:`SquaresTable` sums on a device."""
    name = "the norm of all tensors"
    return not why_not(name, name, device, lambda: difference(device))


def difference(device: torch.device) -> str:
    """Return how a launch differs from the definition, or an empty string."""
    cases = []
    for dtype in FORMATS:
        for size in (1, TILE, TILE + 9):
            for edges in (False, True):
                cases.append(draw(dtype, (size,), edges=edges, seed=size))
    actual = squares_by_kernel([x.to(device) for x in cases]).cpu()
    return first_difference("the sum of squares", actual, exact_squares(cases))
