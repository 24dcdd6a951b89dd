"""Gradients that are dropped as they arrive: the same bits, two bytes less, and refused where all are needed first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.spec.storages import STORAGES
from tensors import assert_same_bits

KEPT = pytest.mark.parametrize("storage", ["word", "compact", "exact", "collage-plus"])


class Layers(nn.Module):
    """Two matrices that are stepped alone, and beside them what shares a bucket: biases, a gain, a small matrix."""

    def __init__(self, storage: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.head = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 3)
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


def everything(optimizer: ng.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name} {what}": optimizer.stored(p, what)
        for p, name in optimizer.parameter_names().items()
        for what in ("weight", "exp_avg", "exp_avg_sq")
    } | {f"{name} visible": p.detach().clone() for p, name in optimizer.parameter_names().items()}


@KEPT
def test_the_bits_and_the_audit_are_those_of_a_step_after_backward(storage: str) -> None:
    plain, released = Layers(storage), Layers(storage)
    one, other = build(plain, storage), build(released, storage)
    ng.optim.release_gradients(other)
    learn(plain, one, range(5))
    learn(released, other, range(5))
    assert_same_bits(everything(one), everything(other))
    # As text: some tensors have no decay to read, and NaN is not equal to itself.
    texts = [{name: repr(reading) for name, reading in ng.audit(each).items()} for each in (one, other)]
    assert texts[0] == texts[1] and ng.audit(other)[""].num_audits == 2
    # Two steps of the window only: every parameter is in it, those stepped alone too.
    assert ng.audit(other).keys() == {"", *dict(plain.named_parameters())}


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


@pytest.mark.parametrize(
    ("storage", "size", "scales"), [("word", 6.0, 0), ("compact", 5.0, 8 / 128), ("states8", 4.0, 8 / 128)]
)
def test_two_bytes_less_are_counted(storage: str, size: float, scales: float) -> None:
    """Two scales of four bytes for each row of 128 beside."""
    layer = nn.Linear(128, 96, bias=False, dtype=torch.bfloat16)
    optimizer = ng.AdamW(layer.parameters(), storage=storage, compile=False)
    handle = ng.optim.release_gradients(optimizer)
    layer(torch.ones(2, 128, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert layer.weight.grad is None and optimizer.bytes_per_param() == size + scales
    handle.remove()
    assert optimizer.bytes_per_param() == size + scales + 2


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
    with pytest.raises(ng.errors.RecipeError, match=r"GradScaler.* needs all of them first") as refused:
        scaler.step(optimizer)
    assert "remove()" in str(refused.value) and torch.equal(layer.weight, before)
    handle.remove()
    scaler.step(optimizer)
    assert not torch.equal(layer.weight, before)


def test_a_grad_scaler_that_is_switched_off_is_not_refused() -> None:
    layer = nn.Linear(**LINEAR)
    optimizer, scaler = ng.SGD(layer.parameters(), lr=1.0), torch.amp.GradScaler("cpu", enabled=False)
    ng.optim.release_gradients(optimizer)
    for _ in range(2):
        backward(layer, scaler)
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.num_steps(layer.weight) == 2


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    ("option", "value"), [("max_grad_norm", 1.0), ("loss_scaler", ng.LossScaler()), ("skip_above", 2.0)]
)
def test_an_option_that_is_set_later_is_refused_too(option: str, value: object, steps: int) -> None:
    layer = nn.Linear(**LINEAR)
    optimizer = ng.SGD(layer.parameters(), lr=1.0)
    ng.optim.release_gradients(optimizer)
    for _ in range(steps):
        backward(layer)
        optimizer.step()
    before = layer.weight.detach().clone()
    setattr(optimizer, option, value)
    with pytest.raises(ng.errors.RecipeError, match=f"{option} = .* needs all of them first"):
        backward(layer)
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("steps", [0, 2])
def test_micro_batches_are_refused(steps: int) -> None:
    """In the first step, and so in every script that sums them, before a weight moves."""
    layer = nn.Linear(**LINEAR)
    optimizer = ng.SGD([("weight", layer.weight)], lr=1.0)
    ng.optim.release_gradients(optimizer)
    for _ in range(steps):
        backward(layer)
        optimizer.step()
    before = layer.weight.detach().clone()
    backward(layer)
    with pytest.raises(ng.errors.RecipeError, match=r"a second one of 'weight' arrived before optimizer.step\(\)"):
        backward(layer)
    assert steps or torch.equal(layer.weight, before)


def test_removed_it_is_over() -> None:
    model, plain = Layers("word"), Layers("word")
    optimizer, twin = build(model, "word"), build(plain, "word")
    handle = ng.optim.release_gradients(optimizer)
    learn(model, optimizer, range(2))
    handle.remove()
    model(torch.ones(4, 64, dtype=torch.bfloat16)).backward()
    assert all(p.grad is not None for p in model.parameters())
    learn(model, optimizer, range(2, 4))
    learn(plain, twin, range(4))
    assert_same_bits(everything(optimizer), everything(twin))


@pytest.mark.parametrize(
    "option", [{"max_grad_norm": 1.0}, {"loss_scaler": ng.LossScaler()}], ids=lambda o: next(iter(o))
)
def test_what_needs_all_gradients_first_is_refused(option: dict[str, Any]) -> None:
    model = Layers("word")
    optimizer = build(model, "word", **option)
    with pytest.raises(ng.errors.RecipeError, match=f"{next(iter(option))} = .* needs all of them first") as refused:
        ng.optim.release_gradients(optimizer)
    assert f"with {next(iter(option))}=None" in str(refused.value)
    model(torch.ones(4, 64, dtype=torch.bfloat16)).backward()
    assert model.up.weight.grad is not None  # nothing is half done


def test_a_loaded_state_brings_its_rate_and_seed_along() -> None:
    """Loading puts new groups in place of those that were there when release began."""
    finals = []
    for release in (False, True):
        first, second = Layers("word"), Layers("word")
        saved = build(first, "word", seed=7)
        learn(first, saved, range(2))
        second.load_state_dict(first.state_dict())
        resumed = ng.AdamW(second.named_parameters(), lr=1.0, storage="word", compile=False)
        if release:
            ng.optim.release_gradients(resumed)
        resumed.load_state_dict(saved.state_dict())
        learn(second, resumed, range(2, 4))
        finals.append(everything(resumed))
    assert_same_bits(*finals)


def test_frozen_parameters_are_left_alone() -> None:
    model = Layers("word")
    model.up.weight.requires_grad_(False)
    before = model.up.weight.detach().clone()
    optimizer = build(model, "word")
    ng.optim.release_gradients(optimizer)
    learn(model, optimizer, range(2))
    assert torch.equal(model.up.weight, before) and model.down.weight.grad is None


def test_a_shared_weight_is_stepped_once_all_its_gradient_is_there() -> None:
    """Used twice in one pass, it has two gradients, and their sum arrives once."""

    def run(release: bool) -> Tensor:
        torch.manual_seed(0)
        layer = nn.Linear(80, 80, bias=False, dtype=torch.bfloat16)
        optimizer = ng.AdamW(layer.parameters(), storage="word", compile=False)
        if release:
            ng.optim.release_gradients(optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            layer(layer(torch.ones(2, 80, dtype=torch.bfloat16))).sum().backward()
            optimizer.step()
        return optimizer.stored(layer.weight)

    assert torch.equal(run(True), run(False))


def test_a_schedule_counts_steps_as_ever() -> None:
    layer = nn.Linear(80, 80, bias=False, dtype=torch.bfloat16)
    optimizer = ng.AdamW(layer.parameters(), lr=1.0, storage="word", compile=False)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    ng.optim.release_gradients(optimizer)
    for _ in range(3):
        layer(torch.ones(2, 80, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.125 and float(optimizer.state_dict()["state"][0]["step"]) == 3.0
