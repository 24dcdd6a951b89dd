"""Widening: compute matmuls of 8- and 16-bit operands in float32, for processors without their format.

The product of two bfloat16 or int8 numbers is exact in float32. Operands are widened, multiplied
and added in float32, and the result is rounded once. It equals a matmul in their format, except for
the order of the sum. Sums of integers are exact: 1,024 products of two int8 codes fit float32's 24
bits.

:func:`linear`, :func:`matmul` and :func:`add_product` are PyTorch's own functions if the processor
multiplies the operands' format. Otherwise one operator does all three matmuls. It saves the
original operands for backward.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.spec.formats import dtype_name
from narrowgauge.torch_support.machine import multiplies
from narrowgauge.torch_support.torch_names import is_traced

EXACT_TERMS = 1 << 10
"""Number of products of 128 × 128 whose sum fits float32's 24 bits."""
INT32_TERMS = 1 << 17
"""Number of products of 127 × 127 whose sum fits int32: codes end at ±127."""


def is_widened(dtype: torch.dtype, device_type: str) -> bool:
    """Return whether products of two operands of this dtype are computed in float32 on this device
    type.
    """
    return device_type == "cpu" and not multiplies(dtype_name(dtype))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x [..., in] · weightᵀ [in, out] + bias [out]`` in the dtype of ``x``, rounded once,
    on any processor.

    The weight is converted to that dtype first. Gradients have each operand's own dtype.
    """
    weight = weight.to(x.dtype)
    if not is_widened(x.dtype, x.device.type):
        if bias is not None:
            bias = bias.to(x.dtype)
        return F.linear(x, weight, bias)
    y = multiply_plain(x.reshape(-1, x.shape[-1]), weight.t(), bias, x.dtype)
    return y.view(*x.shape[:-1], weight.shape[0])


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a [rows, contraction] · b [contraction, columns]`` in their own dtype, on any
    processor.
    """
    if not is_widened(a.dtype, a.device.type):
        return a @ b
    return multiply_plain(a, b, None, a.dtype)


def add_product(x: Tensor, a: Tensor, b: Tensor, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """Return ``beta x + alpha a · b`` of matrices in one dtype, rounded once, on any processor."""
    if not is_widened(x.dtype, x.device.type):
        return torch.addmm(x, a, b, beta=beta, alpha=alpha)
    return x.float().addmm_(a.float(), b.float(), beta=beta, alpha=alpha).to(x.dtype)


def multiply_wide(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``a [rows, contraction] · b [contraction, columns] + bias [columns]``, rounded once to
    ``dtype``.
    """
    with torch.autocast(a.device.type, enabled=False):
        values = torch.mm(a.float(), b.float())
    if bias is not None:
        values += bias.float()
    return values.to(dtype)


# An operator, for compilers and gradients. Its call takes longer than a small product.
multiply_plain = torch.library.custom_op(
    "narrowgauge::multiply_plain", multiply_wide, mutates_args=()
)


@multiply_plain.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


def bias_gradient(grad: Tensor) -> Tensor:
    """Return the gradient ``[out]`` of a bias: the sum of the output's gradient ``[rows, out]``."""
    # Opaque to a compiler. It would sum unrounded values, in another order.
    if not is_traced():
        return grad.sum(0)
    return _sum_of_rows(grad)


@torch.library.custom_op("narrowgauge::bias_gradient", mutates_args=())
def _sum_of_rows(grad: Tensor) -> Tensor:
    return grad.sum(0)


@_sum_of_rows.register_fake
def _(grad: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, bias, _ = inputs
    ctx.save_for_backward(a, b)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    a, b = ctx.saved_tensors
    by_a = by_b = by_bias = None
    if ctx.needs_input_grad[0]:
        by_a = multiply_plain(grad, b.t(), None, a.dtype)
    if ctx.needs_input_grad[1]:
        # In the weight's memory order: b is the weight's transpose.
        by_b = multiply_plain(grad.t(), a, None, b.dtype).t()
    if ctx.needs_input_grad[2]:
        by_bias = bias_gradient(grad).to(ctx.bias_dtype)
    return by_a, by_b, by_bias, None


multiply_plain.register_autograd(_gradients, setup_context=_keep)
