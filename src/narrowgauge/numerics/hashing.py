"""Hashes: one number for the bits of a tensor, and well mixed seeds.

The hash of a tensor is the sum, modulo 2^64, of a hash of every element's bits and position. An
integer sum does not depend on order. So the hashes of shards add up to the hash of the whole.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import FormatError
from narrowgauge.numerics.chunks import chunk_size, flat_chunks
from narrowgauge.torch_support.proof import INTEGERS

_MODULUS = 1 << 64
GOLDEN = 0x9E3779B97F4A7C15
"""Odd, so that its multiples are far from each other."""
# The finalizer's factors, as signed numbers.
_MIX_1 = 0xBF58476D1CE4E5B9 - _MODULUS
_MIX_2 = 0x94D049BB133111EB - _MODULUS


def splitmix64(z: Any) -> Any:
    """Mix the bits of int64 tensors, or of Python integers, which stay in 0 … 2^64 - 1.

    Source: Steele, Lea, Flood, OOPSLA 2014, doi 10.1145/2660193.2660195.
    """
    # torch shifts int64 arithmetically. Mask the copies of the sign bit.
    for places, factor in ((30, _MIX_1), (27, _MIX_2)):
        z = (z ^ ((z >> places) & ((1 << (64 - places)) - 1))) * factor
        if isinstance(z, int):
            z %= _MODULUS
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def step_seed(seed: int, step: int) -> int:
    """Return 32 well mixed bits of (seed, step), as a signed number."""
    return signed(splitmix64((seed * 0xD1342543DE82EF95 + step * GOLDEN) % _MODULUS), 32)


def named_seed(seed: int, name: str) -> int:
    """Return 32 well mixed bits of (seed, name), as a signed number."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return step_seed(seed, int.from_bytes(digest, "little"))


def tensor_hash(x: Tensor, offset: int = 0) -> Tensor:
    """Return :func:`fingerprint` as an int64 0-d tensor on the device of ``x``.

    Do not wait for the device.
    """
    size = x.element_size()
    if size not in INTEGERS:
        raise FormatError(
            f"Cannot hash {x.dtype}: its elements have {size} bytes, not 1, 2, 4 or 8.",
            "Hash its parts, such as torch.view_as_real(x).",
        )
    x = x.detach().resolve_conj().resolve_neg()
    most = min(chunk_size(x.device), x.numel())
    places = torch.arange(most, dtype=torch.int64, device=x.device) * signed(GOLDEN)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    place = offset
    for (chunk,) in flat_chunks(x):
        bits = chunk.view(INTEGERS[size]).to(torch.int64)
        if size in (2, 4):
            bits = bits & ((1 << (8 * size)) - 1)
        total += splitmix64(bits + places[: chunk.numel()] + signed((place + 1) * GOLDEN)).sum()
        place += chunk.numel()
    return total


def fingerprint(x: Tensor, *, offset: int = 0) -> int:
    """Return the fingerprint of a tensor's bits, a 64-bit hash.

    It is ``Σ mix(bits_i + (offset + i + 1)·0x9E3779B97F4A7C15) mod 2^64`` over elements in
    row-major order, with the finalizer of splitmix64 as ``mix``. Strides, device and chunks do not
    matter. Shards at their own offsets add up (:func:`combine`). It ignores shape and dtype.

    Args:
        x: any dtype of 1, 2, 4 or 8 bytes, any shape and stride.
        offset: position of ``x``'s first element in the whole tensor, in elements.
    Returns:
        0 … 2^64 − 1; 0 for no elements.
    Raises:
        FormatError: elements of another size.
    Cost: one read, 3 ns an element on one CPU thread. A tensor that is not contiguous is copied.
    Example:
        >>> x = torch.arange(6.0)
        >>> fingerprint(x) == combine([fingerprint(x[:2]), fingerprint(x[2:], offset=2)])
        True
    """
    return int(tensor_hash(x, offset)) % _MODULUS


def signed(value: int, bits: int = 64) -> int:
    """Return the low ``bits`` of a number as a signed integer."""
    half = 1 << (bits - 1)
    return (value + half) % (2 * half) - half


def combine(fingerprints: Iterable[int]) -> int:
    """Return the fingerprint of a whole tensor from its shards' fingerprints, each taken at its own
    offset.

    >>> combine([2**64 - 1, 3])
    2
    """
    return sum(fingerprints) % _MODULUS


def fingerprint_all(named: Mapping[str, Tensor | int]) -> str:
    """Return one fingerprint for a set of named tensors, such as a model's ``state_dict``: 16
    hexadecimal digits.

    It is the sum modulo 2^64 of a 64-bit BLAKE2b of each (fingerprint, name). A fingerprint may
    stand for its tensor.

    >>> fingerprint_all({"w": torch.ones(2)}) == fingerprint_all({"v": torch.ones(2)})
    False
    """
    hashes = []
    for name, x in named.items():
        number = fingerprint(x) if isinstance(x, Tensor) else x
        pair = number.to_bytes(8, "little") + name.encode()
        hashes.append(int.from_bytes(hashlib.blake2b(pair, digest_size=8).digest(), "little"))
    return f"{combine(hashes):016x}"
