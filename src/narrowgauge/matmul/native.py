"""Multiply the operands' own codes by PyTorch's GPU kernels, the rows of
:mod:`narrowgauge.spec.kernels`.

The operands' scales are laid out as the row's kernel reads them, their sides are padded, and the
result is cropped. Casts write codes along the contraction, as kernels read them, so operands of whole sides
are not copied. Codes, scales and rounding equal those of the emulation in bfloat16
(:mod:`narrowgauge.matmul.gemm`). Only the order and the accumulation of the sum differ. ``nvfp4``
also multiplies the sum by the product of the two tensors' scales, not by one after the other.

A build of PyTorch may lack a kernel of the chip. So before its first use, each kernel multiplies
two small matrices whose product is exact in any order. If it raises or is off by one bit, its
products are emulated.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.matmul.operand import PAIRS, Operand, bound, cast_matrix
from narrowgauge.numerics.quantization import (
    scales_in_columns,
    square_scales_in_columns,
    tiled_scales,
)
from narrowgauge.spec.computes import Cast, Product
from narrowgauge.spec.kernels import Kernel, kernel_for
from narrowgauge.torch_support import torch_names
from narrowgauge.torch_support.compile import fused
from narrowgauge.torch_support.torch_names import is_traced

_SIDE = 16
"""Rows, columns and bytes of the contraction come in multiples of this, as PyTorch's checks ask."""


def kernel_here(product: Product, device: torch.device) -> Kernel | None:
    """Return the device's kernel for the codes of a product; ``None`` if it has no working one."""
    architecture = architecture_of(device)
    if architecture is None:
        return None
    kernel = kernel_for(product, architecture)
    if kernel is None or not _works(kernel, product.left, product.right, device):
        return None
    return kernel


@lru_cache(None)
def architecture_of(device: torch.device) -> str | None:
    """Return ``"sm90"`` and the like; ``None`` without a GPU of NVIDIA: no other chip was tried."""
    if device.type != "cuda" or not torch.cuda.is_available() or torch.version.hip:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def multiply_codes(
    kernel: Kernel,
    lhs: Operand,
    rhs: Operand,
    product: Product,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the product of two operands that the kernel takes, plus a bias, in ``dtype``.

    The accumulation ``fast`` is in the tensor core's register alone, if the kernel can.
    """
    # Float32 sums, so that a bias is added before the result is rounded.
    sum_dtype = dtype
    if bias is not None:
        sum_dtype = torch.float32
    a = filled(lhs.data).contiguous()
    b = filled(rhs.data).contiguous()
    left = right = None
    if kernel.scales:
        values = _by_blocks(product, lhs, rhs, a, b, sum_dtype)
    else:
        is_whole = all(x.outer is None or x.outer.numel() == 1 for x in (lhs, rhs))
        # With scales of rows, older libraries' kernel writes only bfloat16.
        if sum_dtype == torch.float32 or (sum_dtype != torch.bfloat16 and not is_whole):
            left = lhs.outer
            right = rhs.outer
            lhs = lhs._replace(outer=None)
            rhs = rhs._replace(outer=None)
            is_whole = True
            sum_dtype = torch.float32
        first = _scale_of(lhs, a, is_whole)
        second = _scale_of(rhs, b, is_whole)
        is_fast = product.accumulation == "fast"
        values = torch._scaled_mm(
            a, b.t(), first, second.t(), out_dtype=sum_dtype, use_fast_accum=is_fast
        )
    rows, columns = lhs.data.shape[0], rhs.data.shape[0]
    if (*values.shape,) != (rows, columns):
        values = values[:rows, :columns]
    return scaled(values, left, right, bias, dtype)


def scaled(
    values: Tensor, first: Tensor | None, second: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Return sums times the outer scales of the left and the right operand, plus a bias."""
    if first is second is bias is None:
        return values.to(dtype)
    if first is not None:
        first = first.reshape(-1, 1)
    if second is not None:
        second = second.reshape(1, -1)
    result = torch.empty(values.shape, dtype=dtype, device=values.device)
    fused(values.numel(), _scale, values, first, second, bias, result)
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


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """Pad a matrix with zeros.

    ``F.pad`` copies also if nothing is to pad, and does not take float8.
    """
    extra = columns - x.shape[1], rows - x.shape[0]
    if not any(extra):
        return x
    if x.element_size() == 1:
        return F.pad(x.view(torch.int8), (0, extra[0], 0, extra[1])).view(x.dtype)
    return F.pad(x, (0, extra[0], 0, extra[1]))


def filled(x: Tensor, least_rows: int = 0) -> Tensor:
    """Return one-byte codes, padded to whole multiples of the kernels' sides."""
    rows = max(x.shape[0], least_rows)
    columns = x.shape[1]
    return _padded(x, rows + -rows % _SIDE, columns + -columns % _SIDE)


# ── scales as the kernels read them ───────────────────────────────────────────────────────────────


def _scale_of(operand: Operand, codes: Tensor, is_whole: bool) -> Tensor:
    """Return the scale of a tensor, or those of all rows of the padded codes."""
    scale = operand.outer
    if scale is None:
        scale = torch.ones((), dtype=torch.float32, device=codes.device)
    if is_whole:
        return scale.reshape(())
    column = scale.reshape(-1, 1).expand(operand.data.shape[0], 1)
    return _padded(column, codes.shape[0], 1).contiguous()


def _by_blocks(
    product: Product, lhs: Operand, rhs: Operand, a: Tensor, b: Tensor, dtype: torch.dtype
) -> Tensor:
    """Multiply by ``scaled_mm``: float32 scales of 128 values in columns, those of 16 or 32 in tiles,
    and the tensors' scales if they have any.
    """
    assert lhs.inner is not None and rhs.inner is not None
    names = []
    for cast in (product.left, product.right):
        block = cast.granularity.replace("16x16", "1x16")
        names.append(f"BlockWise{block}")
    if names[0] in _SCALES:
        inner = lhs.inner.view(torch.uint8), rhs.inner.view(torch.uint8)
        # Scales of 16 × 16 values are repeated: the kernel reads one for each row. Nothing bound
        # here depends on the number of tokens, so one compiled function lays out all of them.
        times = [
            x.data.shape[0] // scales.shape[0] for x, scales in ((lhs, inner[0]), (rhs, inner[1]))
        ]
        size = inner[0].numel() + inner[1].numel()
        laid_out = fused(size, bound(_tile_both, *times), *inner)
    else:
        laid_out = _in_columns(lhs), _in_columns(rhs)
    scales = []
    for operand, codes in zip((lhs, rhs), laid_out, strict=True):
        scales.append([codes])
        if operand.outer is not None:
            scales[-1].append(operand.outer.reshape(1))
    if product.left.format == "float4_e2m1fn" and product.left.scale != "float8_e4m3fn":
        dtype = torch.bfloat16  # all that mxfp4's kernel writes
    call: Any = _scaled_product
    if is_traced():
        call = _traced_product
    result: Tensor = call(a, b, scales[0], scales[1], names[0], names[1], dtype)
    return result


def _in_columns(operand: Operand) -> Tensor:
    assert operand.inner is not None
    inner = operand.inner.float()
    if inner.shape[0] < operand.data.shape[0]:
        return square_scales_in_columns(inner)
    rows = inner.shape[0] + -inner.shape[0] % _SIDE
    return scales_in_columns(_padded(inner, rows, inner.shape[1]))


def _scaled_product(
    a: Tensor, b: Tensor, first: list[Tensor], second: list[Tensor], first_block: str, second_block: str, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Multiply codes ``[side, contraction]`` by ``scaled_mm``.

    ``first`` and ``second`` are their scales: of blocks, and then of the tensor if there is one.
    """
    if a.dtype == PAIRS:
        a = a.view(torch.float4_e2m1fn_x2)
        b = b.view(torch.float4_e2m1fn_x2)
    sides: list[Any] = []
    for name, scales in ((first_block, first), (second_block, second)):
        blocks = scales[0].view(_SCALES.get(name, torch.float32))
        recipe = [getattr(F.ScalingType, name), F.ScalingType.TensorWise][: len(scales)]
        sides += [[blocks, *scales[1:]], recipe]
    orders: list[Any] = []
    if first_block in _SCALES:
        orders = [[F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE][: len(first)]] * 2
    product: Any = F.scaled_mm
    result: Tensor = product(a, b.t(), *sides, *orders, output_dtype=dtype)
    return result


# PyTorch 2.13's compiler refuses scales in tiles. So the kernel's call alone is an operator of ours:
# casts, tiles and padding around it are traced, and fuse.
_traced_product: Any = torch.library.custom_op(
    "narrowgauge::scaled_mm", _scaled_product, mutates_args=()
)


@_traced_product.register_fake  # type: ignore[untyped-decorator]
def _(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=rest[-1])


_SCALES = {"BlockWise1x32": torch.float8_e8m0fnu, "BlockWise1x16": torch.float8_e4m3fn}
"""The dtype of scales that come as uint8."""


def _tile_both(
    times: int, other_times: int, scales: Tensor, other_scales: Tensor
) -> tuple[Tensor, Tensor]:
    """Lay out the scales of both operands, uint8 ``[rows, blocks]`` each, every row repeated so
    many times.
    """
    if times > 1:
        scales = scales.repeat_interleave(times, 0)
    if other_times > 1:
        other_scales = other_scales.repeat_interleave(other_times, 0)
    return tiled_scales(scales), tiled_scales(other_scales)


# ── the trial of a kernel ─────────────────────────────────────────────────────────────────────────


# Several tiles of scales in each direction, none of them full; padded columns of scales; odd rows.
_TERMS = 640
_ROWS = (137, 269)
_SQUARE_ROWS = 256


@lru_cache(None)
def _works(kernel: Kernel, lhs: Cast, rhs: Cast, device: torch.device) -> bool:
    """Return whether a kernel multiplies two small matrices without error.

    It waits for the device once, so the first call must not happen during CUDA graph capture.
    """
    with torch_names.no_modes(), torch.device("cpu"), torch.no_grad():
        try:
            return _is_exact(kernel, lhs, rhs, device)
        except torch.OutOfMemoryError:
            raise  # not the kernel's fault
        except (RuntimeError, ValueError, AttributeError):  # an older PyTorch lacks the function
            return False


def _is_exact(kernel: Kernel, lhs: Cast, rhs: Cast, device: torch.device) -> bool:
    matrices = []
    operands = []
    casts = []
    for side, cast in enumerate((lhs, rhs)):
        # The same kernel, without what a kernel does not see.
        casts.append(Cast(cast.format, cast.granularity, cast.scale))
        x = exact_matrix(casts[side], _ROWS[side], _TERMS, side)
        dtype = PAIRS
        if cast.element.bits != 4:
            dtype = getattr(torch, cast.format)
        codes = cast_matrix(x, casts[side], 1, dtype)
        matrices.append(x.double())
        operands.append(codes.mapped(lambda part: part.to(device)))
    exactly = matrices[0] @ matrices[1].t()
    product = Product(casts[0], casts[1])
    for dtype in (torch.bfloat16, torch.float32):
        result = multiply_codes(kernel, operands[0], operands[1], product, dtype)
        expected = exactly.to(torch.bfloat16 if kernel.name == "mxfp4" else dtype)
        # Read here: a device error is raised when its result is read.
        if not torch.equal(result.cpu(), expected.to(dtype)):
            return False
    return True


def exact_matrix(operand: Cast, rows: int, terms: int, side: int) -> Tensor:
    """Return a float32 matrix ``[rows, terms]`` on the CPU that a cast represents exactly, for the
    left (0) or right (1) side of a product.

    Each group holds the format's largest number once, where the other side has zeros, and otherwise
    numbers up to 2; scales of rows are 1/2, 1 and 2. So sums of products are exact in any order,
    also in registers of fewer bits than float32 has.
    """
    if operand.block is not None and operand.block[0] > 1:
        rows = _SQUARE_ROWS
    codes = (_scattered(rows, terms) % 9 - 4).float() / 2
    codes[:, 1 - side :: 16] = 0
    codes[:, side::16] = operand.element.max
    if operand.scale == "float8_e4m3fn":
        codes *= 448
    if operand.granularity == "tensor" or len(codes) == _SQUARE_ROWS:
        return codes
    return codes * torch.exp2((_scattered(rows, 1) % 3 - 1).float())


def _scattered(rows: int, columns: int) -> Tensor:
    """Return whole numbers below 251, ordered so that nearby rows and columns differ."""
    row, column = (torch.arange(size, dtype=torch.int64, device="cpu") for size in (rows, columns))
    return (row[:, None] * 37 + column * 101 + row[:, None] * column * 7) % 251
