"""The exact sum of squares of many tensors: one call, whatever the tensors and their dtypes.

The definition is :mod:`narrowgauge.numerics.exact_sums`. The kernels stand beside the step, in
``cpp/norm.h`` and :mod:`narrowgauge.optim.step_triton`, and read the same table. Integers are added
atomically: their sum does not depend on the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.numerics.dtensor import local_of
from narrowgauge.numerics.exact_sums import WORDS, Squares, exact_squares
from narrowgauge.optim.step_cpp import norm_functions
from narrowgauge.optim.table import FORMATS, Table
from narrowgauge.torch_support.proof import draw, why_not

SPAN = 8192
"""Elements that a program reads."""
SLOTS = 16
"""Partial sums: additions to one address wait for each other."""


class SquaresTable(Squares):
    """Sum the squares of tensors of ``FORMATS`` on one device, by a kernel."""

    def __init__(self, device: torch.device) -> None:
        self.table = Table(device, norm_functions, 2)
        self._num_groups = 0

    def lay_out(self, groups: Sequence[tuple[Any, Sequence[Tensor]]]) -> list[Tensor]:
        """Lay out the rows of groups of tensors. Return their dense local tensors."""
        tensors = []
        for _, members in groups:
            tensors += [local_of(tensor).contiguous() for tensor in members]
        rows = self.table.lay_out([(1, x.numel()) for x in tensors])
        rows["format"] = [FORMATS[x.dtype] for x in tensors]
        rows["number"] = np.repeat(np.arange(len(groups)), [len(x) for _, x in groups])
        self._num_groups = len(groups)
        return tensors

    def sums(self, groups: Sequence[tuple[Any, Sequence[Tensor]]]) -> Tensor:
        """Return the words of each group, int64 ``[groups, WORDS]``."""
        tensors = self.lay_out(groups)
        return self.sums_at([x.data_ptr() for x in tensors])

    def sums_at(self, addresses: Any) -> Tensor:
        """Return the words of each group whose tensors were laid out and are at addresses."""
        table = self.table
        table.rows["addresses"][:, 1] = addresses
        table.send()
        shape = self._num_groups, SLOTS, WORDS
        words = torch.zeros(shape, dtype=torch.int64, device=table.device)
        table.call("squares", words, SLOTS, WORDS=WORDS)
        return words.sum(1)


def sums_on(tensors: Sequence[Tensor]) -> bool:
    """Return whether a :class:`SquaresTable` sums the squares of tensors."""
    device = local_of(tensors[0]).device
    if any(tensor.dtype not in FORMATS for tensor in tensors):
        return False
    name = "the norm of all tensors"
    return not why_not(name, name, device, lambda: _has_the_bits(device))


def _has_the_bits(device: torch.device) -> bool:
    """Return whether the launches give the bits of the definition."""
    cases = []
    for dtype in FORMATS:
        for size in (1, SPAN, SPAN + 9):
            for edges in (False, True):
                cases.append(draw(dtype, (size,), edges=edges, seed=size))
    actual = exact_squares([x.to(device) for x in cases], table=SquaresTable(device)).cpu()
    return torch.equal(actual, exact_squares(cases))
