"""Passes taken again: where their gradients began, which random numbers they drew, and what of the run they leave alone."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowgauge.recompute.capture import ForwardCall
from narrowgauge.recompute.departures import unchecked
from narrowgauge.recompute.passes_again import chosen_parameters
from narrowgauge.recompute.piece_results import EQUAL
from narrowgauge.recompute.random_states import RandomStates, kept
from narrowgauge.recompute.step_watcher import StepWatcher
from recompute.audited_loop import WIDTH, Loop, Model, next_token


def statuses(loop: Loop, step: int) -> dict[str, str]:
    return {each.piece: each.status for each in loop.results[step]}


# ── where gradients began ─────────────────────────────────────────────────────────────────────────────────────────────


class Outputs(Model):
    """A model that returns what a function makes of its last hidden states and its logits."""

    def __init__(self, made: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.made = made

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.made(x, self.head(x), tokens)


def own_loss(x: Tensor, logits: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) / 2, "logits": logits}


MODELS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Any], Callable[[Any, Tensor], Tensor]]] = {
    "a loss of its own": (own_loss, lambda out, tokens: out["loss"]),
    "hidden states before the logits": (
        lambda x, logits, tokens: {"logits": logits, "last_hidden_state": x},
        lambda out, tokens: next_token(out["logits"], tokens) / 2,
    ),
    "hidden states that count, too": (
        lambda x, logits, tokens: {"last_hidden_state": x, "logits": logits},
        lambda out, tokens: (next_token(out["logits"], tokens) + 1e-3 * out["last_hidden_state"].square().mean()) / 2,
    ),
    "one output twice": (
        lambda x, logits, tokens: (logits, logits),
        lambda out, tokens: (next_token(out[0], tokens) + next_token(out[1], tokens)) / 4,
    ),
    "another loss beside the logits": (
        lambda x, logits, tokens: (logits, x.square().mean()),
        lambda out, tokens: (next_token(out[0], tokens) + 0.01 * out[1]) / 2,
    ),
    "two losses": (
        lambda x, logits, tokens: {**own_loss(x, logits, tokens), "extra": x.square().mean()},
        lambda out, tokens: out["loss"] + 0.01 * out["extra"],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_each_gradient_begins_once(name: str) -> None:
    made, loss = MODELS[name]
    loop, model = Loop(every=0), Outputs(made)
    model.load_state_dict(loop.model.state_dict())
    loop.model, loop.optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    loop.loss = lambda tokens: loss(model(tokens[:, :-1]), tokens)  # type: ignore[method-assign]
    loop.watcher = StepWatcher(model, loop.optimizer, 2, loop.keep)
    loop.run(4)
    assert not loop.findings()
    assert statuses(loop, 4)["gradient"] == EQUAL, loop.results[4]


def test_parts_of_a_loss_may_go_back_one_by_one() -> None:
    loop = Loop(micro_batches=1)

    def backward(tokens: Tensor, number: int) -> None:
        logits = loop.model(tokens[:, :-1])
        first, second = (next_token(part, of) / 2 for part, of in ((logits[:2], tokens[:2]), (logits[2:], tokens[2:])))
        first.backward(retain_graph=True)
        second.backward()

    loop.backward = backward  # type: ignore[method-assign]
    loop.run(4)
    assert not loop.findings()
    assert {statuses(loop, 4)[piece] for piece in ("loss", "gradient")} == {EQUAL}


def test_gradients_that_are_computed_for_a_weight_of_the_loss_are_not_of_the_step() -> None:
    """As an adaptive weight of a loss does, by autograd.grad before the backward pass."""
    loop = Loop()

    def backward(tokens: Tensor, number: int) -> None:
        loss = loop.loss(tokens)
        torch.autograd.grad(loss, loop.model.norm.weight, retain_graph=True)
        loss.backward()

    loop.backward = backward  # type: ignore[method-assign]
    loop.run(4)
    assert not loop.findings()
    assert {statuses(loop, 4)[piece] for piece in ("loss", "gradient")} == {EQUAL}


def test_a_pass_that_writes_to_its_own_weights_is_of_the_step() -> None:
    loop = Loop(micro_batches=2)
    loop.model.embedding.max_norm = 0.5
    loop.run(4)
    assert "loss-scaled" not in loop.names() and statuses(loop, 4)["loss"] == EQUAL


def test_an_output_that_is_a_parameter_leaves_no_hook() -> None:
    loop = Loop()
    bias, plain = nn.Parameter(torch.zeros(())), loop.model.forward
    loop.model.bias = bias
    loop.model.forward = lambda tokens: (plain(tokens), bias)  # type: ignore[method-assign, assignment]
    loop.loss = lambda tokens: next_token(sum(loop.model(tokens[:, :-1])), tokens) / 2  # type: ignore[method-assign, arg-type]
    loop.run(4)
    assert not {each.name for each in loop.findings()} - {"no-group"} and not bias._backward_hooks


def test_an_output_that_the_loop_writes_into_is_not_checked() -> None:
    loop = Loop()
    loop.loss = lambda tokens: next_token(loop.model(tokens[:, :-1]).div_(2.0), tokens) / 2  # type: ignore[method-assign]
    loop.run(2)
    assert not loop.findings()
    assert unchecked(loop.results[2])["loss"] == "the loop wrote into an output of the model"


# ── random numbers ────────────────────────────────────────────────────────────────────────────────────────────────────


def draw_of(source: str) -> Callable[[], float]:
    return {
        "torch": lambda: float(torch.rand((), dtype=torch.float32)),
        "python": random.random,
        "numpy": lambda: float(np.random.rand()),
    }[source]


@pytest.mark.parametrize("source", ["torch", "python", "numpy"])
def test_layers_that_are_left_out_at_random_are_the_same_and_the_run_too(source: str) -> None:
    draw = draw_of(source)

    class LayerDrop(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return x if self.training and draw() < 0.3 else self.block(x)

    def run(every: int) -> Loop:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        loop = Loop(every=every)
        for place, block in enumerate(loop.model.blocks):
            loop.model.blocks[place] = LayerDrop(block)
        loop.optimizer.param_groups[0]["params"] = list(loop.model.parameters())
        return loop.run(6)

    audited, alone = run(2), run(0)
    assert torch.equal(audited.bits(), alone.bits())
    assert not audited.findings() and statuses(audited, 6)["gradient"] == EQUAL


def test_generators_are_put_back() -> None:
    before = RandomStates.now()
    others = RandomStates.others()
    assert before.equals(RandomStates.now()) and not before.equals(others)
    first = [draw_of(source)() for source in ("torch", "python", "numpy")]
    before.restore()
    with kept(others):
        there = [draw_of(source)() for source in ("torch", "python", "numpy")]
    assert [draw_of(source)() for source in ("torch", "python", "numpy")] == first
    assert all(one != other for one, other in zip(first, there, strict=True))


def test_numpy_is_not_loaded_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy.random")
    assert RandomStates.now().numpy is None


# ── which parameters ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_only_trained_parameters_are_chosen_of_a_larger_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrowgauge.recompute.passes_again.MOST_PARAMETERS", 2 * WIDTH * WIDTH)
    loop = Loop(every=1)
    for name, parameter in loop.model.named_parameters():
        parameter.requires_grad_(name == "blocks.1.out.weight")
    loop.loss = lambda tokens: -next_token(loop.model(tokens[:, :-1]), tokens) / 2  # type: ignore[method-assign]
    loop.run(2)
    assert chosen_parameters(loop.model, 2) == ["blocks.1.out.weight"]
    assert loop.names() == {"loss-sign"}
    monkeypatch.setattr("narrowgauge.recompute.passes_again.MOST_PARAMETERS", WIDTH)
    loop.run(1)
    assert "every parameter that is trained" in unchecked(loop.results[3])["gradient"]
    assert statuses(loop, 3)["loss"] != "not checked"


def test_sparse_gradients_end_no_run() -> None:
    loop = Loop(every=1, optimizer=torch.optim.SGD, weight_decay=0.0)
    loop.model.embedding.sparse = True
    loop.run(4)
    assert loop.step == 4 and not loop.findings()


# ── masks ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("mask", "is_read"),
    [
        (torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]), True),
        (torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]]), True),
        (torch.tensor([[True] * 4, [True] * 4]), True),
        (torch.tensor([[False] * 4, [False, False, True, True]]), False),
        (torch.tensor([[0.0] * 4, [0.0, 0.0, -torch.inf, -torch.inf]]), False),
    ],
    ids=["ones are seen", "the same in floats", "nothing is padding", "True is padding", "added to scores"],
)
def test_a_mask_is_read_where_it_leaves_out_padding(mask: Tensor, is_read: bool) -> None:
    tokens = torch.tensor([[5, 6, 7, 8], [9, 4, 0, 0]])
    call = ForwardCall((tokens,), {"attention_mask": mask}, RandomStates.now(), torch.device("cpu"), None)
    assert (call.seen is not None) == is_read
    if is_read:
        assert call.seen is not None and torch.equal(call.seen, mask != 0)
