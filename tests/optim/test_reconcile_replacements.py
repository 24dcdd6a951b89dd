"""States follow their parameters: to other memory, and to the parameters that take their places in the groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import RecipeError
from narrowgauge.optim import reconcile

STORAGES = ("word", "compact", "split", "master", "kahan", "float32")
SHAPES = ((96, 64), (5, 3), (7,))


def made(storage: str) -> ng.AdamW:
    """An optimizer of three parameters, large and small, whose tails are not zero."""
    torch.manual_seed(0)
    recipe = "float32" if storage == "float32" else f"bfloat16/{storage}"
    model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in SHAPES])
    return ng.prepare(model, recipe, lr=1e-2, audit_every=2)[1]


def step(optimizer: ng.AdamW, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    optimizer.step()


def bits_of(optimizer: ng.AdamW) -> list[torch.Tensor]:
    names = ("weight", "exp_avg", "exp_avg_sq")
    return [optimizer.stored(p, name) for group in optimizer.param_groups for p in group["params"] for name in names]


def replace(optimizer: ng.AdamW, change: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> None:
    """Other parameters at the same places, as Accelerate puts them there."""
    for group in optimizer.param_groups:
        group["params"] = [nn.Parameter(change(p.detach())) for p in group["params"]]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("after", [0, 3])
def test_a_replaced_parameter_goes_on_with_the_same_bits(storage: str, after: int) -> None:
    left, right = made(storage), made(storage)
    for seed in range(after):
        step(left, seed)
        step(right, seed)
    replace(right)
    if after:
        assert len(right.state_dict()["state"]) == len(SHAPES)
    assert all(map(torch.equal, bits_of(left), bits_of(right)))
    for seed in (7, 8, 9):
        step(left, seed)
        step(right, seed)
    assert all(map(torch.equal, bits_of(left), bits_of(right)))
    assert list(right.parameter_names().values()) == list(left.parameter_names().values())


def test_a_parameter_of_other_values_starts_from_these() -> None:
    optimizer = made("word")
    step(optimizer, 0)
    replace(optimizer, lambda p: p + 1)
    with pytest.warns(UserWarning, match="'0' was replaced by a parameter with other values"):
        step(optimizer, 1)
    first = optimizer.param_groups[0]["params"][0]
    assert optimizer.num_steps(first) == 1


def test_one_of_another_format_is_refused() -> None:
    optimizer = made("word")
    replace(optimizer, lambda p: p.float())
    with pytest.raises(RecipeError, match=r"'0' was replaced by a float32 one.*mixed_precision='no'"):
        step(optimizer, 0)


def test_one_of_another_shape_or_place_inherits_nothing() -> None:
    optimizer = made("word")
    step(optimizer, 0)
    replace(optimizer, lambda p: torch.cat([p, p]))
    step(optimizer, 1)
    assert [optimizer.num_steps(p) for group in optimizer.param_groups for p in group["params"]] == [1, 1, 1]
    removed = optimizer.param_groups[0]["params"].pop(0)
    optimizer.param_groups[0]["param_names"].pop(0)
    step(optimizer, 2)
    assert optimizer.num_steps(removed) == 0
    assert [optimizer.num_steps(p) for group in optimizer.param_groups for p in group["params"]] == [2, 2]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("after", [0, 3])
def test_a_moved_parameter_keeps_its_states(storage: str, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = made(storage), made(storage)
    for seed in range(after):
        step(left, seed)
        step(right, seed)
    moved: list[Any] = [p for group in right.param_groups for p in group["params"]]
    for p in moved:
        p.data = p.data.clone()  # as model.to(device) does
    # One device only is at hand: what is elsewhere is said to be.
    waiting = set(right._registry.states.values())
    monkeypatch.setattr(reconcile, "is_elsewhere", lambda store: store in waiting)
    step(right, 7)
    waiting.clear()
    step(left, 7)
    for seed in (8, 9):
        step(left, seed)
        step(right, seed)
    assert all(map(torch.equal, bits_of(left), bits_of(right)))
