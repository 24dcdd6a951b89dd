"""PyTorch's fused attention on a processor that does not multiply bfloat16: in float32, rounded once.

Its CPU kernel multiplies tiles of queries, keys and values in their own format, and its backward pass is 5 to 20 times slower
in bfloat16 than in float32 where the processor has no instructions for it. Models call it themselves, so it is mended below
them: the kernel is given widened operands and its results are rounded. What is kept for backward stays bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from narrowgauge._torch import wrap_cpu_kernel
from narrowgauge.numerics.widening import is_widened
from narrowgauge.spec.processor import multiplies

_NAME = "_scaled_dot_product_flash_attention_for_cpu"
_NARROW = (torch.bfloat16, torch.float16)


@lru_cache(None)
def widen_attention() -> None:
    """Let fused attention of 16-bit operands compute in float32 wherever the processor does not multiply bfloat16.

    Law: float32 operands, and every operand on a processor that multiplies bfloat16, give the bits they gave before.

    Cost: float32 copies of one call's operands while it runs.
    """
    for name in (_NAME, f"{_NAME}_backward"):
        wrap_cpu_kernel(f"aten::{name}", _in_float32)


def _in_float32(kernel: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a kernel gives for widened operands, in their format; log-sums and the like stay float32."""
    dtype = next(each.dtype for each in args if isinstance(each, Tensor))
    if dtype not in _NARROW or multiplies("bfloat16") or not is_widened(dtype, "cpu"):
        return kernel(*args, **options)
    results = kernel(*map(_widened, args), **{name: _widened(value) for name, value in options.items()})
    is_forward = len(results) == 2  # output and log-sums; backward gives three gradients
    return tuple(each if is_forward and place else each.to(dtype) for place, each in enumerate(results))


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _NARROW else value
