"""Checksums of tensors: one number that a flipped bit changes, at the speed of memory.

A :func:`~narrowgauge.numerics.summation.fingerprint` hashes every element, which costs fifty times what reading it does. To find
damaged memory less is enough: 64-bit words are summed modulo 2^64 in chunks, which any single flipped bit changes, and the sums
of the chunks are added up with odd factors, so that exchanged chunks change the number too. What it does not see are changes
that cancel within a chunk, such as two exchanged words; several bits damaged at random cancel once in 2^64.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 15
"""Bytes that are summed into one word."""
_WORD = 8
# The increment of splitmix64, as a signed number: odd, with bits at random places.
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)


def checksum(x: Tensor) -> Tensor:
    """A 64-bit checksum of a tensor's bits; equal bits give equal ones, whatever the strides, the device and the offset.

    Invariant: tensors that differ in one bit have different ones.

    Args:
        x: any dtype and shape.
    Returns:
        int64, 0-d, on its device. Nothing waits for the device.

    Cost: one read: 0.1 ns a byte on one CPU thread; a copy where ``x`` is not contiguous or does not begin at a whole word.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 3.0])
        >>> y = x.clone()
        >>> y.view(torch.int32)[2] ^= 1 << 30
        >>> bool(checksum(x) == checksum(x[:])), bool(checksum(x) == checksum(y))
        (True, False)
    """
    sums = chunk_sums(x)
    if len(sums) == 1:
        return sums[0] * _FACTOR
    factors = (2 * torch.arange(len(sums), dtype=torch.int64, device=sums.device) + 1) * _FACTOR
    return (sums * factors).sum()


def word_sum(x: Tensor) -> Tensor:
    """The plain sum of a tensor's words, int64, 0-d: any flipped bit changes it too, and small tensors cost fewer calls."""
    return _words(x).sum()


def chunk_sums(x: Tensor) -> Tensor:
    """The sums of a tensor's words, int64 ``[chunks]``, for each chunk of :data:`CHUNK_BYTES`; the last may be shorter."""
    words = _words(x)
    size = CHUNK_BYTES // _WORD
    whole = len(words) // size * size
    sums = words[:whole].view(-1, size).sum(1)
    return sums if whole == len(words) else torch.cat([sums, words[whole:].sum().view(1)])


def _words(x: Tensor) -> Tensor:
    """A tensor's bytes in row-major order as int64, filled up with zeros."""
    flat = x.detach().contiguous().view(-1).view(torch.uint8)
    missing = -len(flat) % _WORD
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    elif flat.storage_offset() % _WORD or flat.data_ptr() % _WORD:
        flat = flat.clone()
    return flat.view(torch.int64)
