"""Products by float32: the values of the widened operands' product rounded once, and of integers exactly their sum."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from narrowgauge.machine.processor import pretending
from narrowgauge.numerics import widening
from narrowgauge.numerics.widening import float32_tiles, is_widened, linear, matmul, sum_integers

DTYPES = [torch.bfloat16, torch.float16]
SHAPES = [(5, 7, 3), (1, 16, 8), (64, 96, 33), (0, 4, 3)]


@pytest.fixture(autouse=True)
def laptop() -> object:
    """A processor that multiplies float32 alone."""
    with pretending("avx2"):
        yield


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits_equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def test_what_is_widened() -> None:
    assert is_widened(torch.bfloat16, "cpu") and is_widened(torch.int8, "cpu") and is_widened(torch.float16, "cpu")
    assert not is_widened(torch.float32, "cpu") and not is_widened(torch.bfloat16, "cuda")
    with pretending("avx512_bf16", "avx512_vnni"):
        assert not is_widened(torch.bfloat16, "cpu") and not is_widened(torch.int8, "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SHAPES)
def test_a_linear_and_its_gradients_are_float32s_rounded_once(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    rows, width, out = sizes
    x, weight = (
        drawn(rows, width, dtype=dtype).requires_grad_(),
        drawn(out, width, dtype=dtype, seed=1).requires_grad_(),
    )
    bias, grad = drawn(out, dtype=dtype, seed=2).requires_grad_(), drawn(rows, out, dtype=dtype, seed=3)
    y = linear(x, weight, bias)
    y.backward(grad)
    assert bits_equal(y, (x.float() @ weight.float().t() + bias.float()).to(dtype))
    assert x.grad is not None and bits_equal(x.grad, (grad.float() @ weight.float()).to(dtype))
    assert weight.grad is not None and bits_equal(weight.grad, (grad.float().t() @ x.float()).to(dtype))
    assert bias.grad is not None and bits_equal(bias.grad, grad.sum(0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_narrow_weights_of_a_float32_stream_keep_their_format(dtype: torch.dtype) -> None:
    x, weight = drawn(6, 9, dtype=torch.float32).requires_grad_(), drawn(4, 9, dtype=dtype, seed=1).requires_grad_()
    linear(x, weight).square().sum().backward()
    other, wide = x.detach().clone().requires_grad_(), weight.detach().float().requires_grad_()
    (other @ wide.t()).square().sum().backward()
    assert x.grad is not None and weight.grad is not None and other.grad is not None and wide.grad is not None
    assert bits_equal(x.grad, other.grad) and bits_equal(weight.grad, wide.grad.to(dtype))


def test_what_is_kept_for_backward_is_what_came() -> None:
    x, weight = drawn(4, 8, dtype=torch.bfloat16).requires_grad_(), drawn(8, 8, dtype=torch.bfloat16).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        linear(x, weight)
    assert {t.data_ptr() for t in kept} == {x.data_ptr(), weight.data_ptr()}


def test_tiles_cover_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widening, "_TILE_ELEMENTS", 40)
    monkeypatch.setattr(widening, "_LEAST_SIDE", 2)
    a, b = drawn(11, 13, dtype=torch.bfloat16), drawn(9, 13, dtype=torch.bfloat16, seed=1).t()
    found, seen = torch.full((11, 9), torch.nan), 0
    for tile, values in float32_tiles(a, b):
        seen += 1
        found[tile] = values
    assert seen > 4
    torch.testing.assert_close(found, a.float() @ b.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("terms", [3, 1024, 1025, 2048, 5000])
@pytest.mark.parametrize("transposed", [False, True])
def test_integers_add_up_exactly(terms: int, transposed: bool) -> None:
    made = torch.Generator().manual_seed(terms)
    a = torch.randint(-128, 128, (17, terms), dtype=torch.int8, generator=made)
    b = torch.randint(-128, 128, (terms, 24), dtype=torch.int8, generator=made)
    b = b.t().contiguous().t() if transposed else b
    assert torch.equal(sum_integers(a, b), torch._int_mm(a, b).float())


@pytest.mark.parametrize("terms", [1024, 4096])
def test_the_largest_integers_add_up_exactly(terms: int) -> None:
    a, b = torch.full((2, terms), -128, dtype=torch.int8), torch.full((terms, 2), -128, dtype=torch.int8)
    b[0] = 127
    wanted = 16384 * (terms - 1) - 128 * 127
    assert torch.equal(sum_integers(a, b), torch.full((2, 2), wanted, dtype=torch.int32).float())


def test_a_compiled_linear_gives_the_same_bits() -> None:
    layer = nn.Linear(16, 24).bfloat16()
    x = drawn(2, 5, 16, dtype=torch.bfloat16)
    other = copy.deepcopy(layer)
    compiled = torch.compile(lambda x: linear(x, other.weight, other.bias), fullgraph=True, backend="aot_eager")
    one, two = linear(x, layer.weight, layer.bias), compiled(x)
    assert bits_equal(one, two)
    one.sum().backward(), two.sum().backward()
    assert all(bits_equal(p.grad, q.grad) for p, q in zip(layer.parameters(), other.parameters(), strict=True))


def test_gradients_of_gradients() -> None:
    x, weight = drawn(3, 4, dtype=torch.bfloat16).requires_grad_(), drawn(2, 4, dtype=torch.bfloat16).requires_grad_()
    (grad,) = torch.autograd.grad(linear(x, weight).square().sum(), x, create_graph=True)
    grad.float().sum().backward()
    assert weight.grad is not None and torch.isfinite(weight.grad).all()


def test_matmul_of_two_matrices() -> None:
    a, b = drawn(6, 5, dtype=torch.bfloat16), drawn(5, 4, dtype=torch.bfloat16)
    assert bits_equal(matmul(a, b), (a.float() @ b.float()).bfloat16())
    assert bits_equal(matmul(a.float(), b.float()), a.float() @ b.float())


def test_more_terms_than_int32_holds_add_up_exactly() -> None:
    a, b = torch.full((2, 140_000), -128, dtype=torch.int8), torch.full((140_000, 2), -128, dtype=torch.int8)
    assert torch.equal(sum_integers(a, b), torch.full((2, 2), 140_000.0 * 16384))
