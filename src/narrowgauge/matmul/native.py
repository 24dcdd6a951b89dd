"""Multiply the operands' own codes by PyTorch's GPU kernel of :mod:`narrowgauge.spec.matmul_kernels`.

The sides of the operands are padded, and the result is cropped. Casts write codes along the
contraction, as kernels read them, so operands of whole sides are not copied. Codes, scales and
rounding equal those of the emulation (:mod:`narrowgauge.matmul.gemm`). Only the order and the
accumulation of the sum differ.

A build of PyTorch may lack a kernel of the chip. So before its first use, each kernel multiplies
two small matrices whose product is exact in any order. If it raises or is off by one bit, that is
said, and its products are emulated.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.matmul.operand import Operand, values_of
from narrowgauge.spec import matmul_kernels
from narrowgauge.spec.computes import Cast, Product
from narrowgauge.torch_support import torch_names
from narrowgauge.torch_support.proof import first_difference, prove

_SIDE = 16
"""Rows, columns and bytes of the contraction come in multiples of this, as PyTorch's checks ask."""


def has_kernel(product: Product, device: torch.device) -> bool:
    """Return whether the device has a working kernel for the codes of a product."""
    architecture = architecture_of(device)
    if architecture is None or not matmul_kernels.has_kernel(product, architecture):
        return False
    lhs, rhs = product.left, product.right
    name = f"the product of {lhs.format} and {rhs.format}"
    # It waits for the device once, so the first call must not happen during CUDA graph capture.
    return not prove(name, (lhs, rhs, device), "The kernel", lambda: _compare(lhs, rhs, device))


@cache
def architecture_of(device: torch.device) -> str | None:
    """Return ``"sm90"`` and the like; ``None`` without a GPU of NVIDIA: no other chip was tried."""
    if device.type != "cuda" or not torch.cuda.is_available() or torch.version.hip:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def multiply_codes(
    lhs: Operand, rhs: Operand, product: Product, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the product of two operands that a kernel takes, with padded sides, in ``dtype`` or
    float32, and the outer scales by which it is still to be multiplied.

    The accumulation ``fast`` is in the tensor core's register alone, if the kernel can.
    """
    left = right = None
    a = filled(lhs.data).contiguous()
    b = filled(rhs.data).contiguous()
    has_rows = any(x.outer is not None and x.outer.numel() > 1 for x in (lhs, rhs))
    if has_rows and dtype != torch.bfloat16:
        # With scales of rows, older libraries' kernel writes only bfloat16.
        left, right = lhs.outer, rhs.outer
        lhs, rhs = Operand(lhs.data), Operand(rhs.data)
        dtype = torch.float32
        has_rows = False
    factors = _scale_of(lhs, has_rows), _scale_of(rhs, has_rows).t()
    is_fast = product.accumulation == "fast"
    values = torch._scaled_mm(a, b.t(), *factors, out_dtype=dtype, use_fast_accum=is_fast)
    return values, left, right


def filled(x: Tensor, least_rows: int = 0, columns_by: int = _SIDE) -> Tensor:
    """Pad a matrix with zeros to whole multiples of the kernels' sides.

    ``F.pad`` copies also if nothing is to pad, and does not take float8.
    """
    rows = max(x.shape[0], least_rows)
    extra = -x.shape[1] % columns_by, rows + -rows % _SIDE - x.shape[0]
    if not any(extra):
        return x
    padding = (0, extra[0], 0, extra[1])
    if x.element_size() == 1:
        return F.pad(x.view(torch.int8), padding).view(x.dtype)
    return F.pad(x, padding)


# ── scales as the kernels read them ───────────────────────────────────────────────────────────────


def _scale_of(operand: Operand, has_rows: bool) -> Tensor:
    """Return the scale of a tensor, or those of all rows of the padded codes."""
    scale = operand.outer
    if scale is None:
        scale = torch.ones((), dtype=torch.float32, device=operand.data.device)
    if not has_rows:
        return scale.reshape(())
    column = scale.reshape(-1, 1).expand(operand.data.shape[0], 1)
    return filled(column, columns_by=1).contiguous()


# ── the trial of a kernel ─────────────────────────────────────────────────────────────────────────


def _compare(lhs: Cast, rhs: Cast, device: torch.device) -> str:
    """Return where the kernel's product of two small matrices is not exact, or an empty string."""
    with torch_names.no_modes(), torch.no_grad():
        operands = []
        for operand in (_exact_operand(lhs, 137), _exact_operand(rhs, 269)):
            operands.append(Operand(*[part.to(device) for part in operand if part is not None]))
        first, second = operands
        exactly = (values_of(first).cpu().double() @ values_of(second).cpu().double().t()).float()
        for dtype in (torch.bfloat16, torch.float32):
            values, left, right = multiply_codes(first, second, Product(lhs, rhs), dtype)
            result = values[: exactly.shape[0], : exactly.shape[1]].cpu().float()
            if left is not None and right is not None:
                result = result * left.cpu() * right.cpu().t()
            difference = first_difference("value", result, exactly.to(values.dtype).float())
            if difference:
                return difference
    return ""


def _exact_operand(cast: Cast, rows: int) -> Operand:
    """Return an operand of small whole numbers whose scales are powers of two: sums of its products
    are exact in any order, also in registers of fewer bits than float32 has.
    """
    draw = torch.Generator().manual_seed(rows)
    codes = torch.randint(-2, 3, (rows, 640), generator=draw).float()
    codes = codes.to(getattr(torch, cast.format))
    scales = torch.randint(-1, 2, (rows, 1), generator=draw).float().exp2()
    return Operand(codes, scales[:1] if cast.granularity in ("none", "tensor") else scales)
