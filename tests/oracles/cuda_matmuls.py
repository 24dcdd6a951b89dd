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
FP4 = torch.float4_e2m1fn_x2
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def on_meta(x: Tensor) -> Tensor:
    """Return a tensor as PyTorch's meta functions see it: they take a meta tensor for one of CUDA."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


# ── decoding ──────────────────────────────────────────────────────────────────────────────────────


def memory(x: Tensor) -> Tensor:
    """Return the elements of a tensor in the order in which they lie in memory."""
    return x.as_strided((x.numel(),), (1,))


def decoded(x: Tensor) -> Tensor:
    """Return float64 values of codes; pairs of four bits lie along the dimension of stride 1, the
    first in the low half.
    """
    if x.dtype != FP4:
        return x.double()
    turned = x.view(torch.uint8) if x.stride(1) == 1 else x.view(torch.uint8).t()
    table = torch.tensor(E2M1, dtype=torch.float64)
    low = table[(turned & 15).long()]
    high = table[(turned >> 4).long()]
    values = torch.stack([low, high], -1).flatten(1)
    return values if x.stride(1) == 1 else values.t()


def tiled_offset(outer: Tensor, inner: Tensor, num_inner: int) -> Tensor:
    """Return where the scale of a row and a block lies: cuBLAS's formula within a tile of 128 × 4,
    tiles row by row.
    """
    tile = (outer // 128) * (num_inner // 4) + inner // 4
    return tile * 512 + (outer % 32) * 16 + (outer % 128 // 32) * 4 + inner % 4


def block_scales(scales: Tensor, rows: int, terms: int, name: str) -> Tensor:
    """Return float64 ``[rows, terms]`` of the scales of blocks, found at their places in memory: in
    tiles, or float32 column by column.
    """
    high, wide = map(int, name.removeprefix("BlockWise").split("x"))
    row = torch.arange(rows)[:, None]
    block = torch.arange(terms)[None, :] // wide
    num_blocks = -(-terms // wide)
    if wide < 128:
        places = tiled_offset(row, block, up(num_blocks, 4))
    elif high == 1:
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
    values = (decoded(a) * scale_a.double()) @ (decoded(b) * scale_b.double())
    return values.to(out_dtype)


def scaled_mm(
    a: Tensor, b: Tensor, scales_a: list[Tensor], recipe_a: Any, scales_b: list[Tensor], recipe_b: Any,
    swizzle_a: Any = (), swizzle_b: Any = (), *, output_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute ``torch.nn.functional.scaled_mm`` with scales of blocks, and perhaps of tensors."""
    names = [recipe[0].name for recipe in (recipe_a, recipe_b)]
    if a.dtype == FP4 and names[0] == "BlockWise1x32":
        # PyTorch 2.13's meta function counts half of mxfp4's scales.
        assert output_dtype == torch.bfloat16, "mxfp4 writes bfloat16"
        orders = [order.name for order in (*swizzle_a, *swizzle_b)]
        assert orders == ["SWIZZLE_32_4_4"] * 2
    else:
        REAL_SCALED_MM(
            on_meta(a), on_meta(b), [*map(on_meta, scales_a)], recipe_a, [*map(on_meta, scales_b)], recipe_b,
            swizzle_a or None, swizzle_b or None, None, output_dtype,
        )  # fmt: skip
    terms = a.shape[1] * (2 if a.dtype == FP4 else 1)
    lhs = decoded(a) * block_scales(scales_a[0], len(a), terms, names[0])
    rhs = decoded(b) * block_scales(scales_b[0], b.shape[1], terms, names[1]).t()
    values = lhs @ rhs
    if len(scales_a) == 2:  # PyTorch multiplies the two with each other, in float32
        values = values * scales_a[1].mul(scales_b[1]).double()
    return values.to(output_dtype)
