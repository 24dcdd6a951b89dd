"""PyTorch's matmuls of narrow numbers on CUDA, without a GPU: what they refuse, and what they are
defined to compute.

Each function stands for one of PyTorch's and gets exactly the arguments that the product hands to
it. First PyTorch's own meta function sees them, as tensors of CUDA without memory: it refuses other
dtypes, memory orders, sides, and shapes of scales. Then the codes are decoded, each with the scale
that lies at *its* place in memory by the published formulas, and multiplied in float64, rounded
once.

Source: ``ScaledBlas.cpp``, ``Blas.cpp``, ``GroupedMMUtils.h``, ``ScaledBlasUtils.cpp`` in
``aten/src/ATen/native`` of PyTorch; cuBLAS, "Narrow Precision Data Types Usage" and "1D Block
Scaling Factors Layout".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

REAL_SCALED_MM = torch.nn.functional.scaled_mm
REAL_SCALED_MM_V1 = torch._scaled_mm


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def on_meta(x: Tensor) -> Tensor:
    """Return a tensor as PyTorch's meta functions see it: they take a meta tensor for one of CUDA."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


# ── decoding ──────────────────────────────────────────────────────────────────────────────────────


def memory(x: Tensor) -> Tensor:
    """Return the elements of a tensor in the order in which they lie in memory."""
    return x.as_strided((x.numel(),), (1,))


def block_scales(scales: Tensor, rows: int, terms: int, name: str) -> Tensor:
    """Return float64 ``[rows, terms]`` of the scales of blocks, found at their places in memory:
    float32, column by column.
    """
    high, wide = map(int, name.removeprefix("BlockWise").split("x"))
    row = torch.arange(rows)[:, None]
    block = torch.arange(terms)[None, :] // wide
    num_blocks = -(-terms // wide)
    if high == 1:
        places = block * rows + row
    else:
        places = row // 128 * up(num_blocks, 4) + block
    return memory(scales)[places].double()


# ── products ──────────────────────────────────────────────────────────────────────────────────────


def scaled_mm_v1(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, out_dtype: torch.dtype, use_fast_accum: bool
) -> Tensor:  # fmt: skip
    """Compute ``torch._scaled_mm`` with float32 scales of tensors or rows."""
    REAL_SCALED_MM_V1(*map(on_meta, (a, b, scale_a, scale_b)), out_dtype=out_dtype)
    if scale_a.numel() > 1 or scale_b.numel() > 1:
        assert out_dtype == torch.bfloat16, "by rows, CUTLASS writes bfloat16 before PyTorch 2.13"
    assert not a.dtype == b.dtype == torch.float8_e5m2, "cuBLAS multiplies no two e5m2 matrices"
    values = (a.double() * scale_a.double()) @ (b.double() * scale_b.double())
    return values.to(out_dtype)


def scaled_mm(
    a: Tensor, b: Tensor, scales_a: list[Tensor], recipe_a: Any, scales_b: list[Tensor], recipe_b: Any,
    *, output_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute ``torch.nn.functional.scaled_mm`` with scales of blocks."""
    REAL_SCALED_MM(
        on_meta(a), on_meta(b), [*map(on_meta, scales_a)], recipe_a, [*map(on_meta, scales_b)], recipe_b,
        None, None, None, output_dtype,
    )  # fmt: skip
    terms = a.shape[1]
    lhs = a.double() * block_scales(scales_a[0], len(a), terms, recipe_a[0].name)
    rhs = b.double() * block_scales(scales_b[0], b.shape[1], terms, recipe_b[0].name).t()
    return (lhs @ rhs).to(output_dtype)
