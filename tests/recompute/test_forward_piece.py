"""The forward pass, by what its outputs depend on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from narrowgauge.recompute.departures import unchecked
from narrowgauge.recompute.piece_results import EQUAL
from recompute.audited_loop import Loop


@pytest.mark.parametrize("settings", [{}, {"autocast": True}, {"dtype": torch.bfloat16}, {"dropout": 0.3}])
def test_a_healthy_model_is_equal(settings: dict[str, Any]) -> None:
    loop = Loop(**settings).run(2)
    forward = [each for each in loop.results[2] if each.piece == "forward"]
    assert [each.status for each in forward] == [EQUAL], forward
    assert all(module.training for module in loop.model.modules()), "the mode was not put back"


def leaky(loop: Loop) -> None:
    loop.model.blocks[1].is_causal = False


def shifted(loop: Loop) -> None:
    loop.model.blocks[0].norm2.register_forward_hook(lambda m, args, output: output + 0.01 * output.roll(-1, 1))


def mixed(loop: Loop) -> None:
    loop.model.norm.register_forward_hook(lambda m, args, output: output - output.mean(0, keepdim=True))


def blind(loop: Loop) -> None:
    for block in loop.model.blocks:
        block.out.register_forward_hook(lambda m, args, output: output * 0.0)  # type: ignore[union-attr, operator]


class Unordered(nn.Module):
    """Attends to all tokens before, whose order nothing tells."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(48, 16), nn.Linear(16, 48)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(tokens).cumsum(1))
        return logits


def unordered(loop: Loop) -> None:
    model = Unordered()
    loop.optimizer.param_groups[0]["params"] = list(model.parameters())
    assert loop.watcher is not None
    loop.watcher.remove()
    loop.model = model  # type: ignore[assignment]
    loop.watcher = type(loop.watcher)(model, loop.optimizer, 2, loop.keep)


def cast(loop: Loop) -> None:
    linear = loop.model.blocks[1].down
    linear.forward = lambda x: nn.functional.linear(  # type: ignore[union-attr, assignment]
        x.bfloat16(),
        linear.weight.bfloat16(),
        linear.bias.bfloat16(),  # type: ignore[union-attr, operator]
    ).float()


FAULTS: dict[str, tuple[Callable[[Loop], None], str, str]] = {
    "a mask is missing": (leaky, "sees-future", "blocks.1.out"),
    "a shift along the sequence": (shifted, "sees-future", "blocks.0.norm2"),
    "a mean over the batch": (mixed, "rows-mixed", "norm"),
    "attention returns nothing": (blind, "past-unseen", ""),
    "no positions": (unordered, "order-unseen", ""),
    "one module casts": (cast, "module-cast", "blocks.1.down"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_forward_pass_is_named_with_its_module(name: str) -> None:
    plant, cause, where = FAULTS[name]
    loop = Loop()
    plant(loop)
    loop.run(2)
    found = [each for each in loop.results[2] if each.piece == "forward"]
    assert [(each.cause, ", ".join(each.where)) for each in found] == [(cause, where)]


def test_a_model_without_a_float32_path_is_not_checked() -> None:
    loop = Loop(dtype=torch.bfloat16)
    loop.model.norm.register_forward_hook(lambda m, args, output: output.bfloat16())
    loop.run(2)
    assert "forward" in unchecked(loop.results[2]) and not loop.findings()
