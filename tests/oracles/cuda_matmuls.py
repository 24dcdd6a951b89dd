"""PyTorch's matmuls of narrow numbers on CUDA, without a GPU: what they refuse, and what they are
defined to compute.

Each function stands for one of PyTorch's and gets exactly the arguments that the product hands to
it. First PyTorch's own meta function sees them, as tensors of CUDA without memory: it refuses other
dtypes, memory orders, sides, and shapes of scales. Then the codes are multiplied in float64, and the
product is rounded once.

Source: ``ScaledBlas.cpp`` in ``aten/src/ATen/native`` of PyTorch; cuBLAS, "Narrow Precision Data Types
Usage".
"""

import torch
from torch import Tensor

REAL_SCALED_MM_V1 = torch._scaled_mm


def on_meta(x: Tensor) -> Tensor:
    """Return a tensor as PyTorch's meta functions see it: they take a meta tensor for one of CUDA."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


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
