"""Scalify: rules on scales against exact fractions, whole models against themselves in plain float64, data near one."""

from __future__ import annotations

import copy
import json
import pickle
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from narrowgauge.assembly.preparation import prepare
from narrowgauge.errors import RecipeError
from narrowgauge.matmul import layer_matmuls
from narrowgauge.matmul.cast_cache import cached_weights
from narrowgauge.numerics.tensor_stats import power_of_rms, sqnr_of_sums
from narrowgauge.spec.propagation import RULES
from narrowgauge.trainer.language_model import build, can_chunk, enable_activation_checkpointing, loss_sum
from narrowgauge.transforms import scaled_tensor
from narrowgauge.transforms.scaled_tensor import Scaled, measured, rescaled, root_below
from narrowgauge.transforms.scalify import attention, measurements, scalify, value_of
from oracles import scalify as oracle
from tensors import gradients, random_tokens, relative_error, rms

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 96,
        "n_positions": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}
FAMILIES = list(CONFIGS)
# About what a mean over a large batch makes of gradients: their elements are near 1e-6.
SMALL = 2.0**-20
TOKENS = random_tokens(3, 17, 96, seed=1)


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> PreTrainedModel:
    return tiny(request.param, tmp_path)


def tiny(family: str, folder: Path, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    (folder / "config.json").write_text(json.dumps(CONFIGS[family]))
    made = build(str(folder), seed=0)
    for name, parameter in made.named_parameters():
        # What starts as zeros or ones would hide a wrong rule.
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name or "ln_" in name else 0.0, std=0.02)
    return made.to(dtype)


def scalified(model: nn.Module) -> Any:
    other = copy.deepcopy(model)
    scalify(other)
    return other


def loss_and_gradients(model: PreTrainedModel, factor: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    loss = loss_sum(model, TOKENS, chunked=False)
    return loss.detach(), gradients(model, loss * factor)


def distance(found: Tensor, wanted: Tensor) -> float:
    assert type(found) is Tensor
    assert found.dtype == wanted.dtype
    return relative_error(found, wanted)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- arithmetic, exactly ----------------------------------------------------------------------------------------------

A = [1.0, -2.0, 0.5, 4.0, -0.25, 8.0]
B = [2.0, 0.5, -1.0, 0.25, 4.0, -2.0]


def pair_of(x: Tensor) -> oracle.Pair:
    assert type(x) is Scaled
    return oracle.pair(x.data.flatten().tolist(), x.scale.item())


def scaled(data: list[float], scale: float) -> Tensor:
    return Scaled(torch.tensor(data, dtype=torch.float64).view(2, 3), scale).requires_grad_()


@pytest.mark.parametrize("scales", [(1.0, 1.0), (2.0**-30, 2.0**-20), (2.0**10, 2.0**-3), (2.0**-5, 2.0**-4)])
@pytest.mark.parametrize(
    ("operation", "rule"),
    [
        (torch.mul, oracle.multiply),
        (torch.div, oracle.divide),
        (torch.add, oracle.add),
        (torch.sub, lambda a, b: oracle.add(a, b, -1)),
        (lambda a, b: torch.cat([a, b]), oracle.concatenate),
        (lambda a, b: torch.cat([a, b]).sum(1), lambda a, b: oracle.total(oracle.concatenate(a, b), 4)),
        (lambda a, b: (a + b).sum(), lambda a, b: oracle.total(oracle.add(a, b), 1)),
        (lambda a, b: -a * 0.75 / b, lambda a, b: oracle.divide(oracle.multiply(a, oracle.pair([-1.5] * 6, 0.5)), b)),
    ],
)
def test_arithmetic_hands_on_data_and_scale_by_its_rule(
    operation: Callable[..., Tensor], rule: Callable[..., oracle.Pair], scales: tuple[float, float]
) -> None:
    found = operation(scaled(A, scales[0]), scaled(B, scales[1]))
    wanted = rule(oracle.pair(A, scales[0]), oracle.pair(B, scales[1]))
    assert pair_of(found) == wanted


@pytest.mark.parametrize("scales", [(2.0**-30, 2.0**-20), (2.0**4, 2.0**-3)])
def test_gradients_follow_the_same_rules_and_meet_by_addition(scales: tuple[float, float]) -> None:
    x, a, b = scaled(A, 2.0**-3), scaled(B, scales[0]), scaled([3.0, 1.0, -0.5, 2.0, 1.0, -4.0], scales[1])
    (x * a - x * b).backward(Scaled(torch.full((2, 3), 1.5, dtype=torch.float64), 2.0**-40))
    gradient = oracle.pair([1.5] * 6, 2.0**-40)
    assert pair_of(x.grad) == oracle.add(
        oracle.multiply(gradient, pair_of(a)), oracle.multiply(gradient, pair_of(b)), -1
    )
    assert pair_of(a.grad) == oracle.multiply(gradient, pair_of(x))


def test_a_gradient_of_a_broadcast_is_summed_by_the_rule_for_sums() -> None:
    x = Scaled(torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64), 2.0**-3).requires_grad_()
    x.expand(5, 3).backward(Scaled(torch.arange(15.0, dtype=torch.float64).view(5, 3), 2.0**-9))
    columns = [float(row * 3 + column) for column in range(3) for row in range(5)]
    assert pair_of(x.grad) == oracle.total(oracle.pair(columns, 2.0**-9), 3)


def test_plain_tensors_and_numbers_join() -> None:
    x = scaled(A, 2.0**-30)
    plain = torch.tensor(B, dtype=torch.float64).view(2, 3) * 2.0**-33
    found, other = pair_of(x + plain), oracle.rescale(oracle.pair(plain.flatten().tolist(), 1))
    assert found == oracle.add(oracle.pair(A, 2.0**-30), other)
    # Zeros have no size, so they take no part in choosing one.
    assert pair_of(x + torch.zeros(2, 3, dtype=torch.float64)) == pair_of(x)
    assert pair_of(torch.cat([x, torch.zeros(0, 3, dtype=torch.float64)])) == pair_of(x)
    assert pair_of(x + 3 * 2.0**-31) == oracle.add(oracle.pair(A, 2.0**-30), oracle.pair([1.5] * 6, 2.0**-30))
    assert pair_of(plain * x) == oracle.multiply(oracle.pair(plain.flatten().tolist(), 1), oracle.pair(A, 2.0**-30))


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.view(3, 8),
        lambda x: x.transpose(0, 1),
        lambda x: x.permute(2, 0, 1),
        lambda x: x.reshape(-1).contiguous(),
        lambda x: x.transpose(1, 2).reshape(2, 12),
        lambda x: x[0].t(),
        lambda x: x[..., 1:3],
        lambda x: x.unsqueeze(1).expand(2, 5, 3, 4).clone(),
        lambda x: x[:1].squeeze(0),
        lambda x: x.split(2, dim=-1)[1] * 1.0 + x.split([2, 2], dim=-1)[0],
        lambda x: x.chunk(2, dim=-1)[0],
        lambda x: x.float().double(),
        lambda x: -x,
        lambda x: x.detach() + x,
    ],
)
def test_what_moves_elements_keeps_the_scale(operation: Callable[[Tensor], Tensor]) -> None:
    real = random(2, 3, 4)
    plain, x = real.clone().requires_grad_(), Scaled(real * 8, 0.125).requires_grad_()
    wanted, found = operation(plain), operation(x)
    assert type(found) is Scaled
    assert found.scale == 0.125
    assert torch.equal(found.value(), wanted)
    wanted.backward(torch.ones_like(wanted))
    (gradient,) = torch.autograd.grad(found, x, Scaled(torch.full_like(wanted, 4.0), 0.25))
    assert torch.equal(gradient.value(), plain.grad)


def test_powers_are_the_largest_not_above() -> None:
    assert [root_below(count) for count in range(1, 600)] == [oracle.root_below(count) for count in range(1, 600)]
    for seed, factor in enumerate([1.0, 3e-7, 1e12]):
        x = (random(37, seed=seed) * factor).float()
        assert measured(x).item() == oracle.size(oracle.pair(x.tolist(), 1).data)
    assert measured(torch.full((5,), 2.0**-9)).item() == 2.0**-9
    assert measured(torch.zeros(4)).item() == 1.0
    assert measured(torch.tensor([1.0, torch.inf])).item() == 1.0
    assert measured(torch.tensor([1e30, 1e30])).item() == 1.0
    x = Scaled(random(64) * 40, 2.0**-7)
    assert pair_of(rescaled(x)) == oracle.rescale(pair_of(x))


def test_every_operation_that_is_looked_up_stands_in_the_table() -> None:
    listed = {name for rule in RULES.values() for name in rule.operations}
    known = {str(operation).removeprefix("aten.") for operation in (*scaled_tensor._VIEWS, *scaled_tensor._RULES)}
    assert listed == known
    assert {rule.name for rule in RULES.values() if rule.measures} == {
        "linear layer", "embedding", "norm", "activation", "plain gradient that enters",
    }  # fmt: skip


# --- functions --------------------------------------------------------------------------------------------------------


def test_a_linear_layer_obeys_the_rule_for_dot_products_in_all_three_matmuls() -> None:
    layer = nn.Linear(3, 5, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(-7.0, 8.0).view(5, 3) * 2.0**-9)
        layer.bias.copy_(torch.arange(5.0) * 2.0**-7)
    scalify(layer)
    x = scaled(A, 2.0**-6)
    y = layer.forward(x)  # the module itself would return a plain value
    weight = oracle.rescale(oracle.pair(layer.weight.flatten().tolist(), 1))
    product = oracle.dot(pair_of(x), oracle.transpose(weight, 5), 3)
    assert (y.scale.item(), y.data.shape) == (product.scale, (2, 5))
    bias = [Fraction(value) for value in layer.bias.tolist()]
    assert pair_of(y).values == tuple(value + bias[place % 5] for place, value in enumerate(product.values))

    gradient = oracle.pair([float(place) for place in range(-4, 6)], 2.0**-35)
    y.backward(Scaled(torch.arange(-4.0, 6.0, dtype=torch.float64).view(2, 5), 2.0**-35))
    assert pair_of(x.grad) == oracle.dot(gradient, weight, 5)
    by_weight = oracle.dot(oracle.transpose(gradient, 2), pair_of(x), 2).values
    assert oracle.pair(layer.weight.grad.flatten().tolist(), 1).values == by_weight
    assert oracle.pair(layer.bias.grad.tolist(), 1).values == oracle.total(oracle.transpose(gradient, 2), 5).values


def function_case(
    plain: Callable[..., Tensor], ruled: Callable[..., Tensor], *inputs: Tensor, parameters: tuple[Tensor, ...] = ()
) -> tuple[Any, list[Any]]:
    """Output and input gradients of a rule, its values and all gradients equal to those of the plain function."""
    reals = [x.clone().requires_grad_() for x in inputs]
    scaled_inputs = [Scaled(x / measured(x), measured(x)).requires_grad_() for x in inputs]
    wanted, found = plain(*reals), ruled(*scaled_inputs)
    direction = random(*wanted.shape, seed=5)
    by_plain = torch.autograd.grad(wanted, [*reals, *parameters], direction * SMALL)
    by_rule = torch.autograd.grad(found, [*scaled_inputs, *parameters], Scaled(direction, SMALL))
    assert distance(found.value(), wanted.detach()) < 1e-12
    for one, other in zip(by_rule, by_plain, strict=True):
        assert distance(one.value() if isinstance(one, Scaled) else one, other) < 1e-12
    return found, list(by_rule[: len(inputs)])


def module_case(module: nn.Module, x: Tensor) -> tuple[Any, Any]:
    # Called by its forward: the hooks of a whole module would return a plain value.
    ruled, parameters = copy.copy(module), tuple(module.parameters())
    scalify(ruled)
    assert type(ruled) is not type(module)
    found, (gradient,) = function_case(module, ruled.forward, x, parameters=parameters)
    return found, gradient


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_norms_have_scale_one_and_measure_the_gradient(kind: Callable[..., nn.Module]) -> None:
    found, gradient = module_case(kind(16, dtype=torch.float64), random(5, 16) * 2.0**-9)
    assert found.scale == 1
    assert 1 <= rms(gradient.data) < 2


@pytest.mark.parametrize("module", [nn.SiLU(), nn.GELU(approximate="tanh"), nn.ReLU(), nn.Tanh()])
@pytest.mark.parametrize("factor", [1.0, 2.0**-6, 2.0**3])
def test_activations_measure_what_they_hand_on(module: nn.Module, factor: float) -> None:
    x = random(50, 16) * factor
    found, gradient = module_case(module, x)
    assert found.scale == measured(module(x))
    assert 1 <= rms(found.data) < 2
    # The gradient keeps its scale: no derivative of an activation is far from one, but where all of it is flat.
    assert gradient.scale == SMALL
    assert 0.2 <= rms(gradient.data) < 2


def test_an_embedding_has_its_weight_s_scale() -> None:
    table = nn.Embedding(32, 8, dtype=torch.float64)
    with torch.no_grad():
        table.weight.mul_(0.013)
    tokens = torch.arange(24).view(4, 6) % 20
    wanted = table(tokens)
    ruled = scalified(table)
    found = ruled.forward(tokens)
    assert found.scale == measured(table.weight)
    assert torch.equal(found.value(), wanted.detach())
    direction = random(4, 6, 8)
    (by_rule,) = torch.autograd.grad(found, ruled.weight, Scaled(direction, SMALL))
    (by_plain,) = torch.autograd.grad(wanted, table.weight, direction * SMALL)
    assert distance(by_rule, by_plain) < 1e-12


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"is_causal": True, "scale": 0.7},
        {"is_causal": True, "enable_gqa": True},
        {"attn_mask": torch.ones(64, 64, dtype=torch.bool).tril(3)},
    ],
)
def test_attention_guesses_within_what_the_formats_forgive(options: dict[str, Any]) -> None:
    heads = 1 if "enable_gqa" in options else 4
    query, key = random(2, 4, 64, 16, seed=1) * 0.01, random(2, heads, 64, 16, seed=2) * 8
    value = random(2, heads, 64, 16, seed=3) * 1e-4
    plain = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)  # noqa: E731
    found, found_gradients = function_case(plain, plain, query, key, value)
    # The output is a mean, so at most as large as the values, here near one; e5m2 holds gradients from 2^-14 to 2^15.
    assert found.scale == measured(value)
    assert 2.0**-5 < rms(found.data) < 2
    assert all(2.0**-12 < rms(x.data) < 2.0**10 for x in found_gradients)
    assert torch.equal(attention(query, key, value, **options).value(), plain(query, key, value))


# --- whole models -----------------------------------------------------------------------------------------------------


def test_a_model_computes_what_it_computed(model: PreTrainedModel) -> None:
    other = scalified(model)
    assert list(other.state_dict()) == list(model.state_dict())
    (loss, wanted), (found_loss, found) = loss_and_gradients(model, SMALL), loss_and_gradients(other, SMALL)
    assert distance(found_loss, loss) < 1e-12
    assert max(distance(found[name], wanted[name]) for name in wanted) < 1e-12
    with torch.no_grad():
        logits, other_logits = (m(input_ids=TOKENS, use_cache=False).logits for m in (model, other))
    assert distance(other_logits, logits) < 1e-12


def test_in_bfloat16_too_and_under_autocast(model: PreTrainedModel) -> None:
    for dtype, autocast in ((torch.bfloat16, False), (torch.float32, True)):
        plain = copy.deepcopy(model).to(dtype)
        other = scalified(plain)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            (loss, wanted), (found_loss, found) = loss_and_gradients(plain), loss_and_gradients(other)
        # Powers of two round nothing: only the order in which a few gradients are added differs.
        assert torch.equal(found_loss, loss)
        assert max(distance(found[name].float(), wanted[name].float()) for name in wanted) < 0.01


def test_checkpoints_copies_and_pickles_compute_the_same(model: PreTrainedModel) -> None:
    other = scalified(model)
    _, wanted = loss_and_gradients(other)
    scalify(other)  # a second time
    checkpointed = copy.deepcopy(other)
    enable_activation_checkpointing(checkpointed)
    for again in (other, checkpointed, pickle.loads(pickle.dumps(other))):
        assert any("Scaled" in type(module).__name__ for module in again.modules())
        _, found = loss_and_gradients(again)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert all(torch.equal(loss_and_gradients(checkpointed)[1][name], wanted[name]) for name in wanted)


@pytest.mark.filterwarnings("ignore::narrowgauge.matmul.gemm.EmulationNotice")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("native_formats")
def test_no_more_is_measured_than_is_told(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read of a tensor for its scale is counted, in two micro-batches that share their weights."""
    model, _ = prepare(tiny(family, tmp_path, torch.float32), "scalify/word")
    counts: Counter[str] = Counter()

    def counting(place: str) -> Callable[[Tensor], Tensor]:
        def count(x: Tensor) -> Tensor:
            counts[place] += 1
            return power_of_rms(x)

        return count

    monkeypatch.setattr(layer_matmuls, "power_of_rms", counting("weights"))
    for name in ("narrowgauge.transforms.scalify.measured", "narrowgauge.transforms.scaled_tensor.measured"):
        monkeypatch.setattr(name, counting("passes"))
    told, layers = measurements(model), 2
    embeddings = 1 if family == "llama" else 2
    linears = layers * (7 if family == "llama" else 4)
    assert told == (embeddings + linears, layers, 2 * layers + 2)
    with cached_weights():
        for _ in range(2):
            counts["passes"] = 0
            loss = loss_sum(model, TOKENS, chunked=False)
            assert counts["passes"] == told.forward + embeddings
            loss.backward()
            assert counts["passes"] == told.forward + embeddings + told.backward
    assert counts["weights"] == linears


@pytest.mark.filterwarnings("ignore::narrowgauge.matmul.gemm.EmulationNotice")
def test_weights_are_cast_once_for_all_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[tuple[int, list[Tensor]]] = []
    made: list[int] = []
    cast = layer_matmuls.cast_matrix

    def counting(x: Tensor, *arguments: Any, **options: Any) -> Any:
        made.append(x.shape[0] != 3 * 16)  # the tokens; all else is a weight
        return cast(x, *arguments, **options)

    monkeypatch.setattr(layer_matmuls, "cast_matrix", counting)
    base = tiny("llama", tmp_path, torch.float32)
    for scope in (cached_weights, nullcontext):
        model, _ = prepare(copy.deepcopy(base), "scalify/word")
        made.clear()
        with scope():
            for _ in range(3):
                loss_sum(model, TOKENS, chunked=False).backward()
        results.append((sum(made), [parameter.grad for parameter in model.parameters()]))
    (few, cached), (many, plain) = results
    assert few == 14 and many == 14 * 2 * 3
    assert all(torch.equal(one, other) for one, other in zip(cached, plain, strict=True))


@pytest.mark.filterwarnings("ignore::narrowgauge.matmul.gemm.EmulationNotice")
@pytest.mark.usefixtures("native_formats")
def test_the_head_is_chunked_and_compiled_as_any_other(tmp_path: Path) -> None:
    model, _ = prepare(tiny("llama", tmp_path, torch.float32), "scalify/word")
    assert can_chunk(model)
    torch._dynamo.reset()
    whole, chunked = (loss_sum(model, TOKENS, chunked=each) for each in (False, True))
    assert chunked.item() == pytest.approx(whole.item(), rel=1e-3)
    head = torch.compile(model.get_output_embeddings(), fullgraph=True, backend="aot_eager")
    hidden = random(5, 32).bfloat16()
    assert torch.equal(head(hidden), model.get_output_embeddings()(hidden))


def test_every_way_out_of_a_model_is_plain(model: PreTrainedModel) -> None:
    other = scalified(model)
    body = other.base_model(input_ids=TOKENS, use_cache=False, output_hidden_states=True)
    assert all(type(hidden) is Tensor for hidden in (body.last_hidden_state, *body.hidden_states))
    assert type(other.get_output_embeddings()(body.last_hidden_state)) is Tensor
    chunked = loss_sum(other, TOKENS, chunked=True)
    assert distance(chunked.detach(), loss_sum(model, TOKENS, chunked=True).detach()) < 1e-12
    chunked.backward()
    whole = loss_and_gradients(other)[1]
    other.zero_grad()
    loss_sum(other, TOKENS, chunked=True).backward()
    assert all(distance(parameter.grad, whole[name]) < 1e-6 for name, parameter in other.named_parameters())


def test_all_layers_share_one_compiled_graph(model: PreTrainedModel) -> None:
    other = scalified(model.float())
    _, wanted = loss_and_gradients(model)
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    for module in other.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile(fullgraph=True, backend=counter)
    _, found = loss_and_gradients(other)
    assert counter.frame_count == 1
    assert max(distance(found[name], wanted[name]) for name in wanted) < 1e-5


def test_frozen_parameters_cost_no_gradient(model: PreTrainedModel) -> None:
    other = scalified(recorded(model))
    for name, parameter in other.named_parameters():
        parameter.requires_grad_("mlp" in name)
    loss_sum(other, TOKENS, chunked=False).backward()
    assert all((parameter.grad is not None) == ("mlp" in name) for name, parameter in other.named_parameters())
    layers = {name: module for name, module in other.named_modules() if isinstance(module, RecordedLinear)}
    assert all(layer.wants_gradient == ("mlp" in name) for name, layer in layers.items())


def test_a_plain_gradient_that_enters_is_measured() -> None:
    x = scaled(A, 2.0**-30)
    gradient = torch.tensor(B, dtype=torch.float64).view(2, 3) * 2.0**-50
    (found,) = torch.autograd.grad(value_of(x), x, gradient)
    assert pair_of(found) == oracle.rescale(oracle.pair(gradient.flatten().tolist(), 1))


# --- what it is for ---------------------------------------------------------------------------------------------------


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seen: dict[str, Tensor]) -> Tensor:
        seen.update(x=x, weight=weight)
        ctx.seen = seen
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.seen["gradient"] = gradient
        rows, columns = gradient.flatten(0, -2), ctx.seen["x"].flatten(0, -2)
        return gradient @ ctx.seen["weight"], rows.t() @ columns, None


class RecordedLinear(nn.Linear):
    """A linear layer that keeps the operands of its three matmuls."""

    is_transposed = False

    def forward(self, input: Tensor) -> Tensor:
        return self.multiply(input, self.weight, self.bias)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        assert type(x) is Tensor
        self.seen: dict[str, Tensor] = {}
        self.wants_gradient = weight.requires_grad
        y = _Recorded.apply(x, weight.t() if self.is_transposed else weight, self.seen)
        return y if bias is None else y + bias


def recorded(model: PreTrainedModel) -> PreTrainedModel:
    """As a narrow layer is put in place: by its class."""
    for module in model.modules():
        if type(module) is nn.Linear or type(module).__name__ == "Conv1D":
            module.is_transposed = type(module) is not nn.Linear
            sides = module.weight.shape if module.is_transposed else module.weight.shape[::-1]
            module.__class__ = RecordedLinear
            module.in_features, module.out_features = sides
    return model


def operands(model: nn.Module) -> dict[tuple[str, str], Tensor]:
    layers = {name: module for name, module in model.named_modules() if isinstance(module, RecordedLinear)}
    return {(name, kind): x.float() for name, module in layers.items() for kind, x in module.seen.items()}


def sqnr_of_float8(x: Tensor) -> float:
    """The signal to quantization noise ratio of a cast without a scale, in decibels."""
    lost = x.double() - x.to(torch.float8_e4m3fn).double()
    return float(sqnr_of_sums(torch.stack([x.double().square().sum(), lost.square().sum()])))


def test_operands_of_all_matmuls_lie_near_one_whatever_the_gradient(model: PreTrainedModel) -> None:
    """The band: root mean squares from 1/2 to 8, of gradients, which e5m2 holds, from 2^-8 to 2^8; for gradients near 1e-6
    and for those 2^30 times smaller."""
    plain = recorded(model.float())
    other = scalified(plain)
    loss_and_gradients(other, SMALL * 2.0**-30)
    far = {key: x.clone() for key, x in operands(other).items()}
    loss_and_gradients(plain, SMALL)
    loss_and_gradients(other, SMALL)
    near, raw = operands(other), operands(plain)
    assert len(near) == 3 * (15 if "Llama" in type(model).__name__ else 9)
    assert all(1 / 2 <= rms(x) <= 8 for (_, kind), x in near.items() if kind != "gradient")
    assert all(2.0**-8 <= rms(x) <= 2.0**8 for x in near.values())
    assert all(torch.equal(far[key], near[key]) for key in near)
    assert all(rms(x) < 1e-5 for (_, kind), x in raw.items() if kind == "gradient")


def test_a_static_float8_cast_of_data_loses_little_where_one_of_values_loses_all(model: PreTrainedModel) -> None:
    plain = recorded(model.float())
    other = scalified(plain)
    for m in (plain, other):
        loss_and_gradients(m, SMALL)
    data, raw = operands(other), operands(plain)
    for key in data:
        kept = sqnr_of_float8(data[key])
        assert kept > 25, key
        if key[1] == "gradient":
            assert sqnr_of_float8(raw[key]) == 0, key


# --- float16 without a loss scale -------------------------------------------------------------------------------------


def float16_case(model: nn.Module, factor: float, wanted: dict[str, Tensor]) -> tuple[float, float]:
    """The largest relative error of a parameter's gradient, and the share of all gradients that became zero."""
    found = loss_and_gradients(model, factor)[1]
    assert all(found[name].isfinite().all() for name in wanted)
    errors = [distance(found[name].double(), wanted[name] * factor) for name in wanted]
    lost = sum(int(((found[name] == 0) & (wanted[name] * factor != 0)).sum()) for name in wanted)
    return max(errors), lost / sum(int((value != 0).sum()) for value in wanted.values())


@pytest.mark.filterwarnings("ignore::narrowgauge.matmul.gemm.EmulationNotice")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("storage", ["word", "float32"])
def test_gradients_that_float16_loses_without_a_loss_scale_are_kept(family: str, storage: str, tmp_path: Path) -> None:
    base = tiny(family, tmp_path, torch.float32)
    _, wanted = loss_and_gradients(copy.deepcopy(base).double())
    plain, near = copy.deepcopy(base).half(), {}
    model, optimizer = prepare(copy.deepcopy(base), f"scalify-float16/{storage}", audit_every=0)
    assert optimizer.loss_scaler is None
    for factor in (1.0, 2.0**-16, 2.0**-24, 2.0**-40):
        near[factor] = float16_case(model, factor, wanted)
        assert near[factor] == near[1.0]  # powers of two change no bit
    # bfloat16 weights are cut to 8 bits before anything is computed.
    assert near[1.0][0] < (0.03 if storage == "word" else 0.005)
    assert near[1.0][1] < 1e-3
    assert float16_case(plain, 1.0, wanted)[0] < 0.005
    assert float16_case(plain, 2.0**-16, wanted)[1] > 0.1
    error, lost = float16_case(plain, 2.0**-24, wanted)
    assert error == 1.0 and lost > 0.95


@pytest.mark.filterwarnings("ignore::narrowgauge.matmul.gemm.EmulationNotice")
def test_float16_weights_lose_their_gradients_at_rest_alone(tmp_path: Path) -> None:
    """The same gradients as those of a larger loss, rounded to float16 at the very end."""
    base = tiny("llama", tmp_path, torch.float32)
    model, _ = prepare(base, "scalify-float16/scaled16", audit_every=0)
    assert all(parameter.dtype is torch.float16 for parameter in model.parameters())
    _, large = loss_and_gradients(model, 1.0)
    _, small = loss_and_gradients(model, 2.0**-16)
    for name, gradient in small.items():
        # Half a spacing of float16's smallest numbers, twice where the embedding's and the head's meet in a tied weight.
        assert ((gradient.float() - large[name].float() * 2.0**-16).abs() <= 2.0**-24 * 1.01).all(), name
    assert any((gradient == 0).any() for gradient in small.values())


@pytest.mark.filterwarnings("ignore::narrowgauge.matmul.gemm.EmulationNotice")
@pytest.mark.parametrize("storage", ["word", "scaled16"])
def test_a_float16_model_learns_without_a_loss_scale(storage: str, tmp_path: Path) -> None:
    model, optimizer = prepare(tiny("llama", tmp_path, torch.float32), f"scalify-float16/{storage}", lr=3e-3)
    losses = []
    for _ in range(20):
        loss = loss_sum(model, TOKENS, chunked=False) / 48
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1.0
    assert optimizer.num_skipped == 0


@pytest.mark.filterwarnings("ignore::narrowgauge.matmul.gemm.EmulationNotice")
def test_float16_layers_share_one_compiled_graph_and_its_gradients(tmp_path: Path) -> None:
    model, _ = prepare(tiny("llama", tmp_path, torch.float32), "scalify-float16/word", audit_every=0)
    _, wanted = loss_and_gradients(model, SMALL)
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile(fullgraph=True, backend=counter)
    _, found = loss_and_gradients(model, SMALL)
    assert counter.frame_count == 1
    assert max(distance(found[name].float(), wanted[name].float()) for name in wanted) < 0.01


def test_a_power_beyond_float16_is_multiplied_by_all_the_same() -> None:
    x = torch.tensor([64.0, -3.0, 0.0], dtype=torch.float16)
    assert torch.equal(scaled_tensor.times(x, torch.tensor(2.0**-28)), torch.tensor([2.0**-22, 0, 0]).half())
    assert torch.equal(scaled_tensor.times(x * 2.0**-20, torch.tensor(2.0**20)), x)


# --- refusals ---------------------------------------------------------------------------------------------------------


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


@pytest.mark.parametrize(
    ("unknown", "name"),
    [
        (Gain(), "Gain"),
        (nn.Bilinear(4, 4, 4), "Bilinear"),
        (type("Other", (nn.Linear,), {})(4, 4), "Other"),
        (nn.Embedding(4, 4, max_norm=1.0), "embedding '1'"),
    ],
)
def test_a_module_without_a_rule_is_named_and_nothing_is_changed(unknown: nn.Module, name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), unknown)
    with pytest.raises(RecipeError, match=f"scalify has no rule for the .*{name}"):
        scalify(model)
    assert type(model[0]) is nn.Linear
    assert not model._forward_hooks


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (torch.exp, "aten.exp"),
        (lambda x: x.add_(1), "aten.add_"),
        (lambda x: torch.add(x, x, alpha=2), "alpha = 2"),
        (lambda x: x @ x.t(), "aten.mm"),
        (lambda x: F.softmax(x, -1), "aten._softmax"),
        (lambda x: F.dropout(x, 0.5), "aten.native_dropout|aten.bernoulli|aten.empty_like"),
        (
            lambda x: x * torch.ones(3, requires_grad=True),
            "aten.mul.Tensor .* with a plain one that requires a gradient",
        ),
        (lambda x: torch.cat([x, torch.ones(1, 3, requires_grad=True)]), "aten.cat.default .* with a plain one"),
    ],
)
def test_an_operation_without_a_rule_is_named(operation: Callable[[Tensor], Tensor], name: str) -> None:
    with pytest.raises(RecipeError, match=name):
        operation(Scaled(torch.ones(2, 3), 2.0**-4))


def test_dropout_and_other_attention_are_refused_when_used(tmp_path: Path) -> None:
    other = scalified(tiny("llama", tmp_path))
    other.set_attn_implementation("eager")
    with pytest.raises(RecipeError, match=r"aten\.(bmm|matmul)"):
        loss_sum(other, TOKENS, chunked=False)
