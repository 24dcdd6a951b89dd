"""The exact sum of squares of many tensors on a GPU: two launches, whatever the tensors and their
dtypes.

The definition is :mod:`narrowgauge.numerics.exact_sums`. Integers are added atomically: their sum
does not depend on the order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.numerics.dtensor import local_of
from narrowgauge.numerics.exact_sums import (
    Squares,
    exact_squares,
    largest_magnitude,
    steps_of_squares,
)
from narrowgauge.torch_support.compile import can_compile
from narrowgauge.torch_support.edge_values import draw
from narrowgauge.torch_support.printer import print_graph, prove, trace
from narrowgauge.torch_support.torch_names import is_captured, send
from narrowgauge.torch_support.triton import LAUNCH, REDUCERS, TRITON, load, runs_on

BLOCK = 1024
SPAN = 8192
"""Elements that a program reads at a time, and in all."""
SLOTS = 128
"""Partial sums: additions to one address wait for each other."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_KERNELS = f"""{REDUCERS}

@triton.jit
def load_values(address, begin, at, numel, DTYPE: tl.constexpr):
    if (address | numel * 2) % 16 == 0:
        left = tl.multiple_of(numel - begin, 8)
        x = tl.load(tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16) + begin + at, mask=at < left, other=0.0)
    else:
        x = tl.load(address.to(tl.pointer_type(DTYPE)) + begin + at, mask=at < numel - begin, other=0.0)
    return x.to(tl.float32)


@triton.jit
def find_values(table, tiles):
    row = table + tl.load(tiles + tl.program_id(0)) * 5
    begin = (tl.program_id(0) - tl.load(row + 1)) * {SPAN}
    return tl.load(row), begin, tl.load(row + 2), tl.load(row + 4)


@triton.jit
def largest_of(address, begin, numel, DTYPE: tl.constexpr):
    bits = tl.full([{BLOCK}], 0, tl.int32)
    for start in range(0, {SPAN}, {BLOCK}):
        x = load_values(address, begin, start + tl.arange(0, {BLOCK}), numel, DTYPE)
        bits = tl.maximum(bits, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    return tl.reduce(bits, 0, larger_of)


@triton.jit
def largest(table, tiles, peaks):
    address, begin, numel, dtype = find_values(table, tiles)
    if dtype == 0:
        bits = largest_of(address, begin, numel, tl.bfloat16)
    elif dtype == 1:
        bits = largest_of(address, begin, numel, tl.float16)
    else:
        bits = largest_of(address, begin, numel, tl.float32)
    tl.atomic_max(peaks + tl.load(tiles + tl.program_id(0)), bits)


@triton.jit
def squares_of(address, begin, numel, scales, DTYPE: tl.constexpr):
    v_0, v_1 = tl.load(scales), tl.load(scales + 1)
    coarse, fine = tl.full([{BLOCK}], 0, tl.int64), tl.full([{BLOCK}], 0, tl.int64)
    for start in range(0, {SPAN}, {BLOCK}):
        x = load_values(address, begin, start + tl.arange(0, {BLOCK}), numel, DTYPE)
        {{body}}
        coarse, fine = coarse + {{coarse}}, fine + {{fine}}
    return tl.reduce(coarse, 0, sum_of), tl.reduce(fine, 0, sum_of)


@triton.jit
def squares(table, tiles, scales, sums):
    address, begin, numel, dtype = find_values(table, tiles)
    if dtype == 0:
        coarse, fine = squares_of(address, begin, numel, scales, tl.bfloat16)
    elif dtype == 1:
        coarse, fine = squares_of(address, begin, numel, scales, tl.float16)
    else:
        coarse, fine = squares_of(address, begin, numel, scales, tl.float32)
    group = tl.load(table + tl.load(tiles + tl.program_id(0)) * 5 + 3)
    slot = sums + (group * {SLOTS} + tl.program_id(0) % {SLOTS}) * 2
    tl.atomic_add(slot, coarse)
    tl.atomic_add(slot + 1, fine)
"""


@lru_cache(None)
def functions(interpret: bool) -> dict[str, Any]:
    """Return the Triton functions ``largest`` and ``squares``."""
    arguments = (torch.float32, (8,)), (torch.float64, (2,))
    graph = trace(steps_of_squares, TRITON.device, *arguments)
    printed = print_graph(graph, ["x", "v"], "x", TRITON)
    coarse, fine = printed.results
    body = "\n        ".join(printed.lines)
    return load(_KERNELS.format(body=body, coarse=coarse, fine=fine), interpret=interpret)


class SquaresTable(Squares):
    """Sum the squares of tensors of ``DTYPES`` on one GPU.

    Keep their addresses between steps.
    """

    def __init__(self) -> None:
        self._sizes: list[tuple[int, int, int]] = []
        self._addresses: list[int] = []
        self._unsent: list[tuple[Tensor, Tensor]] = []

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
        """Return an array on a device.

        A captured step leaves it to the caller to :meth:`send` it.
        """
        host = torch.from_numpy(values)
        target = torch.empty_like(host, device=device)
        self._unsent.append((host, target))
        if not is_captured():
            self.send()
        return target

    def send(self) -> None:
        """Copy new tables to the device."""
        for values, target in self._unsent:
            send(values, target)
        self._unsent = []

    def finite(self, tensors: Sequence[Tensor]) -> Callable[[], list[bool]]:
        """Drop the last tensors.

        Return a function that tells which of them were finite, and waits for the device.
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
        if len(self._tiles):
            with torch.cuda.device_of(self._table):
                kernel = functions(self._table.is_cpu)[name]
                kernel[(len(self._tiles),)](self._table, self._tiles, *arguments, **LAUNCH)


def sums_on(tensors: Sequence[Tensor]) -> bool:
    """Return whether a :class:`SquaresTable` sums the squares of tensors: on a GPU."""
    device = local_of(tensors[0]).device
    if not runs_on(device) or any(tensor.dtype not in DTYPES for tensor in tensors):
        return False
    return _is_proven(device)


@lru_cache(None)
def _is_proven(device: torch.device) -> bool:
    """Return whether the launches give the bits of the definition. Warn once if not."""

    def compare() -> bool:
        cases = []
        for dtype in DTYPES:
            for size in (1, SPAN, SPAN + 9):
                for edges in (False, True):
                    cases.append(draw(dtype, (size,), edges=edges, seed=size))
        table = SquaresTable()
        actual = exact_squares([case.to(device) for case in cases], table=table).cpu()
        peaks = torch.stack([largest_magnitude(case) for case in cases])
        is_sum_equal = torch.equal(actual, exact_squares(cases, compile=False))
        return is_sum_equal and torch.equal(table.peaks.cpu(), peaks)

    if device.type != "cpu" and not can_compile("gpu"):
        return False
    return not prove("the norm of all tensors", TRITON.name, compare).reason
