"""Matmuls of two operands, on a kernel that takes their codes or emulated with the same values.

Emulation: a narrow code times the power of two of its block is exact in bfloat16, and so is a four-bit code times its e4m3
scale. A bfloat16 matmul multiplies such numbers without error and adds in float32, so it differs from a narrow kernel's only in
the order of the sum. A code times a float32 scale (of a row, of a tensor) is not exact in bfloat16: those scales multiply the
result instead, which the CPU's matmul has already rounded to bfloat16 once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.machine.processor import multiplies
from narrowgauge.matmul.operand import Operand
from narrowgauge.numerics.fusion import fused
from narrowgauge.numerics.rounding import power_below
from narrowgauge.numerics.widening import SCRATCH, float32_tiles, is_widened, sum_integers
from narrowgauge.spec.computes import Cast, Compute, Product

# Sums of one panel: 4 MiB, so that sums, values and result fit a last-level cache.
_PANEL_ELEMENTS = 1 << 20
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
OCP_ON_AMD = ("gfx950", "gfx1200", "gfx1201")
_EXACT_TERMS = 1 << 17
"""The number of products of 127 × 127 whose sum fits int32."""


def multiply(
    left: Operand,
    right: Operand,
    dims: tuple[int, int],
    product: Product,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """The matmul of two operands: ``[rows, columns]``, padded as the operands are.

    Args:
        left: ``[rows, contraction]`` where ``dims[0]`` is 1, its transpose where it is 0.
        right: ``[columns, contraction]`` where ``dims[1]`` is 1, its transpose where it is 0.
        dims: the dimension of each that is contracted.
        product: which of a compute's matmuls; gives the accumulation.
        dtype: of the result.
        bias: ``[columns]``, added before the result is rounded.
    """
    a = left.data if dims[0] == 1 else left.data.t()
    b = right.data.t() if dims[1] == 1 else right.data
    if bias is not None and len(bias) < b.shape[1]:
        bias = F.pad(bias, (0, b.shape[1] - len(bias)))
    by_row, by_column = _along(left.outer, rows=True), _along(right.outer, rows=False)
    if a.dtype == torch.int8:
        return _multiply_integers(a, b, by_row, by_column, bias, dtype)
    if is_native(product, a.device) and a.dtype in _FLOAT8:
        return _multiply_float8(a, b, [by_row, by_column], product, bias, dtype)
    a, b = _widened(a), _widened(b)
    if is_widened(a.dtype, a.device.type):
        return multiply_widened(a, b, by_row, by_column, bias, dtype)
    if by_row is None and by_column is None and a.dtype == dtype:
        return torch.mm(a, b) if bias is None else torch.addmm(bias.to(dtype), a, b)
    return _scaled(torch.mm(a, b), by_row, by_column, bias, dtype)


def with_channels_back(left: Operand, right: Operand) -> tuple[Operand, Operand]:
    """Move the channels' scales of a smoothed left operand into the right one: the same product.

    A factor per channel cannot be taken out of the sum, and the codes have no room for it; a code times a power of two is
    exact in bfloat16. So 16-bit numbers are multiplied, even on a chip that multiplies the codes.

    Args:
        left: codes, and scales ``[1, channels]``, each the same number times a power of two.
        right: ``[columns, channels]``.
    """
    assert left.outer is not None
    powers = power_below(left.outer)
    columns = right.data.to(torch.bfloat16) * powers.to(torch.bfloat16)
    return Operand(left.data.to(torch.bfloat16), (left.outer / powers)[:, :1]), Operand(columns, right.outer)


def is_native(product: Product, device: torch.device) -> bool:
    """Whether a kernel of this device multiplies the operands' own codes."""
    formats = {product.left.format, product.right.format}
    if "tfloat32" in formats:
        return False  # rounded here, multiplied as float32
    if product.is_wide or formats == {"int8"}:
        return device.type != "cpu" or all(multiplies(name) for name in formats)
    if device.type != "cuda" or not all(name.startswith("float8") for name in formats):
        return False
    return product.left.block is None and _multiplies_float8(device)


def operand_dtype(cast: Cast, product: Product, device: torch.device, *, as_codes: bool = False) -> torch.dtype:
    """The dtype of the result of a cast, one side of ``product``.

    With ``as_codes`` it is that of codes even where the matmul widens them, because they are kept for backward.
    """
    if cast.format == "int8":
        return torch.int8
    if cast.format == "tfloat32":
        return torch.float32
    if cast.is_wide:
        return getattr(torch, cast.format)  # type: ignore[no-any-return]
    if cast.block is None and (as_codes or is_native(product, device)):
        return getattr(torch, cast.format)  # type: ignore[no-any-return]
    return torch.bfloat16


class EmulationNotice(UserWarning):
    """Warned once per compute and device: its matmuls are emulated there."""


_WARNED: set[tuple[str, str]] = set()


def warn_if_emulated(compute: Compute, device: torch.device, stacklevel: int = 3) -> None:
    if (compute.name, str(device)) in _WARNED or device.type == "meta":
        return
    _WARNED.add((compute.name, str(device)))
    if emulated_formats(compute, device):
        warnings.warn(describe_matmuls(compute, device), EmulationNotice, stacklevel=stacklevel)


def emulated_formats(compute: Compute, device: torch.device) -> list[str]:
    emulated = [product for product in compute.products.values() if not is_native(product, device)]
    return sorted({cast.format for product in emulated for cast in (product.left, product.right)})


def describe_matmuls(compute: Compute, device: torch.device) -> str:
    """One line: how a compute's matmuls run on a device."""
    here = "this CPU" if device.type == "cpu" else f"this {torch.cuda.get_device_name(device)}"
    emulated = emulated_formats(compute, device)
    if not emulated:
        return f"{compute.name} multiplies on {here} natively."
    names = " and ".join(emulated)
    is_plain = {"bfloat16", "float16", "int8"}.issuperset(emulated)
    how = "by float32 products (same values, float32's speed)" if is_plain else "(exact values, no speed-up)"
    return f"{compute.name} multiplies {names}, which {here} cannot; it is emulated here {how}."


@lru_cache(None)
def _multiplies_float8(device: torch.device) -> bool:
    """Whether a GPU multiplies the formats of OCP: NVIDIA's from Ada on, AMD's from gfx950 on (gfx942 takes fnuz alone).

    Source: ``_scaled_mm`` of PyTorch 2.13, which refuses the others.
    """
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0] in OCP_ON_AMD
    return torch.cuda.get_device_capability(device) >= (8, 9)


def _along(outer: Tensor | None, *, rows: bool) -> Tensor | None:
    if outer is None:
        return None
    flat = outer.reshape(-1)
    return flat[:, None] if rows else flat[None, :]


def _widened(x: Tensor) -> Tensor:
    if x.dtype not in _FLOAT8:
        return x
    widened: Tensor = fused(x.numel(), _to_bfloat16, x)
    return widened


def _to_bfloat16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16)


def multiply_widened(
    a: Tensor, b: Tensor, by_row: Tensor | None, by_column: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``a [rows, contraction] @ b [contraction, columns]`` by float32 matmuls, scaled and rounded once."""
    result = torch.empty(a.shape[0], b.shape[1], dtype=dtype)
    for (rows, columns), values in float32_tiles(a, b):
        scales = _part(by_row, rows, 0), _part(by_column, columns, 1)
        _scale_into(result[rows, columns], values, *scales, None if bias is None else bias[columns])
    return result


def _part(scale: Tensor | None, which: slice, dim: int) -> Tensor | None:
    """The scales of some rows or columns; a single scale applies to all."""
    return scale if scale is None or scale.shape[dim] == 1 else scale.narrow(dim, which.start, which.stop - which.start)


def _multiply_integers(
    a: Tensor, b: Tensor, by_row: Tensor | None, by_column: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The exact integer product, scaled; on a CPU in panels of rows, whose sums are scaled while they are in the cache."""
    if a.is_cuda:
        # The kernel takes more than 16 rows, and multiples of 8.
        rows, columns = a.shape[0], b.shape[1]
        a = _filled(a, max(-rows % 8, 24 - rows), -a.shape[1] % 8)
        b = _filled(b, -b.shape[0] % 8, -columns % 8)
        parts = zip(a.split(_EXACT_TERMS, 1), b.split(_EXACT_TERMS, 0), strict=True)
        sums = [torch._int_mm(left.contiguous(), right) for left, right in parts]
        whole = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)
        return _scaled(whole[:rows, :columns], by_row, by_column, bias, dtype)
    result = out = torch.empty(a.shape[0], b.shape[1], dtype=dtype)
    turned = a.stride(0) == 1 and a.shape[0] > b.shape[1] and bias is None
    if turned:
        # The kernel is slower with a long transposed left side: compute the transpose of the product.
        a, b, out = b.t(), a.t(), result.t()
        by_row, by_column = _turned(by_column), _turned(by_row)
    height = max(_PANEL_ELEMENTS // max(b.shape[1], 1), 1)
    for first in range(0, a.shape[0], height):
        part = out[first : first + height]
        scale = _part(by_row, slice(first, first + len(part)), 0)
        # The result's rows first, then its columns, also where the product is transposed.
        scales = (by_column, scale) if turned else (scale, by_column)
        _scale_into(part, _sum_integers(a[first : first + height], b), *scales, bias)
    return result


def _turned(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.t()


def _sum_integers(a: Tensor, b: Tensor) -> Tensor:
    """The exact product, rounded to float32, in memory that the next call overwrites."""
    if is_widened(torch.int8, "cpu"):
        return sum_integers(a, b)
    sums = SCRATCH.take("sums", torch.int32, a.shape[0], b.shape[1])
    values = SCRATCH.take("values", torch.float32, *sums.shape)
    a, b = _row_major(a), _row_major(b)
    if a.shape[1] <= _EXACT_TERMS:
        torch._int_mm(a, b, out=sums)
        # In a loop with bfloat16 stores a compiled kernel converts integers one by one; PyTorch's copy is four times faster.
        return values.copy_(sums)
    parts = zip(a.split(_EXACT_TERMS, 1), b.split(_EXACT_TERMS, 0), strict=True)
    total = torch.zeros((), dtype=torch.float64)
    for left, right in parts:
        total = total + torch._int_mm(left, right)
    return values.copy_(total)


def _row_major(x: Tensor) -> Tensor:
    """A contiguous matrix with row-major strides: a side of length 1 may have any stride, and the CPU's integer matmul returns
    uninitialized memory where both strides are 1."""
    return x.as_strided(x.shape, (max(x.shape[1], 1), 1)) if x.is_contiguous() else x


def _scale_into(
    out: Tensor, values: Tensor, by_row: Tensor | None, by_column: Tensor | None, bias: Tensor | None
) -> None:
    if by_row is by_column is bias is None:
        out.copy_(values)
    else:
        fused(values.numel(), _scaling(out.dtype), values, by_row, by_column, bias, out)


def _multiply_float8(
    a: Tensor, b: Tensor, scales: list[Tensor | None], product: Product, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``torch._scaled_mm``: row-major times column-major, sides in multiples of 16, scales of a tensor or of all rows."""
    rows, columns = a.shape[0], b.shape[1]
    a = _filled(a, -rows % 16, -a.shape[1] % 16).contiguous()
    b = _filled(b.t(), -columns % 16, -b.shape[0] % 16).contiguous().t()
    one = torch.ones((), dtype=torch.float32, device=a.device)
    fast = product.accumulation == "fast"
    whole = all(scale is None or scale.numel() == 1 for scale in scales)
    if bias is not None or (dtype != torch.bfloat16 and not whole):
        # With scales of rows the kernel writes bfloat16 alone, and a bias is to be added before the result is rounded.
        sums = torch._scaled_mm(a, b, one, one, out_dtype=torch.float32, use_fast_accum=fast)[:rows, :columns]
        by_row, by_column = scales
        return _scaled(sums, by_row, by_column, bias, dtype)
    left, right = (one if scale is None else scale for scale in scales)
    if whole:
        left, right = left.reshape(()), right.reshape(())
    else:
        left = F.pad(left.expand(rows, 1), (0, 0, 0, a.shape[0] - rows)).contiguous()
        right = F.pad(right.expand(1, columns), (0, b.shape[1] - columns)).contiguous()
    return torch._scaled_mm(a, b, left, right, out_dtype=dtype, use_fast_accum=fast)[:rows, :columns]


def _filled(x: Tensor, rows: int, columns: int) -> Tensor:
    # F.pad does not take float8.
    if rows <= 0 and columns <= 0:
        return x
    return F.pad(x.view(torch.int8), (0, max(columns, 0), 0, max(rows, 0))).view(x.dtype)


def _scaled(
    result: Tensor, by_row: Tensor | None, by_column: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    scaled: Tensor = fused(result.numel(), _scaling(dtype), result, by_row, by_column, bias)
    return scaled


@lru_cache(None)
def _scaling(dtype: torch.dtype) -> Callable[..., Tensor]:
    def scale_result(
        result: Tensor,
        by_row: Tensor | None,
        by_column: Tensor | None,
        bias: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        values = result.float()
        if by_row is not None:
            values = values * by_row
        if by_column is not None:
            values = values * by_column
        if bias is not None:
            values = values + bias.float()
        return values.to(dtype) if out is None else out.copy_(values)

    return scale_result
