"""The exact sum of squares of many tensors: two calls, whatever the tensors and their dtypes.

The definition is :mod:`narrowgauge.numerics.exact_sums`. Integers are added atomically: their sum
does not depend on the order.
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
from narrowgauge.numerics.exact_sums import (
    Squares,
    exact_squares,
    largest_magnitude,
    steps_of_squares,
)
from narrowgauge.torch_support.cpp import CPP, VECTORS, build
from narrowgauge.torch_support.edge_values import draw
from narrowgauge.torch_support.printer import print_graph, trace
from narrowgauge.torch_support.proven import language_on, why_not_printed
from narrowgauge.torch_support.torch_names import send
from narrowgauge.torch_support.triton import LAUNCH, REDUCERS, TRITON, load

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

_CPP = f"""{VECTORS}
typedef double Doubles __attribute__((vector_size(4 * LANES)));
typedef uint64_t Longs __attribute__((vector_size(4 * LANES)));
#if LANES == 16
#define HALF(x, k) __builtin_shufflevector(x, x, k, k + 1, k + 2, k + 3, k + 4, k + 5, k + 6, k + 7)
#elif LANES == 8
#define HALF(x, k) __builtin_shufflevector(x, x, k, k + 1, k + 2, k + 3)
#else
#define HALF(x, k) __builtin_shufflevector(x, x, k, k + 1)
#endif

// Values of bfloat16 (0), float16 (1) and float32 (2) as float32.
template <int DTYPE> INLINE Floats values_of(const char* p) {{
  if constexpr (DTYPE == 2) return float_of(load<4>(p));
  const Ints word = load<2>(p) << 16;
  if constexpr (DTYPE == 0) return float_of(word);
  const Ints bits = ((word & 0x7FFF0000) >> 3) | (word & INT32_MIN);
  const Floats x = float_of(bits) * 0x1p112f;
  return (bits & INT32_MAX) >= (31 << 23) ? float_of(bits | 0x7F800000) : x;
}}

// Run over whole vectors, and over the rest padded with zeros.
template <int DTYPE, class Run> INLINE void over(const char* p, int64_t numel, Run run) {{
  const int size = DTYPE == 2 ? 4 : 2;
  int64_t at = 0;
  for (; at + GROUP <= numel; at += GROUP) {{
    prefetch<DTYPE == 2 ? 4 : 2>(p + size * at + 1024);
    run(values_of<DTYPE>(p + size * at));
    run(values_of<DTYPE>(p + size * (at + LANES)));
  }}
  for (; at + LANES <= numel; at += LANES) run(values_of<DTYPE>(p + size * at));
  if (at == numel) return;
  alignas(64) char copy[4 * LANES] = {{}};
  memcpy(copy, p + size * at, size * (numel - at));
  run(values_of<DTYPE>(copy));
}}

template <int DTYPE> static __attribute__((noinline)) int32_t largest_of_values(const char* p, int64_t numel) {{
  Ints most{{}};
  over<DTYPE>(p, numel, [&](Floats x) ALWAYS {{ most = larger(most, int_of(x) & INT32_MAX); }});
  return largest_of(most);
}}

// Below 2^51 a sum with 1.5 * 2^52 rounds to a whole number, and holds it in its low bits.
template <int DTYPE>
static __attribute__((noinline)) void squares_of(const char* p, int64_t numel, const double* scales, int64_t* sums) {{
  const double shift = 0x1.8p52;
  const uint64_t zero = __builtin_bit_cast(uint64_t, shift);
  const double first = scales[0], second = scales[1];
  if (second <= 0x1p50) {{
    Longs coarse{{}}, fine{{}};
    const auto add = [&](Doubles v) ALWAYS {{
      const Doubles scaled = v * v * first, moved = scaled + shift;
      coarse += (Longs)moved;
      fine += (Longs)((scaled - (moved - shift)) * second + shift);
    }};
    over<DTYPE>(p, numel, [&](Floats x) ALWAYS {{
      add(__builtin_convertvector(HALF(x, 0), Doubles));
      add(__builtin_convertvector(HALF(x, LANES / 2), Doubles));
    }});
    const uint64_t most = (numel + LANES - 1) / LANES * 2 * zero;  // of each lane
    for (int k = 0; k < LANES / 2; k++) sums[0] += coarse[k] - most, sums[1] += fine[k] - most;
    return;
  }}
  over<DTYPE>(p, numel, [&](Floats x) ALWAYS {{
    for (int k = 0; k < LANES; k++) {{
      const double v = x[k], scaled = v * v * first, whole = __builtin_rint(scaled);
      sums[0] += (int64_t)whole;
      sums[1] += (int64_t)__builtin_rint((scaled - whole) * second);
    }}
  }});
}}

#define BEGIN \\
  const int64_t* row = table + tiles[program] * 5; \\
  const int64_t begin = (program - row[1]) * {SPAN}, dtype = row[4]; \\
  const int64_t numel = row[2] - begin < {SPAN} ? row[2] - begin : {SPAN}; \\
  const char* p = (const char*)row[0] + (dtype == 2 ? 4 : 2) * begin;

extern "C" void largest(const int64_t* table, const int64_t* tiles, int64_t num_programs, int32_t* peaks,
                        int32_t threads) {{
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t program = 0; program < num_programs; program++) {{
    BEGIN
    int32_t most;
    if (dtype == 0) most = largest_of_values<0>(p, numel);
    else if (dtype == 1) most = largest_of_values<1>(p, numel);
    else most = largest_of_values<2>(p, numel);
    int32_t* peak = peaks + tiles[program];
    int32_t now = __atomic_load_n(peak, __ATOMIC_RELAXED);
    while (now < most &&
           !__atomic_compare_exchange_n(peak, &now, most, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {{}}
  }}
}}

extern "C" void squares(const int64_t* table, const int64_t* tiles, int64_t num_programs, const double* scales,
                        int64_t* sums, int32_t threads) {{
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t program = 0; program < num_programs; program++) {{
    BEGIN
    int64_t parts[2] = {{0, 0}};
    if (dtype == 0) squares_of<0>(p, numel, scales, parts);
    else if (dtype == 1) squares_of<1>(p, numel, scales, parts);
    else squares_of<2>(p, numel, scales, parts);
    for (int k = 0; k < 2; k++)
      __atomic_fetch_add(sums + (row[3] * {SLOTS} + program % {SLOTS}) * 2 + k, parts[k], __ATOMIC_RELAXED);
  }}
}}
"""
"""The same two functions for a CPU."""


@lru_cache(None)
def functions_in_cpp() -> dict[str, Any]:
    """Return the C++ functions ``largest`` and ``squares``."""
    library = build(_CPP)
    pointer = ctypes.c_void_p
    library.largest.argtypes = [pointer, pointer, ctypes.c_int64, pointer, ctypes.c_int32]
    library.squares.argtypes = [pointer, pointer, ctypes.c_int64, pointer, pointer, ctypes.c_int32]
    return {"largest": library.largest, "squares": library.squares}


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
    """Sum the squares of tensors of ``DTYPES`` on one device, by a printed pass.

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
        if language_on(self._table.device) == CPP.name:
            pointers = [self._table.data_ptr(), self._tiles.data_ptr()]
            rest = [argument.data_ptr() for argument in arguments]
            functions_in_cpp()[name](*pointers, len(self._tiles), *rest, torch.get_num_threads())
        else:
            with torch.cuda.device_of(self._table):
                kernel = functions(self._table.is_cpu)[name]
                kernel[(len(self._tiles),)](self._table, self._tiles, *arguments, **LAUNCH)


def sums_on(tensors: Sequence[Tensor]) -> bool:
    """Return whether a :class:`SquaresTable` sums the squares of tensors."""
    device = local_of(tensors[0]).device
    if any(tensor.dtype not in DTYPES for tensor in tensors):
        return False
    name = "the norm of all tensors"
    return not why_not_printed(name, name, device, lambda: _has_the_bits(device))


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
