"""The one Linear: every row against the straight-through oracle, and everything a training loop does around it."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from covering import whole
from matmul.scenarios import (
    CPU,
    DELAYED,
    NARROW,
    ROWS,
    SMOOTH,
    STOCHASTIC,
    Result,
    exact,
    expected,
    gaussian,
    key_of,
    make_layer,
    names,
    operands,
    passed,
    quantized,
    same,
)  # fmt: skip
from narrowgauge._torch.inductor import _TRUST_COMPILER
from narrowgauge.errors import RecipeError
from narrowgauge.matmul import gemm, layer_matmuls, operand
from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.matmul.linear import Linear
from narrowgauge.matmul.swapping import NarrowLayers, linears_of, swap_linears
from narrowgauge.numerics import fusion
from narrowgauge.numerics.quantization import padded, rotate
from narrowgauge.spec.computes import COMPUTES, Compute
from oracles import linear as oracle
from tensors import bits_with_one_nan

every_row = pytest.mark.parametrize("row", ROWS, **names)
every_arithmetic = pytest.mark.parametrize("row", [*ROWS, *SMOOTH], **names)
every_narrow = pytest.mark.parametrize("row", NARROW, **names)
every_stochastic = pytest.mark.parametrize("row", STOCHASTIC, **names)
# [tokens, in, out]: no whole blocks, one of each side, more than a block.
SHAPES = [(33, 65, 17), (1, 40, 3), (40, 1, 5), (6, 130, 1), (140, 34, 20)]
PLACES = ("output", "grad_input", "grad_weight", "grad_bias")
# A row that stands in no table.
OWN = replace(COMPUTES["float8-row"], name="own", output=COMPUTES["mxfp8"].output)
INDEPENDENT = [
    "float8-row",
    "float8-row-e5m2",
    "float8-block",
    "int8-row",
    "mxfp8",
    "mxfp6",
    "mxfp4",
    "scalify",
    "unit",
]
DEPENDENT = ["float8-tensor", "float8-tensor-e5m2", "float8-delayed", "nvfp4"]


def batch(shape: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    tokens, inputs, outputs = shape
    return gaussian(tokens, inputs, dtype=dtype, seed=3), gaussian(tokens, outputs, dtype=dtype, seed=4)


def silently(model: nn.Module, row: str | Compute | Callable[[str], Any], **options: Any) -> NarrowLayers:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmulationNotice)
        return swap_linears(model, row, **options)


# ── the arithmetic ──────────────────────────────────────────────────────────────────────────────────────────────────


@every_arithmetic
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_output_and_gradients_are_the_straight_through_oracle_s(
    row: Compute, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    layer, linears = make_layer(row, *shape[1:], dtype=dtype)
    linears.step = 5
    x, grad = batch(shape, dtype)
    found = passed(layer, x, grad)
    wanted = expected(layer, x, grad)
    assert layer.bias is not None
    bias = layer.bias.detach().double()
    value, off = wanted["output"]
    u = oracle.ROUNDING[dtype]
    wanted["output"] = value + bias, off * (1 + u) + u * ((value + bias).abs() + bias.abs())
    for got, place in zip(found, PLACES, strict=True):
        value, off = wanted[place]
        assert got.dtype == dtype and got.shape == value.shape
        assert ((got.double() - value).abs() <= off + 2.0**-130).all(), place
        assert got.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_is_the_integer_oracle_s_bit_for_bit(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    layer, _ = make_layer("int8-row", *shape[1:], dtype=dtype)
    x, grad = batch(shape, dtype)
    found, row, weight = passed(layer, x, grad), layer.compute, layer.weight.detach()
    codes, of_weight = quantized(x, row.output.left, 1), quantized(weight, row.output.right, 1)
    assert codes.outer is not None and of_weight.outer is not None
    one = torch.ones(1, 1)

    def multiplied(
        left: Tensor, right: Tensor, by_row: Tensor, by_column: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        return oracle.scaled_integers(oracle.integer_product(left, right), by_row, by_column, bias, dtype)

    assert layer.bias is not None
    output = multiplied(codes.codes, of_weight.codes, codes.outer, of_weight.outer, layer.bias.detach())
    by_token = quantized(
        grad, row.grad_input.left, 1, key=key_of(layer, "grad_input"), fold=of_weight.outer.view(1, -1)
    )
    by_output = quantized(grad, row.grad_weight.left, 0, key=key_of(layer, "grad_weight"), fold=codes.outer.view(-1, 1))
    assert by_token.outer is not None and by_output.outer is not None
    assert torch.equal(bits_with_one_nan(found.output), bits_with_one_nan(output))
    grad_input = multiplied(by_token.codes, of_weight.codes.t(), by_token.outer, one)
    assert torch.equal(bits_with_one_nan(found.grad_input), bits_with_one_nan(grad_input))
    grad_weight = multiplied(by_output.codes.t(), codes.codes.t(), by_output.outer.view(-1, 1), one)
    assert torch.equal(bits_with_one_nan(found.grad_weight), bits_with_one_nan(grad_weight))


@every_row
def test_two_layers_of_a_model_round_apart_and_the_same_layer_alike(row: Compute) -> None:
    model = nn.ModuleDict({name: nn.Linear(65, 17, dtype=torch.bfloat16) for name in ("one", "two")})
    model.two.load_state_dict(model.one.state_dict())
    linears = silently(model, row, keep=())
    x, grad = batch(SHAPES[0])
    one, again, two = (passed(linears.layers[name], x, grad) for name in ("one", "one", "two"))
    assert same(one, again)
    is_random = any(cast.rounding == "stochastic" for cast in row.casts.values())
    assert same(one, two) != is_random


@pytest.mark.parametrize("name", INDEPENDENT)
def test_a_token_s_output_is_its_own_affair(name: str) -> None:
    layer, _ = make_layer(name)
    x, _ = batch(SHAPES[0])
    before = layer(x)
    x[10:] = gaussian(23, 65, seed=9, scale=300.0)
    assert torch.equal(layer(x)[:10], before[:10])


@pytest.mark.parametrize("name", DEPENDENT)
def test_with_a_scale_of_the_tensor_an_outlier_elsewhere_changes_a_token(name: str) -> None:
    layer, _ = make_layer(name)
    x, _ = batch(SHAPES[0])
    before = layer(x)
    x[20, 3] = 3000.0
    assert not torch.equal(layer(x)[:10], before[:10])


def test_rows_are_said_to_be_one_or_the_other() -> None:
    of_columns = {"int8-outlier", "int8-outlier-codes"}  # which columns multiply in 16 bits, the whole batch decides
    assert {row.name for row in NARROW} - of_columns - {"float8-delayed-e5m2", "float8-block-e5m2"} == {
        *INDEPENDENT,
        *DEPENDENT,
    }


# ── chance ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def passed_steps(row: Compute, x: Tensor, grad: Tensor, steps: int) -> tuple[Linear, list[Result]]:
    layer, linears = make_layer(row, x.shape[1], grad.shape[1], dtype=torch.float32)
    found = []
    for step in range(steps):
        linears.step = step
        found.append(passed(layer, x, grad))
    return layer, found


def uncut(layer: Linear, x: Tensor, grad: Tensor, place: str) -> Tensor:
    """The product were the gradient not cut at all, only turned and scaled as the row does before: float64."""
    matmul, dims = layer.compute.products[place], {"grad_input": (1, 0), "grad_weight": (0, 0)}[place]
    right = quantized(layer.weight if place == "grad_input" else x, matmul.right, dims[1])
    left = padded(grad, matmul.left, dims[0])
    left = rotate(left, dims[0]) if matmul.left.rotation == "hadamard" else left
    contracted = left.double() if dims[0] == 1 else left.double().t()
    return contracted @ exact(right)


def nearly_equal(tokens: int) -> Tensor:
    """All the same but for the first token's, larger ones: alone, the others would be the exact ends of their format."""
    grad = torch.full((tokens, 32), 0.3)
    grad[0] = 1.7
    return grad


GRADIENTS: dict[str, Callable[[], Tensor]] = {
    "gaussian": lambda: gaussian(48, 32, dtype=torch.float32, seed=4),
    "equal": lambda: nearly_equal(48),
}


@every_stochastic
@pytest.mark.parametrize("kind", GRADIENTS)
def test_stochastic_gradients_are_unbiased_over_steps(row: Compute, kind: str) -> None:
    steps, x, grad = 250, gaussian(48, 64, dtype=torch.float32, seed=3), GRADIENTS[kind]()
    layer, found = passed_steps(row, x, grad, steps)
    for place in ("grad_input", "grad_weight"):
        draws = torch.stack([getattr(result, place) for result in found]).double()
        exactly = uncut(layer, x, grad, place)
        off, spread = draws.mean(0) - exactly, draws.std(0)
        is_random = spread > 0
        assert is_random.double().mean() > 0.9
        # What is exact, as the largest of all is in its block, is rounded once as it leaves the matmul.
        assert (off.abs() <= 2.0**-8 * exactly.abs())[~is_random].all()
        z = (off / spread)[is_random] * steps**0.5
        # Of as many means the squares average 1 where nothing is lost; one bit cut off each value would make it hundreds.
        assert z.square().mean() < 1.3 and z.abs().max() < 5.5, place


@every_stochastic
@pytest.mark.parametrize("place", ["grad_input", "grad_weight"])
def test_errors_of_equal_gradients_do_not_add_up(row: Compute, place: str) -> None:
    """Rounded alike, n equal gradients would be off by n errors; apart, by √n of them."""
    terms, signs = 1024, torch.ones(1024, 32)
    signs[:, 1::2] = -1
    grad = nearly_equal(terms) if place == "grad_weight" else nearly_equal(terms).t().contiguous()
    x = signs if place == "grad_weight" else gaussian(32, 32, dtype=torch.float32)
    layer, linears = make_layer(row, 32, grad.shape[1], dtype=torch.float32)
    if place == "grad_input":
        with torch.no_grad():
            layer.weight.copy_(signs)
    draws = []
    for linears.step in range(20):
        draws.append(getattr(passed(layer, x, grad), place).abs().double())
    off = torch.stack(draws) / nearly_equal(terms)[:, 0].double().sum() - 1
    assert off.std(0).min() > 0
    # Half a spacing of four bits is an eighth to a quarter of the value, of eight bits far less.
    limit = (0.5 if row.name != "int8-row" else 2.0**-7) / terms**0.5
    assert off.square().mean().sqrt() < limit + 2.0**-8


@every_stochastic
def test_a_step_s_bits_come_back_and_another_s_differ(row: Compute) -> None:
    layer, linears = make_layer(row)
    x, grad = batch(SHAPES[0])
    found = {}
    for step in (7, 8, 7):
        linears.step = step
        result = passed(layer, x, grad)
        assert step not in found or same(result, found[step])
        found[step] = result
    assert not torch.equal(found[7].grad_input, found[8].grad_input)
    assert not torch.equal(found[7].grad_weight, found[8].grad_weight)
    assert torch.equal(found[7].output, found[8].output)
    other, others = make_layer(row)
    others.seed = 1
    others.step = 7
    assert not torch.equal(passed(other, x, grad).grad_input, found[7].grad_input)


@pytest.mark.parametrize("row", [row for row in NARROW if row not in (*STOCHASTIC, *DELAYED)], **names)
def test_without_chance_no_step_differs(row: Compute) -> None:
    layer, linears = make_layer(row)
    x, grad = batch(SHAPES[0])
    first = passed(layer, x, grad)
    linears.step = 9
    linears.set_first_sequence(3)
    assert same(passed(layer, x, grad), first)


def test_micro_batches_give_each_token_the_bits_of_the_whole_batch() -> None:
    layer, linears = make_layer("int8-row")
    linears.step = 3
    x, grad = gaussian(4, 8, 65, seed=3), gaussian(4, 8, 17, seed=4)
    whole = passed(layer, x, grad)
    parts = []
    for first in (0, 2):
        linears.set_first_sequence(first)
        parts.append(passed(layer, x[first : first + 2], grad[first : first + 2]))
    for name in ("output", "grad_input"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
    linears.set_first_sequence(0)
    unsaid = passed(layer, x[2:], grad[2:])
    assert not torch.equal(unsaid.grad_input, whole.grad_input[2:])


# ── special values ──────────────────────────────────────────────────────────────────────────────────────────────────


def next_row_leaks() -> bool:
    """Whether PyTorch's own product spoils the row before one of NaNs.

    oneDNN's kernel for AMX takes numbers in pairs: of rows of an odd length the last one with the first of the next row, times
    zero.
    """
    x = torch.zeros(33, 65, dtype=torch.bfloat16)
    x[5] = torch.nan
    return not bool((x @ torch.zeros(65, 17, dtype=torch.bfloat16))[4].isfinite().all())


@every_arithmetic
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_never_becomes_finite(row: Compute, bad: float) -> None:
    if row.transform and bad == torch.inf:
        pytest.skip("without a scale an infinity saturates, like whatever lies beyond the format's end")
    x, grad = batch(SHAPES[0])

    def spoilt(which: str) -> Result:
        layer, _ = make_layer(row)
        own_x, own_grad = x.clone(), grad.clone()
        with torch.no_grad():
            {"x": own_x, "weight": layer.weight, "grad": own_grad}[which][5, 7] = bad
        return passed(layer, own_x, own_grad)

    of_x, of_weight, of_grad = spoilt("x"), spoilt("weight"), spoilt("grad")
    assert not of_x.output[5].isfinite().any()
    assert not of_x.grad_weight[:, 7].isfinite().any()
    assert of_x.grad_input.isfinite().all()
    assert not of_weight.output[:, 5].isfinite().any()
    assert not of_weight.grad_input[:, 7].isfinite().any()
    assert not of_grad.grad_input[5].isfinite().any()
    assert not of_grad.grad_weight[7].isfinite().any()
    assert of_grad.output.isfinite().all()
    if row.name in INDEPENDENT:
        spoilt_too = {4} if next_row_leaks() else set()
        others = [token for token in range(33) if token not in {5, *spoilt_too}]
        assert of_x.output[others].isfinite().all()
        assert of_grad.grad_input[others].isfinite().all()


@every_arithmetic
def test_zeros_give_zeros(row: Compute) -> None:
    layer, _ = make_layer(row, bias=False)
    x, grad = batch(SHAPES[0])
    found = passed(layer, torch.zeros_like(x), grad)
    assert not found.output.any() and not found.grad_weight.any() and found.grad_input.any()
    found = passed(layer, x, torch.zeros_like(grad))
    assert found.output.any() and not found.grad_weight.any() and not found.grad_input.any()


@every_arithmetic
def test_a_batch_without_tokens_is_one(row: Compute) -> None:
    layer, _ = make_layer(row)
    found = passed(layer, gaussian(0, 65), gaussian(0, 17))
    assert found.output.shape == (0, 17) and found.grad_input.shape == (0, 65)
    assert found.grad_weight.shape == (17, 65) and not found.grad_weight.any() and not found.grad_bias.any()
    # And it leaves no trace.
    x, grad = batch(SHAPES[0])
    assert same(passed(layer, x, grad), passed(make_layer(row)[0], x, grad))


# ── as a module ─────────────────────────────────────────────────────────────────────────────────────────────────────


@every_arithmetic
def test_any_leading_shape_gives_the_same_bits(row: Compute) -> None:
    layer, _ = make_layer(row)
    x, grad = gaussian(12, 65, seed=3), gaussian(12, 17, seed=4)
    flat = passed(layer, x, grad)
    for shape in ((12,), (3, 4), (2, 3, 2), (1, 12), (12, 1)):
        layer, _ = make_layer(row)
        found = passed(layer, x.view(*shape, 65), grad.view(*shape, 17))
        assert found.output.shape == (*shape, 17) and found.grad_input.shape == (*shape, 65)
        flattened = Result(found.output.view(12, 17), found.grad_input.view(12, 65), *found[2:])
        assert same(flattened, flat)
    one = passed(make_layer(row)[0], x[0], grad[0])
    assert one.output.shape == (17,) and one.grad_input.shape == (65,)


@every_row
def test_an_input_may_lie_as_it_likes(row: Compute) -> None:
    x, grad = batch(SHAPES[0])
    results = []
    for lying in (x, x.t().contiguous().t(), torch.cat([x, x], 1)[:, :65]):
        layer, _ = make_layer(row)
        layer.zero_grad()
        leaf = lying.detach().requires_grad_()
        y = layer(leaf)
        y.backward(grad.t().contiguous().t())
        results.append(Result(y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad))
    assert same(results[0], results[1]) and same(results[0], results[2])


@every_arithmetic
@pytest.mark.parametrize("wanted", [(x, w, b) for x in (0, 1) for w in (0, 1) for b in (0, 1) if x + w + b], ids=str)
def test_gradients_are_those_wanted_and_no_others(row: Compute, wanted: tuple[int, int, int]) -> None:
    x, grad = batch(SHAPES[0])
    whole = passed(make_layer(row)[0], x, grad)
    layer, _ = make_layer(row)
    leaves = [x.clone(), layer.weight, layer.bias]
    for leaf, needed in zip(leaves, wanted, strict=True):
        leaf.requires_grad_(bool(needed))
    y = layer(leaves[0])
    y.backward(grad)
    assert torch.equal(y.detach(), whole.output)
    for leaf, needed, value in zip(leaves, wanted, whole[1:], strict=True):
        assert (leaf.grad is None) == (not needed)
        assert leaf.grad is None or torch.equal(leaf.grad, value)


@every_arithmetic
def test_float32_weights_in_a_bfloat16_stream_get_float32_gradients(row: Compute) -> None:
    layer, _ = make_layer(row, dtype=torch.float32)
    x, grad = batch(SHAPES[0])
    found = passed(layer, x, grad)
    assert [tensor.dtype for tensor in found] == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert all(tensor.isfinite().all() and tensor.any() for tensor in found)


@pytest.mark.parametrize("row", [row for row in ROWS if row.dtype == "bfloat16"], **names)
def test_autocast_is_the_stream_s_dtype(row: Compute) -> None:
    layer, _ = make_layer(row, dtype=torch.float32)
    x, grad = batch(SHAPES[0])
    inside = make_layer(row, dtype=torch.float32)[0]

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return inside(x)

    assert torch.equal(passed(inside, x.float(), grad, call).output, passed(layer, x, grad).output)


@pytest.mark.parametrize("name", ["float8-row", "float32", "float16"])
def test_autocast_to_another_dtype_is_a_clear_error(name: str) -> None:
    layer, _ = make_layer(name)
    wrong = torch.float16 if COMPUTES[name].dtype != "float16" else torch.bfloat16
    with (
        pytest.raises(RecipeError, match=f"a layer of compute '{name}' computes in") as error,
        torch.autocast("cpu", wrong),
    ):
        layer(batch(SHAPES[0])[0])
    assert COMPUTES[name].dtype in error.value.advice


@every_arithmetic
def test_inference_mode_gives_the_output_s_bits(row: Compute) -> None:
    layer, _ = make_layer(row)
    layer.eval()
    x, _ = batch(SHAPES[0])
    trained = layer(x).detach()
    with torch.inference_mode():
        assert torch.equal(layer(x), trained)
        assert torch.equal(layer(x.clone()), trained)
    assert torch.equal(layer(x).detach(), trained)


@every_arithmetic
def test_activation_checkpointing_gives_the_same_gradients(row: Compute) -> None:
    x, grad = batch(SHAPES[0])
    layer, again = make_layer(row)[0], make_layer(row)[0]
    for use_reentrant in (False, True):
        recomputed = passed(again, x, grad, lambda x, how=use_reentrant: checkpoint(again, x, use_reentrant=how))
        assert same(passed(layer, x, grad), recomputed)


@every_row
def test_a_layer_s_state_is_the_plain_one_s(row: Compute) -> None:
    plain = nn.Sequential(nn.Linear(65, 17, dtype=torch.bfloat16), nn.Linear(17, 4, bias=False, dtype=torch.bfloat16))
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    parameters = [id(parameter) for parameter in plain.parameters()]
    silently(plain, row, keep=())
    assert plain.state_dict().keys() == state.keys()
    assert [id(parameter) for parameter in plain.parameters()] == parameters
    fresh = nn.Sequential(nn.Linear(65, 17, dtype=torch.bfloat16), nn.Linear(17, 4, bias=False, dtype=torch.bfloat16))
    fresh.load_state_dict(plain.state_dict())
    plain.load_state_dict(state)
    assert f"compute={row.name!r}" in repr(plain[0]) and "in_features=65, out_features=17" in repr(plain[0])


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("row", [COMPUTES["int8-row"], COMPUTES["float8-delayed"], COMPUTES["nvfp4"], OWN], **names)
def test_a_copy_goes_on_with_the_same_bits_in_another_process_too(
    way: str, row: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, linears = make_layer(row)
    x, grad = batch(SHAPES[0])
    for step in range(2):
        linears.step = step
        passed(layer, x * (1 + step), grad)
    linears.step = 2
    copied = copies()[way](layer)
    before = passed(layer, x, grad)
    if way != "deepcopy":
        # What another process knows: the table.
        monkeypatch.setattr(layer_matmuls, "REGISTERED", dict(COMPUTES))
    assert same(passed(copied(), x, grad), before)
    assert copied().weight is not layer.weight


def copies() -> dict[str, Callable[[Linear], Callable[[], Linear]]]:
    def deep(layer: Linear) -> Callable[[], Linear]:
        twin = copy.deepcopy(layer)
        return lambda: twin

    def pickled(layer: Linear) -> Callable[[], Linear]:
        data = pickle.dumps(layer)
        return lambda: pickle.loads(data)

    def saved(layer: Linear) -> Callable[[], Linear]:
        file = io.BytesIO()
        torch.save(layer, file)
        return lambda: torch.load(io.BytesIO(file.getvalue()), weights_only=False)

    return {"deepcopy": deep, "pickle": pickled, "torch.save": saved}


@pytest.mark.parametrize("name", ["int8-row", "float8-delayed"])
def test_a_model_may_be_moved_and_cast_after_it_was_swapped(name: str) -> None:
    """Histories keep their precision, and what layers share they go on sharing."""
    layer, linears = make_layer(name, dtype=torch.float32)
    model = nn.Sequential(layer)
    x, grad = batch(SHAPES[0])
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(parameter.bfloat16())
    passed(layer, x.float(), grad.float())
    model.to(torch.bfloat16)
    model._apply(torch.clone)  # as a move to another device does
    other, others = make_layer(name)
    passed(other, x, grad)
    linears.step = others.step = 1
    assert layer.state.dtype == torch.int32
    assert same(passed(layer, x, grad), passed(other, x, grad))


def test_tied_weights_add_up_their_gradients() -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)).bfloat16()
    model[1].weight = model[0].weight
    silently(model, "int8-row", keep=())
    assert model[0].weight is model[1].weight
    x, grad = gaussian(8, 32), gaussian(8, 32, seed=1)
    y = model(x)
    y.backward(grad)
    apart = copy.deepcopy(model)
    apart[1].weight = nn.Parameter(apart[0].weight.detach().clone())
    apart.zero_grad()
    apart(x).backward(grad)
    assert torch.equal(model[0].weight.grad, apart[1].weight.grad + apart[0].weight.grad)


@every_row
def test_transformers_conv1d_is_a_linear_with_its_weight_transposed(row: Compute) -> None:
    plain, _ = make_layer(row)
    conv = Conv1D(17, 65).bfloat16()
    with torch.no_grad():
        conv.weight.copy_(plain.weight.t())
        conv.bias.copy_(plain.bias)
    model = nn.ModuleDict({"fc": conv})
    silently(model, row, keep=())
    assert model.state_dict()["fc.weight"].shape == (65, 17)
    x, grad = batch(SHAPES[0])
    found, wanted = passed(conv, x, grad), passed(plain, x, grad)
    assert found.grad_weight.shape == (65, 17)
    found = found._replace(grad_weight=found.grad_weight.t())
    if row.is_wide:  # another way through the CPU's matmul, another order of the sum
        assert all(
            torch.allclose(a.float(), b.float(), atol=2e-2, rtol=2e-2) for a, b in zip(found, wanted, strict=True)
        )
    else:
        assert same(found, wanted)


# ── swapping and the handle ─────────────────────────────────────────────────────────────────────────────────────────


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, size, bias=False) for size in (48, 32, 32))
        self.norm = nn.LayerNorm(112)
        self.lm_head = nn.Linear(112, 10)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)


def test_the_head_is_kept_and_so_is_what_patterns_name() -> None:
    assert silently(Model(), "float8-row").layers.keys() == {"q_proj", "k_proj", "v_proj"}
    assert silently(Model(), "float8-row", keep=()).layers.keys() == {"q_proj", "k_proj", "v_proj", "lm_head"}
    assert silently(Model(), "float8-row", keep=("*_head", "[kv]_*")).layers.keys() == {"q_proj"}
    chosen = silently(
        Model(), lambda name: COMPUTES["int8-row" if name == "k_proj" else "mxfp8"] if "proj" in name else None
    )
    assert {name: layer.compute.name for name, layer in chosen.layers.items()} == {
        "q_proj": "mxfp8", "k_proj": "int8-row", "v_proj": "mxfp8",
    }  # fmt: skip


def test_what_cannot_be_swapped_is_said() -> None:
    with pytest.raises(RecipeError, match=r"no compute is named 'float8-raw'\.") as error:
        swap_linears(Model(), "float8-raw")
    assert "float8-row" in error.value.advice
    with pytest.raises(RecipeError, match="LayerNorm has no linear layer to compute narrowly"):
        swap_linears(nn.LayerNorm(3), "float8-row")
    with pytest.raises(RecipeError, match="no linear layer"):
        swap_linears(Model(), "float8-row", keep=("*",))


@pytest.mark.usefixtures("native_formats")
def test_emulation_is_warned_of_once_and_native_computes_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "_WARNED", set())
    with pytest.warns(EmulationNotice, match="float8-row multiplies float8_e4m3fn, which this CPU cannot"):
        swap_linears(Model(), "float8-row")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swap_linears(Model(), "float8-row")
        swap_linears(Model(), "int8-row")
        swap_linears(Model(), "bfloat16")


def test_hooks_and_references_to_a_layer_hold() -> None:
    model = Model().bfloat16()
    layer, called = model.q_proj, []
    layer.register_forward_hook(lambda *_: called.append(1))
    silently(model, "int8-row")
    assert model.q_proj is layer and isinstance(layer, nn.Linear)
    model(gaussian(2, 64))
    assert called == [1]


def test_a_model_goes_on_in_another_row() -> None:
    """Phases of one run: the parameters stay, the arithmetic is the new row's."""
    layer, linears = make_layer("float8-row")
    x, grad = batch(SHAPES[0])
    passed(layer, x, grad)
    for name in ("bfloat16", "int8-row", "float8-delayed", "nvfp4", "float8-row"):
        linears.set_compute(lambda _, name=name: COMPUTES[name])
        assert same(passed(layer, x, grad), passed(make_layer(name)[0], x, grad))


def test_a_row_of_one_s_own_needs_no_place_in_the_table() -> None:
    x, grad = batch(SHAPES[0])
    layer, _ = make_layer(OWN)
    found = passed(layer, x, grad)
    assert torch.equal(found.output, passed(make_layer("mxfp8")[0], x, grad).output)
    assert torch.equal(found.grad_input, passed(make_layer("float8-row")[0], x, grad).grad_input)


def test_a_changed_compute_is_obeyed_under_the_name_that_the_table_has() -> None:
    own = replace(COMPUTES["float8-row"], grad_weight=COMPUTES["bfloat16"].grad_weight)
    layer, _ = make_layer(own)
    assert layer.compute is own
    x, grad = batch(SHAPES[0])
    assert same(passed(layer, x, grad), passed(make_layer(replace(own, name="another name"))[0], x, grad))


def test_a_weight_of_the_output_scaled_per_term_is_refused() -> None:
    """Its scales would have to be multiplied into the cast of the input, which layers share."""
    product = COMPUTES["int8-row"].output
    own = replace(COMPUTES["int8-row"], output=replace(product, right=replace(product.right, granularity="column")))
    with pytest.raises(RecipeError, match=r"scales the weight of output per column.*per row, tensor or block"):
        make_layer(own)


def test_two_rows_of_one_name_are_two_rows() -> None:
    x, grad = batch(SHAPES[0])
    layer, _ = make_layer(replace(COMPUTES["float8-row"], name="one of two"))
    before = passed(layer, x, grad)
    other, _ = make_layer(replace(COMPUTES["mxfp4"], name="one of two"))
    assert same(passed(other, x, grad), passed(make_layer("mxfp4")[0], x, grad))
    assert same(passed(layer, x, grad), before)


@pytest.mark.parametrize("place", PLACES[:3])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_row_rounds_any_of_its_six_operands_by_chance_or_is_refused(place: str, side: str) -> None:
    row = COMPUTES["mxfp8"]
    matmul = row.products[place]
    cast = replace(getattr(matmul, side), rounding="stochastic")
    own = replace(row, name=f"own-{place}-{side}", **{place: replace(matmul, **{side: cast})})
    try:
        layer, linears = make_layer(own)
    except RecipeError:
        return  # what cannot be done is refused
    x, grad = batch(SHAPES[0])
    found = []
    for step in range(2):
        linears.step = step
        found.append(getattr(passed(layer, x, grad), place))
    assert not torch.equal(*found)


def test_the_step_goes_on_with_an_optimizer_s() -> None:
    model = Model()
    linears = silently(model, "int8-row", seed=3)
    mine = torch.optim.SGD(model.parameters(), lr=0.0)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
    assert linears.step == 0
    mine.step()
    assert linears.step == 1
    linears.follow(mine)
    other.step()
    assert linears.step == 1
    mine.step()
    assert linears.step == 2
    states = {tuple(layer.state[:3].tolist()) for layer in linears.layers.values()}
    assert len(states) == 1 and next(iter(states))[1:] == (2, 0)
    assert len({layer.state[operand.LAYER].item() for layer in linears.layers.values()}) == 3
    handle = linears_of(model)
    assert handle is not None and handle.step == 2 and handle.layers == linears.layers
    assert linears_of(nn.LayerNorm(2)) is None


# ── one cast for several layers ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def casts_of_input(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The dimension of each cast of an input of 6 tokens, as it runs: compiled code comes by here too."""
    found: list[int] = []
    real = layer_matmuls.cast_matrix

    def counted(x: Tensor, cast: Any, dim: int, *arguments: Any, **options: Any) -> Any:
        if x.shape == (6, 64):
            found.append(dim)
        return real(x, cast, dim, *arguments, **options)

    monkeypatch.setattr(layer_matmuls, "cast_matrix", counted)
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("name", "dims"),
    [("int8-row", [1]), ("float8-tensor", [1]), ("float8-delayed", [1]), ("mxfp8", [1, 0]), ("float8-row", [1, 0])],
)
def test_layers_with_one_input_cast_it_once(
    casts_of_input: list[int], name: str, dims: list[int], is_compiled: bool
) -> None:
    """And once more for grad_weight where the codes do not serve it."""
    model = Model().bfloat16()
    linears = silently(model, name)
    call = compiled(model) if is_compiled else model
    for step in range(2):
        linears.step = step
        casts_of_input.clear()
        call(gaussian(6, 64, seed=step)).sum().backward()
        # A compiler merges what it finds equal; of three layers' casts for grad_weight it may leave two.
        assert casts_of_input == dims or (is_compiled and casts_of_input == [*dims, 0] and dims == [1, 0])


def test_an_input_changed_in_place_is_cast_anew(casts_of_input: list[int]) -> None:
    model = Model().bfloat16()
    linears = silently(model, "int8-row")
    x = gaussian(6, 64)
    model.q_proj(x)
    model.k_proj(x)
    assert len(casts_of_input) == 1
    x.mul_(2)
    assert torch.equal(model.v_proj(x), model.v_proj(x.clone()))
    model(x)
    before = len(casts_of_input)
    linears.set_compute(lambda name: COMPUTES["mxfp8"])
    model(x)
    assert len(casts_of_input) == before + 1


def test_an_input_changed_where_pytorch_does_not_see_it_is_cast_anew_too() -> None:
    """A buffer that is filled through NumPy, say: no layer may go by the cast it made itself some time ago."""
    buffer = gaussian(33, 65, dtype=torch.float32).numpy()
    layer, x = make_layer("int8-row", dtype=torch.float32)[0], torch.from_numpy(buffer)
    layer(x)
    buffer[:] = gaussian(33, 65, dtype=torch.float32, seed=1).numpy()
    assert torch.equal(layer(x), layer(x.clone()))


def test_an_input_where_another_one_lay_is_not_taken_for_it() -> None:
    layer, met = make_layer("int8-row", bias=False)[0], set()
    for seed in range(30):
        x = gaussian(33, 65, seed=seed)
        met.add(x.data_ptr())
        value, off = expected(layer, x, torch.zeros(33, 17).bfloat16())["output"]
        assert ((layer(x).detach().double() - value).abs() <= off).all()
        del x
    assert len(met) < 30, "no address was used twice, so nothing was tested"


# ── compiled ────────────────────────────────────────────────────────────────────────────────────────────────────────


def compiled(model: nn.Module) -> Callable[..., Tensor]:
    return torch.compile(model, fullgraph=True, options=_TRUST_COMPILER)


REPRESENTATIVES = {
    "int8-row": "codes kept, folded scales, stochastic",
    "float8-tensor": "codes kept, one cast of the gradient",
    "float8-delayed": "a history beside the graph",
    "mxfp8": "the input kept and cast anew",
    "nvfp4": "filled up blocks, two levels, rotated",
    "int8-outlier": "the input beside its cast",
    "int8-outlier-codes": "the input beside its cast",
    "tfloat32": "wide and not PyTorch's own",
}


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_a_compiled_layer_gives_the_same_bits_and_compiles_once(name: str, fresh_compiler: None) -> None:
    eager, others = make_layer(name)
    layer, linears = make_layer(name)
    call = compiled(layer)
    for step in range(4):
        linears.step = others.step = step
        for handle in (linears, others):
            handle.set_first_sequence(2 * step)
        x, grad = gaussian(2, 12, 65, seed=step), gaussian(2, 12, 17, seed=step + 50)
        wanted = passed(eager, x, grad)
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            assert same(passed(layer, x, grad, call), wanted)
    assert layer.amax_history is None or torch.equal(layer.amax_history, eager.amax_history)


def test_layers_of_one_shape_share_a_graph(fresh_compiler: None) -> None:
    """What differs from layer to layer is a tensor, so a model compiled by layers compiles one of them."""
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3))).bfloat16()
    silently(model, "int8-row", keep=())
    wanted = passed_through(model, gaussian(6, 32))

    @torch.compile(fullgraph=True, options=_TRUST_COMPILER)
    def run(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)

    x = gaussian(6, 32)
    y = run(model[0], x)
    with torch.compiler.set_stance("fail_on_recompile"):
        for layer in model[1:]:
            y = run(layer, y.detach())
    assert torch.equal(y, wanted)


def passed_through(model: nn.Sequential, x: Tensor) -> Tensor:
    for layer in model:
        x = layer(x).detach()
    return x


def test_an_input_that_lies_transposed_compiles_too(fresh_compiler: None) -> None:
    for name in ("int8-row", "mxfp8", "tfloat32"):
        layer, _ = make_layer(name, 32, 16)
        x = gaussian(32, 24)

        def run(x: Tensor, layer: Linear = layer) -> Tensor:
            return layer(x.t())

        wanted = run(x)
        assert torch.equal(torch.compile(run, fullgraph=True, options=_TRUST_COMPILER)(x), wanted)


@whole
def test_with_compiled_casts_a_compiled_layer_gives_the_same_bits(
    fresh_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, grad = batch((140, 65, 34))
    wanted = passed(make_layer("int8-row", 65, 34)[0], x, grad)
    monkeypatch.setattr(fusion, "COMPILE_ELEMENTS", 1)
    layer, _ = make_layer("int8-row", 65, 34)
    assert same(passed(layer, x, grad, compiled(layer)), wanted)


# ── what the compiler is told ───────────────────────────────────────────────────────────────────────────────────────


@every_arithmetic
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_operators_return_what_they_tell_the_compiler(row: Compute, shape: tuple[int, int, int]) -> None:
    """Shapes, dtypes and strides, and that no input is changed; histories are state beside the graph, so none here."""
    layer, _ = make_layer(row, *shape[1:])
    x, grad = batch(shape)
    weight, state = layer.weight.detach(), layer.state
    # The first also compares inputs before and after, which PyTorch cannot do for float8.
    checks = ("test_faketensor",) if row.keeps_codes and row.name != "int8-row" else ("test_schema", "test_faketensor")
    with torch.no_grad():
        torch.library.opcheck(layer_matmuls.cast_input, (x, row.name, None, None, False), test_utils=checks)
        data, outer, inner = layer_matmuls.cast_input(x, row.name, None, None, False)
        arguments = (
            data,
            outer,
            inner,
            x,
            weight,
            layer.bias.detach(),
            row.name,
            state,
            None,
            False,
            shape[0],
            x.dtype,
        )
        torch.library.opcheck(layer_matmuls.multiply_output, arguments, test_utils=checks)
        if not row.keeps_codes and not row.grad_weight.right.is_wide:
            torch.library.opcheck(layer_matmuls.cast_kept, (x, row.name, state), test_utils=checks)
            data, outer, inner = layer_matmuls.cast_kept(x, row.name, state)
        elif not row.keeps_codes:
            data = x
        for wanted in ([True, True], [True, False], [False, True]):
            arguments = (grad, data, outer, inner, weight, row.name, state, None, 1, wanted, False)
            torch.library.opcheck(layer_matmuls.gradients, arguments, test_utils=checks)


def test_operands_name_the_three_matmuls() -> None:
    layer, _ = make_layer("int8-row")
    assert tuple(operands(layer, *batch(SHAPES[0]))) == PLACES[:3] and layer.weight.device == CPU
