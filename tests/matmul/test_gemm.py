"""Products: every row's three matmuls against float64 on the same operands, native and emulated, integers bit for bit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from matmul.scenarios import CPU, DIMS, ROWS, cast_operands, gaussian, off
from narrowgauge.matmul import native
from narrowgauge.matmul.gemm import is_native, multiply, operand_dtype
from narrowgauge.matmul.operand import Operand
from narrowgauge.spec.computes import COMPUTES, PLACES, Compute
from narrowgauge.spec.kernels import KERNELS
from oracles import linear as oracle
from tables import exhaustive
from tensors import bits_with_one_nan

every_row = exhaustive("row", ROWS)
every_place = pytest.mark.parametrize("place", PLACES)
# [rows, contraction, columns]: not whole blocks, one of each side, and longer than a block of 128.
SHAPES = [(33, 65, 17), (1, 40, 3), (5, 1, 4), (4, 300, 1)]
DTYPES = [torch.bfloat16, torch.float32, torch.float16]


def values_of(operand: Operand, dim: int, *, folded: bool = False) -> Tensor:
    """Float64 ``[rows, contraction]``; without the scales that lie along the contraction."""
    values = operand.data.double()
    if operand.outer is not None and not folded:
        values = values * operand.outer.double()
    return values if dim == 1 else values.t()


def is_folded(row: Compute, place: str) -> bool:
    return row.products[place].right.granularity == "column"


def bare(operand: Operand, row: Compute, place: str) -> Operand:
    """The right operand as the matmul gets it: its column scales have gone into the left one."""
    return Operand(operand.data, None) if is_folded(row, place) else operand


@every_row
@every_place
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_matmul_is_within_its_bound_of_float64(
    row: Compute, place: str, shape: tuple[int, int, int], dtype
) -> None:
    left, right = cast_operands(row, place, shape)
    found = multiply(left, bare(right, row, place), DIMS[place], row.products[place], dtype)
    exactly = oracle.product(
        values_of(left, DIMS[place][0]), values_of(right, DIMS[place][1], folded=is_folded(row, place))
    )
    assert found.dtype == dtype and found.shape == exactly.value.shape
    bound = off(exactly, row, place, exactly.value.shape[1] and shape[1], dtype)
    assert ((found.double() - exactly.value).abs() <= bound).all()
    # The bound is one: it is small beside what it bounds.
    assert bound.median() <= 0.05 * exactly.magnitude.median() or dtype == torch.float16


# ── integers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def random_codes(*shape: int, seed: int) -> Tensor:
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def random_scales(*shape: int, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 1e-2


@every_place
@pytest.mark.parametrize("shape", [*SHAPES, (70, 513, 90)], ids=str)
@pytest.mark.parametrize(("dtype", "with_bias"), [(torch.bfloat16, True), (torch.float32, False)], ids=str)
def test_integers_multiply_bit_for_bit(place: str, shape: tuple[int, int, int], dtype, with_bias: bool) -> None:
    (of_left, of_right), (rows, contraction, columns) = DIMS[place], shape
    left, right = random_codes(rows, contraction, seed=0), random_codes(columns, contraction, seed=1)
    by_row, by_column = random_scales(rows, 1, seed=2), random_scales(1, columns, seed=3)
    bias = gaussian(columns, dtype=dtype, seed=4) if with_bias else None
    found = multiply(
        Operand(left if of_left == 1 else left.t().contiguous(), by_row.view((-1, 1) if of_left == 1 else (1, -1))),
        Operand(right if of_right == 1 else right.t().contiguous(), by_column.view((-1, 1) if of_right == 1 else (1, -1))),
        DIMS[place], COMPUTES["int8-row"].products[place], dtype, bias,
    )  # fmt: skip
    exactly = oracle.scaled_integers(oracle.integer_product(left, right), by_row, by_column, bias, dtype)
    assert torch.equal(bits_with_one_nan(found), bits_with_one_nan(exactly))


@exhaustive("sign", [1, -1])
def test_integer_sums_hold_beyond_what_int32_does(sign: int) -> None:
    terms = (1 << 17) * 2 + 5
    left, right = torch.full((2, terms), 127, dtype=torch.int8), torch.full((3, terms), 127 * sign, dtype=torch.int8)
    left[1, ::2] = -127
    one = torch.ones((1, 1))
    found = multiply(Operand(left, one), Operand(right, one), (1, 1), COMPUTES["int8-row"].output, torch.float32)
    assert abs(127 * 127 * terms) > 2**31
    assert torch.equal(found, oracle.integer_product(left, right).float())


# ── native or not ───────────────────────────────────────────────────────────────────────────────────────────────────


@every_row
@pytest.mark.usefixtures("native_formats")
def test_what_this_cpu_multiplies_itself(row: Compute) -> None:
    own = {"int8", "bfloat16", "float32", "float64"}
    for matmul in row.products.values():
        assert is_native(matmul, CPU) == ({matmul.left.format, matmul.right.format} <= own)


def test_a_gpu_multiplies_by_its_kernels_and_every_16_bit_format(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, capability = torch.device("cuda"), [(8, 9)]
    for name in ("architecture_of", "_works"):
        monkeypatch.setattr(native, name, getattr(native, name).__wrapped__)
    monkeypatch.setattr(native, "_works", lambda *asked: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    for name in ("float8-tensor", "float8-delayed-e5m2", "float8-row", "scalify"):
        assert is_native(COMPUTES[name].output, cuda) and is_native(COMPUTES[name].grad_weight, cuda)
        assert operand_dtype(COMPUTES[name].output.left, COMPUTES[name].output, cuda) == torch.float8_e4m3fn
    blocks = [COMPUTES[name].output for name in ("float8-block", "mxfp8", "nvfp4", "mxfp6")]
    for capability[0], wanted in (((8, 9), (0, 0, 0, 0)), ((9, 0), (1, 0, 0, 0)), ((12, 0), (0, 1, 1, 0))):
        assert tuple(is_native(product, cuda) for product in blocks) == wanted
    capability[0] = (8, 0)
    assert not is_native(COMPUTES["float8-row"].output, cuda) and is_native(COMPUTES["tfloat32"].output, cuda)
    assert is_native(COMPUTES["float16"].output, cuda) and not is_native(COMPUTES["float16"].output, CPU)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for chip, takes in (("gfx90a", False), ("gfx942:sramecc+:xnack-", True), ("gfx950:sramecc+:xnack-", True)):
        found = SimpleNamespace(gcnArchName=chip)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=found: found)
        assert is_native(COMPUTES["float8-row"].output, cuda) is takes


# ── biases, sides, special values ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["float8-row", "float8-tensor"])
def test_the_float8_kernels_result_is_rounded_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1025 is a float16 and no bfloat16; 1024.5 - 1024 is 0.5, and would be 0 if the product were rounded first."""
    monkeypatch.setattr(native, "kernel_here", lambda product, device: KERNELS["float8"])
    one = torch.ones(1, 1).to(torch.float8_e4m3fn)
    right = Operand(one, torch.ones(1, 1))
    for scale, dtype, bias, wanted in (
        (1025.0, torch.float16, None, 1025.0),
        (1024.5, torch.bfloat16, -1024.0, 0.5),
        (1025.0, torch.float32, 2.0**-13, 1025.0 + 2.0**-13),
    ):
        left = Operand(one, torch.full((1, 1), scale))
        given = None if bias is None else torch.tensor([bias])
        found = multiply(left, right, (1, 1), COMPUTES[name].output, dtype, given)
        assert found.dtype == dtype and found.item() == wanted


@every_row
@every_place
def test_no_rows_give_no_rows_and_no_terms_give_zeros(row: Compute, place: str) -> None:
    matmul = row.products[place]
    for shape in ((0, 64, 17), (33, 0, 17)):
        left, right = cast_operands(row, place, shape)
        found = multiply(left, bare(right, row, place), DIMS[place], matmul, torch.bfloat16)
        assert found.shape[0] in (shape[0], -shape[0] // 32 * -32) and not found.any()


@exhaustive("name", ["int8-row", "float8-row", "float8-tensor", "nvfp4"])
@exhaustive("side", [0, 1])
def test_a_scale_that_is_nan_reaches_all_that_it_scales(name: str, side: int) -> None:
    row = COMPUTES[name]
    pair = cast_operands(row, "output", (32, 64, 16))
    outer = pair[side].outer
    assert outer is not None
    outer = outer.clone()
    outer[0, 0] = torch.nan
    pair[side] = Operand(pair[side].data, outer)
    found = multiply(*pair, (1, 1), row.output, torch.bfloat16).isnan()
    if outer.numel() == 1:
        assert found.all()
    else:
        hit = found if side == 0 else found.t()
        assert hit[0].all() and not hit[1:].any()
