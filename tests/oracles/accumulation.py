"""Sums of micro-batch gradients by definition: one addition after the other.

Two float32 operations are done as numpy's float32 does them, which rounds each once; everything
else is quotients, remainders and lists.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from oracles import codes

Singles = NDArray[np.float32]


def bits(values: Singles) -> codes.Integers:
    """The bits of float32 values, 0 … 2^32 - 1."""
    return values.view(np.uint32).astype(np.int64)


def values(bits: codes.Integers) -> Singles:
    """The float32 values of bits."""
    return bits.astype(np.uint32).view(np.float32)


def nearest(exact: Singles, dropped: int = 16) -> Singles:
    """Rounded to fewer mantissa bits, ties to even."""
    return values(codes.cut(bits(exact), dropped))


def float32_sum(gradients: Sequence[Singles]) -> Singles:
    """One float32 addition after the other, the first of them free."""
    total = gradients[0].copy()
    for gradient in gradients[1:]:
        total = total + gradient
    return total
