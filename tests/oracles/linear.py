"""Products of operands that someone else has cast, in float64 and in integers.

Float64 adds products of such numbers (at most 24 bits each, times scales) with an error that nobody
sees here, but where a sum cancels.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Half of the spacing just above 1: the largest relative error of one rounding.
ROUNDING = {
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}


@dataclass(frozen=True)
class Product:
    """Exact sums of products, and the sums of their magnitudes."""

    value: Tensor
    magnitude: Tensor


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
