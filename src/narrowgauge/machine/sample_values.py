"""The same numbers on every machine, from integers alone, and short hashes of bits."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_PRIME = 2**31 - 1


def fractions(number: int, seed: int = 1) -> Tensor:
    """Fractions in [0, 1), multiples of 2^-20, in an order without a pattern.

    Args:
        number: how many.
        seed: chooses them.
    Returns:
        float64 ``(number,)``, on the CPU.
    Example:
        >>> bool((fractions(5) * 2**20 % 1 == 0).all())
        True
    """
    state = torch.arange(1, number + 1, dtype=torch.int64, device="cpu") * 48271 + seed * 69621
    for _ in range(3):
        state = state % _PRIME * 48271 % _PRIME
    return (state % 2**20).double() / 2**20


def between(low: float, high: float, number: int, seed: int = 1) -> Tensor:
    """float32 values spread over an interval."""
    return (low + (high - low) * fractions(number, seed)).float()


def across_exponents(low: int, high: int, number: int) -> Tensor:
    """Positive float32 values of every binary exponent from ``low`` to below ``high``, equally often."""
    exponents = low + torch.arange(number, dtype=torch.int64, device="cpu") % (high - low)
    return torch.ldexp(1 + fractions(number), exponents).float()


def bits_of(values: Tensor) -> str:
    """Eight hexadecimal digits of a hash of a tensor's bytes."""
    whole = values.detach().contiguous().cpu().flatten().view(torch.uint8)
    return hashlib.sha256(bytes(whole.tolist())).hexdigest()[:8]
