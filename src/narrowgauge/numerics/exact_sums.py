"""Sums that do not depend on order: the norm of many tensors, and their elementwise sum.

Floating-point addition is not associative, integer addition is. So both sums count steps of a fixed
grid.

**The norm** is exact. A float32's square is a whole number below 2^48 times an even power of two.
Word ``k`` of :data:`WORDS` int64 counts steps of 2^(2k - 386). A square adds its low 24 bits to one
word and its high bits to the word twelve places on. Parts and ranks merge by one SUM of the words,
in any order. 2^39 squares fit. The total is rounded once to float64.

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

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from narrowgauge.errors import FormatError
from narrowgauge.numerics.chunks import chunk_size, flat_chunks
from narrowgauge.numerics.dtensor import add_up, by_group, local_of
from narrowgauge.torch_support.torch_names import host_tensor


def largest_magnitude(x: Tensor) -> Tensor:
    """Return the largest absolute value, float32 0-d.

    NaN wins over infinity. It is 0 for no values.
    """
    if not x.numel():
        return torch.zeros((), dtype=torch.float32, device=x.device)
    # One pass and no temporary: on a CPU 14 times as fast as the maximum of abs(x).
    low, high = torch.aminmax(x.detach())
    return torch.maximum(low.abs(), high.abs()).float()


WORDS = 315
"""Counts of squares. The last is of infinities, and 2^32 times that of NaNs."""
_LOW_BITS = (1 << 24) - 1


def add_squares_(words: Tensor, x: Tensor) -> None:
    """Add the squares of values in bfloat16, float16 or float32 to the words."""
    bits = x.float().view(torch.int32).long()
    exponent = bits >> 23 & 255
    fraction = bits & 0x7FFFFF
    is_normal = (exponent > 0).long()
    square = (fraction | is_normal << 23) ** 2
    place = exponent.clamp(min=1) + 43
    is_finite = exponent < 255
    is_nan = (fraction != 0).long()
    words.index_add_(0, place + 12, torch.where(is_finite, square >> 24, 0))
    place = torch.where(is_finite, place, WORDS - 1)
    words.index_add_(0, place, torch.where(is_finite, square & _LOW_BITS, 1 + (is_nan << 32)))


def rounded_total(words: Tensor) -> Tensor:
    """Return the sum of squares that words count, rounded once: float64 0-d, NaN or infinite if a
    value is.

    No word is negative. The host does not wait for a GPU.
    """
    if words.is_cpu:
        return host_tensor(_rounded_integer(words), torch.float64)
    value = _rounded_digits(_digits(words[:-1]))
    not_finite = words[-1]
    value = torch.where(not_finite > 0, math.inf, value)
    return torch.where(not_finite >> 32 > 0, math.nan, value)


def _rounded_integer(words: Tensor) -> float:
    """Return the total as the quotient of Python integers, which rounds once."""
    counts = words.numpy()
    if counts[-1]:
        return math.nan if counts[-1] >> 32 else math.inf
    total = 0
    places = counts.nonzero()[0]
    for place, count in zip(places.tolist(), counts[places].tolist(), strict=True):
        total += count << 2 * place
    return total / 2**386


_DIGIT = (1 << 26) - 1
"""The largest digit of 26 bits: of 13 words, each two bits on."""
_BELOW = 4
"""Zeros before the digits."""


def _digits(counts: Tensor) -> Tensor:
    """Return the digits of the sum that words count, the lowest first."""
    rows = pad(counts, (0, -len(counts) % 13)).view(-1, 13)
    shifts = 2 * torch.arange(13, device=counts.device)
    digits = pad(torch.zeros_like(rows[:, 0]), (_BELOW, 3))
    for place, part in enumerate((rows & _DIGIT, rows >> 26 & _DIGIT, rows >> 52), start=_BELOW):
        digits[place : place + len(rows)] += (part << shifts).sum(1)
    for _ in range(3):
        digits = (digits & _DIGIT) + pad(digits >> 26, (1, -1))
    # Now each is at most 2^26. A full digit passes on the carry of the digits below it.
    places = torch.arange(len(digits), device=counts.device)
    start = torch.where(digits != _DIGIT, places, 0).cummax(0).values
    carries = (digits[start] > _DIGIT).long()
    return (digits + pad(carries, (1, -1))) & _DIGIT


def _rounded_digits(digits: Tensor) -> Tensor:
    """Return the float64 nearest to a number of 26-bit digits: two exact parts, and one sum."""
    place = torch.arange(len(digits), device=digits.device)
    top = torch.where(digits > 0, place, _BELOW).amax()
    first, second, third, fourth = digits[top - place[:4]]
    is_below = ((place < top - 3) & (digits > 0)).any()
    high = (first << 26) + second
    low = (third << 26) + (fourth | is_below)
    exponent = (top - 3 - _BELOW) * 26 - 386
    unit = (exponent + 1023 << 52).view(torch.float64)
    return (high.double() * 2.0**52 + low.double()) * unit


@torch.no_grad()
def exact_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the exact sum of squares of all tensors, at least one, rounded to float64, 0-d; NaN or
    infinite if a value is.

    For DTensors it is that of the whole, with the bits of one process that holds all. All ranks of
    their meshes pass the same tensors in the same order.

    Cost: one read of this rank's data, and one small message.
    """
    groups = by_group(tensors)
    device = local_of(tensors[0]).device
    totals = torch.zeros(len(groups), WORDS, dtype=torch.int64, device=device)
    for words, (_, members) in zip(totals, groups, strict=True):
        for tensor in members:
            for (chunk,) in flat_chunks(local_of(tensor)):
                add_squares_(words, chunk.reshape(-1))
    return total_over_ranks(totals, [ranks for ranks, _ in groups])


def total_over_ranks(words: Tensor, ranks: Sequence[Sequence[Any]]) -> Tensor:
    """Return the :func:`rounded_total` of words ``[groups, WORDS]``, each summed over ranks."""
    parts = [add_up(part, members, "sum") for part, members in zip(words, ranks, strict=True)]
    return rounded_total(torch.stack(parts).sum(0))


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
