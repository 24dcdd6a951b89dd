"""Grouped linears: each expert's values are those of a linear layer on that expert's tokens, bit for bit, in every row."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.errors import RecipeError
from narrowgauge.matmul import layer_matmuls, operand
from narrowgauge.matmul.delayed_scaling import count_overflows
from narrowgauge.matmul.experts import GroupedLinear, grouped_linear, grouped_output, new_state
from narrowgauge.matmul.linear import Linear
from narrowgauge.matmul.swapping import swap_linears
from narrowgauge.spec.computes import COMPUTES, Compute

pytestmark = pytest.mark.filterwarnings("ignore")

ENDS = (10, 10, 30, 37)  # the second of four experts got no tokens
TOKENS, IN, OUT = 40, 48, 40  # and three tokens have no expert


def operands(experts: int = 4, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x with one outlier feature, weights, biases, the output's gradient."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, IN, generator=draw)
    x[:, 3] *= 20
    weights, bias = torch.randn(experts, OUT, IN, generator=draw), torch.randn(experts, OUT, generator=draw)
    grad = torch.randn(TOKENS, OUT, generator=draw)
    return x.to(dtype), weights.to(dtype).requires_grad_(), bias.to(dtype).requires_grad_(), grad.to(dtype)


def offsets(*ends: int) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def plain(row: str | Compute, weight: Tensor, bias: Tensor | None, state: Tensor) -> Linear:
    """One expert as a layer of its own."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    holder = nn.ModuleDict({"expert": layer})
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    swapped = swap_linears(holder, row, keep=()).layers["expert"]
    swapped.state.copy_(state)
    return swapped


def groups(ends: tuple[int, ...]) -> Iterator[tuple[int, slice]]:
    yield from ((k, slice(a, b)) for k, (a, b) in enumerate(zip((0, *ends), ends, strict=False)))


@pytest.mark.parametrize(("dtype", "with_bias"), [(torch.bfloat16, False), (torch.float32, True)])
@pytest.mark.parametrize("row", COMPUTES)
def test_each_expert_is_a_linear_layer_of_its_own(row: str, dtype: torch.dtype, with_bias: bool) -> None:
    x, weights, bias, grad = operands(dtype=dtype)
    own_bias = bias if with_bias else None
    layer = GroupedLinear(4, "experts.down_proj", COMPUTES[row])
    layer.state[operand.STEP_SEED] = 77
    y = layer(x.requires_grad_(), weights, offsets(*ENDS), own_bias)
    y[: ENDS[-1]].backward(grad[: ENDS[-1]])
    for expert, tokens in groups(ENDS):
        if tokens.start == tokens.stop:
            assert not weights.grad[expert].any()
            continue
        alone = plain(
            COMPUTES[row], weights[expert], None if own_bias is None else own_bias[expert], layer.state[:, expert]
        )
        group = x.detach()[tokens].clone().requires_grad_()
        expected = alone(group)
        expected.backward(grad[tokens])
        assert torch.equal(y[tokens], expected)
        assert torch.equal(x.grad[tokens], group.grad)
        assert torch.equal(weights.grad[expert], alone.weight.grad)
        if with_bias:
            assert torch.equal(bias.grad[expert], alone.bias.grad)


@pytest.mark.parametrize("row", ["float8-row", "int8-row", "float8-delayed", "nvfp4"])
def test_tokens_without_an_expert_come_out_zero_and_pass_no_gradient(row: str) -> None:
    x, weights, bias, grad = operands()
    y = GroupedLinear(4, "", COMPUTES[row])(x.requires_grad_(), weights, offsets(*ENDS), bias)
    y.backward(grad)
    assert not y[ENDS[-1] :].any() and not x.grad[ENDS[-1] :].any()
    assert y[: ENDS[-1]].any(1).all() and x.grad[: ENDS[-1]].any(1).all()


@pytest.mark.parametrize("row", ["float8-tensor", "int8-row", "mxfp8", "bfloat16"])
def test_one_expert_is_one_layer_and_no_tokens_are_no_output(row: str) -> None:
    x, weights, _, _ = operands(experts=1)
    layer = GroupedLinear(1, "", COMPUTES[row])
    alone = plain(row, weights[0], None, layer.state[:, 0])
    assert torch.equal(layer(x, weights, offsets(TOKENS)), alone(x))
    nothing = layer(x[:0].requires_grad_(), weights, offsets(0))
    nothing.sum().backward()
    assert nothing.shape == (0, OUT) and not weights.grad.any()


@pytest.mark.parametrize("row", ["int8-row", "nvfp4"])
def test_equal_experts_round_equal_tokens_by_bits_of_their_own(row: str) -> None:
    x, weights, _, grad = operands()
    twice = torch.cat((x[:16], x[:16])).requires_grad_()
    same = weights.detach()[:1].repeat(2, 1, 1).requires_grad_()
    layer = GroupedLinear(2, "experts", COMPUTES[row])

    def gradients() -> tuple[Tensor, Tensor]:
        twice.grad = same.grad = None
        layer(twice, same, offsets(16, 32)).backward(torch.cat((grad[:16], grad[:16])))
        return twice.grad.clone(), same.grad.clone()

    by_token, by_weight = gradients()
    assert not torch.equal(by_token[:16], by_token[16:]) and not torch.equal(by_weight[0], by_weight[1])
    again = gradients()
    assert torch.equal(again[0], by_token) and torch.equal(again[1], by_weight)
    layer.state[operand.STEP_SEED] = 5
    assert not torch.equal(gradients()[0], by_token)


def test_each_expert_remembers_its_own_magnitudes() -> None:
    x, weights, _, grad = operands()
    layer = GroupedLinear(4, "", COMPUTES["float8-delayed"])
    alone = [plain("float8-delayed", weights[expert], None, layer.state[:, expert]) for expert in range(4)]
    for step, ends in enumerate([(10, 10, 30, 37), (5, 12, 12, 37), (9, 20, 30, 37)]):
        layer.state[operand.STEP] = step
        scaled = x * 3.0**step  # so that the scales of the step before overflow
        y = layer(scaled, weights, offsets(*ends))
        y[:37].backward(grad[:37])
        for expert, tokens in groups(ends):
            if tokens.start < tokens.stop:
                alone[expert].state[operand.STEP] = step
                expected = alone[expert](scaled[tokens])
                expected.backward(grad[tokens])
                assert torch.equal(y[tokens], expected)
    assert layer.amax_history is not None
    expected = sum(count_overflows(other.amax_history) for other in alone if other.amax_history is not None)
    assert torch.equal(count_overflows(layer.amax_history), expected) and expected[0] > 0


@pytest.mark.usefixtures("native_formats")
def test_a_plain_row_takes_the_grouped_matmul_of_pytorch_where_that_takes_the_operands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, weights, _, _ = operands()
    calls = []
    real = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *args, **options: calls.append(1) or real(*args, **options))
    taken = grouped_linear(x, weights, offsets(*ENDS), "bfloat16")
    assert calls
    odd = grouped_linear(x[:, :-1], weights[:, :, :-1], offsets(*ENDS), "bfloat16")
    assert len(calls) == 1
    for expert, tokens in groups(ENDS):
        assert torch.equal(taken[tokens], F.linear(x[tokens], weights[expert]))
        assert torch.equal(odd[tokens], F.linear(x[tokens, :-1], weights[expert, :, :-1]))


@pytest.mark.parametrize("row", ["int8-row", "float8-row", "float8-block"])
def test_weights_may_lie_the_other_way(row: str) -> None:
    x, weights, bias, grad = operands()
    layer = GroupedLinear(4, "", COMPUTES[row])
    layer(x, weights, offsets(*ENDS), bias)[: ENDS[-1]].backward(grad[: ENDS[-1]])
    turned = weights.detach().transpose(1, 2).contiguous().requires_grad_()
    layer(x, turned.transpose(1, 2), offsets(*ENDS), bias)[: ENDS[-1]].backward(grad[: ENDS[-1]])
    assert torch.equal(turned.grad.transpose(1, 2), weights.grad)


@pytest.mark.parametrize(("row", "kept_bytes"), [("int8-row", 1), ("float8-tensor", 1), ("float8-row", 2)])
def test_what_is_kept_for_backward_is_what_the_row_says(row: str, kept_bytes: int) -> None:
    x, weights, _, _ = operands()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
        GroupedLinear(4, "", COMPUTES[row])(x.requires_grad_(), weights, offsets(*ENDS))
    inputs = [saved for saved in kept if saved.shape == x.shape]
    assert [saved.element_size() for saved in inputs] == [kept_bytes] == [COMPUTES[row].kept_bytes]


@pytest.mark.parametrize("row", ["int8-row", "float8-tensor", "nvfp4"])
def test_compiled_whole_it_gives_the_same_bits_wherever_the_tokens_went(row: str) -> None:
    x, weights, bias, grad = operands()
    layer = GroupedLinear(4, "", COMPUTES[row])
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = []
    for run in (layer, compiled):
        for ends in ((10, 10, 30, 40), (40, 40, 40, 40), (0, 1, 2, 40)):
            with torch._dynamo.config.patch(error_on_recompile=True):
                y = run(x.requires_grad_(), weights, offsets(*ends), bias)
                gradients = torch.autograd.grad(y, (x, weights, bias), grad)
            found.append((y, *gradients))
    for eager, graph in zip(found[:3], found[3:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(eager, graph, strict=True))


def test_the_operator_says_its_shapes_truly() -> None:
    x, weights, bias, _ = operands()
    for row in ("int8-row", "float8-tensor", "mxfp8", "bfloat16", "unit"):
        layer_matmuls.REGISTERED[row] = COMPUTES[row]
        arguments = (x, weights.detach(), bias.detach(), offsets(*ENDS), row, new_state(4), None, False)
        torch.library.opcheck(grouped_output, arguments, test_utils=("test_schema", "test_faketensor"))


def test_wrong_questions_get_an_answer() -> None:
    x, weights, _, _ = operands()
    with pytest.raises(RecipeError, match=r"no compute is named 'float8-rows'.*Did you mean 'float8-row'"):
        grouped_linear(x, weights, offsets(*ENDS), "float8-rows")
    with pytest.raises(RecipeError, match="got no history"):
        grouped_linear(x, weights, offsets(*ENDS), "float8-delayed")
    with torch.autocast("cpu", torch.float16), pytest.raises(RecipeError, match="autocast to float16"):
        GroupedLinear(4, "", COMPUTES["float8-row"])(x, weights, offsets(*ENDS))
