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
    if product.right.granularity == "column":
        rhs = rhs._replace(outer=None)
    if bias is not None and bias.shape[0] < rhs.data.shape[0]:
        bias = F.pad(bias, (0, rhs.data.shape[0] - bias.shape[0]))
    kernel = None
    if lhs.data.dtype in CODES and rhs.data.dtype in CODES:
        kernel = native.kernel_here(product, lhs.data.device)
    if kernel is None:
        with torch.autocast(lhs.data.device.type, enabled=False):  # the operands are cast already
            y = _emulate(lhs, rhs, dtype, bias)
    else:
        y = native.multiply_codes(kernel, lhs, rhs, product, dtype, bias)
    if (*y.shape,) == shape and not y._is_view():
        return y
    # A view could not be changed in place by the model.
    return y[: shape[0], : shape[1]].clone(memory_format=torch.contiguous_format)


def _emulate(lhs: Operand, rhs: Operand, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Multiply the operands' values in a format that the device multiplies."""
    a = _widened(lhs)
    b = _widened(rhs)
    if a.shape[1] != b.shape[1]:  # one is padded to other blocks, with zeros
        size = min(a.shape[1], b.shape[1])
        a = a[:, :size].contiguous()
        b = b[:, :size].contiguous()
    if a.dtype != b.dtype:
        a = a.float()
        b = b.float()
    b = b.t()
    has_scales = lhs.outer is not None or rhs.outer is not None
    if a.dtype == torch.int8:
        values = _multiply_integers(a, b)
    elif is_widened(a.dtype, a.device.type):
        values = multiply_plain(a, b, None, torch.float32)
    elif bias is not None and not has_scales and a.dtype == dtype:
        return torch.addmm(bias.to(dtype), a, b)
    else:
        values = torch.mm(a, b)
    return native.scaled(values, lhs.outer, rhs.outer, bias, dtype)


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


# ── reports of emulation ──────────────────────────────────────────────────────────────────────────


class EmulationNotice(UserWarning):
    """Warned once per compute and device whose matmuls are emulated."""


@cache
def warn_if_emulated(compute: Compute, device: torch.device) -> None:
    words = describe_matmuls(compute, device)
    if not words.endswith("natively.") and device.type != "meta":
        warnings.warn(words, EmulationNotice, stacklevel=4)


def describe_matmuls(compute: Compute, device: torch.device) -> str:
    """Describe in one line how a compute's matmuls run on a device."""
    emulated: set[str] = set()
    for product in compute.products.values():
        if not is_native(product, device):
            emulated |= {product.left.format, product.right.format}
    here = "this CPU"
    if device.type == "cuda":
        here = f"this {torch.cuda.get_device_name(device)}"
    if not emulated:
        return f"{compute.name} multiplies on {here} natively."
    how = "(exact values, no speed-up)"
    if {"bfloat16", "float16", "int8"}.issuperset(emulated):
        how = "by float32 products (same values, float32's speed)"
    elif device.type == "cpu" and not is_widened(torch.bfloat16, "cpu"):
        how = "(exact values, each sum rounded to bfloat16 once; no speed-up)"
    names = " and ".join(sorted(emulated))
    return f"{compute.name} multiplies {names}, which {here} cannot; it is emulated here {how}."


# ── the products ──────────────────────────────────────────────────────────────────────────────────


def _widened(operand: Operand) -> Tensor:
    """Return the operand's data in a dtype that other kernels multiply."""
    if operand.inner is not None:
        return block_values(operand)
    if operand.data.dtype not in CODES:
        return operand.data
    widened: Tensor = fused(operand.data.numel(), _to_bfloat16, operand.data)
    return widened


def _to_bfloat16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16)


def _multiply_integers(a: Tensor, b: Tensor) -> Tensor:
    """Return the exact product of int8 codes ``[rows, contraction]`` and ``[contraction,
    columns]``, rounded to float32.
    """
    shape = a.shape[0], b.shape[1]
    terms = INT32_TERMS
    multiply_part: Any = torch._int_mm
    if a.is_cuda:
        # Its kernel takes more than 16 rows.
        a, b = native.filled(a, least_rows=17), native.filled(b)
    elif is_widened(torch.int8, "cpu"):
        terms = EXACT_TERMS
        multiply_part = torch.mm
        a, b = a.float(), b.float()
    else:  # a long transposed left side is slow
        a, b = _row_major(a.contiguous()), _row_major(b)
    sums: list[Tensor] = []
    for lhs, rhs in zip(a.split(terms, 1), b.split(terms, 0), strict=True):
        sums.append(multiply_part(lhs.contiguous() if a.is_cuda else lhs, rhs))
    total = sums[0]
    if len(sums) > 1:
        total = torch.stack(sums).sum(0, dtype=torch.float64)
    if a.is_cuda:
        return total[: shape[0], : shape[1]]  # widened where it is scaled
    if terms == EXACT_TERMS:  # the product of 0 and a negative number is -0: integers have none
        total = total + 0.0
    return total.float()


def _row_major(x: Tensor) -> Tensor:
    """Return a contiguous, row-major matrix.

    With both strides 1, the CPU's integer matmul returns uninitialized memory.
    """
    if x.is_contiguous():
        return x.as_strided(x.shape, (max(x.shape[1], 1), 1))
    return x
