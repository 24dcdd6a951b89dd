"""The exact sum of squares of many tensors: two calls, whatever the tensors and their dtypes.

The definition is :mod:`narrowgauge.numerics.exact_sums`. The kernels stand beside the step, in
``step.h`` and :mod:`narrowgauge.optim.step_triton`. Integers are added atomically: their sum does
not depend on the order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.numerics.dtensor import local_of
from narrowgauge.numerics.exact_sums import Squares, exact_squares, largest_magnitude
from narrowgauge.optim.step_cpp import STEP_H
from narrowgauge.optim.table import TRITON_MODULE
from narrowgauge.torch_support import triton
from narrowgauge.torch_support.cpp import build
from narrowgauge.torch_support.edge_values import draw
from narrowgauge.torch_support.proof import CPP, language_on, why_not
from narrowgauge.torch_support.torch_names import send

SPAN = 8192
"""Elements that a program reads."""
SLOTS = 128
"""Partial sums: additions to one address wait for each other."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@lru_cache(None)
def functions_in_cpp() -> dict[str, Any]:
    """Return the C++ functions ``largest`` and ``squares``."""
    library = build(f"{STEP_H.read_text()}EXPORT_NORM({SPAN}, {SLOTS})\n")
    pointer = ctypes.c_void_p
    library.largest.argtypes = [pointer, pointer, ctypes.c_int64, pointer, ctypes.c_int32]
    library.squares.argtypes = [pointer, pointer, ctypes.c_int64, pointer, pointer, ctypes.c_int32]
    return {"largest": library.largest, "squares": library.squares}


class SquaresTable(Squares):
    """Sum the squares of tensors of ``DTYPES`` on one device, by a kernel.

    Keep their addresses between steps.
    """

    def __init__(self) -> None:
        self._sizes: list[tuple[int, int, int]] = []
        self._addresses: list[int] = []

    def largest(self, groups: Sequence[tuple[Any, Sequence[Tensor]]]) -> list[Tensor]:
        """Return the largest magnitude of each group.

        ``peaks`` holds the magnitudes of the tensors, in the groups' order.
        """
        self._num_groups = len(groups)
        self._ids = []
        self._tensors = []
        sizes = []
        addresses = []
        for number, (_, members) in enumerate(groups):
            for tensor in members:
                x = local_of(tensor).contiguous()
                self._ids.append(id(tensor))
                self._tensors.append(x)
                sizes.append((x.numel(), number, DTYPES.index(x.dtype)))
                addresses.append(x.data_ptr())
        device = self._tensors[0].device
        if sizes != self._sizes:
            counts = np.array([-(-numel // SPAN) for numel, *_ in sizes], np.int64)
            self._sizes = sizes
            self._first = np.cumsum(counts) - counts
            self._addresses = []
            self._tiles = self._put(np.repeat(np.arange(len(sizes)), counts), device)
        if addresses != self._addresses:
            self._addresses = addresses
            self._table = self._put(np.column_stack([addresses, self._first, sizes]), device)
        peaks = torch.zeros(len(sizes), dtype=torch.int32, device=device)
        self._launch("largest", peaks)
        self.peaks = peaks.view(torch.float32)
        result = []
        start = 0
        for _, members in groups:
            part = self.peaks[start : start + len(members)]
            start += len(members)
            result.append(torch.nn.functional.pad(part, (1, 0)).amax())
        return result

    def _put(self, values: Any, device: torch.device) -> Tensor:
        """Return an array on a device."""
        host = torch.from_numpy(values)
        target = torch.empty_like(host, device=device)
        send(host, target)
        return target

    def finite(self, tensors: Sequence[Tensor]) -> Callable[[], list[bool]]:
        """Drop the last tensors.

        Return a function that waits for the device and returns which of them were finite.
        """
        self._tensors = []
        ids = self._ids
        peaks = self.peaks
        order = list(map(id, tensors))

        def flags() -> list[bool]:
            by_id = dict(zip(ids, peaks.isfinite().tolist(), strict=True))
            return list(map(by_id.__getitem__, order))

        return flags

    def sums(self, scales: Tensor) -> Tensor:
        """Return the squares in steps of the grids of :func:`grid_scales`, int64 ``[groups, 2]``."""
        sums = torch.zeros(self._num_groups, SLOTS, 2, dtype=torch.int64, device=scales.device)
        self._launch("squares", scales, sums)
        return sums.sum(1)

    def _launch(self, name: str, *arguments: Tensor) -> None:
        if not len(self._tiles):
            return
        if language_on(self._table.device) == CPP:
            pointers = [self._table.data_ptr(), self._tiles.data_ptr()]
            rest = [argument.data_ptr() for argument in arguments]
            functions_in_cpp()[name](*pointers, len(self._tiles), *rest, torch.get_num_threads())
            return
        module = triton.load(TRITON_MODULE, self._table.is_cpu)
        sizes = {"SPAN": SPAN, "BLOCK": 1024}
        if name == "squares":
            sizes["SLOTS"] = SLOTS
        with torch.cuda.device_of(self._table):
            kernel = getattr(module, name)[(len(self._tiles),)]
            kernel(self._table, self._tiles, *arguments, **sizes, **triton.LAUNCH)


def sums_on(tensors: Sequence[Tensor]) -> bool:
    """Return whether a :class:`SquaresTable` sums the squares of tensors."""
    device = local_of(tensors[0]).device
    if any(tensor.dtype not in DTYPES for tensor in tensors):
        return False
    name = "the norm of all tensors"
    return not why_not(name, name, device, lambda: _has_the_bits(device))


def _has_the_bits(device: torch.device) -> bool:
    """Return whether the launches give the bits of the definition."""
    cases = []
    for dtype in DTYPES:
        for size in (1, SPAN, SPAN + 9):
            for edges in (False, True):
                cases.append(draw(dtype, (size,), edges=edges, seed=size))
    for some in (cases, cases[:2]):  # also few elements, whose grid is finer
        table = SquaresTable()
        actual = exact_squares([case.to(device) for case in some], table=table).cpu()
        peaks = torch.stack([largest_magnitude(case) for case in some])
        is_sum_equal = torch.equal(actual, exact_squares(some))
        if not (is_sum_equal and torch.equal(table.peaks.cpu(), peaks)):
            return False
    return True
