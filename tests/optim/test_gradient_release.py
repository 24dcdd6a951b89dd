"""Gradients that are dropped as they arrive: the same bits, two bytes less, and refused where all are needed first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.spec.storages import STORAGES
from optim.scenarios import kept
from tensors import assert_same_bits

KEPT = pytest.mark.parametrize("storage", ["word", "compact"])


class Layers(nn.Module):
    """Two matrices that are stepped alone, and beside them what shares a bucket: biases, a gain, a small matrix."""

    def __init__(self, storage: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.head = nn.Linear(64, 288), nn.Linear(288, 64), nn.Linear(64, 3)
        self.gain = nn.Parameter(torch.ones(64))
        self.to(getattr(torch, STORAGES[storage].visible))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(x + self.gain * self.down(torch.relu(self.up(x))))
        return output.float().square().mean()


def build(model: nn.Module, storage: str, **options: Any) -> ng.AdamW:
    return ng.AdamW(model.named_parameters(), lr=0.01, storage=storage, audit_every=2, compile=False, **options)


def learn(model: nn.Module, optimizer: ng.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        x = torch.randn(8, 64, generator=generator).to(next(model.parameters()).dtype)
        model(x).backward()
        optimizer.step()


@KEPT
def test_the_bits_and_the_audit_are_those_of_a_step_after_backward(storage: str) -> None:
    plain, released = Layers(storage), Layers(storage)
    one, other = build(plain, storage), build(released, storage)
    ng.optim.release_gradients(other)
    learn(plain, one, range(5))
    learn(released, other, range(5))
    assert_same_bits(kept(one), kept(other))
    # As text: some tensors have no decay to read, and NaN is not equal to itself.
    texts = [{name: repr(reading) for name, reading in ng.audit(each).items()} for each in (one, other)]
    assert texts[0] == texts[1] and ng.audit(other).total.num_audits == 2
    # Two steps of the window only: every parameter is in it, those stepped alone too.
    assert ng.audit(other).keys() == dict(plain.named_parameters()).keys()


def test_large_gradients_are_gone_after_backward_and_small_ones_wait() -> None:
    model = Layers("word")
    optimizer = build(model, "word")
    ng.optim.release_gradients(optimizer)
    learn(model, optimizer, range(1))  # the first step makes states
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.zero_grad()
    model(torch.ones(4, 64, dtype=torch.bfloat16)).backward()
    large = {"up.weight", "down.weight"}
    assert {name for name, p in model.named_parameters() if p.grad is None} == large
    assert {name for name, p in model.named_parameters() if not torch.equal(p, before[name])} == large
    optimizer.step()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    steps = {float(entry["step"]) for entry in optimizer.state_dict()["state"].values()}
    assert steps == {2.0}


LINEAR = {"in_features": 80, "out_features": 80, "bias": False, "dtype": torch.bfloat16}


def backward(layer: nn.Module, scaler: torch.amp.GradScaler | None = None) -> None:
    loss = layer(torch.ones(2, 80, dtype=torch.bfloat16)).float().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()


@pytest.mark.parametrize("unscaled_by_hand", [False, True], ids=["", "unscaled"])
def test_a_grad_scaler_is_refused_before_a_weight_moves(unscaled_by_hand: bool) -> None:
    """It scales the loss and tells the optimizer of it only when it steps; Accelerate unscales by hand to clip."""
    layer = nn.Linear(**LINEAR)
    before = layer.weight.detach().clone()
    optimizer, scaler = ng.SGD(layer.parameters(), lr=1.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    handle = ng.optim.release_gradients(optimizer)
    backward(layer, scaler)
    if unscaled_by_hand:
        scaler.unscale_(optimizer)
    with pytest.raises(ng.errors.RecipeError, match=r"Cannot release gradients .*GradScaler") as refused:
        scaler.step(optimizer)
    assert "remove()" in str(refused.value) and torch.equal(layer.weight, before)
    handle.remove()
    scaler.step(optimizer)
    assert not torch.equal(layer.weight, before)
