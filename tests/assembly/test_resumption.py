"""A loop of one's own that saves the ``state_dict()`` of model and optimizer and nothing else resumes with the same bits.

What a step takes besides weights and moments (delayed scales, the step that seeds stochastic casts and reductions, the loss
scale) travels in the optimizer's state; a state that lacks it is noticed when it is loaded.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import narrowgauge as ng
from tensors import assert_same_bits, random_tokens

VOCABULARY, BEFORE, STEPS = 32, 3, 6
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32,
}  # fmt: skip
# Computes that keep something between steps, with storages of several layouts; tests/equivalence has the others.
REMEMBERING = [
    "float8-delayed/split", "float8-delayed/compact", "int8-row/compact", "int8-row/exact", "nvfp4/states8", "mxfp4/float32",
]  # fmt: skip
CASES = [(recipe, ("model first", "optimizer first")[place % 2]) for place, recipe in enumerate(REMEMBERING)]
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
Saved = dict[str, Any]


def prepared(recipe: str, seed: int) -> tuple[LlamaForCausalLM, ng.Optimizer]:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).train()
    lr = 0.05 if ng.parse(recipe).compute.transform == "unit" else 3e-3
    return ng.prepare(model, recipe, lr=lr, audit_every=2, compile=False)  # type: ignore[return-value]


def trained(model: nn.Module, optimizer: ng.Optimizer, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        tokens = random_tokens(4, 16, VOCABULARY, seed=step)
        loss = model(input_ids=tokens, labels=tokens).loss
        (loss if optimizer.loss_scaler is None else optimizer.loss_scaler.scale(loss)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def through_a_file(content: Saved) -> Saved:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    loaded: Saved = torch.load(file, weights_only=True)
    return loaded


def everything(model: nn.Module, optimizer: ng.Optimizer, losses: list[Tensor]) -> dict[str, Tensor]:
    """Losses, weights and states, under flat names."""
    found = {f"loss {k}": loss for k, loss in enumerate(losses)} | dict(model.state_dict())
    for number, entry in optimizer.state_dict()["state"].items():
        found |= {f"state {number} {name}": value for name, value in entry.items()}
    return found


@pytest.mark.parametrize(("recipe", "order"), CASES)
def test_two_dicts_resume_with_the_same_bits(recipe: str, order: str) -> None:
    model, optimizer = prepared(recipe, seed=0)
    names = set(LlamaForCausalLM(LlamaConfig(**SHAPE)).state_dict())
    trained(model, optimizer, range(BEFORE))
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert set(saved["model"]) == names  # what others load is the plain model
    expected = everything(model, optimizer, trained(model, optimizer, range(BEFORE, STEPS)))

    model, optimizer = prepared(recipe, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts = [("model", model), ("optimizer", optimizer)]
        for name, part in parts if order == "model first" else reversed(parts):
            part.load_state_dict(saved[name])  # type: ignore[attr-defined]
    assert_same_bits(everything(model, optimizer, trained(model, optimizer, range(BEFORE, STEPS))), expected)


def test_the_step_travels_whatever_is_computed_in_when_it_is_saved() -> None:
    """An evaluation, or an early phase of a recipe, may compute without random bits."""
    model, optimizer = prepared("int8-row/word", seed=0)
    trained(model, optimizer, range(2))
    linears = ng.matmul.linears_of(model)
    assert linears is not None
    linears.set_compute(lambda name: ng.spec.COMPUTES["bfloat16"])
    assert optimizer.state_dict()["param_groups"][0]["narrowgauge"]["matmul_step"] == 2


def test_the_loss_scale_and_the_step_of_a_stochastic_reduction_travel() -> None:
    _, optimizer = prepared("float16/split/compressed8", seed=0)
    assert optimizer.loss_scaler is not None and optimizer.reduction is not None
    for overflowed in (True, True, False):
        optimizer.loss_scaler.update_(torch.tensor(overflowed))
    optimizer.reduction.set_step(5)
    _, other = prepared("float16/split/compressed8", seed=1)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert other.loss_scaler is not None
    assert other.loss_scaler.state_dict() == optimizer.loss_scaler.state_dict()
    assert other.reduction.step == 5
