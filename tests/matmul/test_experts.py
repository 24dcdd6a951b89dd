"""Experts of transformers' mixtures: swapped in place, nothing renamed; they learn, and compute
what their layers would.
"""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmul import zoo
from narrowgauge.matmul.experts import GroupedLinear
from narrowgauge.matmul.inference import quantize_for_inference
from narrowgauge.matmul.swapping import swap_linears
from narrowgauge.spec.computes import Compute
from tensors import gaussian
from text.refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore")


def layers_of(
    experts: Any, expert: int, names: tuple[str, ...], row: str | Compute
) -> nn.ModuleDict:
    """One expert's weights as narrow layers of their own."""
    layers = nn.ModuleDict()
    for name in names:
        weight = getattr(experts, name).detach()[expert]
        layers[name] = nn.Linear(*weight.shape[::-1], bias=False, dtype=torch.bfloat16)
        layers[name].weight.data.copy_(weight)
    swap_linears(layers, row)
    return layers


# ── experts that a module multiplies in its own code ──────────────────────────────────────────────


class Stacked(nn.Module):
    """Experts as torchtitan keeps them: sorted tokens, and their number for each expert."""

    def __init__(self, in_a_loop: bool) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.w1 = nn.Parameter(torch.randn(4, 48, 32, generator=draw).bfloat16() / 6)
        self.w2 = nn.Parameter(torch.randn(4, 32, 48, generator=draw).bfloat16() / 6)
        self.w3 = nn.Parameter(torch.randn(4, 48, 32, generator=draw).bfloat16() / 6)
        self.in_a_loop = in_a_loop

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        if not self.in_a_loop:
            ends = counts.cumsum(0, dtype=torch.int32)
            gate = torch._grouped_mm(x, self.w1.bfloat16().transpose(-2, -1), offs=ends)
            up = torch._grouped_mm(x, self.w3.bfloat16().transpose(-2, -1), offs=ends)
            hidden = F.silu(gate) * up
            return torch._grouped_mm(hidden, self.w2.bfloat16().transpose(-2, -1), offs=ends)
        outputs = []
        for expert, rows in enumerate(x.split(counts.tolist())):
            hidden = F.silu(rows @ self.w1[expert].transpose(-2, -1))
            hidden = hidden * torch.matmul(rows, self.w3[expert].transpose(-2, -1))
            outputs.append(hidden @ self.w2[expert].transpose(-2, -1))
        return torch.cat(outputs)


@pytest.mark.parametrize("row", ["float8-row", "int8-row"])
@pytest.mark.parametrize("in_a_loop", [False, True], ids=["grouped", "loop"])
def test_experts_in_a_module_s_own_code_are_layers_of_their_own(in_a_loop, row):
    experts = Stacked(in_a_loop)
    x = gaussian(24, 32, seed=4).bfloat16()
    counts = torch.tensor([8, 0, 12, 4])
    linears = swap_linears(nn.ModuleDict({"experts": experts}), lambda _: row)
    assert sorted(linears.layers) == ["experts.w1", "experts.w2", "experts.w3"]
    expected = []
    for expert, rows in enumerate(x.split(counts.tolist())):
        layers = layers_of(experts, expert, ("w1", "w2", "w3"), row)
        expected.append(layers["w2"](F.silu(layers["w1"](rows)) * layers["w3"](rows)))
    y = experts(x, counts)
    assert torch.equal(y, torch.cat(expected))
    assert torch.equal(copy.deepcopy(experts)(x, counts), y)
    twin = Stacked(not in_a_loop)  # random bits are an expert's, in either form
    swap_linears(nn.ModuleDict({"experts": twin}), lambda _: row)
    for module in (experts, twin):
        module(x, counts).float().square().mean().backward()
    for weight, other in zip(experts.parameters(), twin.parameters(), strict=True):
        assert weight.grad[0].any() and not weight.grad[1].any()
        assert torch.equal(weight.grad, other.grad)


def test_experts_of_other_code_than_products_are_refused_at_their_first_call():
    class Summed(Stacked):
        def forward(self, x, counts):
            return torch.einsum("ti,eoi->to", x, self.w1)

    experts = Summed(False)
    swap_linears(nn.ModuleDict({"experts": experts}), lambda _: "float8-row")
    with refused("experts by einsum"):
        experts(torch.ones(2, 32).bfloat16(), torch.tensor([1, 1, 0, 0]))


@pytest.mark.parametrize("name", ["Mixtral", "GptOss", "Llama4", "JetMoe"])
def test_experts_of_transformers_are_narrow_in_every_form(name):
    """Grouped, transposed, batched, and one by one: their gradients are off by the format alone,
    and by a token that takes another expert.
    """
    plain, narrow = zoo.build(name), zoo.build(name)
    linears = swap_linears(narrow, "float8-row")
    for model in (plain, narrow):
        model(**zoo.inputs_of(name)).loss.backward()
    stacks = [name for name, layer in linears.layers.items() if isinstance(layer, GroupedLinear)]
    assert len(stacks) >= 4
    for stack in stacks:
        exact = plain.get_parameter(stack).grad
        error = narrow.get_parameter(stack).grad - exact
        assert 0.03 < error.norm() / exact.norm() < 0.4


@pytest.mark.parametrize("compute", ["int8-row", "float8-tensor", "int8-outlier-codes"])
@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_stored_experts_multiply_as_those_in_training(name, compute):
    """Of both memory orders; saved and loaded too."""
    trained, served, loaded = (zoo.build(name).bfloat16().eval() for _ in range(3))
    inputs = zoo.inputs_of(name)
    swap_linears(trained, compute)
    quantize_for_inference(served, compute)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
        quantize_for_inference(loaded, compute).load_state_dict(served.state_dict())
        expected = trained(**inputs).logits
        assert torch.equal(served(**inputs).logits, expected)
        assert torch.equal(copy.deepcopy(loaded)(**inputs).logits, expected)
    sizes = {p.ndim for p in served.parameters()}
    assert 3 not in sizes and served.bfloat16().float().dtype is torch.float32


def test_experts_that_do_not_say_how_their_weights_lie_are_not_stored():
    with refused("experts that lie anyhow"):
        quantize_for_inference(zoo.build("Llama4"))
    served = quantize_for_inference(zoo.build("Llama4"), keep=("*.experts",))
    assert served(**zoo.inputs_of("Llama4")).logits.isfinite().all()


# ── compiled ──────────────────────────────────────────────────────────────────────────────────────


class OfTransformers(Stacked):
    """Experts that name their implementation, as transformers' do, and call the public function."""

    config = SimpleNamespace(_experts_implementation="grouped_mm")

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden = F.silu(F.grouped_mm(x, self.w1.transpose(-2, -1), offs=ends))
        return F.grouped_mm(hidden, self.w2.transpose(-2, -1), offs=ends)


@pytest.mark.parametrize("compute", ["int8-row", "nvfp4", "float8-tensor", "served"])
def test_compiled_experts_are_one_graph_with_the_same_bits(compute):
    torch._dynamo.reset()
    results = []
    for compiles in (False, True):
        experts = OfTransformers(False)
        del experts.w3
        experts.is_transposed = False
        x = gaussian(24, 32, seed=4).bfloat16()
        x.requires_grad_()
        model = nn.ModuleDict({"experts": experts})
        if compute == "served":
            quantize_for_inference(model, "int8-row")
        else:
            swap_linears(model, lambda _: compute)
        call = experts
        if compiles:
            call = torch.compile(experts, fullgraph=True, backend="aot_eager")
        y = call(x, torch.tensor([8, 0, 10, 4]))  # and two tokens without an expert
        y.float().square().mean().backward()
        results.append([y, x.grad, *(p.grad for p in experts.parameters())])
    assert results[0][1].any() and not results[0][0][-2:].any()
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_batched_experts_are_refused_with_the_implementation_that_works():
    model = zoo.build("Mixtral").bfloat16()
    swap_linears(model, "float8-row")
    model.set_experts_implementation("batched_mm")
    with refused("experts in a batch"):
        model(**zoo.inputs_of("Mixtral"))
    model.set_experts_implementation("grouped_mm")
    assert model(**zoo.inputs_of("Mixtral")).loss.isfinite()
