"""Plain products: operands of 16 or 32 bits as they are, without scales.

Where the processor multiplies their format, that is PyTorch's own function. Elsewhere, and where the weight is narrower than
what it is multiplied with (bfloat16 weights in a float32 compute), it is one operator for all three matmuls, by float32
products rounded once; the operands are kept for backward as they came.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.numerics.widening import float32_tiles, is_widened


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x · weightᵀ + bias`` in the dtype of ``x``, on any processor.

    Invariant: each value is the sum of the products of ``x`` and the weight in that dtype, and of the bias, rounded once.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]``; rounded to the dtype of ``x`` where it is wider.
        bias: ``[out]``.
    Returns:
        ``[..., out]``; gradients come in each operand's own dtype.

    Cost: PyTorch's, or that of a float32 matmul and of widening tiles of both operands.
    Example:
        >>> linear(torch.ones(2, 3), torch.ones(4, 3, dtype=torch.bfloat16))
        tensor([[3., 3., 3., 3.],
                [3., 3., 3., 3.]])
    """
    is_narrower = weight.dtype.itemsize < x.dtype.itemsize
    weight = weight if is_narrower else weight.to(x.dtype)
    if not is_narrower and not is_widened(x.dtype, x.device.type):
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))
    y: Tensor = multiply_plain(x.reshape(-1, x.shape[-1]), weight.t(), bias, x.dtype)
    return y.view(*x.shape[:-1], weight.shape[0])


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a [rows, contraction] · b [contraction, columns]`` in their own dtype, on any processor."""
    if not is_widened(a.dtype, a.device.type):
        return a @ b
    product: Tensor = multiply_plain(a, b, None, a.dtype)
    return product


def add_product(x: Tensor, a: Tensor, b: Tensor, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """``beta x + alpha a · b`` of matrices in one dtype, rounded once, on any processor."""
    if not is_widened(x.dtype, x.device.type):
        return torch.addmm(x, a, b, beta=beta, alpha=alpha)
    return torch.addmm(x.float(), a.float(), b.float(), beta=beta, alpha=alpha).to(x.dtype)


@torch.library.custom_op("narrowgauge::multiply_plain", mutates_args=())
def multiply_plain(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``a [rows, contraction] · b [contraction, columns] + bias [columns]``, rounded once to ``dtype``."""
    if a.device.type != "cpu":
        product = torch.mm(a.float(), b.float())
        return (product if bias is None else product + bias.float()).to(dtype)
    result = torch.empty(a.shape[0], b.shape[1], dtype=dtype)
    wide = None if bias is None else bias.float()
    for tile, values in float32_tiles(a, b):
        result[tile].copy_(values if wide is None else values.add_(wide[tile[1]]))
    return result


@multiply_plain.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


@torch.library.custom_op("narrowgauge::bias_gradient", mutates_args=())
def bias_gradient(grad: Tensor) -> Tensor:
    """The gradient ``[out]`` of a bias: the sum of the output's gradient ``[rows, out]``.

    An operator of its own, since a compiler would sum values that it has not rounded yet, unless something else reads them.
    """
    return grad.sum(0)


@bias_gradient.register_fake
def _(grad: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, bias, _ = inputs
    ctx.save_for_backward(a, b)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    a, b = ctx.saved_tensors
    by_a = multiply_plain(grad, b.t(), None, a.dtype) if ctx.needs_input_grad[0] else None
    # Lying as the weight does, of which b is the transpose.
    by_b = multiply_plain(grad.t(), a, None, b.dtype).t() if ctx.needs_input_grad[1] else None
    by_bias = bias_gradient(grad).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
    return by_a, by_b, by_bias, None


multiply_plain.register_autograd(_gradients, setup_context=_keep)
