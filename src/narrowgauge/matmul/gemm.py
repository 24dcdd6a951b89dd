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

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.matmul import native
from narrowgauge.matmul.operand import CODES, PAIRS, Operand, block_dtype, block_values
from narrowgauge.numerics.widening import (
    INT32_TERMS,
    SCRATCH,
    float32_tiles,
    is_widened,
    sum_integers,
)
from narrowgauge.spec.computes import Cast, Compute, Product
from narrowgauge.spec.kernels import Kernel, needs_kernel
from narrowgauge.torch_support.compile import fused
from narrowgauge.torch_support.machine import multiplies

# Size of one panel of sums: 4 MiB. Sums, values and result then fit a last-level cache.
_PANEL_ELEMENTS = 1 << 20


def multiply(
    lhs: Operand,
    rhs: Operand,
    dims: tuple[int, int],
    product: Product,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the matmul of two operands in ``dtype``: ``[rows, columns]``, padded like the
    operands.

    ``dims`` are the contracted dimensions: 1 for ``[rows, contraction]`` or ``[columns,
    contraction]``, 0 for its transpose. ``bias`` ``[columns]`` is added before the result is
    rounded.
    """
    columns = rhs.data.shape[1 - dims[1]]
    if bias is not None and len(bias) < columns:
        bias = F.pad(bias, (0, columns - len(bias)))
    kernel = _kernel(lhs, rhs, product)
    if kernel is not None:
        # Add the bias before the result is rounded: in the kernel, or to float32 sums.
        inside = None
        result_dtype = dtype
        if bias is not None and native.adds_bias(kernel, product, bias, dtype):
            inside = bias
            bias = None
        elif bias is not None:
            result_dtype = torch.float32
        fast = product.accumulation == "fast"
        return _scaled(
            *native.multiply_codes(kernel, lhs, rhs, dims, result_dtype, inside, fast=fast),
            bias,
            dtype,
        )
    a = _widened(lhs, dims[0])
    b = _widened(rhs, dims[1])
    if dims[0] == 0:
        a = a.t()
    if dims[1] == 1:
        b = b.t()
    if a.shape[1] != b.shape[0]:  # one is padded to other blocks, with zeros
        size = min(a.shape[1], b.shape[0])
        a = a[:, :size].contiguous()
        b = b[:size].contiguous()
    if a.dtype != b.dtype:
        a = a.float()
        b = b.float()
    by_row = lhs.by_row()
    by_column = rhs.by_column()
    if a.dtype == torch.int8:
        return _multiply_integers(a, b, by_row, by_column, bias, dtype)
    if is_widened(a.dtype, a.device.type):
        return _multiply_widened(a, b, by_row, by_column, bias, dtype)
    if bias is not None and by_row is by_column is None and a.dtype == dtype:
        return torch.addmm(bias.to(dtype), a, b)
    return _scaled(torch.mm(a, b), by_row, by_column, bias, dtype)


def _kernel(lhs: Operand, rhs: Operand, product: Product) -> Kernel | None:
    """Return this device's kernel for two operands; ``None`` for values, as of a cast shared with
    an emulated product.
    """
    are_codes = lhs.data.dtype in CODES and rhs.data.dtype in CODES
    if are_codes:
        return native.kernel_here(product, lhs.data.device)
    return None


def is_opaque(lhs: Operand, rhs: Operand, product: Product) -> bool:
    """Return whether the product is opaque to compilers: the CPU's products by tiles."""
    if _kernel(lhs, rhs, product) is not None:
        return False
    return lhs.data.is_cpu and (
        lhs.data.dtype == torch.int8 or is_widened(_widened_dtype(lhs), "cpu")
    )


def is_native(product: Product, device: torch.device) -> bool:
    """Return whether a kernel of this device multiplies the operands' own codes."""
    if needs_kernel(product):
        return native.kernel_here(product, device) is not None
    return device.type != "cpu" or (
        multiplies(product.left.format) and multiplies(product.right.format)
    )


def operand_dtype(
    cast: Cast, product: Product, device: torch.device, *, as_codes: bool = False
) -> torch.dtype:
    """Return the result dtype of a cast, one side of ``product``.

    With ``as_codes`` return the codes' dtype even if the matmul widens them, since they are saved
    for backward.
    """
    if cast.is_wide:
        return getattr(torch, cast.format)  # type: ignore[no-any-return]
    has_codes = cast.block is None and bool(cast.carrier)
    if is_native(product, device):
        if cast.element.bits == 4:
            return PAIRS
        return getattr(torch, cast.carrier)  # type: ignore[no-any-return]
    if has_codes and (as_codes or cast.carrier == "int8"):
        return getattr(torch, cast.carrier)  # type: ignore[no-any-return]
    return getattr(torch, cast.values_format)  # type: ignore[no-any-return]


# ── reports of emulation ──────────────────────────────────────────────────────────────────────────


class EmulationNotice(UserWarning):
    """Warned once per compute and device whose matmuls are emulated."""


_WARNED: set[tuple[str, str]] = set()


def warn_if_emulated(compute: Compute, device: torch.device) -> None:
    if (compute.name, str(device)) in _WARNED or device.type == "meta":
        return
    _WARNED.add((compute.name, str(device)))
    if emulated_formats(compute, device):
        warnings.warn(describe_matmuls(compute, device), EmulationNotice, stacklevel=3)


def emulated_formats(compute: Compute, device: torch.device) -> list[str]:
    emulated = [product for product in compute.products.values() if not is_native(product, device)]
    return sorted({cast.format for product in emulated for cast in (product.left, product.right)})


def describe_matmuls(compute: Compute, device: torch.device) -> str:
    """Describe in one line how a compute's matmuls run on a device."""
    here = "this CPU"
    if device.type != "cpu":
        here = f"this {torch.cuda.get_device_name(device)}"
    emulated = emulated_formats(compute, device)
    if not emulated:
        return f"{compute.name} multiplies on {here} natively."
    names = " and ".join(emulated)
    is_plain = {"bfloat16", "float16", "int8"}.issuperset(emulated)
    how = (
        "by float32 products (same values, float32's speed)"
        if is_plain
        else "(exact values, no speed-up)"
    )
    return f"{compute.name} multiplies {names}, which {here} cannot; it is emulated here {how}."


# ── the products ──────────────────────────────────────────────────────────────────────────────────


def _widened_dtype(operand: Operand) -> torch.dtype:
    if operand.inner is not None:
        return block_dtype(operand.inner)
    return torch.bfloat16 if operand.data.dtype in CODES else operand.data.dtype


def _widened(operand: Operand, dim: int) -> Tensor:
    """Return the operand's data in a dtype that other kernels multiply."""
    if operand.inner is not None:
        return block_values(operand, dim)
    if operand.data.dtype not in CODES:
        return operand.data
    widened: Tensor = fused(operand.data.numel(), _to_bfloat16, operand.data)
    return widened


def _to_bfloat16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16)


def _multiply_widened(
    a: Tensor,
    b: Tensor,
    by_row: Tensor | None,
    by_column: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``a [rows, contraction] @ b [contraction, columns]`` by float32 matmuls, scaled and
    rounded once.
    """
    result = torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=a.device)
    for (rows, columns), values in float32_tiles(a, b):
        scales = _part(by_row, rows, 0), _part(by_column, columns, 1)
        _scale_into(result[rows, columns], values, *scales, _part(bias, columns, 0))
    return result


def _part(scale: Tensor | None, span: slice, dim: int) -> Tensor | None:
    """Return the scales of some rows or columns. A single scale applies to all."""
    if scale is None or scale.shape[dim] == 1:
        return scale
    return scale.narrow(dim, span.start, span.stop - span.start)


def _multiply_integers(
    a: Tensor,
    b: Tensor,
    by_row: Tensor | None,
    by_column: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the exact integer product, scaled.

    On a CPU, work in panels of rows and scale their sums in the cache.
    """
    if a.is_cuda:
        return _scaled(native.sum_integers(a, b), by_row, by_column, bias, dtype)
    result = out = torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=a.device)
    is_turned = a.stride(0) == 1 and a.shape[0] > b.shape[1] and bias is None
    if is_turned:
        # The kernel is slower with a long transposed left side: compute the transposed product.
        a, b, out = b.t(), a.t(), result.t()
        by_row, by_column = (None if scale is None else scale.t() for scale in (by_column, by_row))
    height = max(_PANEL_ELEMENTS // max(b.shape[1], 1), 1)
    for first in range(0, a.shape[0], height):
        part = out[first : first + height]
        scale = _part(by_row, slice(first, first + len(part)), 0)
        # Scale by row first, then by column, also if the product is transposed.
        if is_turned:
            scales = (by_column, scale)
        else:
            scales = (scale, by_column)
        _scale_into(part, _sum_integers(a[first : first + height], b), *scales, bias)
    return result


def _sum_integers(a: Tensor, b: Tensor) -> Tensor:
    """Return the exact product, rounded to float32, in memory that the next call overwrites."""
    if is_widened(torch.int8, "cpu"):
        return sum_integers(a, b)
    sums = SCRATCH.take("sums", torch.int32, a.shape[0], b.shape[1])
    values = SCRATCH.take("values", torch.float32, *sums.shape)
    a = _row_major(a)
    b = _row_major(b)
    if a.shape[1] <= INT32_TERMS:
        torch._int_mm(a, b, out=sums)
        # In a loop with bfloat16 stores, a compiled kernel converts integers one by one. PyTorch's
        # copy is four times faster.
        return values.copy_(sums)
    parts = zip(a.split(INT32_TERMS, 1), b.split(INT32_TERMS, 0), strict=True)
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for lhs, rhs in parts:
        total = total + torch._int_mm(lhs, rhs)
    return values.copy_(total)


def _row_major(x: Tensor) -> Tensor:
    """Return a contiguous, row-major matrix.

    With both strides 1, the CPU's integer matmul returns uninitialized memory.
    """
    if x.is_contiguous():
        return x.as_strided(x.shape, (max(x.shape[1], 1), 1))
    return x


def _scaled(
    values: Tensor,
    by_row: Tensor | None,
    by_column: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    if by_row is by_column is bias is None:
        return values.to(dtype)
    result = torch.empty(values.shape, dtype=dtype, device=values.device)
    _scale_into(result, values, by_row, by_column, bias)
    return result


def _scale_into(
    out: Tensor,
    values: Tensor,
    by_row: Tensor | None,
    by_column: Tensor | None,
    bias: Tensor | None,
) -> None:
    if by_row is by_column is bias is None:
        out.copy_(values)
    else:
        fused(values.numel(), _scale, values, by_row, by_column, bias, out)


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
