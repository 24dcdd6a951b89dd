"""The exact sum of squares of many tensors on a GPU: two launches, whatever the number of tensors.

The definition is :mod:`narrowgauge.numerics.exact_sums`. Integers are added atomically: their sum does not depend on the order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge import triton_printer
from narrowgauge.compile import can_compile
from narrowgauge.edge_values import draw
from narrowgauge.numerics.dtensor import local_of
from narrowgauge.numerics.exact_sums import exact_squares, largest_magnitude, steps_of_squares
from narrowgauge.torch_names import is_captured, send
from narrowgauge.triton_printer import LARGEST, LAUNCH, TOTAL, load, print_graph, proves, trace

BLOCK, SPAN = 1024, 8192
"""Elements that a program reads at a time, and in all."""
SLOTS = 128
"""Partial sums: additions to one address wait for each other."""

_KERNELS = f"""
@triton.jit
def load_block(table, tiles, start, DTYPE: tl.constexpr):
    program = tl.program_id(0)
    row = table + tl.load(tiles + program) * 4
    address, numel, at = tl.load(row), tl.load(row + 2), start + tl.arange(0, {BLOCK})
    begin = (program - tl.load(row + 1)) * {SPAN}
    if (address | numel * 2) % 16 == 0:
        left = tl.multiple_of(numel - begin, 8)
        x = tl.load(tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16) + begin + at, mask=at < left, other=0.0)
    else:
        x = tl.load(address.to(tl.pointer_type(DTYPE)) + begin + at, mask=at < numel - begin, other=0.0)
    return x.to(tl.float32)


@triton.jit
def largest(table, tiles, peaks, DTYPE: tl.constexpr):
    bits = tl.full([{BLOCK}], 0, tl.int32)
    for start in range(0, {SPAN}, {BLOCK}):
        bits = tl.maximum(bits, load_block(table, tiles, start, DTYPE).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.atomic_max(peaks + tl.load(tiles + tl.program_id(0)), tl.reduce(bits, 0, {LARGEST}))


@triton.jit
def squares(table, tiles, scales, sums, DTYPE: tl.constexpr):
    program = tl.program_id(0)
    v_0, v_1 = tl.load(scales), tl.load(scales + 1)
    coarse, fine = tl.full([{BLOCK}], 0, tl.int64), tl.full([{BLOCK}], 0, tl.int64)
    for start in range(0, {SPAN}, {BLOCK}):
        x = load_block(table, tiles, start, DTYPE)
        {{body}}
        coarse, fine = coarse + {{coarse}}, fine + {{fine}}
    slot = sums + (tl.load(table + tl.load(tiles + program) * 4 + 3) * {SLOTS} + program % {SLOTS}) * 2
    tl.atomic_add(slot, tl.reduce(coarse, 0, {TOTAL}))
    tl.atomic_add(slot + 1, tl.reduce(fine, 0, {TOTAL}))
"""


@lru_cache(None)
def _functions(interpret: bool) -> dict[str, Any]:
    graph = trace(steps_of_squares, (torch.float32, (8,)), (torch.float64, (2,)))
    lines, (coarse, fine), _ = print_graph(graph, ["x", "v"], "x")
    return load(_KERNELS.format(body="\n        ".join(lines), coarse=coarse, fine=fine), interpret=interpret)


class SquaresTable:
    """Sum the squares of tensors of one dtype and device. Keep their addresses between steps."""

    def __init__(self) -> None:
        self._sizes: list[tuple[int, int]] = []
        self._addresses: list[int] = []
        self._unsent: list[tuple[Tensor, Tensor]] = []

    def largest(self, groups: Sequence[tuple[Any, Sequence[Tensor]]]) -> list[Tensor]:
        """Return the largest magnitude of each group of :func:`by_group`, float32 0-d. It is 0 for no values, and may be NaN.

        ``peaks`` holds the magnitudes of the tensors, in the groups' order.
        """
        self._ids = [id(tensor) for _, members in groups for tensor in members]
        self._tensors = [local_of(tensor).contiguous() for _, members in groups for tensor in members]
        device, self._num_groups = self._tensors[0].device, len(groups)
        numbers = [number for number, (_, members) in enumerate(groups) for _ in members]
        sizes = [(x.numel(), number) for x, number in zip(self._tensors, numbers, strict=True)]
        if sizes != self._sizes:
            counts = np.array([-(-numel // SPAN) for numel, _ in sizes], np.int64)
            self._sizes, self._first, self._addresses = sizes, np.cumsum(counts) - counts, []
            self._tiles = self._put(np.repeat(np.arange(len(sizes)), counts), device)
        addresses = [x.data_ptr() for x in self._tensors]
        if addresses != self._addresses:
            self._addresses = addresses
            self._table = self._put(np.column_stack([addresses, self._first, sizes]), device)
        peaks = torch.zeros(len(sizes), dtype=torch.int32, device=device)
        self._launch("largest", peaks)
        self.peaks = peaks.view(torch.float32)
        parts = self.peaks.split([len(members) for _, members in groups])
        return [torch.nn.functional.pad(part, (1, 0)).amax() for part in parts]

    def _put(self, values: Any, device: torch.device) -> Tensor:
        """Return an array on a device. A captured step leaves it to the caller to :meth:`send` it."""
        host = torch.from_numpy(values)
        self._unsent.append((host, torch.empty_like(host, device=device)))
        target = self._unsent[-1][1]
        if not is_captured():
            self.send()
        return target

    def send(self) -> None:
        """Copy new tables to the device."""
        for values, target in self._unsent:
            send(values, target)
        self._unsent = []

    def finite(self, tensors: Sequence[Tensor]) -> Callable[[], list[bool]]:
        """Return a function that tells which of the last tensors were finite. It keeps no tensor, and waits for the device."""
        ids, peaks, order = self._ids, self.peaks, list(map(id, tensors))

        def flags() -> list[bool]:
            by_id = dict(zip(ids, peaks.isfinite().tolist(), strict=True))
            return [by_id[number] for number in order]

        return flags

    def sums(self, scales: Tensor) -> Tensor:
        """Return the squares in steps of the grids of :func:`grid_scales`, int64 ``[groups, 2]``. Drop the tensors."""
        sums = torch.zeros(self._num_groups, SLOTS, 2, dtype=torch.int64, device=scales.device)
        self._launch("squares", scales, sums)
        self._tensors = []  # the gradients may be freed before the next step
        return sums.sum(1)

    def _launch(self, name: str, *arguments: Tensor) -> None:
        import triton.language as tl

        dtype = getattr(tl, str(self._tensors[0].dtype).removeprefix("torch."))
        if len(self._tiles):
            with torch.cuda.device_of(self._table):
                kernel = _functions(self._table.is_cpu)[name]
                kernel[(len(self._tiles),)](self._table, self._tiles, *arguments, dtype, **LAUNCH)


def sums_on(tensors: Sequence[Tensor]) -> bool:
    """Return whether a :class:`SquaresTable` sums the squares of tensors: on a GPU, all of one dtype."""
    device, dtypes = local_of(tensors[0]).device, {tensor.dtype for tensor in tensors}
    return triton_printer.launches_on(device) and len(dtypes) == 1 and _is_proven(dtypes.pop(), device)


@lru_cache(None)
def _is_proven(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the launches give the bits of the definition. Warn once if not."""

    def compare() -> bool:
        cases = [draw(dtype, (size,), edges=edges, seed=size) for size in (1, SPAN + 9) for edges in (False, True)]
        table = SquaresTable()
        actual = exact_squares([case.to(device) for case in cases], table=table).cpu()
        peaks = torch.stack([largest_magnitude(case) for case in cases])
        return torch.equal(actual, exact_squares(cases, compile=False)) and torch.equal(table.peaks.cpu(), peaks)

    return (device.type == "cpu" or can_compile("gpu")) and proves("the norm of all tensors", compare)
