"""The step of random bits is that of the optimizer that steps a layer's weight: whatever is swapped,
in whatever order, beside whichever optimizers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.matmul.linear import NarrowLayer
from narrowgauge.matmul.swapping import swap_linears

pytestmark = pytest.mark.filterwarnings("ignore::narrowgauge.matmul.gemm.EmulationNotice")
Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "torch": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "ours": lambda parameters: ng.SGD(parameters, lr=0.1, storage="word"),
}


class Two(nn.Module):
    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = (
            nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(2)
        )
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.is_checkpointed:
            x = checkpoint(self.first, x, use_reentrant=False)
            return checkpoint(self.last, x, use_reentrant=False)
        return self.last(self.first(x))


def steps(*models: nn.Module) -> set[int]:
    result = set()
    for model in models:
        for layer in model.modules():
            if isinstance(layer, NarrowLayer):
                words = layer.clock_words
                assert words is None or words.tolist() == layer.draw.words()
                result.add(layer.draw.step)
    return result


def train(optimizers: Any, *models: nn.Module, times: int = 3) -> None:
    for _ in range(times):
        for model in models:
            model(torch.ones(2, 4, 32)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def two_swaps(make: Make) -> set[int]:
    model = Two()
    swap_linears(model, "float8-row")
    swap_linears(model, lambda name: "nvfp4" if "first" in name else "int8-row")
    train([make(model.parameters())], model)
    return steps(model)


def parts_apart(make: Make) -> set[int]:
    model = Two()
    swap_linears(model.first, "int8-row")
    swap_linears(model.last, "nvfp4")
    train([make(model.parameters())], model)
    return steps(model)


def two_models(make: Make) -> set[int]:
    models = Two(), Two()
    for model in models:
        swap_linears(model, "nvfp4")
    train([make([*models[0].parameters(), *models[1].parameters()])], *models)
    return steps(*models)


def vectors_apart(make: Make) -> set[int]:
    model = Two()
    optimizers = []
    for dims in (1, 2):
        optimizers.append(make([p for p in model.parameters() if p.ndim == dims]))
    swap_linears(model, "nvfp4")
    train(optimizers[::-1], model)
    return steps(model)


def swapped_later(make: Make) -> set[int]:
    model = Two()
    swap_linears(model.first, "nvfp4")
    swap_linears(model.last, "float8-row")
    optimizer = make(model.parameters())
    train([optimizer], model, times=2)
    swap_linears(model.last, "nvfp4")
    assert steps(model) == {2}
    train([optimizer], model, times=1)
    return steps(model)


def frozen_layers(make: Make) -> set[int]:
    model = Two()
    model.first.requires_grad_(False)
    swap_linears(model, "nvfp4")
    train([make(p for p in model.parameters() if p.requires_grad)], model)
    return steps(model)


def a_copy_of_both(make: Make) -> set[int]:
    model = Two()
    swap_linears(model, "nvfp4")
    optimizer = make(model.parameters())
    train([optimizer], model, times=2)
    other, other_optimizer = copy.deepcopy((model, optimizer))
    train([other_optimizer], other, times=1)
    assert steps(model) == {2}
    train([optimizer], model, times=1)
    assert torch.equal(model.first[0].weight, other.first[0].weight)
    return steps(model, other)


def one_after_the_other(make: Make) -> set[int]:
    model = Two()
    swap_linears(model, "nvfp4")
    train([make(model.parameters())], model, times=2)
    train([make(model.parameters())], model, times=1)
    return steps(model)


def a_step_within_a_step(make: Make) -> set[int]:
    model = Two()
    swap_linears(model, "nvfp4")
    base: Any = type(make(model.parameters()))  # PyTorch hooks the step of each class of optimizers

    class Outer(base):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    train([Outer(model.parameters(), lr=0.1)], model)
    return steps(model)


def a_container_of_optimizers(make: Make) -> set[int]:
    """torchtitan's container is an optimizer of all parameters, and its step calls the members'."""
    model = Two()
    swap_linears(model, "nvfp4")

    class Container(torch.optim.Optimizer):
        def __init__(self) -> None:
            self.members = [make(part.parameters()) for part in (model.first, model.last)]
            super().__init__(model.parameters(), {})

        def step(self, closure: Any = None) -> Any:
            for member in self.members:
                member.step()

    train([Container()], model)
    return steps(model)


CASES = [a_step_within_a_step, a_container_of_optimizers, two_swaps, parts_apart, two_models, vectors_apart,
         swapped_later, frozen_layers, a_copy_of_both, one_after_the_other]  # fmt: skip


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_each_layer_counts_the_steps_of_its_weight(
    case: Callable[[Make], set[int]], make: Make
) -> None:
    assert case(make) == {3}


def test_layers_of_two_optimizers_count_apart() -> None:
    model = Two()
    swap_linears(model, "nvfp4")
    optimizers = [OPTIMIZERS["torch"](part.parameters()) for part in (model.first, model.last)]
    train(optimizers, model)
    train(optimizers[1:], model, times=2)
    assert steps(model.first) == {3} and steps(model.last) == {5}


def test_an_optimizer_a_parameter_in_backward_has_the_bits_of_one_optimizer() -> None:
    def weights(in_backward: bool, is_checkpointed: bool) -> list[Tensor]:
        model = Two(is_checkpointed)
        swap_linears(model, "nvfp4")
        make = OPTIMIZERS["torch"]
        if not in_backward:
            train([make(model.parameters())], model)
            return list(model.parameters())
        optimizers = {parameter: make([parameter]) for parameter in model.parameters()}

        def step(parameter: Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        train([], model)
        return list(model.parameters())

    expected = weights(False, False)
    for is_checkpointed in (False, True):
        for ours, theirs in zip(weights(True, is_checkpointed), expected, strict=True):
            assert torch.equal(ours, theirs)
