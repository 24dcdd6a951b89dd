"""PyTorch's matmuls of narrow numbers on CUDA, without a GPU: what they refuse, and what they are
defined to compute.

Each function stands for one of PyTorch's and gets exactly the arguments that the product hands to
it. First PyTorch's own meta function sees them, as tensors of CUDA without memory. Then come the
rules that only the device's code checks, or cuBLAS: :class:`Refused` says which was broken. Then
the codes are decoded, each with the scale that lies at *its* place in memory by the published
formulas, and multiplied in float64, rounded once.

Source: ``ScaledBlas.cpp``, ``Blas.cpp``, ``GroupedMMUtils.h``, ``ScaledBlasUtils.cpp`` in
``aten/src/ATen/native`` of PyTorch; cuBLAS, "Narrow Precision Data Types Usage" and "1D Block
Scaling Factors Layout".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

REAL_SCALED_MM = torch.nn.functional.scaled_mm
REAL_SCALED_MM_V1 = torch._scaled_mm
REAL_GROUPED_MM = torch._scaled_grouped_mm
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
E8M0 = torch.float8_e8m0fnu
FP4 = torch.float4_e2m1fn_x2
FLOAT = torch.float32
OUT = (torch.bfloat16, torch.float16, torch.float32)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Refused(AssertionError):
    """An operand that PyTorch or cuBLAS would refuse on the device."""


def check(holds: bool, rule: str) -> None:
    if not holds:
        raise Refused(rule)


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def on_meta(x: Tensor) -> Tensor:
    """A tensor as PyTorch's meta functions see it: they take a meta tensor for one of CUDA."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


# ── decoding ──────────────────────────────────────────────────────────────────────────────────────


def memory(x: Tensor) -> Tensor:
    """The elements of a tensor without gaps, in the order in which they lie in memory."""
    flat = x.as_strided((x.numel(),), (1,))
    check(
        x.untyped_storage().nbytes() // x.element_size() >= x.storage_offset() + x.numel(),
        "a gap in memory",
    )
    return flat


def decoded(x: Tensor) -> Tensor:
    """Float64 values of codes; pairs of four bits lie along the dimension of stride 1, the first in
    the low half.
    """
    if x.dtype != FP4:
        return x.double()
    turned = x.view(torch.uint8) if x.stride(1) == 1 else x.view(torch.uint8).t()
    table = torch.tensor(E2M1, dtype=torch.float64)
    low = table[(turned & 15).long()]
    high = table[(turned >> 4).long()]
    values = torch.stack([low, high], -1).flatten(1)
    return values if x.stride(1) == 1 else values.t()


def tiled_offset(outer: Tensor, inner: Tensor, num_inner: int) -> Tensor:
    """Where the scale of a row and a block lies: cuBLAS's formula within a tile of 128 × 4, tiles
    row by row.
    """
    tile = (outer // 128) * (num_inner // 4) + inner // 4
    return tile * 512 + (outer % 32) * 16 + (outer % 128 // 32) * 4 + inner % 4


def tile_values(scales: Tensor, rows: int, terms: int, block: int) -> Tensor:
    """Float64 ``[rows, terms]`` of scales in tiles."""
    num_inner = up(-(-terms // block), 4)
    check(
        scales.numel() == up(rows, 128) * num_inner,
        f"{scales.numel()} scales in tiles for {rows} × {terms} in {block}",
    )
    outer = torch.arange(rows)[:, None]
    inner = torch.arange(terms)[None, :] // block
    return memory(scales)[tiled_offset(outer, inner, num_inner)].double()


# ── the rules ─────────────────────────────────────────────────────────────────────────────────────


def check_matrices(
    architecture: str, a: Tensor, b: Tensor, out_dtype: torch.dtype, bias: Tensor | None, fast: bool
) -> int:
    """The rules of both ``_scaled_mm``; returns how many numbers a byte of the operands holds."""
    sm = int(architecture[2:])
    check(sm >= 89, f"{architecture} has no _scaled_mm")
    kinds = (E4M3, E5M2, FP4)
    check(a.dtype in kinds and b.dtype in kinds, f"{a.dtype} × {b.dtype} on {architecture}")
    check(not a.dtype == b.dtype == E5M2, "cuBLAS multiplies no two e5m2 matrices")
    check((a.dtype == FP4) == (b.dtype == FP4), "four bits times eight")
    per_byte = 2 if a.dtype == FP4 else 1
    check(a.stride(1) == 1 and a.stride(0) >= a.shape[1], "the left matrix is row-major")
    check(b.stride(0) == 1 and b.stride(1) >= b.shape[0], "the right matrix is column-major")
    check(
        a.data_ptr() % 16 == 0 and b.data_ptr() % 16 == 0, "matrices begin at multiples of 16 bytes"
    )
    check(a.stride(0) % 16 == 0 and b.stride(1) % 16 == 0, "rows lie at multiples of 16 bytes")
    check(
        a.shape[1] == b.shape[0] and a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0,
        "multiples of 16",
    )
    check(min(*a.shape, *b.shape) > 0, "an empty matrix never reaches cuBLAS")
    check(out_dtype in OUT, f"{out_dtype} is no result")
    check(not (fast and per_byte == 2), "fast accumulation of four bits")
    if bias is not None:
        check(
            bias.numel() == b.shape[1] and bias.dtype == out_dtype != FLOAT,
            "a bias has the result's 16-bit dtype",
        )
    return per_byte


def scaled_mm_v1(architecture: str) -> Callable[..., Tensor]:
    """``torch._scaled_mm`` with float32 scales of tensors or rows, all that the product calls it
    with.
    """

    def _scaled_mm(
        a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None, *,
        out_dtype: torch.dtype, use_fast_accum: bool = False,
    ) -> Tensor:  # fmt: skip
        REAL_SCALED_MM_V1(
            *map(on_meta, (a, b, scale_a, scale_b)),
            out_dtype=out_dtype,
            use_fast_accum=use_fast_accum,
        )
        check(
            check_matrices(architecture, a, b, out_dtype, bias, use_fast_accum) == 1, "float8 alone"
        )
        check(scale_a.dtype == scale_b.dtype == FLOAT, "scales in float32")
        if scale_a.numel() != 1 or scale_b.numel() != 1:
            shapes = tuple(scale_a.shape), tuple(scale_b.shape)
            check(shapes == ((len(a), 1), (1, b.shape[1])), f"scales of rows: {shapes}")
            check(
                scale_a.is_contiguous() and scale_b.is_contiguous(), "scales of rows are contiguous"
            )
            check(
                out_dtype == torch.bfloat16, "by rows, CUTLASS writes bfloat16 before PyTorch 2.13"
            )
        values = (decoded(a) * scale_a.double()) @ (decoded(b) * scale_b.double())
        return (values if bias is None else values + bias.double()).to(out_dtype)

    return _scaled_mm


def scaled_mm(architecture: str) -> Callable[..., Tensor]:
    """``torch.nn.functional.scaled_mm`` with the scales of blocks."""

    def scaled_mm(
        mat_a: Tensor, mat_b: Tensor, scale_a: Any, scale_recipe_a: Any, scale_b: Any, scale_recipe_b: Any, swizzle_a: Any = None,
        swizzle_b: Any = None, bias: Tensor | None = None, output_dtype: torch.dtype = torch.bfloat16,
        contraction_dim: Any = (), use_fast_accum: bool = False,
    ) -> Tensor:  # fmt: skip
        scales = []
        for x in (scale_a, scale_b):
            scales.append(list(x) if isinstance(x, (list, tuple)) else [x])
        names = []
        for x in (scale_recipe_a, scale_recipe_b):
            names.append([r.name for r in (x if isinstance(x, list) else [x])])
        swizzles = []
        for x in (swizzle_a, swizzle_b):
            swizzles.append([s.name for s in (x or [])])
        # PyTorch 2.13's counts half of mxfp4's scales.
        if (mat_a.dtype, names[0]) != (FP4, ["BlockWise1x32"]):
            REAL_SCALED_MM(
                on_meta(mat_a), on_meta(mat_b), [*map(on_meta, scales[0])], scale_recipe_a, [*map(on_meta, scales[1])],
                scale_recipe_b, swizzle_a, swizzle_b, None, output_dtype, contraction_dim, use_fast_accum,
            )  # fmt: skip
        per_byte = check_matrices(architecture, mat_a, mat_b, output_dtype, bias, use_fast_accum)
        for scale in (*scales[0], *scales[1]):
            check(
                scale.data_ptr() % 16 == 0 or scale.numel() == 1,
                "scales begin at multiples of 16 bytes",
            )
        sm = int(architecture[2:])
        terms = mat_a.shape[1] * per_byte
        sides = len(mat_a), mat_b.shape[1]
        if names[0][0].endswith("128"):
            check(90 <= sm < 100, "blocks of 128 on Hopper alone")
            check(mat_a.dtype == mat_b.dtype == E4M3, "blocks of 128 are e4m3 on both sides")
            check(names != [["BlockWise128x128"]] * 2, "two matrices of square blocks")
            check(not any(swizzles), "blocks of 128 lie in columns, not in tiles")
            check(sides[0] % 4 == 0 and sides[1] % 4 == 0, "multiples of 4")
            factors = []
            for levels, side, name in zip(scales, sides, names, strict=True):
                factors.append(column_values(levels[0], side, terms, name[0]))
        else:
            block, dtype, bits = {
                ("BlockWise1x32",): (32, E8M0, mat_a.dtype),
                ("BlockWise1x16", "TensorWise"): (16, E4M3, FP4),
            }[tuple(names[0])]
            check(
                names[0] == names[1] and mat_a.dtype == mat_b.dtype == bits,
                f"{names} of {mat_a.dtype}, {mat_b.dtype}",
            )
            check(
                sm >= 100 and mat_a.dtype in (E4M3, FP4),
                "scales of 16 and 32 values on Blackwell, of e4m3 or e2m1",
            )
            check(terms % 32 == 0, "multiples of 32 terms")
            orders = ["SWIZZLE_32_4_4", "NO_SWIZZLE"]
            check(all(s == orders[: len(names[0])] for s in swizzles), f"tiles: {swizzles}")
            check(
                all(levels[0].dtype == dtype and levels[0].is_contiguous() for levels in scales),
                f"scales in {dtype}, contiguous",
            )
            if block == 32 and mat_a.dtype == FP4:
                check(100 <= sm < 110, "mxfp4 on B200 and B300 alone")
                check(
                    output_dtype == torch.bfloat16 and bias is None,
                    "mxfp4 writes bfloat16 and adds no bias",
                )
            factors = []
            for levels, side in zip(scales, sides, strict=True):
                factors.append(tile_values(levels[0], side, terms, block))
            check(
                {len(levels) for levels in scales} == {len(names[0])}, "as many scales as recipes"
            )
            for scale in (scale for levels in scales for scale in levels[1:]):
                check(
                    scale.dtype == FLOAT and scale.numel() == 1, "one float32 scale for the tensor"
                )
        values = (decoded(mat_a) * factors[0]) @ (decoded(mat_b) * factors[1].t())
        if len(scales[0]) == 2:  # PyTorch multiplies the two with each other, in float32
            values = values * scales[0][1].mul(scales[1][1]).double()
        return (values if bias is None else values + bias.double()).to(output_dtype)

    return scaled_mm


def column_values(scales: Tensor, side: int, terms: int, name: str) -> Tensor:
    """Float64 ``[side, terms]`` of the float32 scales of 1 × 128 or 128 × 128 values, found at
    their places in memory.
    """
    check(
        scales.dtype == FLOAT and scales.dim() == 2, "scales of 128 in float32, in two dimensions"
    )
    blocks = -(-terms // 128)
    row = torch.arange(side)[:, None]
    block = torch.arange(terms)[None, :] // 128
    if name == "BlockWise1x128":
        check(
            tuple(scales.shape) == (side, blocks),
            f"{tuple(scales.shape)} scales of 1 × 128 for {side} × {terms}",
        )
        check(
            scales.stride(0) == 1 and (scales.stride(1) == side or blocks == scales.stride(1) == 1),
            "column by column",
        )
        return memory(scales)[block * side + row].double()
    length = up(blocks, 4)
    rows = -(-side // 128)
    check(
        tuple(scales.shape) == (length, rows),
        f"{tuple(scales.shape)} scales of 128 × 128 for {side} × {terms}",
    )
    check(
        scales.stride(0) == 1 and (scales.stride(1) == length or rows == scales.stride(1) == 1),
        "column by column",
    )
    return memory(scales)[(row // 128) * length + block].double()


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool = False,
) -> Tensor:
    """``torch._scaled_grouped_mm``: rows of ``a`` by experts of ``b``, or groups of their columns.

    Rows after the last offset are not written: here they are NaN.
    """
    arguments = [on_meta(x) for x in (a, b, scale_a, scale_b)]
    REAL_GROUPED_MM(*arguments, offs=on_meta(offs), out_dtype=out_dtype)
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return REAL_GROUPED_MM(a, b, scale_a, scale_b, offs=offs, out_dtype=out_dtype)
    check(a.shape[-1] % 16 == b.shape[-1] % 16 == b.shape[-2] % 16 == 0, "multiples of 16")
    check(out_dtype == torch.bfloat16, "results in bfloat16")
    spans = list(zip([0, *offs.tolist()], offs.tolist(), strict=False))
    check(all(stop % 16 == 0 for _, stop in spans), "groups of whole 16")
    rows = len(a)
    columns = b.shape[-1]
    products = []
    if b.ndim == 3:
        lhs = a.double() * scale_a[:, None].double()
        for expert, (start, stop) in enumerate(spans):
            rhs = b[expert].double() * scale_b[expert][None, :].double()
            products.append(lhs[start:stop] @ rhs)
        products.append(torch.full((rows - spans[-1][1], columns), torch.nan).double())
        return torch.cat(products).to(out_dtype)
    for group, (start, stop) in enumerate(spans):
        sides = []
        for codes, scales in ((a[:, start:stop], scale_a), (b[start:stop].t(), scale_b)):
            side = len(codes)
            factor = scales[group * side : (group + 1) * side, None]
            sides.append(codes.double() * factor.double())
        products.append(sides[0] @ sides[1].t())
    return torch.stack(products).to(out_dtype)
