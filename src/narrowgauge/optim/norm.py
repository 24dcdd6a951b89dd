"""The exact sum of squares of many tensors: two calls, whatever the tensors and their dtypes.

The definition is :mod:`narrowgauge.numerics.exact_sums`. The kernels stand beside the step, in
``step.h`` and :mod:`narrowgauge.optim.step_triton`, and read the same table. Integers are added
atomically: their sum does not depend on the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.numerics.dtensor import local_of
from narrowgauge.numerics.exact_sums import Squares, exact_squares, largest_magnitude
from narrowgauge.optim.step_cpp import norm_functions
from narrowgauge.optim.table import FORMATS, Programs
from narrowgauge.torch_support.proof import draw, why_not

SPAN = 8192
"""Elements that a program reads."""
SLOTS = 128
"""Partial sums: additions to one address wait for each other."""
FEWEST = 1 << 12
"""Of fewer elements the fine grid is too fine for a kernel: then the definition sums."""


class SquaresTable(Squares):
    """Sum the squares of tensors of ``FORMATS`` on one device, by a kernel."""

    def __init__(self, device: torch.device) -> None:
        self.programs = Programs(device, norm_functions, 2)

    def largest(self, groups: Sequence[tuple[Any, Sequence[Tensor]]]) -> list[Tensor]:
        """Return the largest magnitude of each group.

        ``peaks`` holds the magnitudes of the tensors, in the groups' order.
        """
        self._tensors = []
        for _, members in groups:
            self._tensors += [local_of(tensor).contiguous() for tensor in members]
        counts = [len(members) for _, members in groups]
        self.programs.lay_out([(1, x.numel()) for x in self._tensors])
        self.programs.rows["addresses"][:, 1] = [x.data_ptr() for x in self._tensors]
        self.programs.rows["format"] = [FORMATS[x.dtype] for x in self._tensors]
        self.programs.rows["number"] = np.repeat(np.arange(len(groups)), counts)
        self._num_groups = len(groups)
        self.programs.send()
        peaks = torch.zeros(len(self._tensors), dtype=torch.int32, device=self.programs.device)
        self.programs.call("largest", peaks)
        self.peaks = peaks.view(torch.float32)
        parts = self.peaks.split(counts)
        return [torch.nn.functional.pad(part, (1, 0)).amax() for part in parts]

    def sums(self, scales: Tensor) -> Tensor:
        """Return the squares in steps of the grids of :func:`grid_scales`, int64 ``[groups, 2]``."""
        sums = torch.zeros(self._num_groups, SLOTS, 2, dtype=torch.int64, device=scales.device)
        self.programs.call("squares", scales, sums, SLOTS)
        self._tensors = []
        return sums.sum(1)


def sums_on(tensors: Sequence[Tensor]) -> bool:
    """Return whether a :class:`SquaresTable` sums the squares of tensors."""
    device = local_of(tensors[0]).device
    if any(tensor.dtype not in FORMATS for tensor in tensors):
        return False
    if sum(tensor.numel() for tensor in tensors) < FEWEST:
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
    table = SquaresTable(device)
    actual = exact_squares([case.to(device) for case in cases], table=table).cpu()
    peaks = torch.stack([largest_magnitude(case) for case in cases])
    return torch.equal(actual, exact_squares(cases)) and torch.equal(table.peaks.cpu(), peaks)
