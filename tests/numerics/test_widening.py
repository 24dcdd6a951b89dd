"""Products by float32: the values of the widened operands' product rounded once, and of integers
exactly their sum.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowgauge.numerics.widening import is_widened, linear, sum_integers
from processors import pretending
from tensors import gaussian

DTYPES = [torch.bfloat16, torch.float16]
SHAPES = [(5, 7, 3), (1, 16, 8), (64, 96, 33), (0, 4, 3)]


@pytest.fixture(autouse=True)
def laptop() -> object:
    """A processor that multiplies float32 alone."""
    with pretending("avx2"):
        yield


def bits_equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def test_what_is_widened() -> None:
    assert is_widened(torch.bfloat16, "cpu")
    assert is_widened(torch.int8, "cpu")
    assert is_widened(torch.float16, "cpu")
    assert not is_widened(torch.float32, "cpu") and not is_widened(torch.bfloat16, "cuda")
    with pretending("avx512_bf16", "avx512_vnni"):
        assert not is_widened(torch.bfloat16, "cpu") and not is_widened(torch.int8, "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SHAPES)
def test_a_linear_and_its_gradients_are_float32s_rounded_once(
    dtype: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    rows, width, out = sizes
    x = gaussian(rows, width, dtype=dtype).requires_grad_()
    weight = gaussian(out, width, dtype=dtype, seed=1).requires_grad_()
    bias = gaussian(out, dtype=dtype, seed=2).requires_grad_()
    grad = gaussian(rows, out, dtype=dtype, seed=3)
    y = linear(x, weight, bias)
    y.backward(grad)
    assert bits_equal(y, (x.float() @ weight.float().t() + bias.float()).to(dtype))
    assert x.grad is not None and bits_equal(x.grad, (grad.float() @ weight.float()).to(dtype))
    assert weight.grad is not None
    assert bits_equal(weight.grad, (grad.float().t() @ x.float()).to(dtype))
    assert bias.grad is not None and bits_equal(bias.grad, grad.sum(0))


@pytest.mark.parametrize("terms", [3, 1024, 1025, 2048, 5000])
@pytest.mark.parametrize("transposed", [False, True])
def test_integers_add_up_exactly(terms: int, transposed: bool) -> None:
    generator = torch.Generator().manual_seed(terms)
    a = torch.randint(-128, 128, (17, terms), dtype=torch.int8, generator=generator)
    b = torch.randint(-128, 128, (terms, 24), dtype=torch.int8, generator=generator)
    b = b.t().contiguous().t() if transposed else b
    assert torch.equal(sum_integers(a, b), torch._int_mm(a, b).float())


@pytest.mark.parametrize("terms", [1024, 4096, 140_000])  # more than int32 holds
def test_the_largest_integers_add_up_exactly(terms: int) -> None:
    a = torch.full((2, terms), -128, dtype=torch.int8)
    b = torch.full((terms, 2), -128, dtype=torch.int8)
    assert torch.equal(sum_integers(a, b), torch.full((2, 2), terms * 16384.0))


def test_a_model_traced_with_fake_tensors_leaves_no_buffers_behind() -> None:
    """Once they were kept: every later product of the process was what the memory held."""

    def products() -> Tensor:
        codes = torch.ones(2, 3, dtype=torch.int8)
        with FakeTensorMode(allow_non_fake_inputs=True):
            sum_integers(codes, codes.t())
        return sum_integers(codes, codes.t()).clone()

    with pretending("avx2"), ThreadPoolExecutor(1) as thread:  # whose buffers are new
        assert torch.equal(thread.submit(products).result(), torch.full((2, 2), 3.0))
