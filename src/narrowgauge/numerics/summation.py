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
below ``2^-37`` of the largest as zero, though a hundred million of those may count. :func:`exact_sum` repeats the grid
until nothing is left, and so drops nothing. The four pieces of the picture are pure functions for kernels to compile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from narrowgauge.errors import FormatError

# A quarter of a MiB as float64: the ten temporaries of a chunk fit the second-level cache.
CHUNK = 1 << 15

_SQUARABLE = (torch.bfloat16, torch.float16, torch.float32)
# Every finite float64 is a whole number of 2^-1074.
_UNIT_EXPONENT = 1074


def flat_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Go through tensors of one shape together, in row-major order, as 1-D chunks of at most :data:`CHUNK` elements.

    Invariant: concatenated, each tensor's chunks are its ``reshape(-1)``; the elements of one tuple belong together. Chunks
    of contiguous tensors are views; of other layouts one chunk at a time is copied.

    Example:
        >>> [chunk.tolist() for (chunk,) in flat_chunks(torch.arange(6).reshape(3, 2).t())]
        [[0, 2, 4, 1, 3, 5]]
    """
    first = tensors[0]
    if first.numel() == 0:
        return
    if all(tensor.is_contiguous() for tensor in tensors):
        yield from zip(*(tensor.reshape(-1).split(CHUNK) for tensor in tensors), strict=True)
    elif first.numel() <= CHUNK:
        yield tuple(tensor.reshape(-1) for tensor in tensors)
    elif first.shape[0] == 1:
        yield from flat_chunks(*(tensor[0] for tensor in tensors))
    else:
        rows = max(1, CHUNK // (first.numel() // first.shape[0]))
        for parts in zip(*(tensor.split(rows) for tensor in tensors), strict=True):
            yield from flat_chunks(*parts)


def chunks_of(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """All elements of all tensors, as by :func:`flat_chunks` of each."""
    return (chunk for tensor in tensors for (chunk,) in flat_chunks(tensor))


def exact_sum(x: Tensor) -> Tensor:
    """The sum of all elements, rounded once: float64, 0-d, on the CPU, where Python's integers finish the sum.

    Invariant: the float64 nearest to the exact sum (ties to even), so it depends on nothing but the multiset of values: not
    on order, shape, chunking or device. Nothing is dropped: ``2^60 + 1 - 2^60 + 2^-8`` is ``1 + 2^-8``.

    No elements, or zeros of any sign: +0. NaN or infinities of both signs: NaN. Infinities of one sign, or a sum beyond
    float64: that infinity.

    Cost: a round over each chunk per 47 binades of its range (two or three for most data), each waiting for the device;
        4 ns an element on one CPU thread for a Gaussian.

    Example:
        >>> exact_sum(torch.tensor([2.0**60, 1.0, -(2.0**60), 2.0**-8])).item()
        1.00390625
    """
    if not x.is_floating_point():
        raise FormatError(f"exact_sum takes floating-point values, and got {x.dtype}.", "Sum integers with torch.sum.")
    units, non_finite = 0, 0.0
    for (chunk,) in flat_chunks(x.detach()):
        values = chunk.double()
        if bool(torch.isfinite(values).all()):
            units += _units(values)
        else:
            # Infinities of both signs, or any NaN, give NaN in any order: this sum needs no care.
            non_finite += float(values[~torch.isfinite(values)].sum())
    try:
        # Python rounds the quotient of two integers correctly, subnormal results included.
        finite = units / (1 << _UNIT_EXPONENT)
    except OverflowError:
        finite = math.inf if units > 0 else -math.inf
    # A finite sum that overflowed must not turn an infinity of the other sign into NaN.
    return torch.tensor(non_finite if non_finite != 0.0 else finite, dtype=torch.float64)


def _units(values: Tensor) -> int:
    """The exact sum of one finite float64 chunk, as a whole number of 2^-1074."""
    width = 63 - values.numel().bit_length()
    units = 0
    while (largest := values.abs().amax().item()) != 0.0:
        exponent = min(width - math.frexp(largest)[1], _UNIT_EXPONENT)
        # Two factors, since 2^exponent alone may lie outside float64. A value that underflows here rounds to zero steps
        # and stays whole in the remainder, which is formed at the values' own scale, where it is exact.
        first, second = 2.0 ** (exponent // 2), 2.0 ** (exponent - exponent // 2)
        steps = (values * first * second).round()
        units += int(steps.to(torch.int64).sum()) << (_UNIT_EXPONENT - exponent)
        values = values - steps / first / second
    return units


def largest_magnitude(x: Tensor) -> Tensor:
    """The first pass: the largest absolute value, float32 0-d, exact and in no order; at least one element.

    Invariant: NaN if any element is NaN, else infinity if any is infinite, so one number carries the overflow flag too.

    Example:
        >>> largest_magnitude(torch.tensor([1.0, -3.0, 2.0])).item()
        3.0
    """
    return x.float().abs().amax()


def largest_magnitude_words(words: Tensor) -> Tensor:
    """:func:`largest_magnitude` of bfloat16 values read as int32 words of two neighbours.

    Invariant: equals ``largest_magnitude(words.view(torch.bfloat16))``, up to the bits of a NaN; at least one word.
    """
    # The bits of magnitudes order like the magnitudes, NaN above infinity; and an integer maximum vectorizes where a
    # NaN-aware maximum of two float lanes does not (0.02 ns a value against 0.5).
    even, odd = (words << 16) & 0x7FFFFFFF, words & 0x7FFF0000
    return torch.maximum(even, odd).amax().view(torch.float32)


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
    if not 1 <= count <= 1 << 40:
        raise FormatError(f"grid_scales takes 1 … 2^40 elements, and got {count}.", "Sum empty sets as zero.")
    width = 63 - count.bit_length()
    square = largest.double() * largest.double()
    # Its exponent field. The least positive float32 squares to 2^-298; zero is treated as that.
    field = (square.view(torch.int64) >> 52).clamp(min=1023 - 298)
    coarse = ((width + 1022 + 1023 - field) << 52).view(torch.float64)
    return torch.stack((coarse, torch.full_like(coarse, 2.0**width)))


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
    coarse, fine = _grid_steps(x, scales)
    return torch.stack((coarse.sum(), fine.sum()))


def grid_sum_of_squares_words(words: Tensor, scales: Tensor) -> Tensor:
    """:func:`grid_sum_of_squares` of bfloat16 values read as int32 words of two neighbours.

    Invariant: equals ``grid_sum_of_squares(words.view(torch.bfloat16), scales)``; ``scales`` counts values, not words.

    Cost: compiled, 0.1 ns a value: bitcasts are free in a loop over 32-bit words and slow beside bfloat16 loads.
    """
    even = _grid_steps((words << 16).view(torch.float32), scales)
    odd = _grid_steps((words & -65536).view(torch.float32), scales)
    return torch.stack(((even[0] + odd[0]).sum(), (even[1] + odd[1]).sum()))


def _grid_steps(x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    # In float64 a float32's square is exact, and so are its product with a power of two and the rest after rounding:
    # the only roundings are the two that are written.
    values = x.double()
    scaled = values * values * scales[0]
    coarse = scaled.round()
    fine = ((scaled - coarse) * scales[1]).round()
    return coarse.to(torch.int64), fine.to(torch.int64)


def from_grid(steps: Tensor, scales: Tensor, largest: Tensor) -> Tensor:
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


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements of all tensors, in no order.

    Invariant: a function of the multiset of all values: equal bits for any order, cut into tensors, shape, stride or chunk.
    With ``n`` elements, off by at most ``n · 2^(-2w)`` times the largest square, ``w = 63 - n.bit_length()``, and two
    float64 roundings; exact up to those where the squares' bits all lie within ``2w`` of the largest.

    Args:
        tensors: bfloat16, float16 or float32 (a float64's square is not a float64), all on one device.

    Returns:
        float64, 0-d, on their device. No elements: 0. Any NaN: NaN; else any infinity: infinity.

    Cost: two reads; eager 2 ns an element on one CPU thread. Temporaries under 16 MiB. Nothing waits for the device.

    Example:
        >>> sum_of_squares([torch.tensor([3.0]), torch.tensor([[4.0]])]).item()
        25.0
    """
    for place, tensor in enumerate(tensors):
        if tensor.dtype not in _SQUARABLE:
            found = f"tensor {place} is {tensor.dtype}"
            raise FormatError(f"sum_of_squares takes bfloat16, float16 or float32, and {found}.", "Use .float() first.")
    filled = [tensor.detach() for tensor in tensors if tensor.numel() > 0]
    if not filled:
        return torch.zeros((), dtype=torch.float64, device=tensors[0].device if tensors else None)
    largest = torch.stack([largest_magnitude(chunk) for chunk in chunks_of(filled)]).amax()
    scales = grid_scales(largest, sum(x.numel() for x in filled))
    steps = torch.zeros(2, dtype=torch.int64, device=largest.device)
    for chunk in chunks_of(filled):
        steps += grid_sum_of_squares(chunk, scales)
    return from_grid(steps, scales, largest)


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all tensors taken as one vector, in no order: float32, 0-d; otherwise as :func:`sum_of_squares`.

    A norm beyond float32 is infinite, so ``isfinite`` of it is the skip flag of a training step.

    Example:
        >>> global_norm([torch.tensor([3.0]), torch.tensor([[4.0]])])
        tensor(5.)
    """
    return root(sum_of_squares(tensors))
