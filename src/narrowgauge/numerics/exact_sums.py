"""Sums that do not depend on order: the norm of many tensors, and their elementwise sum.

Floating-point addition is not associative, integer addition is. So both sums count steps of a fixed
grid.

**The norm** reads values twice. The first pass finds the largest magnitude. The second writes each
square as a whole number of steps of a coarse grid, and the remainder as steps of a fine grid. Both
are summed in int64. The largest magnitude and the number ``n`` of values determine the grids, so
that neither sum overflows. Ranks merge with one MAX and one SUM all-reduce. Let ``w = 63 -
n.bit_length()`` (36 for a hundred million). The error of a square is at most ``2^(-2w)`` times the
largest square.

**The elementwise sum** uses float64 as an integer: a sum of multiples of 2^-74 below 2^53 of them
is exact. 53 bits are too few for float32's range, so a value is split into five float64 words,
multiples of 2^100, 2^59, 2^18, 2^-23 and 2^-74. Near 1.5 · 2^29 float64 has an ulp of 2^-23. So
(x + 1.5 · 2^29) - 1.5 · 2^29 rounds x to a multiple of 2^-23, ties to even. The remainder is exact,
and the next word takes it.

4,096 addends of at most half the coarser step fit 53 bits of each word but the last. That holds
more than six addends and a remainder: after each six its multiple of 2^-23 is *carried* to the word
before. That multiple may depend on the order. The words together do not.

Values below 2^-50 in magnitude have bits below the grid. Rounding to the grid changes them by at
most 2^-75. The total is rounded once to float32, ties to even. The float64 nearest to a sum of
words may be a tie of float32 although the sum is not one. So if that addition rounds, first correct
it to *odd*: an odd float64 is not a tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import FormatError
from narrowgauge.numerics.chunks import chunk_size, flat_chunks
from narrowgauge.numerics.dtensor import add_up, by_group, local_of


def largest_magnitude(x: Tensor) -> Tensor:
    """Return the largest absolute value, float32 0-d.

    NaN wins over infinity. It is 0 for no values.
    """
    if not x.numel():
        return torch.zeros((), dtype=torch.float32, device=x.device)
    # One pass and no temporary: on a CPU 14 times as fast as the maximum of abs(x).
    low, high = torch.aminmax(x.detach())
    return torch.maximum(low.abs(), high.abs()).float()


def grid_scales(largest: Tensor, count: int) -> Tensor:
    """Return the multipliers of squares on the coarse grid and of remainders on the fine one:
    float64 ``[2]``.

    Let ``w = 63 - count.bit_length()``, and ``e`` the least with ``largest² < 2^e``. The scales are
    ``2^(w-e)`` and ``2^w``, so ``count`` addends stay below 2^63. ``largest`` (float32, 0-d) and
    ``count`` (1 … 2^40) are of all tensors and ranks.

    Example:
        >>> grid_scales(torch.tensor(1.5), count=1000).log2().tolist()
        [51.0, 53.0]
    """
    width = 63 - count.bit_length()
    square = largest.double() * largest.double()
    # The smallest positive float32 squares to 2^-298. Zero is treated the same.
    exponent = (square.view(torch.int64) >> 52).clamp(min=1023 - 298) - 1022
    bits = torch.stack([width + 1023 - exponent, torch.full_like(exponent, width + 1023)])
    return (bits << 52).view(torch.float64)


def steps_of_squares(x: Tensor, scales: Tensor) -> Tensor:
    """Return each square in steps of the coarse grid, and its remainder in steps of the fine grid:
    int64 ``[2, *x.shape]``.

    Sums of parts add up to the sums of the whole. With NaN or infinity in ``x`` they are
    meaningless but harmless.
    """
    # A float32's square is exact in float64. The product with a power of two and the remainder
    # after rounding are exact too. So only the two written roundings round.
    values = x.double()
    scaled = values * values * scales[0]
    coarse = scaled.round()
    fine = ((scaled - coarse) * scales[1]).round()
    return torch.stack([coarse, fine]).to(torch.int64)


class Squares:
    """Read tensors twice: for the largest magnitude of groups, then for the sums of their squares."""

    def __init__(self) -> None:
        self._groups: list[list[Tensor]] = []

    def largest(self, groups: Sequence[tuple[Any, Sequence[Tensor]]]) -> list[Tensor]:
        """Return the largest magnitude of each group of :func:`by_group`, float32 0-d.

        It is 0 for no values, and may be NaN.
        """
        self._groups = []
        peaks = []
        first = next(tensor for _, members in groups for tensor in members)
        zero = torch.zeros((), dtype=torch.float32, device=local_of(first).device)
        for _, members in groups:
            tensors = list(map(local_of, members))
            self._groups.append(tensors)
            peaks.append(torch.stack([zero, *map(largest_magnitude, tensors)]).amax())
        return peaks

    def sums(self, scales: Tensor) -> Tensor:
        """Return the squares in steps of the grids of :func:`grid_scales`, int64 ``[groups, 2]``."""
        totals = torch.zeros(len(self._groups), 2, dtype=torch.int64, device=scales.device)
        for total, tensors in zip(totals, self._groups, strict=True):
            for tensor in tensors:
                for (chunk,) in flat_chunks(tensor):
                    total += steps_of_squares(chunk, scales).sum(1)
        return totals


@torch.no_grad()
def exact_squares(tensors: Sequence[Tensor], table: Squares | None = None) -> Tensor:
    """Return the sum of squares of all tensors, at least one: float64 0-d; NaN or infinite if a
    value is.

    For DTensors it is that of the whole, with the bits of one process that holds all. All ranks of
    their meshes pass the same tensors in the same order. A ``table`` sums all by two
    calls.

    Cost: two reads of this rank's data, and two small messages.
    """
    groups = by_group(tensors)
    squares = table or Squares()
    maxima = []
    for (ranks, _), peak in zip(groups, squares.largest(groups), strict=True):
        maxima.append(add_up(peak, ranks, "max"))
    largest = torch.stack(maxima).amax()
    scales = grid_scales(largest, max(1, sum(tensor.numel() for tensor in tensors)))
    sums = []
    for (ranks, _), part in zip(groups, squares.sums(scales), strict=True):
        sums.append(add_up(part, ranks, "sum"))
    coarse, fine = torch.stack(sums).sum(0).double()
    total = (coarse + fine / scales[1]) / scales[0]
    return torch.where(largest.isfinite(), total, largest.double())


# ── elementwise ───────────────────────────────────────────────────────────────────────────────────

MOST_ADDENDS = 4096
"""Largest number of addends of a sum."""
_GRIDS = (2.0**100, 2.0**59, 2.0**18, 2.0**-23, 2.0**-74)
"""The steps of the words, coarse to fine."""
_ROUNDERS = tuple(1.5 * 2.0**52 * step for step in _GRIDS)
"""Numbers whose ulp is a word's step: added and subtracted, they round to it."""
LARGEST = 2.0**18
"""The largest magnitude that needs no coarser word."""
_BETWEEN_CARRIES = 6
_SUMMABLE = (torch.bfloat16, torch.float16, torch.float32)


class ExactSums:
    """Sum up to 4,096 tensors elementwise.

    The result does not depend on their order, as on a parameter server.

    Args:
        numel: number of elements of each tensor.
        device: of the sums and of the tensors.

    Invariant: :meth:`total` depends only on each element's multiset of values. Each value is
    rounded to a multiple of 2^-74. The total is the float32 nearest to their exact sum. Both round
    ties to even. It is NaN if a value was NaN or infinite, and infinite if the sum is beyond
    float32. A sum of zero is +0.

    Cost: 40 bytes per element.
    Example:
        >>> sums = ExactSums(1)
        >>> for value in (2.0**18, 2.0**-60, -(2.0**18)):
        ...     sums.add_(torch.tensor([value]))
        >>> sums.total() == 2.0**-60
        tensor([True])
    """

    def __init__(self, numel: int, device: torch.device | str = "cpu") -> None:
        self._words = torch.zeros(len(_GRIDS), numel, dtype=torch.float64, device=device)
        self._num_addends = 0

    @torch.no_grad()
    def add_(self, values: Tensor) -> None:
        """Add a tensor ``[numel]``, or each row of ``[rows, numel]``, in bfloat16, float16 or
        float32.

        Raises:
            FormatError: another dtype or shape, or too many addends.
        """
        rows = values if values.ndim == 2 else values.unsqueeze(0)
        _check(rows, self._words.shape[1], self._num_addends + rows.shape[0])
        size = chunk_size(rows.device)
        for part, words in zip(rows.split(size, 1), self._words.split(size, 1), strict=True):
            _add(part, words)
        self._num_addends += rows.shape[0]

    @torch.no_grad()
    def total(self, output: Tensor | None = None, divisor: int = 1) -> Tensor:
        """Return the sums in ``output`` ``[numel]``: rounded once to float32, then divided, then
        rounded to its dtype.

        Without ``output``, return a new float32 tensor.
        """
        if output is None:
            output = self._words.new_empty(self._words.shape[1], dtype=torch.float32)
        size = chunk_size(output.device)
        for words, into in zip(self._words.split(size, 1), output.split(size), strict=True):
            into.copy_(_rounded(words, divisor))
        return output

    def clear_(self) -> None:
        """Start again without addends."""
        self._words.zero_()
        self._num_addends = 0


def sum_rows(rows: Tensor, output: Tensor, divisor: int = 1) -> Tensor:
    """Write :class:`ExactSums` of the rows of one tensor, divided, to ``output``.

    The words exist for one chunk only.

    ``rows`` is ``[rows, numel]`` in bfloat16, float16 or float32. ``output`` has any floating-point
    dtype, and may be the only row.
    """
    size = chunk_size(rows.device)
    for part, into in zip(rows.split(size, 1), output.split(size), strict=True):
        sums = ExactSums(len(into), rows.device)
        sums.add_(part)
        sums.total(into, divisor)
    return output


def _check(rows: Tensor, numel: int, num_addends: int) -> None:
    if rows.dtype not in _SUMMABLE or rows.shape[1] != numel:
        shape = tuple(rows.shape)
        raise FormatError(
            f"Cannot add {shape} of {rows.dtype} to exact sums of {numel} elements.",
            "They take bfloat16, float16 and float32.",
        )
    if num_addends > MOST_ADDENDS:
        raise FormatError(
            f"Cannot add {num_addends} addends exactly: {MOST_ADDENDS} fit.",
            "Try larger micro-batches.",
        )


def _add(rows: Tensor, words: Tensor) -> None:
    """Add rows to ``words [5, numel]``. The last word is at most 2^-24 before and after."""
    rounders = _ROUNDERS
    # A CPU may look at the values. A sum of so many up to 2^18 fits the last two words.
    if rows.is_cpu and bool(largest_magnitude(rows) <= LARGEST):
        words = words[-2:]
        rounders = rounders[-2:]
    # Allocate once for all rows. Page faults of fresh memory would cost more than the sum.
    rest, rounded = torch.empty_like(words[:2])
    for place, row in enumerate(rows, start=1):
        rest.copy_(row)
        for word, rounder in zip(words, rounders, strict=True):
            torch.add(rest, rounder, out=rounded)
            rest -= rounded.sub_(rounder)
            word += rounded
        if place % _BETWEEN_CARRIES == 0 or place == len(rows):
            _carry(words[-2], words[-1], _ROUNDERS[-2], rounded)


def _carry(coarse: Tensor, fine: Tensor, rounder: float, carried: Tensor) -> None:
    """Move the multiple of a coarse word's step from the word after it."""
    torch.add(fine, rounder, out=carried)
    coarse += carried.sub_(rounder)
    fine -= carried


def _rounded(words: Tensor, divisor: int) -> Tensor:
    """Return the sum of the words as the nearest float32, divided."""
    if words.is_cpu and not bool(words[:-2].any()):
        words = words[-2:]
    words = words.clone()
    scratch = torch.empty_like(words[0])
    # Each word then is at most half a step of the next coarser one, so the odd bit of a finer sum
    # survives.
    for place in range(len(words) - 1, 0, -1):
        rounder = _ROUNDERS[place - 1 - len(words)]
        _carry(words[place - 1], words[place], rounder, scratch)
    total = words[-1]
    for word in reversed(words[:-1]):
        total = _add_to_odd(word, total)
    return total.float() / divisor


def _add_to_odd(coarse: Tensor, fine: Tensor) -> Tensor:
    """Return ``coarse + fine``, rounded to odd."""
    # The exact rounding error of the addition (Knuth).
    total = coarse + fine
    part = total - coarse
    error = (coarse - (total - part)) + (fine - part)
    bits = total.view(torch.int64) - (error * total < 0).long()  # toward zero
    return (bits | (error != 0).long()).view(torch.float64)
