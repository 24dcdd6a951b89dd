"""A loop of one's own that saves the ``state_dict()`` of model and optimizer and nothing else resumes with the same bits.

What a step takes besides weights and moments (delayed scales, the step that seeds stochastic casts and reductions, the loss
scale) travels in the optimizer's state; a state that lacks it is noticed when it is loaded.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

import narrowgauge as ng
from narrowgauge.assembly import resumption
from narrowgauge.spec.notation import default_storage
from tensors import assert_same_bits, random_tokens

VOCABULARY, BEFORE, STEPS = 32, 3, 6
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32,
}  # fmt: skip
# Each compute with its own storage, and those that keep something between steps with others of another layout, in both orders.
REMEMBERING = [
    "float8-delayed/split", "float8-delayed/compact", "int8-row/compact", "int8-row/exact", "nvfp4/states8", "mxfp4/float32",
]  # fmt: skip
CASES = [
    *((f"{name}/{default_storage(name)}", "model first") for name in ng.spec.COMPUTES),
    *((recipe, order) for recipe in REMEMBERING for order in ("model first", "optimizer first")),
]
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


@pytest.mark.parametrize("recipe", ["float8-delayed/word", "int8-row/split"])
def test_a_distributed_checkpoint_holds_it_too(recipe: str, tmp_path: Path) -> None:
    model, optimizer = prepared(recipe, seed=0)
    trained(model, optimizer, range(BEFORE))
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path)
    expected = everything(model, optimizer, trained(model, optimizer, range(BEFORE, STEPS)))

    model, optimizer = prepared(recipe, seed=1)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=tmp_path)
    model.load_state_dict(state["model"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert_same_bits(everything(model, optimizer, trained(model, optimizer, range(BEFORE, STEPS))), expected)


@pytest.mark.parametrize(
    ("recipe", "what"), [("float8-delayed/word", "amax_histories"), ("float16/split", "loss_scaler")]
)
def test_a_state_without_it_is_noticed(recipe: str, what: str) -> None:
    """Of an earlier version: it loads, and says what is missing. The groups of the optimizer hold options alone."""
    model, optimizer = prepared(recipe, seed=0)
    trained(model, optimizer, range(BEFORE))
    saved = optimizer.state_dict()
    assert what in saved["param_groups"][0].pop("narrowgauge")
    with pytest.warns(UserWarning, match=rf"lacks .*{what}.*same bits"):
        optimizer.load_state_dict(saved)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not any("narrowgauge" in group for group in optimizer.param_groups)


def test_a_recipe_that_needs_nothing_more_saves_what_it_did() -> None:
    _, optimizer = prepared("bfloat16/split", seed=0)
    saved = optimizer.state_dict()
    assert set(saved) == {"state", "param_groups"} and "narrowgauge" not in saved["param_groups"][0]
    groups = [{"params": [p.detach().clone() for p in group["params"]]} for group in optimizer.param_groups]
    plain = torch.optim.AdamW(groups).state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared("int8-row/split", seed=0)[1].load_state_dict(plain)  # of torch.optim, which promises no bits


def test_the_step_travels_whatever_is_computed_in_when_it_is_saved() -> None:
    """An evaluation, or an early phase of a recipe, may compute without random bits."""
    model, optimizer = prepared("int8-row/word", seed=0)
    trained(model, optimizer, range(2))
    linears = ng.matmul.linears_of(model)
    assert linears is not None
    linears.set_compute(lambda name: ng.spec.COMPUTES["bfloat16"])
    assert optimizer.state_dict()["param_groups"][0]["narrowgauge"]["matmul_step"] == 2

    plain = LlamaForCausalLM(LlamaConfig(**SHAPE))
    _, stepped = ng.prepare(plain, "bfloat16/word")
    ng.swap_linears(plain, "bfloat16").step = 5
    assert resumption.carried_with_audit(stepped, plain)["matmul_step"] == 5  # a later phase may take some


@pytest.mark.parametrize("from_loop", [False, True])
def test_a_loop_and_a_framework_load_each_others_states(from_loop: bool) -> None:
    """A framework's stands beside the param groups."""

    def made(by_loop: bool) -> tuple[nn.Module, ng.Optimizer]:
        if by_loop:
            return prepared("int8-row/word", seed=0)
        plain = LlamaForCausalLM(LlamaConfig(**SHAPE)).train()
        model, optimizer = ng.prepare(plain, "int8-row/word", lr=3e-3, weight_decay=0.0)
        resumption.carry_state_and_audit(optimizer, model)
        return model, optimizer

    model, optimizer = made(from_loop)
    trained(model, optimizer, range(2))
    other, its = made(not from_loop)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        its.load_state_dict(through_a_file(optimizer.state_dict()))
    linears = ng.matmul.linears_of(other)
    assert linears is not None and linears.step == 2
    assert not any("narrowgauge" in group for group in its.param_groups)


def test_a_framework_carries_the_audit_and_the_count_of_skipped_steps() -> None:
    made = []
    for _ in range(2):
        model, optimizer = ng.prepare(LlamaForCausalLM(LlamaConfig(**SHAPE)).train(), "bfloat16/word", audit_every=1)
        resumption.carry_state_and_audit(optimizer, model)
        made.append((model, optimizer))
    (model, optimizer), (_, other) = made
    trained(model, optimizer, range(2))
    optimizer.num_skipped = 3
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    wanted = resumption.saved_audit(optimizer)["windows"]
    assert wanted and other.num_skipped == 3
    assert_same_bits(resumption.saved_audit(other)["windows"], wanted)


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


def test_histories_are_found_under_the_names_of_a_compiled_model() -> None:
    model, optimizer = prepared("float8-delayed/word", seed=0)
    trained(model, optimizer, range(1))
    saved = optimizer.state_dict()
    for name, layer in list(model.model.layers.named_children()):
        model.model.layers._modules[name] = torch.compile(layer, backend="eager")
    optimizer.load_state_dict(saved)
    found = {name.replace("_orig_mod.", ""): h for name, h in ng.matmul.linears_of(model).histories().items()}  # type: ignore[union-attr]
    assert_same_bits(found, saved["param_groups"][0]["narrowgauge"]["amax_histories"])
