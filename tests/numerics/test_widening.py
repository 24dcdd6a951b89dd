"""Products by float32: the values of the widened operands' product rounded once, and of integers
exactly their sum.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from narrowgauge.numerics.widening import is_widened, linear
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
