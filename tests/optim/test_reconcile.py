"""What has happened to a parameter since its state was last used: asked in one function, of each parameter by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.errors import RecipeError
from narrowgauge.optim.reconcile import reconcile
from tensors import parameters_of

SHAPES = ((96, 80), (12, 10), (5,))


def trained(steps: int = 1) -> ng.Optimizer:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in SHAPES]
    optimizer = ng.SGD(parameters, lr=0.1, storage="word", compile=False, audit_every=0)
    for p in parameters:
        p.grad = torch.full_like(p, 0.01)
    for _ in range(steps):
        optimizer.step()
    return optimizer


def asked(optimizer: ng.Optimizer) -> tuple[list[Tensor], set[Tensor], list[Tensor]]:
    found = reconcile(optimizer._registry, parameters_of(optimizer), optimizer.param_groups[0])
    return found.new, set(found.wider), [state.owner for state in found.modified]


def test_nothing_has_happened_after_a_step_and_everything_is_new_before_it() -> None:
    optimizer = trained(steps=0)
    assert asked(optimizer) == (parameters_of(optimizer), set(), [])
    optimizer.step()
    assert asked(optimizer) == ([], set(), [])


def test_each_change_is_that_of_its_parameter() -> None:
    optimizer = trained()
    first, second, third = parameters_of(optimizer)
    with torch.no_grad():
        second.mul_(0.5)
    third.data = third.data.clone()
    assert asked(optimizer) == ([], set(), [second, third])
    optimizer.param_groups[0]["momentum"] = 0.9
    assert asked(optimizer) == ([], {first, second, third}, [second, third])


def test_what_cannot_be_taken_in_is_refused() -> None:
    optimizer = trained()
    optimizer.param_groups[0]["storage"] = "split"
    with pytest.raises(RecipeError, match="storage was changed to 'split'"):
        asked(optimizer)


def test_a_state_that_was_just_loaded_waits_for_its_weight_until_a_step() -> None:
    optimizer = trained()
    optimizer.load_state_dict(optimizer.state_dict())
    everyone = parameters_of(optimizer)
    assert not reconcile(optimizer._registry, everyone).modified
    assert asked(optimizer)[2] == everyone


def test_a_write_counts_where_options_change_before_the_same_step() -> None:
    optimizer = trained()
    weight = parameters_of(optimizer)[0]
    values = torch.linspace(-1, 1, weight.numel()).view(weight.shape).bfloat16()
    with torch.no_grad():
        weight.copy_(values)
    optimizer.param_groups[0].update(momentum=0.9, lr=0.0)
    with pytest.warns(UserWarning, match="modified outside"):
        optimizer.step()
    assert torch.equal(optimizer.stored(weight), values.float())


def test_what_users_added_to_a_state_stays_where_options_widen_it() -> None:
    optimizer = trained()
    weight = parameters_of(optimizer)[0]
    optimizer.state[weight]["seen"] = 3
    snapshot = optimizer._registry.states[weight].snapshot
    assert snapshot is not None
    snapshot.num_writes = 2
    optimizer.param_groups[0]["momentum"] = 0.9
    optimizer.step()
    assert optimizer.state[weight]["seen"] == 3 and "momentum_buffer" in optimizer.state[weight]
    widened = optimizer._registry.states[weight].snapshot
    assert widened is not None and widened is not snapshot and widened.num_writes == 2
