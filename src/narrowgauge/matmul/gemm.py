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
from narrowgauge.matmul.operand import CODES, PAIRS, Operand, block_values
from narrowgauge.numerics.widening import INT32_TERMS, is_widened, multiply_plain, sum_integers
from narrowgauge.spec.computes import Cast, Compute, Product
from narrowgauge.spec.kernels import Kernel, needs_kernel
from narrowgauge.torch_support.compile import fused
from narrowgauge.torch_support.machine import multiplies


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
        return _scaled(_multiply_integers(a, b), by_row, by_column, bias, dtype)
    if is_widened(a.dtype, a.device.type):
        values = multiply_plain(a, b, None, torch.float32)
        return _scaled(values, by_row, by_column, bias, dtype)
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
    if {"bfloat16", "float16", "int8"}.issuperset(emulated):
        how = "by float32 products (same values, float32's speed)"
    elif device.type == "cpu" and not is_widened(torch.bfloat16, "cpu"):
        how = "(exact values, each sum rounded to bfloat16 once; no speed-up)"
    else:
        how = "(exact values, no speed-up)"
    return f"{compute.name} multiplies {names}, which {here} cannot; it is emulated here {how}."


# ── the products ──────────────────────────────────────────────────────────────────────────────────


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


def _multiply_integers(a: Tensor, b: Tensor) -> Tensor:
    """Return the exact product of int8 codes ``[rows, contraction]`` and ``[contraction,
    columns]``, rounded to float32.
    """
    if a.is_cuda:
        return native.sum_integers(a, b)
    if is_widened(torch.int8, "cpu"):
        widened: Tensor = _multiply_widened_integers(a, b)
        return widened
    # A long transposed left side is slow.
    a = _row_major(a.contiguous())
    b = _row_major(b)
    total = torch.zeros((), dtype=torch.int32, device="cpu")
    for lhs, rhs in zip(a.split(INT32_TERMS, 1), b.split(INT32_TERMS, 0), strict=True):
        part = torch._int_mm(lhs, rhs)
        if a.shape[1] <= INT32_TERMS:
            return part.float()
        total = total.double() + part
    return total.float()


# Opaque to a compiler: it works in reused memory.
@torch.library.custom_op("narrowgauge::multiply_widened_integers", mutates_args=())
def _multiply_widened_integers(a: Tensor, b: Tensor) -> Tensor:
    return sum_integers(a, b).clone()


@_multiply_widened_integers.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)


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
