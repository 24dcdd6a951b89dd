"""Products: every row's three matmuls against float64 on the same operands, native and emulated, integers bit for bit."""

from __future__ import annotations

import dataclasses
from types import FunctionType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from covering import exhaustive
from matmul.scenarios import CPU, DIMS, KEY, NARROW, ROWS, exact, gaussian, names, off, quantized, words_for
from narrowgauge.matmul import gemm, native
from narrowgauge.matmul.gemm import describe_matmuls, is_native, multiply, operand_dtype
from narrowgauge.matmul.operand import Operand, cast_matrix
from narrowgauge.numerics import fusion, widening
from narrowgauge.spec.computes import COMPUTES, PLACES, Compute
from narrowgauge.spec.kernels import KERNELS
from oracles import linear as oracle
from tensors import bits_with_one_nan

every_row = exhaustive("row", ROWS)
every_place = pytest.mark.parametrize("place", PLACES)
# [rows, contraction, columns]: not whole blocks, one of each side, and longer than a block of 128.
SHAPES = [(33, 65, 17), (1, 40, 3), (5, 1, 4), (4, 300, 1)]
DTYPES = [torch.bfloat16, torch.float32, torch.float16]
FLOAT8 = [
    row for row in ROWS if row.native and not row.is_wide and not row.output.left.block and "int8" not in row.name
]


def lying(shape: tuple[int, int], dim: int, seed: int) -> Tensor:
    """A matrix ``[rows, contraction]``, or its transpose where ``dim`` is 0."""
    return gaussian(*(shape if dim == 1 else shape[::-1]), seed=seed)


def operands_of(row: Compute, place: str, shape: tuple[int, int, int], as_codes: bool = False) -> list[Operand]:
    """Both, cast for a matmul of the row."""
    found, matmul, (rows, contraction, columns) = [], row.products[place], shape
    for seed, (cast, dim, size) in enumerate(
        zip((matmul.left, matmul.right), DIMS[place], (rows, columns), strict=True)
    ):
        dtype = getattr(torch, cast.format) if as_codes else operand_dtype(cast, matmul, CPU)
        x = lying((size, contraction), dim, seed)
        found.append(cast_matrix(x, cast, dim, dtype, words=words_for(x, cast, dim, KEY)))
    return found


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
    left, right = operands_of(row, place, shape)
    found = multiply(left, bare(right, row, place), DIMS[place], row.products[place], dtype)
    exactly = oracle.product(
        values_of(left, DIMS[place][0]), values_of(right, DIMS[place][1], folded=is_folded(row, place))
    )
    assert found.dtype == dtype and found.shape == exactly.value.shape
    bound = off(exactly, row, place, exactly.value.shape[1] and shape[1], dtype)
    assert ((found.double() - exactly.value).abs() <= bound).all()
    # The bound is one: it is small beside what it bounds.
    assert bound.median() <= 0.05 * exactly.magnitude.median() or dtype == torch.float16


@every_row
@every_place
def test_operands_are_the_definition_s_in_a_dtype_that_holds_them(row: Compute, place: str) -> None:
    matmul = row.products[place]
    for cast, dim, size, found in zip(
        (matmul.left, matmul.right), DIMS[place], (33, 17), operands_of(row, place, (33, 65, 17)), strict=True
    ):
        source = lying((size, 65), dim, 0 if cast is matmul.left and size == 33 else 1)
        defined = exact(quantized(source, cast, dim))
        outer = 1.0 if found.outer is None else found.outer.double()
        assert torch.equal(found.data.double() * outer, defined)
        narrow = {"int8": torch.int8, "tfloat32": torch.float32}
        wide = getattr(torch, cast.format, None) if cast.is_wide else torch.bfloat16
        assert found.data.dtype == narrow.get(cast.format, wide)


@pytest.mark.parametrize("row", NARROW, **names)
@every_place
@pytest.mark.usefixtures("native_formats")
def test_emulated_operands_multiply_without_error(row: Compute, place: str) -> None:
    """With one term there is no sum: what the CPU's bfloat16 matmul gives is the exact product, rounded once."""
    matmul, pair = row.products[place], operands_of(row, place, (64, 32, 64))
    left, right = (Operand(x.data.narrow(dim, 5, 1), None) for x, dim in zip(pair, DIMS[place], strict=True))
    found = multiply(left, right, DIMS[place], matmul, torch.float32)
    exactly = values_of(left, DIMS[place][0]) @ values_of(right, DIMS[place][1]).t()
    exactly = exactly if left.data.dtype == torch.int8 else exactly.bfloat16()
    assert torch.equal(found.double(), exactly.double())


# ── integers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def random_codes(*shape: int, seed: int) -> Tensor:
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def random_scales(*shape: int, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 1e-2


@every_place
@pytest.mark.parametrize("shape", [*SHAPES, (70, 513, 90)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
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


@pytest.mark.parametrize("columns", [3, 40])
@every_place
def test_integers_multiply_in_panels_with_the_same_bits(
    place: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the last panel, of fewer rows, and where the transpose of the product is what is cut into them."""
    (of_left, of_right), dtype = DIMS[place], torch.float32
    left, right = random_codes(33, 65, seed=0), random_codes(columns, 65, seed=1)
    pair = [x if dim == 1 else x.t().contiguous() for x, dim in ((left, of_left), (right, of_right))]
    by_row, by_column = random_scales(33, 1, seed=2), random_scales(1, columns, seed=3)
    exactly = oracle.scaled_integers(oracle.integer_product(left, right), by_row, by_column, None, dtype)
    for size in (1, 4 * columns, 7 * 33, 1 << 20):
        monkeypatch.setattr(gemm, "_PANEL_ELEMENTS", size)
        found = multiply(
            Operand(pair[0], by_row), Operand(pair[1], by_column), DIMS[place], COMPUTES["int8-row"].output, dtype
        )
        assert torch.equal(bits_with_one_nan(found), bits_with_one_nan(exactly))


def test_integers_multiply_in_inference_and_then_in_training() -> None:
    """The memory that sums go through outlives the mode it was taken in."""
    widening.SCRATCH.buffers.clear()
    codes = Operand(random_codes(4, 8, seed=0), None)
    with torch.inference_mode():
        first = multiply(codes, codes, (1, 1), COMPUTES["int8-row"].output, torch.float32).clone()
    assert torch.equal(multiply(codes, codes, (1, 1), COMPUTES["int8-row"].output, torch.float32), first)


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


@pytest.mark.parametrize("row", FLOAT8, **names)
@every_place
@pytest.mark.parametrize("shape", [(33, 65, 17), (1, 40, 3), (16, 16, 16)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_codes_multiply_as_they_are_and_as_bfloat16_alike(
    row: Compute, place: str, shape: tuple[int, int, int], with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way to the float8 kernel, walked on the CPU's own slow one: layouts, filling up, scales."""
    if row.products[place].left.granularity == "row" and torch.__version__ < "2.13":
        pytest.skip("on CPUs this PyTorch multiplies float8 with one scale for a tensor only")
    left, right = operands_of(row, place, shape, as_codes=True)
    bias = gaussian(shape[2], seed=5) if with_bias else None
    matmul = row.products[place]
    emulated = multiply(left, right, DIMS[place], matmul, torch.bfloat16, bias)
    monkeypatch.setattr(native, "kernel_here", lambda product, device: KERNELS["float8"])
    found = multiply(left, right, DIMS[place], matmul, torch.bfloat16, bias)
    exactly = oracle.product(values_of(left, DIMS[place][0]), values_of(right, DIMS[place][1]))
    bound = exactly.off(matmul.bound(shape[1]), [2.0**-8])
    value = exactly.value
    if bias is not None:
        value = value + bias.double()
        bound = bound + 2.0**-8 * (value.abs() + bound)
    assert found.shape == emulated.shape == value.shape
    assert ((found.double() - value).abs() <= bound).all()
    assert ((found.double() - emulated.double()).abs() <= bound + 2.0**-7 * (value.abs() + exactly.value.abs())).all()


@pytest.mark.usefixtures("native_formats")
def test_emulation_is_described() -> None:
    assert describe_matmuls(COMPUTES["int8-row"], CPU) == "int8-row multiplies on this CPU natively."
    said = describe_matmuls(COMPUTES["float8-row-e5m2"], CPU)
    assert said.startswith("float8-row-e5m2 multiplies float8_e4m3fn and float8_e5m2, which this CPU cannot")


# ── biases, sides, special values ───────────────────────────────────────────────────────────────────────────────────


@every_row
@exhaustive("dtype", DTYPES[:2])
def test_a_bias_is_added_in_every_row(row: Compute, dtype: torch.dtype) -> None:
    left, right = operands_of(row, "output", (33, 65, 17))
    bias = gaussian(17, dtype=dtype, seed=3, scale=5.0)
    found = multiply(left, right, (1, 1), row.output, dtype, bias)[:33, :17].double()
    whole = oracle.product(values_of(left, 1), values_of(right, 1))
    exactly = oracle.Product(whole.value[:33, :17], whole.magnitude[:33, :17])
    value = exactly.value + bias.double()
    bound = off(exactly, row, "output", 65, dtype) + 2 * oracle.ROUNDING[dtype] * (value.abs() + bias.double().abs())
    assert ((found - value).abs() <= bound).all()


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


def test_a_bias_is_added_before_the_result_is_rounded() -> None:
    """1024.5 + (−1024) is 0.5; in bfloat16 the sum would first have been 1024."""
    row = COMPUTES["int8-row"]
    left = Operand(torch.tensor([[127]], dtype=torch.int8), torch.tensor([[1024.5 / 127]]))
    right = Operand(torch.tensor([[1]], dtype=torch.int8), torch.ones(1, 1))
    found = multiply(left, right, (1, 1), row.output, torch.bfloat16, torch.tensor([-1024.0]))
    assert found.item() == 0.5


@every_row
@every_place
def test_no_rows_give_no_rows_and_no_terms_give_zeros(row: Compute, place: str) -> None:
    matmul = row.products[place]
    for shape in ((0, 64, 17), (33, 0, 17)):
        left, right = operands_of(row, place, shape)
        found = multiply(left, bare(right, row, place), DIMS[place], matmul, torch.bfloat16)
        assert found.shape[0] in (shape[0], -shape[0] // 32 * -32) and not found.any()


@exhaustive("name", ["int8-row", "float8-row", "float8-tensor", "nvfp4"])
@exhaustive("side", [0, 1])
def test_a_scale_that_is_nan_reaches_all_that_it_scales(name: str, side: int) -> None:
    row = COMPUTES[name]
    pair = operands_of(row, "output", (32, 64, 16))
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


def test_large_results_are_scaled_by_the_compiler_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for any shape: nothing compiles anew for the second one."""
    assert fusion.can_compile("cpu")
    row = COMPUTES["float8-row"]

    shapes = [SHAPES[0], (64, 40, 30)]
    # Made before anything is compiled: only the product is looked at.
    operands = {shape: operands_of(row, "output", shape, as_codes=True) for shape in shapes}

    def run(shape: tuple[int, int, int]) -> Tensor:
        return multiply(*operands[shape], (1, 1), row.output, torch.bfloat16, gaussian(shape[2], seed=7))

    expected = [run(shape) for shape in shapes]
    gemm._scaling.cache_clear()
    monkeypatch.setattr(fusion, "COMPILE_ELEMENTS", 1)
    called: list[str] = []
    real = fusion.compiled_for_pattern

    def counted(definition: FunctionType, *arguments: Tensor | None) -> object:
        called.append(definition.__name__)
        return real(definition, *arguments)

    monkeypatch.setattr(fusion, "compiled_for_pattern", counted)
    assert torch.equal(bits_with_one_nan(run(shapes[0])), bits_with_one_nan(expected[0]))
    assert called == ["_to_bfloat16", "_to_bfloat16", "scale_result"]
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(bits_with_one_nan(run(shapes[1])), bits_with_one_nan(expected[1]))


def test_the_stated_bounds() -> None:
    row = COMPUTES["float8-row"]
    assert COMPUTES["int8-row"].output.bound(10**6) == 0
    assert dataclasses.replace(row.output, accumulation="float32").bound(1024) == 1024 * 2.0**-23
    assert (
        row.output.bound(4096) == 128 * 2.0**-13 + 32 * 2.0**-23 < COMPUTES["float8-tensor"].output.bound(4096) == 0.5
    )
