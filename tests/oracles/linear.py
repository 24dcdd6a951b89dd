"""A linear layer in float64: three products of operands that someone else has cast, and how far off
a product may be.

Straight through: the gradient of a cast is taken to be 1, so with x̂, ŵ and the two casts d̂, ď of
the output's gradient

    output = x̂ ŵᵀ + b      grad_input = d̂ ŵ      grad_weight = ďᵀ x̂      grad_bias = Σ d

where every operand is given as the matrix ``[rows, contraction]`` that it stands for. Float64 adds
products of such numbers (at most 24 bits each, times scales) with an error that nobody sees here,
but where a sum cancels. An error bound is made of what each step may add: a share of the sum of
magnitudes for the accumulation, then a share of the value for each rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

FLOAT64 = 2.0**-45
"""The oracle's own error: some hundred roundings."""
# Half of the spacing just above 1: the largest relative error of one rounding.
ROUNDING = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}


@dataclass(frozen=True)
class Product:
    """Exact sums of products, and the sums of their magnitudes."""

    value: Tensor
    magnitude: Tensor

    def off(self, accumulation: float, roundings: list[float]) -> Tensor:
        """How far a computed product may be off.

        Args:
            accumulation: error of the sum as a share of ``magnitude``.
            roundings: relative errors of what is done to the sum, in turn.
        """
        error = (accumulation + FLOAT64) * self.magnitude
        for rounding in roundings:
            error = error * (1 + rounding) + rounding * self.value.abs()
        return error


def product(lhs: Tensor, rhs: Tensor) -> Product:
    """``lhs [rows, contraction]`` times ``rhs [columns, contraction]`` transposed."""
    a = lhs.double()
    b = rhs.double().t()
    return Product(a @ b, a.abs() @ b.abs())


def integer_product(lhs: Tensor, rhs: Tensor) -> Tensor:
    """The same of integers, exactly: int64."""
    return torch.from_numpy(lhs.long().numpy() @ rhs.long().numpy().T)


def scaled_integers(
    sums: Tensor, by_row: Tensor, by_column: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Integer sums times a scale for each row, then one for each column, plus a bias: float32
    steps, rounded at the end.
    """
    values = (
        sums.numpy().astype(np.float32)
        * by_row.numpy().reshape(-1, 1)
        * by_column.numpy().reshape(1, -1)
    )
    if bias is not None:
        values = values + bias.float().numpy()
    assert values.dtype == np.float32
    return torch.from_numpy(values).to(dtype)
