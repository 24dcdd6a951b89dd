"""Multiply two operands on a kernel that takes their codes (:mod:`.native`), or emulate it with the
same values.

Emulation: a narrow code times its block's power of two is exact in bfloat16, and also a code of up to
four significant bits times its e4m3 scale. A bfloat16 matmul multiplies such numbers without error
and adds in float32. It differs from a narrow kernel only in the order of the sum. A code times a
block's float32 scale is rounded to float32, and multiplied there. The float32 scale of a row or a
tensor multiplies the sum instead, in float32.
"""

import warnings
from functools import cache

import torch
from torch import Tensor

from narrowgauge.matmul import native
from narrowgauge.matmul.operand import CODES, Operand, bound, without_outer
from narrowgauge.numerics.float32_matmul import (
    EXACT_TERMS,
    INT32_TERMS,
    is_widened,
    multiply_plain,
    multiply_wide,
)
from narrowgauge.spec.computes import Cast, Compute, Product
from narrowgauge.spec.matmul_kernels import needs_kernel
from narrowgauge.torch_support.compile import call_compiled
from narrowgauge.torch_support.machine import multiplies
from narrowgauge.torch_support.torch_names import is_traced


def multiply(
    lhs: Operand,
    rhs: Operand,
    product: Product,
    shape: tuple[int, int],
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the matmul of two operands ``[rows, contraction]`` and ``[columns, contraction]``, in
    ``dtype`` and of ``shape [rows, columns]``, without padding.

    ``bias`` ``[columns]`` is added before the result is rounded. A left operand includes the scales
    of the right one's columns.
    """
    device = lhs.data.device
    if torch.is_autocast_enabled(device.type):
        with torch.autocast(device.type, enabled=False):  # the operands are cast already
            return multiply(lhs, rhs, product, shape, dtype, bias)
    left, right = lhs.outer, rhs.outer
    if product.right.granularity == "column":
        right = None
    is_native = lhs.data.dtype in CODES and rhs.data.dtype in CODES
    if not is_native or not native.has_kernel(product, device):
        a, b = _emulated(lhs, rhs, shape)
        is_result = left is right is None and a.dtype == dtype
        if is_result and bias is not None and not is_widened(dtype, device.type):
            return torch.addmm(bias.to(dtype), a, b)
        values = _multiply_values(a, b, is_result)
    else:
        # Float32 sums, so that a bias is added before the result is rounded.
        sum_dtype = dtype
        if bias is not None:
            sum_dtype = torch.float32
        rhs = rhs._replace(outer=right)
        values, left, right = native.multiply_codes(lhs, rhs, product, sum_dtype)
        if values.shape != shape:
            values = values[: shape[0], : shape[1]]
    return _scaled(values, left, right, bias, dtype)


def _scaled(
    values: Tensor, left: Tensor | None, right: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Return sums times the outer scales of both operands, plus a bias."""
    if left is right is bias is None:
        y = values.to(dtype)
        if y._is_view():  # which the model could not change in place
            y = y.clone(memory_format=torch.contiguous_format)
        return y
    if right is not None:
        right = right.reshape(1, -1)
    return call_compiled(values.numel(), bound(_scale, dtype=dtype), values, left, right, bias)


def _scale(
    values: Tensor, left: Tensor | None, right: Tensor | None, bias: Tensor | None, *, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    values = values.float()
    if left is not None:
        values = values * left
    if right is not None:
        values = values * right
    if bias is not None:
        values = values + bias.float()
    return values.to(dtype)


# ── emulation ─────────────────────────────────────────────────────────────────────────────────────


def _emulated(lhs: Operand, rhs: Operand, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the operands' values ``[rows, contraction]`` and ``[contraction, columns]``, in a dtype
    that other kernels multiply, without padding to blocks.
    """
    a, b = without_outer(lhs), without_outer(rhs)
    if a.shape != (shape[0], b.shape[1]) or b.shape[0] != shape[1]:
        size = min(a.shape[1], b.shape[1])  # of operands in other blocks
        a = a[: shape[0], :size].contiguous()
        b = b[: shape[1], :size].contiguous()
    if a.dtype != b.dtype:
        a = a.float()
        b = b.float()
    return a, b.t()


def _multiply_values(a: Tensor, b: Tensor, is_result: bool) -> Tensor:
    """Return the product of values or int8 codes, summed in float32 or wider.

    It is rounded to the operands' dtype only if it is the result: nothing scales it.
    """
    if a.dtype == torch.int8:
        return _multiply_integers(a, b)
    if is_result and not is_widened(a.dtype, a.device.type):
        return torch.mm(a, b)
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    if not is_traced():  # here nothing needs a gradient
        return multiply_wide(a, b, None, torch.float32)
    return multiply_plain(a, b, None, torch.float32)


def _multiply_integers(a: Tensor, b: Tensor) -> Tensor:
    """Return the exact product of int8 codes ``[rows, contraction]`` and ``[contraction,
    columns]``, rounded to float32.
    """
    rows, columns = a.shape[0], b.shape[1]
    multiply_part = torch._int_mm
    terms = INT32_TERMS
    if a.is_cuda:
        # Its kernel takes more than 16 rows.
        a, b = native.filled(a, least_rows=17), native.filled(b)
    elif is_widened(torch.int8, "cpu"):
        multiply_part = torch.mm
        terms = EXACT_TERMS
        a, b = a.float(), b.float()
    else:  # a long transposed left side is slow
        a, b = _row_major(a.contiguous()), _row_major(b)
    if a.shape[1] <= terms:
        total = multiply_part(a, b)
    else:
        parts = []
        for lhs, rhs in zip(a.split(terms, 1), b.split(terms, 0), strict=True):
            parts.append(multiply_part(lhs.contiguous() if a.is_cuda else lhs, rhs))
        total = torch.stack(parts).sum(0, dtype=torch.float64)
    if total.dtype is torch.int32:
        return total[:rows, :columns]  # widened where it is scaled
    # The product of 0 and a negative float is -0: integers have none.
    return total[:rows, :columns].float() + 0.0


def _row_major(x: Tensor) -> Tensor:
    """Return a contiguous, row-major matrix.

    With both strides 1, the CPU's integer matmul returns uninitialized memory.
    """
    if x.is_contiguous():
        return x.as_strided(x.shape, (max(x.shape[1], 1), 1))
    return x


# ── what is emulated ──────────────────────────────────────────────────────────────────────────────


def operand_dtype(cast: Cast) -> torch.dtype:
    """Return the result dtype of a cast: of codes with scales of rows or tensors, or of values."""
    has_codes = cast.block is None and cast.element.bits == 8
    if cast.is_wide or has_codes:
        return getattr(torch, cast.format)
    return getattr(torch, cast.values_format)


class EmulationNotice(UserWarning):
    """Warned once per compute and device whose matmuls are emulated."""


@cache
def warn_if_emulated(compute: Compute, device: torch.device) -> None:
    formats = set()
    for product in compute.products.values():
        both = {product.left.format, product.right.format}
        if needs_kernel(product):
            is_native = native.has_kernel(product, device)
        else:
            is_native = device.type != "cpu" or all(map(multiplies, both))
        if not is_native:
            formats |= both
    if formats and device.type != "meta":
        warnings.warn(
            f"{compute.name} multiplies {' and '.join(sorted(formats))}, for which there is no "
            f"kernel on this {device.type}; it is emulated here with the same values, and no faster "
            "than a plain layer.",
            EmulationNotice,
            stacklevel=4,
        )
