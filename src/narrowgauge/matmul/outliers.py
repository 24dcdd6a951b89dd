"""Outlier features: the few columns of an input that int8 cannot hold beside the others multiply in 16 bits.

In large language models some features are hundreds of times larger than the rest, in every token; one scale per row that
takes them in leaves the others a handful of codes. Without those columns a row fits int8, and a thin 16-bit matmul adds them.
Source: Dettmers et al. 2022, LLM.int8() (2208.07339), section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.numerics.plain import add_product


def outlier_columns(x: Tensor, threshold: float) -> Tensor:
    """Which columns of ``[rows, columns]`` hold a magnitude of ``threshold`` or more (or a NaN): bool ``[columns]``."""
    return ~(x.abs().amax(0) < threshold) if len(x) else x.new_zeros(x.shape[1], dtype=torch.bool)


def without_outliers(x: Tensor, threshold: float) -> Tensor:
    """``x`` with zeros in its outlier columns."""
    return torch.where(outlier_columns(x, threshold), 0, x)


def multiply_outliers(result: Tensor, x: Tensor, weight: Tensor, threshold: float) -> Tensor:
    """``result`` plus the product of the outlier columns of ``x`` with those of ``weight [out, in]``.

    Cost: a thin matmul; on CUDA one synchronization, since how many columns there are must be known.
    """
    columns = outlier_columns(x, threshold).nonzero().view(-1)
    if not len(columns):
        return result
    return add_product(result, x[:, columns].to(result.dtype), weight[:, columns].to(result.dtype).t())
