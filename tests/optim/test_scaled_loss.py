"""A scaled loss in loops of every kind: who scales, who divides, and that nobody divides what nobody scaled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from optim.pairs import build, everything, parameters
from tensors import assert_same_bits, parameters_of, step_gradients

STORAGE = "float16/split"


def loss_of(params: list[nn.Parameter], step: int) -> Tensor:
    """A loss whose step_gradients are those of :func:`optim.pairs.gradients`."""
    slopes = step_gradients(params, step)
    return torch.stack([(p.float() * slope.float()).sum() for p, slope in zip(params, slopes, strict=True)]).sum()


def learn(optimizer: ng.Optimizer, scale: Callable[[Tensor], Tensor] | None, steps: range) -> None:
    """A loop of a framework's: it scales, or calls ``backward`` on the loss as it is."""
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(parameters_of(optimizer), step)
        (loss if scale is None else scale(loss)).backward()
        optimizer.step()


def scaled(storage: str = STORAGE, scaler: ng.LossScaler | None = None) -> tuple[ng.Optimizer, ng.LossScaler]:
    scaler = scaler or ng.LossScaler(2.0**6)
    return build("adamw", parameters(storage), storage, loss_scaler=scaler), scaler


@pytest.mark.parametrize("storage", [STORAGE, "float16/master", "float32"])
def test_a_loss_that_nobody_scaled_is_refused_and_nothing_changes(storage: str) -> None:
    """Also between steps that were scaled: a scale is good for one step."""
    optimizer, scaler = scaled(storage)
    twin, other = scaled(storage)
    with pytest.raises(ng.errors.RecipeError, match="was not called since the last step"):
        learn(optimizer, None, range(1))
    learn(optimizer, scaler.scale, range(2))
    before = everything(optimizer)
    with pytest.raises(ng.errors.RecipeError, match=r"optimizer\.loss_scaler\.scale\(loss\)\.backward\(\)"):
        learn(optimizer, None, range(2, 3))
    assert_same_bits(before, everything(optimizer))
    learn(optimizer, scaler.scale, range(2, 4))
    learn(twin, other.scale, range(4))
    assert_same_bits(everything(optimizer), everything(twin))
    assert scaler.state_dict() == other.state_dict()


def test_two_optimizers_with_one_scaler_are_refused() -> None:
    """The first step changes the scale by which the second would divide."""
    scaler, weights = ng.LossScaler(2.0, growth_interval=1), [nn.Parameter(torch.ones(4)) for _ in range(2)]
    first, second = (ng.SGD([p], lr=0.5, storage="float32", loss_scaler=scaler) for p in weights)
    scaler.scale(sum(p.sum() for p in weights)).backward()
    first.step()
    with pytest.raises(ng.errors.RecipeError, match="two optimizers with one LossScaler"):
        second.step()
