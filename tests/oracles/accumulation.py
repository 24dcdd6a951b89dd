"""Sums of micro-batch gradients and the loss scale by definition: one addition, one decision after
the other.

Two float32 operations are done as numpy's float32 does them, which rounds each once; everything
else is quotients, remainders and lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass
class Scale:
    """A loss scale that a person would keep on paper."""

    scale: float = 2.0**16
    growth_interval: int = 2000
    hysteresis: int = 2
    floor: float = 1.0
    ceiling: float = 2.0**24
    overflows_in_a_row: int = 0
    good_in_a_row: int = 0
    overflows: int = 0
    held: int = 0

    def step(self, overflowed: bool) -> None:
        """One step, overflowed or not."""
        if not overflowed:
            self.overflows_in_a_row = 0
            self.good_in_a_row += 1
            if self.good_in_a_row == self.growth_interval:
                self.good_in_a_row = 0
                self.scale = min(self.scale * 2, self.ceiling)
            return
        self.overflows += 1
        self.overflows_in_a_row += 1
        self.good_in_a_row = 0
        if self.overflows_in_a_row >= self.hysteresis:
            before = self.scale
            self.scale = max(self.scale / 2, self.floor)
            self.held += before == self.scale

    def as_dict(self) -> dict[str, Any]:
        """The state by name."""
        return {
            "scale": self.scale,
            "lives": max(self.hysteresis - self.overflows_in_a_row, 0),
            "good_steps": self.good_in_a_row,
            "num_overflows": self.overflows,
            "num_held": self.held,
        }
