"""Native matmuls, walked as on the device: what a kernel gets, it takes, and its product is the emulation's.

Stand-ins (``oracles/cuda_matmuls.py``) take the place of PyTorch's functions, check each argument by PyTorch's and cuBLAS's
rules, and compute in float64 what the kernel is defined to do with exactly these bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from matmul.scenarios import CPU, DIMS, cast_operands, gaussian, names
from narrowgauge.matmul import native
from narrowgauge.matmul.gemm import describe_matmuls, is_native, is_opaque, multiply, operand_dtype
from narrowgauge.matmul.operand import PAIRS, Operand, block_values
from narrowgauge.spec.computes import COMPUTES, PLACES, Compute
from narrowgauge.spec.kernels import kernel_for, needs_kernel
from oracles import cuda_matmuls as device_rules
from oracles import linear as oracle

NATIVE_ON = {
    "float8-row": "sm90", "float8-tensor": "sm89", "float8-tensor-e5m2": "sm90", "float8-block": "sm90", "mxfp8": "sm100",
    "mxfp4": "sm100", "nvfp4": "sm120",
}  # fmt: skip
"""A compute of each way through the code, on a chip that has its kernel."""
# [rows, contraction, columns]: ragged, and several tiles.
SHAPES = [(33, 65, 17), (150, 300, 140)]
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


def values_of(operand: Operand, dim: int) -> Tensor:
    values = (operand.data if operand.inner is None else block_values(operand, dim)).double()
    values = values if operand.outer is None else values * operand.outer.double()
    return values if dim == 1 else values.t()


def test_which_computes_each_chip_multiplies_itself() -> None:
    whole = {"float8-tensor", "float8-row", "float8-tensor-e5m2", "scalify"}
    expected = {
        **dict.fromkeys(("sm75", "sm80", "gfx90a"), frozenset()), **dict.fromkeys(("sm89", "gfx942", "gfx950"), whole),
        "sm90": whole | {"float8-block"}, "sm100": whole | {"mxfp8", "mxfp4", "nvfp4"}, "sm120": whole | {"mxfp8", "nvfp4"},
    }  # fmt: skip
    for architecture, computes in expected.items():
        needed = {name: [p for p in row.products.values() if needs_kernel(p)] for name, row in COMPUTES.items()}
        found = {name for name, of in needed.items() if of and all(kernel_for(product, architecture) for product in of)}
        assert found == computes, architecture


@every_way
@pytest.mark.usefixtures("untried")
def test_a_chip_that_has_the_kernel_is_asked_once_and_then_gets_codes(row: Compute) -> None:
    assert not is_native(row.output, CPU)
    with device(NATIVE_ON[row.name]):
        for product in row.products.values():
            assert is_native(product, CPU)
            for cast in (product.left, product.right):
                codes = PAIRS if cast.format == "float4_e2m1fn" else getattr(torch, cast.format)
                assert operand_dtype(cast, product, CPU) == codes
        assert describe_matmuls(row, CPU) == f"{row.name} multiplies on this CPU natively."
        tried = native._works.cache_info().misses
        assert is_native(row.output, CPU) and native._works.cache_info().misses == tried


@every_way
@every_place
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_native_product_is_the_exact_one_rounded_once(row: Compute, place: str, shape: tuple[int, int, int]) -> None:
    """The stand-in adds in float64, so what is off is the layout. And the emulation of the same codes is as near as it states."""
    bias = gaussian(shape[2], seed=5)
    for dtype, given in itertools.product((torch.bfloat16, torch.float32), (None, bias)):
        with device(NATIVE_ON[row.name]):
            pair = cast_operands(row, place, shape)
            assert is_opaque(*pair, row.products[place])
            found = multiply(*pair, DIMS[place], row.products[place], dtype, given)
        left, right = (values_of(x, dim) for x, dim in zip(pair, DIMS[place], strict=True))
        product = oracle.product(left, right)
        wide = F.pad(bias, (0, product.value.shape[1] - len(bias))).double() if given is not None else 0.0
        exactly = product.value + wide
        # Sums leave mxfp4's kernel in bfloat16; two tensors' scales are rounded in float32.
        roundings = (
            2.0**-22 + oracle.ROUNDING[torch.bfloat16 if row.name == "mxfp4" else dtype] + oracle.ROUNDING[dtype]
        )
        bound = product.magnitude * 2.0**-40 + (exactly.abs() + product.value.abs()) * roundings
        assert found.dtype == dtype and found.shape == exactly.shape
        assert ((found.double() - exactly).abs() <= bound).all()
        emulated = multiply(*pair, DIMS[place], row.products[place], dtype, given)
        accumulated = max(shape[1], 1) * 2.0**-23 * product.magnitude + 2.0**-7 * (exactly.abs() + product.value.abs())
        assert ((found.double() - emulated.double()).abs() <= bound + accumulated).all()


def untiled(scales: Tensor) -> Tensor:
    """Scales filled up to whole tiles, and left row by row."""
    rows, blocks = scales.shape
    return F.pad(scales.view(torch.uint8), (0, -blocks % 4, 0, -rows % 128)).flatten().view(scales.dtype)


PLANTED: dict[str, tuple[str, str, Callable[..., object]]] = {
    "scales row by row": ("mxfp8", "tiled_scales", untiled),
    "scales in rows": ("float8-block", "scales_in_columns", lambda scales: scales.contiguous()),
}
"""A compute, a function of its layout, and a wrong one in its place."""


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("planted", PLANTED)
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
