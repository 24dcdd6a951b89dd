"""Sums that do not depend on order.

Floating-point addition is not associative: a gradient norm summed in another order is another number, and a run clipped
by it another run. Integer addition is. So the values are read twice: the first pass finds the largest magnitude (a
maximum is the same in any order), the second writes every square as a whole number of steps of a grid, a power of two
chosen from that maximum and from the number of addends, so that 64-bit integers cannot overflow. What falls between
two grid lines goes to a second, finer grid in the same pass. The two integers are a property of the *multiset* of
values: no order, chunk, shard, thread or rank enters, and ranks merge with one MAX and one SUM all-reduce.

    largest_magnitude ─► grid_scales ─► grid_sum_of_squares ─► from_grid ─► root
     (MAX over ranks)                    (SUM over ranks)

What lies below the grids: with ``n`` addends and ``w = 63 - n.bit_length()`` (36 for a hundred million) each keeps ``w``
bits, so an addend is off by at most ``2^(-2w)`` times the largest square. One grid alone would have read every square
below ``2^-37`` of the largest as zero, though a hundred million of those may count. The pieces of the picture are
pure functions for kernels to compile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from narrowgauge.errors import FormatError
from narrowgauge.numerics.rounding import MAGNITUDE

CHUNK, CHUNK_ON_GPU = 1 << 15, 1 << 22
"""Elements that uncompiled code takes at a time: on a CPU ten temporaries of float64 fit the second-level cache; on a GPU a
launch costs as much as some hundred thousand elements, and the temporaries stay within 1 GiB."""


def chunk_size(device: torch.device) -> int:
    """How many elements uncompiled code takes at a time on a device."""
    return CHUNK if device.type == "cpu" else CHUNK_ON_GPU


def flat_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Go through tensors of one shape together, in row-major order, as 1-D chunks of at most :func:`chunk_size` elements.

    Invariant: concatenated, each tensor's chunks are its ``reshape(-1)``; the elements of one tuple belong together. Chunks
    of contiguous tensors are views; of other layouts one chunk at a time is copied.

    Example:
        >>> [chunk.tolist() for (chunk,) in flat_chunks(torch.arange(6).reshape(3, 2).t())]
        [[0, 2, 4, 1, 3, 5]]
    """
    first = tensors[0]
    if first.numel() == 0:
        return
    most = chunk_size(first.device)
    if all(tensor.is_contiguous() for tensor in tensors):
        yield from zip(*(tensor.reshape(-1).split(most) for tensor in tensors), strict=True)
    elif first.numel() <= most:
        yield tuple(tensor.reshape(-1) for tensor in tensors)
    elif first.shape[0] == 1:
        yield from flat_chunks(*(tensor[0] for tensor in tensors))
    else:
        rows = max(1, most // (first.numel() // first.shape[0]))
        for parts in zip(*(tensor.split(rows) for tensor in tensors), strict=True):
            yield from flat_chunks(*parts)


def chunks_of(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """All elements of all tensors, as by :func:`flat_chunks` of each."""
    return (chunk for tensor in tensors for (chunk,) in flat_chunks(tensor))


Dims = tuple[int, ...]
"""Which dims a pass takes together; ``()`` for all of them."""


def largest_magnitude(x: Tensor, dim: Dims = ()) -> Tensor:
    """The first pass: the largest absolute value, float32 0-d, exact and in no order; at least one element.

    Invariant: NaN if any element is NaN, else infinity if any is infinite, so one number carries the overflow flag too.

    Example:
        >>> largest_magnitude(torch.tensor([1.0, -3.0, 2.0])).item()
        3.0
    """
    return x.float().abs().amax(dim)


def largest_magnitude_words(words: Tensor, dim: Dims = ()) -> Tensor:
    """:func:`largest_magnitude` of bfloat16 values read as int32 words of two neighbours.

    Invariant: equals ``largest_magnitude(words.view(torch.bfloat16))``, up to the bits of a NaN; at least one word.
    """
    # The bits of magnitudes order like the magnitudes, NaN above infinity; and an integer maximum vectorizes where a
    # NaN-aware maximum of two float lanes does not (0.02 ns a value against 0.5).
    even, odd = (words << 16) & MAGNITUDE, words & 0x7FFF0000
    return torch.maximum(even, odd).amax(dim).view(torch.float32)


def grid_scales(largest: Tensor, count: int) -> Tensor:
    """The two scales that put squares on the coarse grid, and its remainders on the fine one: float64 ``[2]``.

    Invariant: with ``w = 63 - count.bit_length()`` and ``e`` the least with ``largest² < 2^e``, the scales are ``2^(w-e)``
    and ``2^w``, so that ``count`` addends stay below 2^63 on either grid. Nothing waits for the device.

    Args:
        largest: float32, 0-d: the largest magnitude over *all* tensors and ranks.
        count: how many elements all tensors and ranks have, 1 … 2^40, else :class:`FormatError`.

    Example:
        >>> grid_scales(torch.tensor(1.5), count=1000).log2().tolist()
        [51.0, 53.0]
    """
    width = torch.full((), grid_width(count), dtype=torch.int64, device=largest.device)
    return torch.stack(scales_of_width(largest, width))


def grid_width(count: int) -> int:
    """``w`` of :func:`grid_scales`: how many bits each of so many addends keeps."""
    if not 1 <= count <= 1 << 40:
        raise FormatError(f"grid_scales takes 1 … 2^40 elements, and got {count}.", "Sum empty sets as zero.")
    return 63 - count.bit_length()


def scales_of_width(largest: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """The two of :func:`grid_scales` under a :func:`grid_width`, int64 0-d."""
    square = largest.double() * largest.double()
    # Its exponent. The least positive float32 squares to 2^-298; zero is treated as that.
    exponent = (square.view(torch.int64) >> 52).clamp(min=1023 - 298) - 1022
    coarse = width + 1023 - exponent
    # By way of the maximum, of which a compiler then makes both in one kernel.
    fine = coarse + exponent
    return (coarse << 52).view(torch.float64), (fine << 52).view(torch.float64)


def grid_sum_of_squares(x: Tensor, scales: Tensor) -> Tensor:
    """The second pass: the squares of ``x`` as whole steps of the coarse and the fine grid, summed, int64 ``[2]``.

    Invariant: integers, so any order, chunking or sharding gives the same two; those of parts add up to those of the whole.
    No magnitude may exceed the ``largest`` given to :func:`grid_scales`. With NaN or infinity in ``x`` the steps are
    meaningless (but harmless): :func:`from_grid` answers from ``largest`` then.

    Cost: one read; compiled, 0.1 ns an element for float32 and 0.6–1 for bfloat16 on two AVX512 threads.

    Example:
        >>> x = torch.tensor([1.0, 0.5])
        >>> grid_sum_of_squares(x, grid_scales(largest_magnitude(x), 2)).tolist()
        [1441151880758558720, 0]
    """
    return torch.stack(grid_sums(x, scales))


def grid_sums(x: Tensor, scales: Tensor, dim: Dims = ()) -> tuple[Tensor, Tensor]:
    """The two of :func:`grid_sum_of_squares`, over all of ``x`` or over some of its dims."""
    coarse, fine = _grid_steps(x, scales)
    return coarse.sum(dim), fine.sum(dim)


def grid_sums_words(words: Tensor, scales: Tensor, dim: Dims = ()) -> tuple[Tensor, Tensor]:
    """:func:`grid_sums` of bfloat16 values read as int32 words of two neighbours.

    Invariant: equals ``grid_sums(words.view(torch.bfloat16), scales, dim)``; ``scales`` counts values, not words.

    Cost: compiled, 0.1 ns a value: bitcasts are free in a loop over 32-bit words and slow beside bfloat16 loads.
    """
    even = _grid_steps((words << 16).view(torch.float32), scales)
    odd = _grid_steps((words & -65536).view(torch.float32), scales)
    return (even[0] + odd[0]).sum(dim), (even[1] + odd[1]).sum(dim)


def _grid_steps(x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    # In float64 a float32's square is exact, and so are its product with a power of two and the rest after rounding:
    # the only roundings are the two that are written.
    values = x.double()
    scaled = values * values * scales[0]
    coarse = scaled.round()
    fine = ((scaled - coarse) * scales[1]).round()
    return coarse.to(torch.int64), fine.to(torch.int64)


def from_grid(steps: Sequence[Tensor] | Tensor, scales: Tensor, largest: Tensor) -> Tensor:
    """The sum of squares that the two integers, the sums of every part's :func:`grid_sum_of_squares`, stand for.

    Float64, 0-d, within 2^-52 relative; ``largest`` itself if that is NaN or infinite. Never waits for the device.

    Example:
        >>> largest, x = torch.tensor(4.0), torch.tensor([3.0, 4.0])
        >>> scales = grid_scales(largest, 2)
        >>> from_grid(grid_sum_of_squares(x, scales), scales, largest).item()
        25.0
    """
    value = (steps[0].double() + steps[1].double() / scales[1]) / scales[0]
    return torch.where(torch.isfinite(largest), value, largest.double())


def root(squares: Tensor) -> Tensor:
    """The square root of a 0-d float64, as float32, both correctly rounded; an infinity beyond float32.

    Example:
        >>> root(torch.tensor(25.0, dtype=torch.float64))
        tensor(5.)
    """
    if squares.device.type == "cpu":
        # torch.sqrt calls a vector library there that is one ulp off for 1 % of float64 values; CUDA's is right.
        return torch.tensor(math.sqrt(squares.item()), dtype=torch.float64).float()
    return squares.sqrt().float()
