"""Multiply two operands on a kernel that takes their codes (:mod:`.native`), or emulate it with the
same values.

Emulation: a narrow code times its block's power of two is exact in bfloat16. So is a code of up to
four significant bits times its e4m3 scale. A bfloat16 matmul multiplies such numbers without error
and adds in float32. It differs from a narrow kernel only in the order of the sum. A code times a
block's float32 scale is rounded to float32, and multiplied there. The float32 scale of a row or a
tensor multiplies the result instead, which the CPU's matmul has already rounded to bfloat16 once.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.matmul import native
from narrowgauge.matmul.operand import CODES, PAIRS, Operand, block_values
from narrowgauge.numerics.widening import EXACT_TERMS, INT32_TERMS, is_widened, multiply_plain
from narrowgauge.spec.computes import Cast, Compute, Product
from narrowgauge.spec.kernels import needs_kernel
from narrowgauge.torch_support.compile import fused
from narrowgauge.torch_support.machine import multiplies


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
    place = lhs.data.device.type
    if torch.is_autocast_enabled(place):
        with torch.autocast(place, enabled=False):  # the operands are cast already
            return multiply(lhs, rhs, product, shape, dtype, bias)
    if product.right.granularity == "column":
        rhs = rhs._replace(outer=None)
    if bias is not None and bias.shape[0] < rhs.data.shape[0]:
        bias = F.pad(bias, (0, rhs.data.shape[0] - bias.shape[0]))
    left, right = lhs.outer, rhs.outer
    kernel = None
    if lhs.data.dtype in CODES and rhs.data.dtype in CODES:
        kernel = native.kernel_here(product, lhs.data.device)
    if kernel is not None:
        # Float32 sums, so that a bias is added before the result is rounded.
        sum_dtype = dtype
        if bias is not None:
            sum_dtype = torch.float32
        values, left, right = native.multiply_codes(kernel, lhs, rhs, product, sum_dtype)
    else:
        a, b = _emulated(lhs, rhs)
        if bias is not None and left is right is None and _adds_bias(a, dtype):
            values = torch.addmm(bias.to(dtype), a, b)
            bias = None
        else:
            values = _multiply_values(a, b)
    y = _scaled(values, left, right, bias, dtype)
    if (*y.shape,) == shape and not y._is_view():
        return y
    # A view could not be changed in place by the model.
    return y[: shape[0], : shape[1]].clone(memory_format=torch.contiguous_format)


def _scaled(
    values: Tensor, left: Tensor | None, right: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Return sums times the outer scales of the left and the right operand, plus a bias."""
    if left is right is bias is None:
        return values.to(dtype)
    if left is not None:
        left = left.reshape(-1, 1)
    if right is not None:
        right = right.reshape(1, -1)
    result = torch.empty(values.shape, dtype=dtype, device=values.device)
    fused(values.numel(), _scale, values, left, right, bias, result)
    return result


def _scale(
    values: Tensor,
    by_row: Tensor | None,
    by_column: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    values = values.float()
    if by_row is not None:
        values = values * by_row
    if by_column is not None:
        values = values * by_column
    if bias is not None:
        values = values + bias.float()
    out.copy_(values)


# ── emulation ─────────────────────────────────────────────────────────────────────────────────────


def _emulated(lhs: Operand, rhs: Operand) -> tuple[Tensor, Tensor]:
    """Return the operands' values ``[rows, contraction]`` and ``[contraction, columns]``, in a dtype
    that other kernels multiply.
    """
    a, b = [_widened(operand) for operand in (lhs, rhs)]
    if a.shape[1] != b.shape[1]:  # one is padded to other blocks, with zeros
        size = min(a.shape[1], b.shape[1])
        a = a[:, :size].contiguous()
        b = b[:, :size].contiguous()
    if a.dtype != b.dtype:
        a = a.float()
        b = b.float()
    return a, b.t()


def _adds_bias(a: Tensor, dtype: torch.dtype) -> bool:
    """Return whether PyTorch's product adds a bias before it rounds."""
    return a.dtype == dtype and not is_widened(dtype, a.device.type)


def _multiply_values(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == torch.int8:
        return _multiply_integers(a, b)
    if is_widened(a.dtype, a.device.type):
        product: Tensor = multiply_plain(a, b, None, torch.float32)
        return product
    return torch.mm(a, b)


def _widened(operand: Operand) -> Tensor:
    if operand.inner is not None:
        return block_values(operand)
    if operand.data.dtype in CODES:
        return operand.data.to(torch.bfloat16)
    return operand.data


def _multiply_integers(a: Tensor, b: Tensor) -> Tensor:
    """Return the exact product of int8 codes ``[rows, contraction]`` and ``[contraction,
    columns]``, rounded to float32.
    """
    rows, columns = a.shape[0], b.shape[1]
    terms = INT32_TERMS
    if a.is_cuda:
        # Its kernel takes more than 16 rows.
        a, b = native.filled(a, least_rows=17), native.filled(b)
    elif is_widened(torch.int8, "cpu"):
        terms = EXACT_TERMS
        a, b = a.float(), b.float()
    else:  # a long transposed left side is slow
        a, b = _row_major(a.contiguous()), _row_major(b)
    multiply_part: Any = torch.mm if a.dtype == torch.float32 else torch._int_mm
    parts = []
    for lhs, rhs in zip(a.split(terms, 1), b.split(terms, 0), strict=True):
        parts.append(multiply_part(lhs.contiguous() if a.is_cuda else lhs, rhs))
    total: Tensor = parts[0]
    if len(parts) > 1:
        total = torch.stack(parts).sum(0, dtype=torch.float64)
    if a.is_cuda:
        return total[:rows, :columns]  # widened where it is scaled
    # The product of 0 and a negative float is -0: integers have none.
    return total.float() + 0.0


def _row_major(x: Tensor) -> Tensor:
    """Return a contiguous, row-major matrix.

    With both strides 1, the CPU's integer matmul returns uninitialized memory.
    """
    if x.is_contiguous():
        return x.as_strided(x.shape, (max(x.shape[1], 1), 1))
    return x


# ── what is emulated ──────────────────────────────────────────────────────────────────────────────


def is_native(product: Product, device: torch.device) -> bool:
    """Return whether a kernel of this device multiplies the operands' own codes."""
    if needs_kernel(product):
        return native.kernel_here(product, device) is not None
    return device.type != "cpu" or (
        multiplies(product.left.format) and multiplies(product.right.format)
    )


def operand_dtype(cast: Cast, product: Product, device: torch.device) -> torch.dtype:
    """Return the result dtype of a cast, one side of ``product``: of codes with scales of rows or
    tensors always, of codes in blocks where a kernel takes them.
    """
    name = cast.values_format
    if cast.is_wide:
        name = cast.format
    elif cast.block is None and cast.carrier:
        name = cast.carrier
    elif is_native(product, device):
        if cast.element.bits == 4:
            return PAIRS
        name = cast.carrier
    return getattr(torch, name)  # type: ignore[no-any-return]


class EmulationNotice(UserWarning):
    """Warned once per compute and device whose matmuls are emulated."""


@cache
def warn_if_emulated(compute: Compute, device: torch.device) -> None:
    formats: set[str] = set()
    for product in compute.products.values():
        if not is_native(product, device):
            formats |= {product.left.format, product.right.format}
    if not formats or device.type == "meta":
        return
    how = "with the same values, and no faster than bfloat16"
    if {"bfloat16", "float16", "int8"}.issuperset(formats):
        how = "by float32 products (same values, float32's speed)"
    chip = "this CPU"
    if device.type == "cuda":
        chip = f"this {torch.cuda.get_device_name(device)}"
    warnings.warn(
        f"{compute.name} multiplies {' and '.join(sorted(formats))}, which {chip} cannot; it is "
        f"emulated here {how}.",
        EmulationNotice,
        stacklevel=4,
    )
