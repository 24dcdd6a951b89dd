"""Fingerprints and checksums: one number that says whether two tensors hold the same bits.

A :func:`fingerprint` is the sum, modulo 2^64, of a hash of every element's bits and place. An integer sum does not depend
on order, so the fingerprints of shards add up to that of the whole.

A :func:`checksum` runs at the speed of memory, fifty times as fast, and is enough to find damaged memory: 64-bit words are
summed modulo 2^64 in chunks, which any single flipped bit changes, and the sums of the chunks are added up with odd
factors, so that exchanged chunks change the number too. It misses changes that cancel within a chunk, such as two exchanged
words; several bits damaged at random cancel once in 2^64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from narrowgauge.errors import FormatError
from narrowgauge.numerics.summation import chunk_size, flat_chunks

CHUNK_BYTES = 1 << 15
"""Bytes that are summed into one word."""
_WORD = 8
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULUS = 1 << 64
# The increment and the finalizer's factors of splitmix64.
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# The increment as a signed number: odd, with bits at random places.
_FACTOR = _GOLDEN - _MODULUS


def fingerprint(x: Tensor, *, offset: int = 0) -> int:
    """A 64-bit hash: two tensors with equal hashes hold the same bits in the same places.

    Invariant: ``Σ mix(bits_i + (offset + i + 1)·0x9E3779B97F4A7C15) mod 2^64``, ``i`` the row-major index, ``bits_i`` the
    element's bits as an unsigned number, ``mix`` the finalizer of splitmix64. Strides, device and chunks do not enter.
    Shards at their own offsets add up to the whole (:func:`combine`). It sees a swap, a sign, one ulp, −0, and NaN
    payloads. It does not see shape or dtype: zeros of two bytes and of four are alike.

    Args:
        x: any dtype of 1, 2, 4 or 8 bytes, any shape and stride.
        offset: the place of ``x``'s first element in the whole tensor, in elements.

    Returns:
        0 … 2^64 − 1; 0 for no elements.

    Raises:
        FormatError: elements of another size.

    Cost: one read, 3 ns an element on one CPU thread; temporaries under 16 MiB; waits for the device per chunk.

    Example:
        >>> x = torch.arange(6.0)
        >>> fingerprint(x) == combine([fingerprint(x[:2]), fingerprint(x[2:], offset=2)])
        True

    Source:
        splitmix64: Steele, Lea, Flood, OOPSLA 2014, doi 10.1145/2660193.2660195.
    """
    size = x.element_size()
    if size not in _INTEGER_OF_SIZE:
        raise FormatError(f"fingerprint takes elements of 1, 2, 4 or 8 bytes, and {x.dtype} has {size}.")
    x = x.detach().resolve_conj().resolve_neg()
    strides = torch.arange(min(chunk_size(x.device), x.numel()), dtype=torch.int64, device=x.device) * _signed(_GOLDEN)
    total, place = 0, offset
    for (chunk,) in flat_chunks(x):
        bits = chunk.view(_INTEGER_OF_SIZE[size]).to(torch.int64)
        if size in (2, 4):
            bits = bits & ((1 << (8 * size)) - 1)
        total += int(_mix(bits + strides[: chunk.numel()] + _signed((place + 1) * _GOLDEN)).sum())
        place += chunk.numel()
    return total % _MODULUS


def _mix(z: Tensor) -> Tensor:
    """The finalizer of splitmix64 on int64, whose products wrap modulo 2^64."""
    z = (z ^ _shifted(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shifted(z, 27)) * _signed(_MIX_2)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, places: int) -> Tensor:
    # torch shifts int64 arithmetically: the copies of the sign bit are masked away.
    return (z >> places) & ((1 << (64 - places)) - 1)


def _signed(value: int) -> int:
    """``value`` modulo 2^64 as the int64 with the same bits."""
    value %= _MODULUS
    return value - _MODULUS if value >> 63 else value


def combine(fingerprints: Iterable[int]) -> int:
    """The fingerprint of a whole tensor from those of its shards, each taken at its own offset: the sum modulo 2^64.

    >>> combine([2**64 - 1, 3])
    2
    """
    return sum(fingerprints) % _MODULUS


def fingerprint_all(named: Mapping[str, Tensor | int]) -> str:
    """One fingerprint for a set of named tensors, such as a model's ``state_dict``: 16 hexadecimal digits.

    Invariant: the sum modulo 2^64 of a 64-bit BLAKE2b of each (fingerprint, name): the order of the mapping does not enter,
    and exchanging two tensors' names does. In place of a tensor its fingerprint may stand, as after :func:`combine`.

    >>> fingerprint_all({"w": torch.ones(2)}) == fingerprint_all({"v": torch.ones(2)})
    False
    """
    numbers = {name: x if isinstance(x, int) else fingerprint(x) for name, x in named.items()}
    pairs = (number.to_bytes(8, "little") + name.encode() for name, number in numbers.items())
    hashes = (hashlib.blake2b(pair, digest_size=8).digest() for pair in pairs)
    return f"{combine(int.from_bytes(digest, 'little') for digest in hashes):016x}"


def checksum(x: Tensor) -> Tensor:
    """A 64-bit checksum of a tensor's bits, int64 0-d on its device; strides, device and offset do not enter.

    Invariant: tensors that differ in one bit have different ones.

    Cost: one read: 0.1 ns a byte on one CPU thread; a copy where ``x`` is not contiguous or does not begin at a whole word.
        Nothing waits for the device.

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
    """The sums of a tensor's words in each chunk of :data:`CHUNK_BYTES`, int64 ``[chunks]``; the last chunk may be shorter."""
    words = _words(x)
    size = CHUNK_BYTES // _WORD
    whole = len(words) // size * size
    sums = words[:whole].view(-1, size).sum(1)
    return sums if whole == len(words) else torch.cat([sums, words[whole:].sum().view(1)])


def _words(x: Tensor) -> Tensor:
    """A tensor's bytes in row-major order as int64, padded with zeros."""
    flat = x.detach().contiguous().view(-1).view(torch.uint8)
    missing = -len(flat) % _WORD
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    elif flat.storage_offset() % _WORD or flat.data_ptr() % _WORD:
        flat = flat.clone()
    return flat.view(torch.int64)
