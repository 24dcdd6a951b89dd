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
is exact. 53 bits are too few for gradients, so a value is split into two float64 words:

    x  =  upper + lower        upper a multiple of 2^-23,    |x| <= 2^18
                               lower a multiple of 2^-74,    |lower| <= 2^-24

Near 1.5 · 2^29 float64 has an ulp of 2^-23. So (x + 1.5 · 2^29) - 1.5 · 2^29 rounds x to ``upper``,
ties to even. The remainder is exact, and 1.5 · 2^-22 rounds it to ``lower``. 4,096 addends have
|upper| <= 4,096 · 2^18 = 2^53 · 2^-23. So each partial sum of the upper word is exact. The lower
word holds 2^53 · 2^-74 = 8 · 2^-24, more than six addends and a remainder. After each six its
multiple of 2^-23 is *carried* to the upper word. That multiple may depend on the order. Both words
together do not.

Larger values take three words more, multiples of 2^100, 2^59 and 2^18, which hold all of float32's
range. They exist only if such a value does. The grids are absolute, so the total does not depend on
which rank widened its sums, or when.

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
    if not 1 <= count <= 1 << 40:
        raise FormatError(f"Cannot sum the squares of {count} elements: a grid takes 1 … 2^40.")
    width = 63 - count.bit_length()
    square = largest.double() * largest.double()
    # The smallest positive float32 squares to 2^-298. Zero is treated the same.
    exponent = (square.view(torch.int64) >> 52).clamp(min=1023 - 298) - 1022
    bits = torch.stack([width + 1023 - exponent, torch.full_like(exponent, width + 1023)])
    return (bits << 52).view(torch.float64)


def steps_of_squares(x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return each square in steps of the coarse grid, and its remainder in steps of the fine grid:
    int64.
    """
    # A float32's square is exact in float64. The product with a power of two and the remainder
    # after rounding are exact too. So only the two written roundings round.
    values = x.double()
    scaled = values * values * scales[0]
    coarse = scaled.round()
    fine = ((scaled - coarse) * scales[1]).round()
    return coarse.to(torch.int64), fine.to(torch.int64)


def grid_steps(x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the squares of ``x`` in steps of the coarse and the fine grid, int64 0-d each.

    Sums of parts add up to the sums of the whole. With NaN or infinity in ``x`` they are
    meaningless but harmless.
    """
    coarse, fine = steps_of_squares(x, scales)
    return coarse.sum(), fine.sum()


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
                    total += torch.stack(grid_steps(chunk, scales))
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

LARGEST = 2.0**18
"""The largest magnitude that two words hold."""
MOST_ADDENDS = 4096
"""Largest number of addends of a sum."""
_GRIDS = (2.0**100, 2.0**59, 2.0**18, 2.0**-23, 2.0**-74)
"""The steps of the words, coarse to fine. Two words are the last two."""
_ROUNDERS = tuple(1.5 * 2.0**52 * step for step in _GRIDS)
"""Numbers whose ulp is a word's step: added and subtracted, they round to it."""
_NARROW = 2
_WIDE = len(_GRIDS)
_BETWEEN_CARRIES = 6
_SUMMABLE = (torch.bfloat16, torch.float16, torch.float32)


def exceeds_two_words(rows: Tensor, limit: float = LARGEST) -> Tensor:
    """Return whether a finite magnitude is beyond ``limit``: bool 0-d."""
    magnitude = rows.abs()
    return ((magnitude > limit) & (magnitude < torch.inf)).any()


class ExactSums:
    """Sum up to 4,096 tensors elementwise.

    The result does not depend on their order, as on a parameter server.

    Args:
        numel: number of elements of each tensor.
        device: of the sums and of the tensors.
        is_wide: take values of all float32's range. On a CPU the sums become wide themselves when a
            value is beyond 2^18. On a GPU that would have to wait for the values: there such a
            value is NaN in narrow sums, see :func:`exceeds_two_words`.

    Invariant: :meth:`total` depends only on each element's multiset of values. Each value is
    rounded to a multiple of 2^-74. The total is the float32 nearest to their exact sum. Both round
    ties to even. It is NaN if a value was NaN or infinite, and infinite if the sum is beyond
    float32. A sum of zero is +0.

    Cost: 16 bytes per element, 40 if wide. On one CPU thread adding takes 2.5 ns an element,
    rounding the total 4 ns once.
    Example:
        >>> sums = ExactSums(1)
        >>> for value in (2.0**18, 2.0**-60, -(2.0**18)):
        ...     sums.add_(torch.tensor([value]))
        >>> sums.total() == 2.0**-60
        tensor([True])
    """

    def __init__(
        self, numel: int, device: torch.device | str = "cpu", *, is_wide: bool = False
    ) -> None:
        # The first addends fill it.
        num_words = _WIDE if is_wide else _NARROW
        self._words = torch.empty(num_words, numel, dtype=torch.float64, device=device)
        self._num_addends = 0

    @property
    def numel(self) -> int:
        return self._words.shape[1]

    @property
    def num_bytes(self) -> int:
        return self._words.numel() * 8

    def widen_(self) -> None:
        """Take values of all float32's range from now on."""
        narrow = self._words
        if len(narrow) < _WIDE:
            self._words = narrow.new_zeros(_WIDE, self.numel)
            self._words[-_NARROW:] = narrow

    @torch.no_grad()
    def add_(self, values: Tensor) -> None:
        """Add a tensor ``[numel]``, or each row of ``[rows, numel]``, in bfloat16, float16 or
        float32.

        Raises:
            FormatError: another dtype or shape, or too many addends.
        """
        rows = values if values.ndim == 2 else values.unsqueeze(0)
        _check(rows, self.numel, self._num_addends + rows.shape[0])
        if _needs_width(rows):
            self.widen_()
        scratch = _scratch(rows, 4)
        size = chunk_size(rows.device)
        for part, words in zip(rows.split(size, 1), self._words.split(size, 1), strict=True):
            _add(part, words, scratch, is_first=self._num_addends == 0)
            _carry(words, scratch)
        self._num_addends += rows.shape[0]

    @torch.no_grad()
    def total(self, output: Tensor | None = None, divisor: int = 1) -> Tensor:
        """Return the sums in ``output`` ``[numel]``: rounded once to float32, then divided, then
        rounded to its dtype.

        Without ``output``, return a new float32 tensor.
        """
        if output is None:
            output = self._words.new_empty(self.numel, dtype=torch.float32)
        scratch = _scratch(self._words, 4)
        if self._num_addends == 0:
            self._words.zero_()
        size = chunk_size(output.device)
        for words, into in zip(self._words.split(size, 1), output.split(size), strict=True):
            _round(words, scratch, into, divisor)
        return output

    def clear_(self) -> None:
        """Start again without addends."""
        self._num_addends = 0


@torch.no_grad()
def sum_rows(rows: Tensor, output: Tensor, divisor: int = 1, *, is_wide: bool = False) -> Tensor:
    """Write :class:`ExactSums` of the rows of one tensor, divided, to ``output``.

    The words exist for one chunk only.

    ``rows`` is ``[rows, numel]`` in bfloat16, float16 or float32. ``output`` has any floating-point
    dtype, and may be the only row.
    """
    _check(rows, rows.shape[1], rows.shape[0])
    num_words = _NARROW
    if is_wide or _needs_width(rows):
        num_words = _WIDE
    scratch = _scratch(rows, num_words + 4)
    size = chunk_size(rows.device)
    for part, into in zip(rows.split(size, 1), output.split(size), strict=True):
        words = scratch[:num_words, : len(into)]
        _add(part, words, scratch[num_words:], is_first=True)
        _round(words, scratch[num_words:], into, divisor)
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


def _needs_width(rows: Tensor) -> bool:
    """Return whether two words are too few for values that can be read without waiting."""
    if not on_cpu(rows) or rows.numel() == 0:
        return False
    # One pass without a temporary, as in largest_magnitude.
    least, largest = torch.aminmax(rows)
    if -least.item() <= LARGEST and largest.item() <= LARGEST:
        return False
    return bool(exceeds_two_words(rows))


def on_cpu(tensor: Tensor) -> bool:
    """Return whether a value can be read without waiting for a device."""
    return tensor.is_cpu


def _scratch(rows: Tensor, count: int) -> Tensor:
    # Allocate once for all chunks. Page faults of fresh memory would cost more than the sum.
    size = min(chunk_size(rows.device), rows.shape[1])
    return torch.empty(count, size, dtype=torch.float64, device=rows.device)


def _add(rows: Tensor, words: Tensor, scratch: Tensor, *, is_first: bool) -> None:
    """Add rows to ``words [words, numel]``, or overwrite them if ``is_first``.

    The last word is at most 2^-24 before, and seven times that afterwards. ``scratch`` has two rows
    or more.
    """
    rest, rounded = scratch[:2, : words.shape[1]]
    for place, row in enumerate(rows):
        rest.copy_(row)
        if len(words) == _NARROW and not on_cpu(row):
            rest.masked_fill_(rest.abs() > LARGEST, torch.nan)
        starts = is_first and place == 0
        if place > 0 and place % _BETWEEN_CARRIES == 0:
            _carry(words, scratch[1:])
        for word, rounder in zip(words, _ROUNDERS[-len(words) :], strict=True):
            target = word if starts else rounded
            torch.add(rest, rounder, out=target)
            rest -= target.sub_(rounder)
            if not starts:
                word += rounded


def _carry(words: Tensor, scratch: Tensor) -> None:
    """Move the last word's multiple of 2^-23 to the word before."""
    _carry_into(words[-2], words[-1], _ROUNDERS[-2], scratch)


def _carry_into(coarse: Tensor, fine: Tensor, rounder: float, scratch: Tensor) -> None:
    carried = scratch[0, : fine.numel()]
    torch.add(fine, rounder, out=carried)
    coarse += carried.sub_(rounder)
    fine -= carried


def _round(words: Tensor, scratch: Tensor, output: Tensor, divisor: int) -> None:
    """Write the sum of the words as the nearest float32, divided and in the format of ``output``."""
    total, part, error, result = scratch[:, : words.shape[1]]
    if len(words) == _WIDE:
        # Each word then is at most half a step of the next coarser one, so the odd bit of a finer
        # sum survives.
        for place in range(_WIDE - 1, 0, -1):
            _carry_into(words[place - 1], words[place], _ROUNDERS[place - 1], scratch)
    finer = words[-1]
    for word in reversed(words[:-1]):
        finer = _add_to_odd(word, finer, total, part, error)
    single = result.view(torch.float32)[: words.shape[1]]
    single.copy_(finer)
    if divisor != 1:
        single.div_(divisor)
    output.copy_(single)


def _add_to_odd(coarse: Tensor, fine: Tensor, total: Tensor, part: Tensor, error: Tensor) -> Tensor:
    """Return ``coarse + fine``, rounded to odd. The last three are scratch."""
    # The exact rounding error of the addition (Knuth).
    sums = coarse + fine if fine is total else torch.add(coarse, fine, out=total)
    torch.sub(sums, coarse, out=part)
    torch.sub(sums, part, out=error)
    torch.sub(coarse, error, out=error)
    torch.sub(fine, part, out=part)
    error += part
    if not on_cpu(coarse):
        return _odd(sums, error)
    if any(value.item() != 0 for value in torch.aminmax(error)):
        places = error.nonzero().squeeze(1)
        sums[places] = _odd(sums[places], error[places])
    return sums


def _odd(total: Tensor, error: Tensor) -> Tensor:
    """Round ``total + error`` to odd. ``total`` is the nearest float64."""
    bits = total.view(torch.int64) - (error * total < 0).long()  # toward zero
    return (bits | (error != 0).long()).view(torch.float64)
