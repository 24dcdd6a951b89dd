"""Native matmuls, walked as on the device: what a kernel gets, it takes, and its product is the
emulation's.

Stand-ins (``oracles/cuda_matmuls.py``) take the place of PyTorch's functions, hand each argument to
PyTorch's own checks, and compute in float64 what the kernel is defined to do with exactly these
bytes.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_compiler

from matmul.scenarios import cast_operands, exact, gaussian, make_layer, names, passed, same
from narrowgauge.matmul import native
from narrowgauge.matmul.gemm import multiply
from narrowgauge.spec.computes import COMPUTES, PLACES, Cast, Compute, Product
from narrowgauge.spec.matmul_kernels import has_kernel, needs_kernel
from narrowgauge.torch_support import proof
from oracles import cuda_matmuls as device_rules
from oracles import linear as oracle

NATIVE_ON = ("float8-row", "float8-tensor")
"""A compute of each way through the code."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# [rows, contraction, columns]: ragged, and several tiles.
SHAPES = [(33, 65, 17), (150, 300, 140)]
MIXED = []
"""A compute of each pair of scales that a kernel takes."""
for left, right in itertools.product(("none", "tensor", "row"), repeat=2):
    product = Product(Cast("float8_e5m2", left), Cast("float8_e4m3fn", right))
    MIXED.append(Compute(f"{left} by {right}", *(product,) * 3, purpose="", source=""))


@contextmanager
def device(architecture: str, scaled_mm: Any = device_rules.scaled_mm_v1) -> Iterator[None]:
    """This process takes the CPU for a chip, and stand-ins for its kernels. PyTorch's own
    ``torch._scaled_mm`` runs on a CPU too.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "architecture_of", lambda device: architecture)
        patch.setattr(torch, "_scaled_mm", scaled_mm)
        yield


@pytest.fixture
def untried() -> Iterator[None]:
    """No kernel has been tried yet, and what this test finds is forgotten."""
    proof._reasons.clear()
    yield
    proof._reasons.clear()


def test_which_computes_each_chip_multiplies_itself():
    float8 = {"float8-tensor", "float8-row", "scalify"}
    expected = {
        **dict.fromkeys(("sm75", "sm80", "gfx90a", "gfx950"), frozenset()),
        **dict.fromkeys(("sm89", "sm90", "sm100", "sm120"), float8),
    }  # fmt: skip
    for architecture, computes in expected.items():
        native = set()
        for name, row in COMPUTES.items():
            narrow = [product for product in row.products.values() if needs_kernel(product)]
            if narrow and all(has_kernel(product, architecture) for product in narrow):
                native.add(name)
        assert native == computes, architecture


@pytest.mark.parametrize("row", [*map(COMPUTES.get, NATIVE_ON), *MIXED], **names)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_native_product_is_the_exact_one_rounded_once(row, place, shape):
    """The stand-in adds in float64, so what is off is the layout.

    And the emulation of the same codes is as near as it states.
    """
    for dtype, has_bias in itertools.product(DTYPES, (False, True)):
        bias = None
        with device("sm90"):
            pair = cast_operands(row, place, shape)
            sides = len(pair[0].data), len(pair[1].data)
            if has_bias:
                bias = gaussian(sides[1], seed=5)
            result = multiply(*pair, row.products[place], sides, dtype, bias)
        lhs, rhs = map(exact, pair)
        product = oracle.product(lhs, rhs)
        wide = bias.double() if bias is not None else 0.0
        exactly = product.value + wide
        # Two tensors' scales are rounded in float32.
        roundings = 2.0**-22 + 2 * oracle.ROUNDING[dtype]
        bound = product.magnitude * 2.0**-40 + (exactly.abs() + product.value.abs()) * roundings
        assert result.dtype == dtype and result.shape == exactly.shape
        assert ((result.double() - exactly).abs() <= bound).all()
        emulated = multiply(*pair, row.products[place], sides, dtype, bias)
        accumulated = max(shape[1], 1) * 2.0**-23 * product.magnitude + 2.0**-7 * (
            exactly.abs() + product.value.abs()
        )
        assert ((result.double() - emulated.double()).abs() <= bound + accumulated).all()


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("compute", NATIVE_ON)
def test_compilers_see_through_a_native_layer(compute):
    """Its graph has three kernels, and nothing else that is opaque."""
    layer, _ = make_layer(compute, 64, 80)
    graphs = []

    def seen(module, _):
        graphs.append(module.graph)
        return module.forward

    backend = aot_autograd(
        fw_compiler=make_boxed_compiler(seen), bw_compiler=make_boxed_compiler(seen)
    )
    call = torch.compile(layer, backend=backend, fullgraph=True)
    x = gaussian(48, 64, seed=3)
    grad = gaussian(48, 80, seed=4)
    with device("sm90", torch._scaled_mm):
        assert same(passed(layer, x, grad, call), passed(layer, x, grad))
    calls = []
    for graph in graphs:
        for node in graph.nodes:
            if node.op == "call_function":
                calls.append(node)
    kernels = [node for node in calls if node.target is torch.ops.aten._scaled_mm.default]
    assert len(kernels) == 3
    ours = {str(node.target) for node in calls if "narrowgauge" in str(node.target)}
    assert ours <= {"narrowgauge.bias_gradient.default"}


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(
    ("compute", "of_matmuls"),
    [("float8-row", [False] * 3), ("float8-tensor", [True, False, False])],
)
def test_a_compute_chooses_the_accumulation_of_its_kernels(compute, of_matmuls):
    scaled_mm = torch._scaled_mm
    choices = []

    def recorded(*args, use_fast_accum, **options):
        choices.append(use_fast_accum)
        return scaled_mm(*args, use_fast_accum=use_fast_accum, **options)

    layer, _ = make_layer(compute, 64, 80)
    with device("sm90", recorded):
        passed(layer, gaussian(48, 64), gaussian(48, 80))  # the trials too
        choices.clear()
        passed(layer, gaussian(48, 64), gaussian(48, 80))
    assert choices == of_matmuls


@pytest.mark.usefixtures("untried")
@pytest.mark.filterwarnings("ignore:The kernel and the definition differ")
def test_a_kernel_that_is_off_in_its_trial_is_not_used():
    product = COMPUTES["float8-row"].output

    def off(*args, **options):
        return device_rules.scaled_mm_v1(*args, **options) * 1.01

    for scaled_mm, works in ((device_rules.scaled_mm_v1, True), (off, False)):
        proof._reasons.clear()
        with device("sm90", scaled_mm):
            assert native.has_kernel(product, torch.device("cpu")) == works


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("row", MIXED, **names)
def test_a_trial_has_the_scales_of_its_products(row):
    """One number, or one of each row: these are two kernels."""
    dims = []

    def recorded(a, b, *scales, **options):
        dims.append([scale.ndim for scale in scales])
        return device_rules.scaled_mm_v1(a, b, *scales, **options)

    with device("sm90", recorded):
        pair = cast_operands(row, "output", SHAPES[0])
        multiply(*pair, row.output, (33, 17), torch.bfloat16)
    assert dims[0] == dims[-1] == [2 * ("row" in row.name)] * 2
