"""The hooks of a loop: every listener hears every event once, and an error ends its listener alone."""

import copy
import pickle
from contextlib import ExitStack
from functools import partialmethod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from narrowgauge.measuring.watch.hooks import LoopHooks

EVENTS = ("before_pass", "before_step", "after_step")


@pytest.fixture(autouse=True)
def loud() -> None:
    """Errors end their listener here."""


class Diary:
    """Note the events, and fail in one of them."""

    title = "the diary"
    compares_ranks = False

    def __init__(self, fails_in: str = "") -> None:
        self.fails_in = fails_in
        self.events: list[str] = []

    def note(self, event: str, *args: Any) -> None:
        self.events.append(event)
        if event == self.fails_in:
            raise ValueError("no ink")

    before_pass = partialmethod(note, "before_pass")
    before_step = partialmethod(note, "before_step")
    after_step = partialmethod(note, "after_step")
    end = partialmethod(note, "end")


def hooks_of(*listeners: Diary):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = LoopHooks(model, [optimizer], model, print)
    hooks.listeners += listeners
    return hooks, model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(torch.ones(2, 4))


ONE_STEP = [*EVENTS]


@pytest.mark.parametrize("event", EVENTS)
def test_an_error_ends_its_listener_and_nothing_else(event):
    broken = Diary(event)
    well = Diary()
    hooks, model, optimizer = hooks_of(broken, well)
    messages = []
    hooks.say = messages.append
    for _ in range(2):
        train(model, optimizer)
    assert well.events == 2 * ONE_STEP
    assert broken.events == [*ONE_STEP[: ONE_STEP.index(event) + 1], "end"]
    assert hooks.listeners == [well] and messages == ["the diary ended: ValueError: no ink"]


def test_ranks_wait_for_each_other_so_an_error_ends_the_loop():
    """Where its listener compares ranks; another one ends alone."""
    for compares_ranks in (True, False):
        diary = Diary("before_step")
        diary.compares_ranks = compares_ranks
        hooks, model, optimizer = hooks_of(diary)
        hooks.say = lambda message: None
        hooks.ranks = SimpleNamespace(size=2)
        with ExitStack() as expected:
            if compares_ranks:
                expected.enter_context(pytest.raises(ValueError, match="no ink"))
            train(model, optimizer)


class Derived(torch.optim.SGD):
    """Calls its parent's step, which PyTorch hooks, too, once a plain one was made."""

    def step(self, closure: Any = None) -> Any:
        if closure == "raises":
            raise ValueError("no step")
        return super().step(closure)


@pytest.mark.parametrize("has_closure", [False, True])
def test_a_step_that_calls_its_parents_step_is_one_step(has_closure):
    model = nn.Linear(4, 1)
    torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = Derived(model.parameters(), lr=0.1)
    diary = Diary()
    LoopHooks(model, [optimizer], model, print).listeners.append(diary)

    def closure():
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    with pytest.raises(ValueError, match="no step"):
        optimizer.step("raises")
    model(torch.ones(2, 4))  # the loop goes on
    diary.events.clear()
    for _ in range(2):
        if has_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    assert diary.events == 2 * ONE_STEP
    for duplicate in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        duplicate.step()
    assert diary.events == 2 * ONE_STEP


def test_no_hook_is_left():
    diary = Diary()
    hooks, model, optimizer = hooks_of(diary)
    train(model, optimizer)
    hooks.close()
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    train(model, optimizer)
    assert diary.events == [*ONE_STEP, "end"]


def test_transforms_and_compilers_are_left_alone():
    diary = Diary()
    _, model, _ = hooks_of(diary)
    torch.func.vmap(lambda x: model(x[None]))(torch.ones(3, 4))
    assert diary.events == []
