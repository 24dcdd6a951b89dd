"""What was asked for is what runs: the compute's dtype, whatever format the weights lie in."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import narrowgauge as ng
from narrowgauge.spec.recipes import Override


class Net(nn.Module):
    """A module of every kind that has parameters of its own, one of them outside any layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.inner, self.gain = nn.Linear(8, 16), nn.Parameter(torch.randn(16))
        self.rms, self.head = nn.RMSNorm(16), nn.Linear(16, 5, bias=False)

    def forward(self, places: Tensor) -> Tensor:
        x = self.inner(self.norm(self.table(places)))
        result: Tensor = self.head(self.rms(torch.relu(x) * self.gain))
        return result


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    )


def wide_twin(model: nn.Module, made: nn.Module) -> nn.Module:
    """A plain float32 model with the weights that ``model`` shows."""
    made.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    return made


def logits(model: Any, places: Tensor) -> Tensor:
    found = model(places)
    return found if isinstance(found, Tensor) else found.logits


@pytest.mark.parametrize("make", [Net, llama])
@pytest.mark.parametrize("storage", ["word", "exact"])
def test_float32_over_narrow_weights_is_the_float32_model_of_those_weights(make: Any, storage: str) -> None:
    places = torch.tensor([[1, 2, 3, 1]])
    model, optimizer = ng.prepare(make(), f"float32/{storage}", lr=0.01)
    twin = wide_twin(model, make())
    found, wanted = logits(model, places), logits(twin, places)
    assert found.dtype is torch.float32 and torch.equal(found, wanted)
    found.square().sum().backward(), wanted.square().sum().backward()
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert one.dtype is one.grad.dtype is torch.bfloat16, name
        assert torch.equal(one.grad, other.grad.bfloat16()), name
    optimizer.step()
    assert torch.isfinite(logits(model, places)).all()


def test_float16_over_bfloat16_weights_computes_in_float16() -> None:
    model, _ = ng.prepare(Net(), "float16/word")
    seen: list[torch.dtype] = []
    for module in model.children():
        module.register_forward_hook(lambda *given: seen.append(given[2].dtype))
    assert model(torch.tensor([1, 2])).dtype is torch.float16 and set(seen) == {torch.float16}


def test_overrides_of_float32_are_obeyed_over_narrow_weights() -> None:
    """One layer of another compute: its products are those of the row, not of the weights' format."""
    recipe = ng.Recipe(
        ng.parse("bfloat16/word").compute, ng.parse("bfloat16/word").storage,
        overrides=(Override("0", compute=ng.parse("float32/word").compute),),
    )  # fmt: skip
    torch.manual_seed(1)
    model, _ = ng.prepare(nn.Sequential(nn.Linear(64, 64, bias=False)), recipe)
    x = torch.randn(8, 64)
    wanted = x @ model[0].weight.float().t()
    assert torch.equal(model[0](x), wanted)


def test_inputs_come_in_any_format() -> None:
    torch.manual_seed(0)
    model, _ = ng.prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "float32/word")
    assert model(torch.ones(2, 4, dtype=torch.bfloat16)).dtype is torch.float32


def test_batch_norms_compute_in_float32_over_narrow_weights() -> None:
    model, _ = ng.prepare(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "float32/word")
    model(torch.randn(3, 4)).sum().backward()
    assert model[1].weight.dtype is torch.bfloat16 and model[1].running_mean.dtype is torch.float32


def test_copies_and_pickles_compute_with_their_own_weights() -> None:
    places = torch.tensor([1, 2])
    model, _ = ng.prepare(Net(), "float32/word")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    wanted = model(places)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(places), wanted)
        with torch.no_grad():
            other.table.weight.zero_()
        assert not torch.equal(other(places), wanted) and torch.equal(model(places), wanted)


def test_a_second_prepare_replaces_the_first() -> None:
    model, _ = ng.prepare(Net(), "float32/word")
    model, _ = ng.prepare(model, "bfloat16/word")
    assert model(torch.tensor([1, 2])).dtype is torch.bfloat16


def test_compiled_it_gives_the_same_bits() -> None:
    places = torch.tensor([1, 2, 1])
    model, _ = ng.prepare(Net(), "float32/word")
    other = copy.deepcopy(model)
    other.compile(fullgraph=True, backend="aot_eager")
    one, two = model(places), other(places)
    assert torch.equal(one, two)
    one.sum().backward(), two.sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))
