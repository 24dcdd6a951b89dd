"""The matmuls' part of ``gpu.py``: the bits of every cast, the error of every product, and the speed of layers.

Claim: every cast of the table of computes gives the CPU's bits, along both dimensions, eager and compiled; every product, native
or emulated, is within its stated bound of the float64 product of its operands.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from unittest.mock import patch

import torch
from _gpu_setting import Setting, Tables
from timing import Row
from torch import Tensor

from narrowgauge.matmul.gemm import is_native, multiply, operand_dtype
from narrowgauge.matmul.operand import PAIRS, Operand, block_values, cast_matrix, random_words
from narrowgauge.numerics import fusion
from narrowgauge.spec.computes import COMPUTES, Cast, Compute


def distinct_casts() -> dict[Cast, str]:
    """Every cast of the table of computes that has arithmetic of its own, with the place that it is first found in."""
    found: dict[Cast, str] = {}
    for row in COMPUTES.values():
        for name, cast in row.casts.items():
            if not cast.is_wide or cast.format == "tfloat32":
                found.setdefault(cast, f"{row.name} {name}")
    return found


def ordinary(rows: int, columns: int) -> Tensor:
    """Values of all sizes in bfloat16, subnormal ones among them."""
    generator = torch.Generator().manual_seed(rows * columns)
    sizes = torch.randint(-14, 6, (rows, columns), generator=generator).float().exp2()
    values = torch.randn(rows, columns, generator=generator) * sizes
    values[:, 0] *= 1e-39
    return values.bfloat16()


def special(rows: int, columns: int) -> Tensor:
    """The same with a row and a column of zeros, an infinity and a NaN."""
    values = ordinary(rows, columns)
    values[1], values[:, 2] = 0, 0
    values[3, 5], values[40, 70] = torch.inf, torch.nan
    return values


STATE = torch.tensor([12_345, 3, 7, 99], dtype=torch.int32)
"""Of a layer: seed of the step, step, first sequence, number."""


def cast_bits(cast: Cast, dim: int, x: Tensor, device: str, compile: bool) -> list[Tensor]:
    """Codes and scale of a cast, on the CPU as float32 (which holds each exactly); codes under a scale of NaN may be any.

    Of a cast in blocks, the values both as they are emulated and from the codes and scales that a kernel takes.
    """
    if cast.is_wide:
        dtype = torch.float32
    else:
        dtype = torch.bfloat16 if cast.block is not None else getattr(torch, cast.format)
    x, state = x.to(device), STATE.to(device)
    finite = x.float().nan_to_num(0, 0, 0)
    amax = finite.abs().amax().view(1, 1) / 2 if cast.scaling == "delayed" else None
    fold = finite.abs().amax(dim, keepdim=True) + 1 if cast.format == "int8" else None
    least = 0 if compile else sys.maxsize
    with patch.object(fusion, "COMPILE_ELEMENTS", least):
        words = random_words(cast, x, dim, state, 0, 1)
        made = [cast_matrix(x, cast, dim, dtype, words=words, fold=fold, amax=amax)]
        if cast.block is not None and cast.element.bits in (8, 4):
            narrow = PAIRS if cast.element.bits == 4 else getattr(torch, cast.format)
            coded = cast_matrix(x, cast, dim, narrow, words=words, amax=amax)
            made.append(Operand(block_values(coded, dim), coded.outer))
    found = []
    for data, outer, _ in made:
        values, scale = data.float().cpu(), None if outer is None else outer.float().cpu()
        found += [values] if scale is None else [torch.where(scale.isnan(), torch.nan, values), scale]
    return found


def differing(expected: Sequence[Tensor], found: Sequence[Tensor]) -> int:
    """How many values have other bits; a NaN is a NaN."""
    return sum(
        int(((a.view(torch.int32) != b.view(torch.int32)) & ~(a.isnan() & b.isnan())).sum())
        for a, b in zip(expected, found, strict=True)
    )


def cast_row(cast: Cast, where: str, device: str) -> Row:
    """How many bits of a cast differ between the eager CPU and a device, eager and compiled, along both dimensions."""
    row: Row = {"cast": str(cast), "of": where}
    for name, x in (("ordinary", ordinary(300, 520)), ("special", special(200, 300))):
        for dim in (0, 1):
            expected = cast_bits(cast, dim, x, "cpu", compile=False)
            found = [differing(expected, cast_bits(cast, dim, x, device, way)) for way in (False, True)]
            row[f"{name}, dim {dim}"] = f"{found[0]}, {found[1]}"
    row["passes"] = "NO" if any(row[key] != "0, 0" for key in row if "dim" in key) else "yes"
    return row


DIMS = {"output": (1, 1), "grad_input": (1, 0), "grad_weight": (0, 0)}
"""The dimension that each operand of a product is contracted along, as a linear layer has them."""
SIDES = (128, 192, 1024)
"""Rows, columns and contraction of the products that are checked."""


def operands_of(row: Compute, place: str, device: torch.device) -> tuple[Operand, Operand]:
    """Both operands of a product, as the operators make them."""
    product, dims, (rows, columns, terms) = row.products[place], DIMS[place], SIDES

    def made(side: Cast, dim: int, size: int, fold: Tensor | None) -> Operand:
        generator = torch.Generator().manual_seed(size)
        values = torch.randn(*((size, terms) if dim else (terms, size)), generator=generator)
        x = values.to(device, torch.bfloat16)
        words = random_words(side, x, dim, STATE.to(device), 0, 1)
        return cast_matrix(x, side, dim, operand_dtype(side, product, device), words=words, fold=fold)

    right, fold = made(product.right, dims[1], columns, None), None
    if product.right.granularity == "column":
        assert right.outer is not None
        right, fold = Operand(right.data, None), right.outer.view((1, -1) if dims[0] else (-1, 1))
    return made(product.left, dims[0], rows, fold), right


def dequantized(operand: Operand, dim: int) -> Tensor:
    """An operand as float64 ``[rows, contraction]``."""
    data = operand.data if operand.inner is None else block_values(operand, dim)
    values = data.double() * (1.0 if operand.outer is None else operand.outer.double())
    return values if dim else values.t()


def product_row(row: Compute, place: str, device: torch.device) -> Row:
    """The largest error of a product, as a share of what is allowed."""
    product, dims, dtype = row.products[place], DIMS[place], getattr(torch, row.dtype)
    left, right = operands_of(row, place, device)
    found = multiply(left, right, dims, product, dtype).double()
    a, b = dequantized(left, dims[0]), dequantized(right, dims[1])
    exact, summed = a @ b.t(), product.bound(SIDES[2]) * (a.abs() @ b.abs().t())
    # Rounded to the result's format once before the scales and once after them.
    allowed = summed + 2 * 2.0 ** -_bits(dtype) * (exact.abs() + summed) + 1e-30
    share = float(((found - exact).abs() / allowed).max())
    return {
        "row": row.name,
        "product": place,
        "native": "yes" if is_native(product, device) else "no",
        "accumulation": product.accumulation,
        "error / bound": share,
        "passes": "yes" if share <= 1 else "NO",
    }


def _bits(dtype: torch.dtype) -> int:
    """Significant bits of a format, the implicit one included."""
    return {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[dtype]


def check_casts(setting: Setting) -> Tables:
    """Every distinct cast."""
    found = list(distinct_casts().items())[: setting.extent.casts]
    title = "casts: values whose bits differ from the eager CPU's; eager, compiled"
    yield title, setting.rows("cast", found, lambda item: cast_row(*item, str(setting.device)))


def check_products(setting: Setting) -> Tables:
    """All three products of every compute."""
    places = list(itertools.product(setting.extent.computes, DIMS))
    rows = setting.rows("product", places, lambda item: product_row(COMPUTES[item[0]], item[1], setting.device))
    yield f"products of {SIDES[0]} × {SIDES[1]}, {SIDES[2]} terms, against float64", rows


def time_layers(setting: Setting, rounds: int) -> None:
    """Linear layers of a model of 5 billion parameters, in the computes that a claim is made of, and torchao's."""
    import narrow_linear  # loads the trainer's packages, which the checks of the optimizer do without

    names = [*setting.extent.rows, *narrow_linear.peer_names(setting.report)]
    chosen = narrow_linear.SETS[setting.extent.layers]
    narrow_linear.emit(setting.report, chosen, setting.in_time("layers", names), rounds, setting.device)
    for line in narrow_linear.notes(names, setting.device):
        setting.report.note(line)
