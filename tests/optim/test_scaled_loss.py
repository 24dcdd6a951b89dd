"""A scaled loss in loops of every kind: who scales, who divides, and that nobody divides what nobody scaled."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

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
    with pytest.raises(ng.errors.RecipeError, match="loss_scaler has scaled none since its last step"):
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


def test_one_scaler_serves_many_optimizers() -> None:
    first, scaler = scaled()
    second, _ = scaled(scaler=scaler)
    for step in range(2):
        losses = [loss_of(parameters_of(optimizer), step) for optimizer in (first, second)]
        scaler.scale(torch.stack(losses).sum()).backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_bits(everything(first), everything(second))
    scaler.scale(loss_of(parameters_of(first), 2)).backward()
    first.step()
    loss_of(parameters_of(second), 2).backward()
    second.step()  # the scale was asked for by then: what it was asked for is not known
    loss_of(parameters_of(second), 3).backward()
    with pytest.raises(ng.errors.RecipeError, match="was not scaled"):
        second.step()


def test_micro_batches_and_evaluations_between_steps() -> None:
    optimizer, scaler = scaled()
    for step in range(3):
        for _ in range(2):
            scaler.scale(loss_of(parameters_of(optimizer), step) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            loss_of(parameters_of(optimizer), 99)  # whose loss nobody scales
    assert optimizer.num_steps(parameters_of(optimizer)[0]) == 3


@pytest.mark.parametrize("how", ["state_dict", "deepcopy", "distributed checkpoint"])
def test_a_resumed_run_scales_its_first_loss_or_is_refused(how: str) -> None:
    optimizer, scaler = scaled()
    learn(optimizer, scaler.scale, range(2))
    if how == "deepcopy":
        twin = copy.deepcopy(optimizer)
        other = twin.loss_scaler
        assert other is not None
    else:
        twin, other = scaled()
        other.load_state_dict(scaler.state_dict())
    if how == "state_dict":
        twin.load_state_dict(optimizer.state_dict())
    elif (
        how == "distributed checkpoint"
    ):  # which makes a state by a step with step_gradients of zero, that nobody scales
        models = [nn.ParameterList(parameters_of(each)) for each in (optimizer, twin)]
        saved = get_optimizer_state_dict(models[0], optimizer)
        set_optimizer_state_dict(models[1], twin, saved)
        assert other.num_overflows == scaler.num_overflows and other.state_dict() == scaler.state_dict()
    with torch.no_grad():
        for p, q in zip(parameters_of(twin), parameters_of(optimizer), strict=True):
            p.copy_(q)
    with pytest.raises(ng.errors.RecipeError, match="was not scaled"):
        learn(twin, None, range(2, 3))
    for each, its in ((optimizer, scaler), (twin, other)):
        learn(each, its.scale, range(2, 4))
    assert_same_bits(everything(optimizer), everything(twin))


@pytest.mark.parametrize(("storage", "clipped_by_hand"), [(STORAGE, False), ("float32", False), ("float32", True)])
def test_a_frameworks_grad_scaler_takes_the_place_of_ours(storage: str, clipped_by_hand: bool) -> None:
    """Accelerate's, Lightning's and the Trainer's way; ours stays as it was."""
    optimizer, ours = scaled(storage)
    twin, other = scaled(storage)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    for step in range(3):
        optimizer.zero_grad()
        theirs.scale(loss_of(parameters_of(optimizer), step)).backward()
        if clipped_by_hand:
            theirs.unscale_(optimizer)
        theirs.step(optimizer)
        theirs.update()
    learn(twin, other.scale, range(3))
    assert_same_bits(everything(optimizer), everything(twin))
    assert ours.state_dict() == ng.LossScaler(2.0**6).state_dict()


@pytest.mark.parametrize(
    ("storage", "with_scaler", "inside"),
    [("word", False, False), ("float32", False, False), ("float32", True, True), (STORAGE, False, True)],
)
def test_unscaling_inside_the_step_is_said_only_where_a_loss_is_scaled(
    storage: str, with_scaler: bool, inside: bool
) -> None:
    """Lightning refuses to clip the step_gradients of an optimizer that says so, under bf16-mixed too."""
    optimizer = build("adamw", parameters(storage), storage, loss_scaler=ng.LossScaler() if with_scaler else None)
    assert getattr(optimizer, "_step_supports_amp_scaling", False) is inside
