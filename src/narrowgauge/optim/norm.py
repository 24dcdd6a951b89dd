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
from narrowgauge.optim.table import FORMATS, Programs
from narrowgauge.torch_support.proof import draw, first_difference, why_not

SPAN = 8192
"""Elements that a program reads."""
SLOTS = 16
"""Partial sums: additions to one address wait for each other."""


class SquaresTable(Squares):
    """Sum the squares of tensors of ``FORMATS`` on one device, by a kernel."""

    def __init__(self, device: torch.device) -> None:
        self.programs = Programs(device, norm_functions, 2)

    def sums(self, groups: Sequence[tuple[Any, Sequence[Tensor]]]) -> Tensor:
        """Return the words of each group, int64 ``[groups, WORDS]``."""
        tensors = []
        for _, members in groups:
            tensors += [local_of(tensor).contiguous() for tensor in members]
        programs = self.programs
        programs.lay_out([(1, x.numel()) for x in tensors])
        programs.rows["addresses"][:, 1] = [x.data_ptr() for x in tensors]
        programs.rows["format"] = [FORMATS[x.dtype] for x in tensors]
        programs.rows["number"] = np.repeat(np.arange(len(groups)), [len(x) for _, x in groups])
        programs.send()
        shape = len(groups), SLOTS, WORDS
        words = torch.zeros(shape, dtype=torch.int64, device=programs.device)
        programs.call("squares", words, SLOTS, WORDS=WORDS)
        return words.sum(1)


def sums_on(tensors: Sequence[Tensor]) -> bool:
    """Return whether a :class:`SquaresTable` sums the squares of tensors."""
    device = local_of(tensors[0]).device
    if any(tensor.dtype not in FORMATS for tensor in tensors):
        return False
    name = "the norm of all tensors"
    return not why_not(name, name, device, lambda: difference(device))


def difference(device: torch.device) -> str:
    """Return how a launch differs from the definition, or an empty string."""
    cases = []
    for dtype in FORMATS:
        for size in (1, SPAN, SPAN + 9):
            for edges in (False, True):
                cases.append(draw(dtype, (size,), edges=edges, seed=size))
    actual = exact_squares([x.to(device) for x in cases], table=SquaresTable(device)).cpu()
    return first_difference("the sum of squares", actual, exact_squares(cases))
