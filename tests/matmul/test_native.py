"""Native matmuls, walked as on the device: what a kernel gets, it takes, and its product is the emulation's.

Stand-ins (``oracles/cuda_matmuls.py``) take the place of PyTorch's functions, check each argument by PyTorch's and cuBLAS's
rules, and compute in float64 what the kernel is defined to do with exactly these bytes.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import narrowgauge as ng
from covering import exhaustive
from matmul.scenarios import CPU, DIMS, KEY, bits_with_one_nan, gaussian, make_layer, names, passed, same, words_for
from narrowgauge.machine.processor import multiplies
from narrowgauge.matmul import experts, gemm, native
from narrowgauge.matmul.gemm import describe_matmuls, is_native, multiply, operand_dtype
from narrowgauge.matmul.operand import PAIRS, Operand, block_values, cast_matrix
from narrowgauge.numerics import code_layouts
from narrowgauge.spec.chips import CHIPS
from narrowgauge.spec.computes import COMPUTES, PLACES, Cast, Compute
from narrowgauge.spec.kernels import KERNELS, kernel_for, needs_kernel
from oracles import cuda_matmuls as device_rules
from oracles import linear as oracle
from oracles.cuda_matmuls import Refused

ARCHITECTURES = ("sm80", "sm89", "sm90", "sm100", "sm103", "sm120", "gfx942", "gfx950")
NATIVE_ON = {
    "float8-row": "sm90", "float8-tensor": "sm89", "float8-delayed-e5m2": "sm90", "float8-block": "sm90", "mxfp8": "sm100",
    "mxfp4": "sm100", "nvfp4": "sm120", "tfloat32": "sm80",
}  # fmt: skip
"""A compute of each way through the code, on a chip that has its kernel."""
BLOCKS = [COMPUTES[name] for name in ("float8-block", "mxfp8", "mxfp4", "nvfp4")]
# [rows, contraction, columns]: ragged, one of each side, several tiles, and whole blocks.
SHAPES = [(33, 65, 17), (1, 40, 3), (5, 1, 4), (150, 300, 140), (256, 512, 128)]
every_place = pytest.mark.parametrize("place", PLACES)
every_way = pytest.mark.parametrize("row", [COMPUTES[name] for name in NATIVE_ON], **names)


@contextmanager
def device(architecture: str) -> Iterator[None]:
    """This process takes the CPU for a chip, and stand-ins for its kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "architecture_of", lambda device: architecture)
        patch.setattr(F, "scaled_mm", device_rules.scaled_mm(architecture))
        patch.setattr(torch, "_scaled_mm", device_rules.scaled_mm_v1(architecture))
        yield


@pytest.fixture
def untried() -> Iterator[None]:
    """No kernel has been tried yet, and what this test finds is forgotten."""
    native._works.cache_clear()
    yield
    native._works.cache_clear()


def operands_of(
    row: Compute, place: str, shape: tuple[int, int, int], draw: Callable[..., Tensor] = gaussian
) -> list[Operand]:
    """Both, cast for a matmul of the row by what the device asks for."""
    found, matmul, (rows, contraction, columns) = [], row.products[place], shape
    for seed, (cast, dim, size) in enumerate(
        zip((matmul.left, matmul.right), DIMS[place], (rows, columns), strict=True)
    ):
        x = draw(*((size, contraction) if dim == 1 else (contraction, size)), seed=seed)
        x = x.float() if cast.format == "tfloat32" else x
        dtype = operand_dtype(cast, matmul, CPU)
        found.append(cast_matrix(x, cast, dim, dtype, words=words_for(x, cast, dim, KEY)))
    return found


def multiplied(
    row: Compute,
    place: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    bias: Tensor | None = None,
    **options: object,
) -> Tensor:
    left, right = operands_of(row, place, shape, **options)  # type: ignore[arg-type]
    return multiply(left, right, DIMS[place], row.products[place], dtype, bias)


def values_of(operand: Operand, dim: int) -> Tensor:
    values = (operand.data if operand.inner is None else block_values(operand, dim)).double()
    values = values if operand.outer is None else values * operand.outer.double()
    return values if dim == 1 else values.t()


# ── which chip multiplies what ──────────────────────────────────────────────────────────────────────────────────────


def test_which_computes_each_chip_multiplies_itself() -> None:
    whole = {
        "float8-tensor", "float8-delayed", "float8-row", "float8-tensor-e5m2", "float8-delayed-e5m2", "float8-row-e5m2",
        "scalify", "unit",
    }  # fmt: skip
    expected = {
        "sm75": set(),
        "sm80": {"tfloat32"},
        "sm89": whole | {"tfloat32"},
        "sm90": whole | {"tfloat32", "float8-block"},
        "sm100": whole | {"tfloat32", "mxfp8", "mxfp4", "nvfp4"},
        "sm120": whole | {"tfloat32", "mxfp8", "nvfp4"},
        "gfx90a": set(),
        "gfx942": whole,
        "gfx950": whole,
    }
    for architecture, computes in expected.items():
        found = {
            row.name
            for row in COMPUTES.values()
            if any(map(needs_kernel, row.products.values()))
            and all(kernel_for(product, architecture) for product in row.products.values() if needs_kernel(product))
        }
        assert found == computes, architecture
    assert kernel_for(COMPUTES["float8-block-e5m2"].output, "sm90") is KERNELS["float8-blocks"]
    assert kernel_for(COMPUTES["float8-block-e5m2"].grad_input, "sm90") is None, (
        "PyTorch multiplies e4m3 in blocks alone"
    )


def test_every_kernel_has_a_function_a_chip_and_a_compute() -> None:
    assert set(native._FUNCTIONS) == set(KERNELS)
    architectures = {chip.architecture.split()[-1] for chip in CHIPS.values() if chip.vendor in ("NVIDIA", "AMD")}
    products = [product for row in COMPUTES.values() for product in row.products.values()]
    for kernel in KERNELS.values():
        assert any(map(kernel.runs_on, architectures)) and any(map(kernel.takes, products))


def test_the_documentation_has_the_table() -> None:
    text = (Path(__file__).parents[2] / "docs/gpu.md").read_text("utf-8")
    for kernel in KERNELS.values():
        assert f"| `{kernel.name}` | {kernel.purpose} |" in text


def test_computes_say_where_they_are_native() -> None:
    for row in COMPUTES.values():
        if any(map(needs_kernel, row.products.values())):
            has_kernel = any(kernel_for(row.output, architecture) for architecture in ARCHITECTURES)
            assert bool(row.native) == has_kernel, row.name


@every_way
@pytest.mark.usefixtures("untried")
def test_a_chip_that_has_the_kernel_is_asked_once_and_then_gets_codes(row: Compute) -> None:
    assert not is_native(row.output, CPU)
    with device(NATIVE_ON[row.name]):
        narrow = {"float4_e2m1fn": PAIRS, "tfloat32": torch.float32}
        for product in row.products.values():
            assert is_native(product, CPU)
            for cast in (product.left, product.right):
                assert operand_dtype(cast, product, CPU) == narrow.get(cast.format) or getattr(torch, cast.format)
        assert describe_matmuls(row, CPU) == f"{row.name} multiplies on this CPU natively."
        tried = native._works.cache_info().misses
        assert is_native(row.output, CPU) and native._works.cache_info().misses == tried


# ── the product, as on the device ───────────────────────────────────────────────────────────────────────────────────


@every_way
@every_place
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_native_product_is_the_exact_one_rounded_once(row: Compute, place: str, shape: tuple[int, int, int]) -> None:
    """The stand-in adds in float64, so what is off is the layout. And the emulation of the same codes is as near as it states."""
    bias = gaussian(shape[2], seed=5)
    for dtype, given in itertools.product((torch.bfloat16, torch.float32), (None, bias)):
        with device(NATIVE_ON[row.name]):
            pair = operands_of(row, place, shape)
            assert native.takes(KERNELS["tfloat32"] if row.name == "tfloat32" else KERNELS["float8"], *pair)
            found = multiply(*pair, DIMS[place], row.products[place], dtype, given)
        left, right = (values_of(x, dim) for x, dim in zip(pair, DIMS[place], strict=True))
        product = oracle.product(left, right)
        wide = F.pad(bias, (0, product.value.shape[1] - len(bias))).double() if given is not None else 0.0
        exactly = product.value + wide
        # Sums leave mxfp4's kernel in bfloat16; two tensors' scales are rounded in float32.
        roundings = [
            2.0**-22,
            oracle.ROUNDING[torch.bfloat16 if row.name == "mxfp4" else dtype],
            oracle.ROUNDING[dtype],
        ]
        bound = (product.magnitude * 2.0**-40) + exactly.abs() * sum(roundings) + product.value.abs() * sum(roundings)
        summed = shape[1] * 2.0**-23 * product.magnitude if row.name == "tfloat32" else 0.0  # by the CPU, in float32
        assert found.dtype == dtype and found.shape == exactly.shape
        assert ((found.double() - exactly).abs() <= bound + summed).all()
        emulated = multiply(*pair, DIMS[place], row.products[place], dtype, given)
        accumulated = max(shape[1], 1) * 2.0**-23 * product.magnitude + 2.0**-7 * (exactly.abs() + product.value.abs())
        assert ((found.double() - emulated.double()).abs() <= bound + accumulated).all()


@every_way
@every_place
def test_sums_that_are_exact_are_equal_bit_for_bit(row: Compute, place: str) -> None:
    """Small integers and powers of two: no order of the sum matters, so native and emulated differ in no bit."""

    def draw(rows: int, columns: int, seed: int) -> Tensor:
        x = torch.randint(-2, 3, (rows, columns), generator=torch.Generator().manual_seed(seed)).bfloat16()
        # The largest magnitude of each block and row is 2: every scale is a power of two, or what 2 makes of it.
        x[::2] = x[::2].sign() * 2
        x[:, ::2] = x[:, ::2].sign() * 2
        return torch.where(x == 0, 2, x)

    left, right = row.products[place].left, row.products[place].right
    if left.rotation != "none":
        pytest.skip("a rotation makes other numbers of small integers")
    for shape in SHAPES:
        emulated = multiplied(row, place, shape, torch.float32, draw=draw)
        with device(NATIVE_ON[row.name]):
            found = multiplied(row, place, shape, torch.float32, draw=draw)
        # A CPU that multiplies bfloat16 rounds the sums to it.
        is_rounded = multiplies("bfloat16")
        if row.name == "nvfp4":  # two tensors' scales are multiplied first
            assert torch.allclose(found, emulated, rtol=2.0**-8 if is_rounded else 2.0**-22, atol=0)
        elif right.scale == "float32" and right.granularity not in ("none", "128x128"):
            assert torch.allclose(found, emulated, rtol=2.0**-7)  # scales are not powers of two
        else:  # sums leave mxfp4's kernel in bfloat16
            wanted = emulated.bfloat16().float() if is_rounded or row.name == "mxfp4" else emulated
            assert torch.equal(found.bfloat16().float() if is_rounded else found, wanted)


@exhaustive("row", BLOCKS)
@exhaustive("place", PLACES)
def test_native_codes_are_the_emulation_s(row: Compute, place: str) -> None:
    """Cast for a kernel and cast for the emulation, an operand is the same numbers, and kept in fewer bytes."""
    for shape in SHAPES:
        emulated = operands_of(row, place, shape)
        with device(NATIVE_ON[row.name]):
            found = operands_of(row, place, shape)
        for one, other, dim in zip(found, emulated, DIMS[place], strict=True):
            assert one.inner is not None and other.inner is None
            assert torch.equal(block_values(one, dim), other.data + 0.0)
            assert (one.outer is None) == (other.outer is None)
            assert one.outer is None or other.outer is None or torch.equal(one.outer, other.outer)
            assert one.data.nbytes * (4 if one.data.dtype == PAIRS else 2) == other.data.nbytes


@exhaustive("row", BLOCKS)
def test_what_is_not_finite_reaches_the_kernel_as_nan(row: Compute) -> None:
    for bad in (torch.nan, torch.inf):
        x, y = gaussian(40, 160, seed=1), gaussian(48, 160, seed=2)
        x[3, 130] = bad
        with device(NATIVE_ON[row.name]):
            pair = [
                cast_matrix(each, cast, 1, operand_dtype(cast, row.output, CPU))
                for each, cast in ((x, row.output.left), (y, row.output.right))
            ]
            found = multiply(*pair, (1, 1), row.output, torch.bfloat16)[:40, :48].isnan()
        assert found[3].all() and (row.name == "nvfp4" or not found[:3].any())


@every_way
@every_place
def test_no_rows_give_no_rows_and_no_terms_give_zeros(row: Compute, place: str) -> None:
    for shape in ((0, 32, 16), (16, 0, 16), (16, 32, 0)):
        bias = gaussian(shape[2], seed=1)
        with device(NATIVE_ON[row.name]):
            found = multiplied(row, place, shape, torch.bfloat16, bias)[: shape[0], : shape[2]]
        assert found.shape == (shape[0], shape[2])
        assert torch.equal(found, bias.expand_as(found)) if shape[1] == 0 else not found.numel()


@every_way
@pytest.mark.parametrize("shape", [(33, 65, 17), (130, 200, 96)], ids=str)
def test_a_layer_learns_the_same_from_codes(row: Compute, shape: tuple[int, int, int]) -> None:
    """Forward and backward through the operators: codes and both kinds of scales come through, and the gradients fit."""
    dtype = getattr(torch, row.dtype)
    x, grad = gaussian(*shape[:2], dtype=dtype, seed=3), gaussian(shape[0], shape[2], dtype=dtype, seed=4)
    emulated = passed(make_layer(row, *shape[1:], dtype=dtype)[0], x, grad)
    with device(NATIVE_ON[row.name]):
        native_result = passed(make_layer(row, *shape[1:], dtype=dtype)[0], x, grad)
    for found, expected in zip(native_result, emulated, strict=True):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert (found - expected).norm() <= 2.0**-7 * expected.norm()


@exhaustive("row", BLOCKS)
def test_operators_tell_the_compiler_what_they_return(row: Compute) -> None:
    from narrowgauge.matmul import layer_matmuls

    x = gaussian(33, 65)
    layer, _ = make_layer(row, 65, 17)
    with device(NATIVE_ON[row.name]), torch.no_grad():
        torch.library.opcheck(layer_matmuls.cast_input, (x, row.name, None, None, False), test_utils="test_faketensor")
        torch.library.opcheck(layer_matmuls.cast_kept, (x, row.name, layer.state), test_utils="test_faketensor")


@exhaustive("row", BLOCKS)
def test_a_compiled_layer_hands_codes_over_with_the_same_bits(row: Compute) -> None:
    """Through Inductor's graph, forward and backward: scales in dtypes that it does not compute with pass through as they are."""
    x, grad = gaussian(33, 65, seed=3), gaussian(33, 17, seed=4)
    with device(NATIVE_ON[row.name]):
        eager = passed(make_layer(row, 65, 17)[0], x, grad)
        layer, _ = make_layer(row, 65, 17)
        assert same(passed(layer, x, grad, torch.compile(layer, fullgraph=True)), eager)


def test_a_weight_cast_for_a_kernel_serves_the_emulated_product_too() -> None:
    """float8-block-e5m2: ``output`` is native on Hopper, and ``grad_input``, which reuses its codes of the weight, is not."""
    row, shape = COMPUTES["float8-block-e5m2"], (33, 65, 17)
    x, grad = gaussian(*shape[:2], seed=3), gaussian(shape[0], shape[2], seed=4)
    emulated = passed(make_layer(row, *shape[1:])[0], x, grad)
    with device("sm90"):
        assert is_native(row.output, CPU) and not is_native(row.grad_input, CPU)
        found = passed(make_layer(row, *shape[1:])[0], x, grad)
    assert torch.equal(found.grad_input, emulated.grad_input) and torch.equal(found.grad_weight, emulated.grad_weight)
    assert (found.output - emulated.output).norm() <= 2.0**-7 * emulated.output.norm()


@pytest.mark.parametrize("name", ["float8-block", "mxfp8"])
def test_inference_hands_stored_codes_over_as_they_are(name: str) -> None:
    def made() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(200, 72, dtype=torch.bfloat16))
            return ng.quantize_for_inference(model, name, keep=())

    x = gaussian(5, 200)
    with torch.no_grad():
        model, sent = made(), []
        emulated, weight = model(x), model[0].dequantize()  # type: ignore[index, operator]
        with device(NATIVE_ON[name]), pytest.MonkeyPatch.context() as patch:
            stand_in = F.scaled_mm
            patch.setattr(F, "scaled_mm", lambda *given, **options: sent.append(given) or stand_in(*given, **options))
            found = made()(x.clone())  # the cast of the same input would be remembered
            assert torch.equal(model[0].dequantize(), weight)  # type: ignore[index, operator]
    assert len(sent) in (1, 3), "a trial's two, and the layer's"
    assert (found - emulated).norm() <= 2.0**-7 * emulated.norm()


@pytest.mark.parametrize("row", ["float8-block", "mxfp8", "nvfp4"])
def test_experts_multiply_codes(row: str) -> None:
    x, weights = gaussian(40, 48, seed=1), gaussian(3, 40, 48, seed=2).requires_grad_()
    offsets = torch.tensor([10, 10, 37], dtype=torch.int32)
    emulated = experts.grouped_linear(x, weights, offsets, row)
    (expected,) = torch.autograd.grad(emulated.float().square().sum(), weights)
    with device(NATIVE_ON[row]):
        found = experts.grouped_linear(x, weights, offsets, row)
        (gradient,) = torch.autograd.grad(found.float().square().sum(), weights)
    for one, other in ((found, emulated), (gradient, expected)):
        assert (one - other).norm() <= 2.0**-5 * other.norm()


# ── each check can fail ─────────────────────────────────────────────────────────────────────────────────────────────


def untiled(scales: Tensor) -> Tensor:
    """Scales filled up to whole tiles, and left row by row."""
    rows, blocks = scales.shape
    return F.pad(scales.view(torch.uint8), (0, -blocks % 4, 0, -rows % 128)).flatten().view(scales.dtype)


def swapped_pairs(codes: Tensor, dim: int) -> Tensor:
    packed = code_layouts.packed_pairs(codes, dim)
    return (packed >> 4) | (packed << 4)


PLANTED: dict[str, tuple[str, str, Callable[..., object]]] = {
    "scales row by row": ("mxfp8", "tiled_scales", untiled),
    "no tiles filled up": ("mxfp8", "tiled_scales", lambda scales: scales.contiguous().flatten()),
    "columns of a tile as rows": ("nvfp4", "tiled_scales", lambda scales: untiled(scales.flip(0))),
    "codes not filled up": ("mxfp8", "_filled", lambda x: x.contiguous()),
    "rows of the right matrix": ("float8-row", "_filled", lambda x: x.t().contiguous().t()),
    "scales in rows": ("float8-block", "scales_in_columns", lambda scales: scales.contiguous()),
    "square scales not filled up": ("float8-block", "square_scales_in_columns", lambda scales: scales.t()),
    "scales of another block": (
        "float8-block",
        "scales_in_columns",
        lambda scales: scales.roll(1, 1).t().contiguous().t(),
    ),
}


REFUSED_ALONE = ("rows of the right matrix", "codes not filled up")
"""What the definition still computes rightly, and the device refuses."""


@pytest.mark.parametrize("planted", PLANTED)
def test_a_wrong_layout_is_refused_or_differs(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, function, wrong = PLANTED[planted]
    row, shape = COMPUTES[name], (150, 650, 140)
    x = (
        gaussian(shape[0], shape[1])
        * 2.0 ** (torch.arange(shape[1]) // 32 % 5)
        * 2.0 ** (torch.arange(shape[0])[:, None] % 7)
    )
    y = gaussian(shape[2], shape[1], seed=1) * 2.0 ** (torch.arange(shape[1]) // 32 % 3)
    with device(NATIVE_ON[name]):
        pair = [
            cast_matrix(each.bfloat16(), cast, 1, operand_dtype(cast, row.output, CPU))
            for each, cast in ((x, row.output.left), (y, row.output.right))
        ]
        right = multiply(*pair, (1, 1), row.output, torch.float32)
        assert is_native(row.output, CPU)
        monkeypatch.setattr(native, function, wrong)
        try:
            found = multiply(*pair, (1, 1), row.output, torch.float32)
        except (Refused, RuntimeError, ValueError):
            return
        assert not torch.allclose(found, right, rtol=0.01)


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("planted", [name for name in PLANTED if name not in REFUSED_ALONE])
def test_a_kernel_that_is_off_in_its_trial_is_not_used(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a chip would show it: nobody refuses, and the product is another."""
    name, function, wrong = PLANTED[planted]
    product = COMPUTES[name].output
    with device(NATIVE_ON[name]):
        monkeypatch.setattr(device_rules, "check", lambda holds, rule: None)
        monkeypatch.setattr(native, function, wrong)
        try:
            assert not is_native(product, CPU)
            assert operand_dtype(product.left, product, CPU) == torch.bfloat16
        except IndexError:
            pass  # the stand-in read beyond the scales, which a chip does not tell


@pytest.mark.usefixtures("untried")
def test_a_kernel_that_raises_is_not_used_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    row = COMPUTES["mxfp4"]
    emulated = multiplied(row, "output", SHAPES[0], torch.bfloat16)

    def missing(*arguments: object, **options: object) -> Tensor:
        raise NotImplementedError("MXFP4 scaling supported on ROCM and CUDA+FBGEMM_GENAI only")

    with device("sm100"):
        monkeypatch.setattr(F, "scaled_mm", missing)
        assert describe_matmuls(row, CPU).startswith(
            "mxfp4 multiplies float4_e2m1fn, which this CPU cannot; it is emulated"
        )
        assert torch.equal(multiplied(row, "output", SHAPES[0], torch.bfloat16), emulated)
        native._works.cache_clear()
        monkeypatch.delattr(F, "scaled_mm")  # as in an older PyTorch
        assert not is_native(row.output, CPU) and not is_native(COMPUTES["mxfp8"].output, CPU)


@pytest.mark.usefixtures("untried")
def test_a_full_memory_says_nothing_about_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> Tensor:
        raise torch.OutOfMemoryError

    with device("sm100"):
        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
            patch.setattr(F, "scaled_mm", full)
            is_native(COMPUTES["mxfp8"].output, CPU)
        assert is_native(COMPUTES["mxfp8"].output, CPU)


@pytest.mark.usefixtures("untried")
@exhaustive("name", list(NATIVE_ON))
def test_a_trial_has_real_numbers_wherever_it_is_asked_for(name: str) -> None:
    for mode in (FakeTensorMode(), torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        native._works.cache_clear()
        with device(NATIVE_ON[name]), mode:
            assert all(is_native(product, CPU) for product in COMPUTES[name].products.values())


def test_a_process_without_a_gpu_has_no_architecture() -> None:
    assert native.architecture_of(CPU) is None and native.architecture_of(torch.device("meta")) is None
    if not torch.cuda.is_available():
        assert native.architecture_of(torch.device("cuda")) is None


@exhaustive("format", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "tfloat32"])
def test_the_products_of_a_trial_are_exact_in_any_order(format: str) -> None:
    """Partial sums of magnitudes stay below 2^24 of their smallest step."""
    for granularity, scale in (
        ("row", "float32"),
        ("1x16", "float8_e4m3fn"),
        ("1x32", "float8_e8m0fnu"),
        ("128x128", "float32"),
    ):
        if (format, granularity) in (("tfloat32", "row"),) or (format == "float4_e2m1fn" and granularity == "row"):
            continue
        left, right = (native.specimen(native._Side(format, granularity, scale), rows, 640) for rows in native._ROWS)
        a, b = (native._values(x) for x in (left, right))
        assert (a.abs() @ b.abs().t()).max() < 2**17
        assert torch.equal((a @ b.t()) * 16, ((a @ b.t()) * 16).round())
        assert len({tuple(r.tolist()) for r in a[:64]}) == 64, "rows differ, so that an exchange is seen"


# ── rules that PyTorch checks on the device alone ───────────────────────────────────────────────────────────────────


def float8(rows: int, columns: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    return torch.ones(rows, columns).to(dtype)


def test_the_stand_ins_refuse_what_only_the_device_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's meta functions let all of these pass."""
    one, e5m2 = torch.ones(()), torch.float8_e5m2
    mm, blocks = device_rules.scaled_mm_v1("sm90"), device_rules.scaled_mm("sm90")
    by128, square = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    by32, tiles = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    columns, squares = torch.ones(1, 16).t(), torch.ones(1, 4).t()
    e8m0 = torch.ones(512).to(torch.float8_e8m0fnu)
    faults: dict[str, Callable[[], object]] = {
        "no two e5m2": lambda: mm(float8(16, 32, e5m2), float8(16, 32, e5m2).t(), one, one, out_dtype=torch.bfloat16),
        "no _scaled_mm": lambda: device_rules.scaled_mm_v1("sm80")(
            float8(16, 32), float8(16, 32).t(), one, one, out_dtype=torch.bfloat16
        ),
        "is no result": lambda: mm(float8(16, 32), float8(16, 32).t(), one, one, out_dtype=torch.float64),
        "begin at multiples": lambda: mm(
            float8(1, 16 * 32 + 8).flatten()[8:].view(16, 32), float8(16, 32).t(), one, one, out_dtype=torch.bfloat16
        ),
        "on Hopper alone": lambda: device_rules.scaled_mm("sm100")(
            float8(16, 128), float8(128, 128).t(), columns, by128, squares, square
        ),
        "e4m3 on both": lambda: blocks(float8(16, 128, e5m2), float8(128, 128).t(), columns, by128, squares, square),
        "on Blackwell alone": lambda: blocks(float8(16, 32), float8(16, 32).t(), e8m0, by32, e8m0, by32, [tiles], [tiles]),
        "on B200 and B300": lambda: device_rules.scaled_mm("sm120")(
            torch.zeros(16, 16, dtype=PAIRS).view(torch.float4_e2m1fn_x2),
            torch.zeros(16, 16, dtype=PAIRS).view(torch.float4_e2m1fn_x2).t(), e8m0, by32, e8m0, by32, [tiles], [tiles],
        ),
        "more than 16 rows": lambda: device_rules.int_mm(*(torch.ones(16, 16, dtype=torch.int8) for _ in range(2))),
        "a multiple of 8": lambda: device_rules.int_mm(
            torch.ones(17, 9, dtype=torch.int8), torch.ones(9, 8, dtype=torch.int8)
        ),
    }  # fmt: skip
    for rule, fault in faults.items():
        with pytest.raises(Refused, match=rule):
            fault()
    for faulty in ("no two e5m2", "on Hopper alone", "more than 16 rows", "a multiple of 8"):
        with monkeypatch.context() as patch:
            patch.setattr(device_rules, "check", lambda holds, rule: None)
            faults[faulty]()


@exhaustive("shape", [(1, 1, 1), (17, 8, 8), (16, 16, 16), (33, 65, 17), (40, 7, 130), (0, 8, 8), (8, 0, 8), (8, 8, 0)])
def test_integers_are_handed_over_as_the_gpu_takes_them(shape: tuple[int, int, int]) -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-127, 128, sides, generator=draw, dtype=torch.int8) for sides in (shape[:2], shape[1:]))
    for left, right in itertools.product((a, a.t().contiguous().t()), (b, b.t().contiguous().t())):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "_int_mm", device_rules.int_mm)
            for terms in (native.EXACT_TERMS, 16):
                patch.setattr(native, "EXACT_TERMS", terms)
                assert torch.equal(native.sum_integers(left, right).double(), a.double() @ b.double())


def grouped_cases() -> Iterator[tuple[Tensor, Tensor]]:
    x, weights = gaussian(40, 48), gaussian(3, 40, 48)
    wide, late = gaussian(40, 60), gaussian(40 * 48 + 8)
    yield from itertools.product(
        (x, x.t().contiguous().t(), wide[:, :48], wide[:, 3:51], late[4:-4].view(40, 48), late[8:].view(40, 48)),
        (weights, weights.transpose(1, 2).contiguous().transpose(1, 2), gaussian(3, 40, 60)[:, :, 4:52]),
    )


def test_grouped_matmuls_are_sent_to_pytorch_only_where_it_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slice of a wider matrix, or one that begins between multiples of 16 bytes, goes to our own."""
    offsets, sent = torch.tensor([10, 10, 37], dtype=torch.int32), []
    real = F.grouped_mm

    def checked(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        device_rules.check_grouped_mm(a, b, offs)
        sent.append(a)
        return real(a, b, offs=offs)

    monkeypatch.setattr(experts, "is_widened", lambda dtype, device: False)
    monkeypatch.setattr(F, "grouped_mm", checked)
    cases = list(grouped_cases())
    for x, weights in cases:
        found = experts.grouped_linear(x, weights, offsets, "bfloat16")[:37]
        expected = experts.grouped_linear(x.contiguous().clone(), weights.contiguous().clone(), offsets, "bfloat16")[
            :37
        ]
        assert torch.allclose(found, expected, rtol=2.0**-7, atol=2.0**-5)
    assert len(sent) - len(cases) == 6  # three of six inputs lie well, and two of three weights


# ── AMD's own float8 ────────────────────────────────────────────────────────────────────────────────────────────────


@exhaustive("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_code_stands_for_twice_what_its_fnuz_code_does(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).view(dtype)
    found, values = native._as_fnuz(Operand(codes, None)), codes.float()
    assert found.data.dtype in device_rules.FNUZ and found.outer is not None
    expected = torch.where(values.isfinite(), values, torch.nan)  # no cast makes an infinity of a finite number
    assert torch.equal(bits_with_one_nan(found.data.float() * found.outer), bits_with_one_nan(expected + 0.0))
    scaled = native._as_fnuz(Operand(codes, torch.full((16, 1), 3.0)))
    assert scaled.outer is not None and scaled.outer.eq(6).all()


@pytest.mark.parametrize("architecture", ["gfx942", "gfx950"])
@pytest.mark.parametrize("name", ["float8-row", "float8-tensor", "float8-row-e5m2", "scalify"])
@every_place
def test_amd_multiplies_the_same_numbers(name: str, architecture: str, place: str) -> None:
    row = COMPUTES[name]
    for shape, dtype in itertools.product(SHAPES[:4], (torch.bfloat16, torch.float32)):
        with device("sm90"):
            expected = multiplied(row, place, shape, dtype)
        with device(architecture):
            assert is_native(row.products[place], CPU)
            found = multiplied(row, place, shape, dtype)
        assert torch.equal(found, expected)


# ── float32 matmuls on tensor cores ─────────────────────────────────────────────────────────────────────────────────


def test_tfloat32_sets_the_switch_around_its_own_matmul_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    row, switch, real, seen = COMPUTES["tfloat32"], torch.backends.cuda.matmul, torch.mm, []

    def recorded(a: Tensor, b: Tensor) -> Tensor:
        seen.append(switch.fp32_precision)
        for x in (a, b):
            assert not (x.contiguous().view(torch.int32) & 0x1FFF).any(), "operands are tfloat32 numbers"
        return real(a, b)

    before = switch.fp32_precision
    with device("sm80"):
        assert is_native(row.output, CPU)
        pair = operands_of(row, "output", SHAPES[0])
        monkeypatch.setattr(torch, "mm", recorded)
        multiply(*pair, (1, 1), row.output, torch.float32)
    assert seen == ["tf32"] and switch.fp32_precision == before != "tf32"


@pytest.mark.parametrize("set_by_user", ["none", "ieee", "tf32"])
def test_the_switch_is_put_back_however_the_block_ends(set_by_user: str) -> None:
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    try:
        switch.fp32_precision = set_by_user
        with pytest.raises(ZeroDivisionError), native.tensor_cores(), native.tensor_cores():
            raise ZeroDivisionError
        assert switch.fp32_precision == set_by_user
        # Two threads overlap, and the first to enter leaves first.
        inside, leave, done = threading.Event(), threading.Event(), []

        def first() -> None:
            with native.tensor_cores():
                inside.set()
                leave.wait(10)
            done.append(switch.fp32_precision)

        thread = threading.Thread(target=first)
        thread.start()
        assert inside.wait(10)
        with native.tensor_cores():
            leave.set()
            thread.join(10)
            assert done == ["tf32"] == [switch.fp32_precision]
        assert switch.fp32_precision == set_by_user
    finally:
        switch.fp32_precision = before


def test_a_cast_without_blocks_is_as_it_was() -> None:
    """Codes that are kept for backward need no kernel."""
    row = COMPUTES["float8-tensor"]
    assert operand_dtype(row.output.left, row.output, CPU, as_codes=True) == torch.float8_e4m3fn
    block = Cast("float8_e4m3fn", "128x128", "power-of-two")
    assert operand_dtype(block, COMPUTES["float8-block"].output, CPU, as_codes=True) == torch.bfloat16
    assert gemm.emulated_formats(row, CPU) == ["float8_e4m3fn"]
