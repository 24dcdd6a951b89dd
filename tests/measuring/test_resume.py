"""A resume is the same run, or says which state is not restored."""

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import narrowgauge as ng
from tensors import gaussian


class Loop:
    """A loop with dropout, a schedule, a loss scale and a data order of its own; ``forget`` is not
    restored.
    """

    stateful = ("model", "optimizer", "schedule", "scaler")

    def __init__(self, saved: Any = None, forget: str = "", hides: str = "") -> None:
        self.hides = hides
        if saved is None:
            torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
        self.position = 0
        for name, value in (saved or {}).items():
            if name in self.stateful and name != forget:
                getattr(self, name).load_state_dict(value)
        if saved is not None and forget != "position":
            self.position = saved["position"]
        if saved is not None and forget != "generators":
            torch.set_rng_state(saved["rng"])

    def objects(self) -> dict[str, Any]:
        names = (*self.stateful, "position")
        return {name: getattr(self, name) for name in names if name != self.hides}

    def loss(self) -> Any:
        """Take the next step, and return its loss."""
        self.batch = gaussian(4, 8, seed=self.position)
        self.position += 1
        loss = self.model(self.batch).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def step(self) -> dict[str, Any]:
        self.loss()
        return {**self.objects(), "batch": self.batch}

    def save(self) -> dict[str, Any]:
        states = {name: copy.deepcopy(getattr(self, name).state_dict()) for name in self.stateful}
        return {**states, "position": self.position, "rng": torch.get_rng_state()}


def load(saved: Any, **options: Any) -> Any:
    loop = Loop(saved, **options)
    return loop.objects(), loop.step


FIRST = {
    "": [], "model": ["model"], "optimizer": ["optimizer.step", "optimizer.exp_avg", "optimizer.exp_avg_sq", "optimizer.lr"],
    "schedule": ["schedule"], "scaler": ["scaler"], "position": ["position"], "generators": ["generators"],
}  # fmt: skip
"""What is named where something is not restored."""


@pytest.mark.parametrize("forget", FIRST)
def test_what_a_resume_forgets_is_named(forget):
    loop = Loop()
    result = ng.check_resume(loop.step, loop.save, partial(load, forget=forget))
    assert [r.tensor for r in result] == FIRST[forget], result
    if not forget:
        assert "every state has the bits" in str(result)
        counts = [line.rpartition(": ")[2].split(" of ") for line in result.lines]
        assert all(count[1].startswith(count[0]) for count in counts) and len(counts) == 2


def counting(start: int):
    count = torch.tensor(start)
    batch = None

    def step() -> torch.Tensor:
        if count < 0:
            print(batch)  # noqa: F821
        return count.add_(1) * 0.5

    del batch  # a variable without a value
    return step


def test_a_step_that_returns_its_loss_is_compared_by_what_it_holds():
    """By the attributes of a method's object, or by the variables around a function."""
    for start in (0, 1):
        result = ng.check_resume(counting(0), partial(counting, start), lambda step: (None, step))
        assert [r.tensor for r in result] == ["count"][start:], result
    loop = Loop()
    fresh = Loop(loop.save(), "schedule")
    result = ng.check_resume(loop.loss, loop.save, lambda saved: (None, fresh.loss))
    assert "schedule" in [r.tensor for r in result]


def test_a_state_that_the_loop_does_not_return_is_seen_in_the_steps_that_follow():
    """A place in the data that the loop does not return: a step later the batch differs, and so do
    states and weights.
    """
    loop = Loop(hides="position")
    fresh = partial(load, forget="position", hides="position")
    result = ng.check_resume(loop.step, loop.save, fresh, steps=2)
    names = ["model", "optimizer.exp_avg", "optimizer.exp_avg_sq", "batch"]
    assert [r.tensor for r in result] == names, result
    assert {r.what for r in result} == {"lost-elsewhere"}
    assert any("2 steps after the load" in line for line in result.lines)


class Scaled(nn.Linear):
    """A layer whose scale no state_dict holds."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.lerp_(x.detach().abs().max(), 0.1)
        return super().forward(x / self.scale)


def test_a_buffer_that_no_state_dict_holds_is_a_state():
    def stepping(model):
        return lambda: {"model": model, "loss": model(3 * torch.ones(4, 8)).sum().detach()}

    def load(saved):
        fresh = Scaled()
        fresh.load_state_dict(saved)
        return {"model": fresh}, stepping(fresh)

    model = Scaled()
    result = ng.check_resume(stepping(model), model.state_dict, load)
    assert [(r.what, r.tensor) for r in result] == [("not-restored", "model")]
    assert "1 state, scale: " in result.lines[-1]


def test_a_state_that_the_next_step_computes_anew_changes_nothing():
    loop = Loop()

    def step():
        loss = loop.loss()
        return {**loop.objects(), "last": loss}

    def load(saved):
        fresh = Loop(saved)

        def step_on():
            loss = fresh.loss()
            return {**fresh.objects(), "last": loss}

        return {**fresh.objects(), "last": 0.0}, step_on

    result = ng.check_resume(step, loop.save, load)
    assert result.ok and result.lines[1].startswith("last: "), result


def of_seed(state_of: Callable[[int], Any]) -> Any:
    """Check a resume whose state was made from 3 and is made from 7."""
    saved, fresh = ({"state": state_of(seed)} for seed in (3, 7))
    return ng.check_resume(lambda: saved, lambda: None, lambda _: (fresh, lambda: fresh))


STATES = {
    "a long list": lambda seed: [*range(100), seed],
    "a long list of dicts": lambda seed: [{"lr": seed}] * 20,
    "a number of NumPy": np.int64,
    "an array": np.arange,
    "a generator": lambda seed: torch.Generator().manual_seed(seed),
    "a counter that a load casts": lambda seed: torch.ones(2, dtype=[torch.half, torch.float][seed == 7]),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_every_state_is_compared(name):
    result = of_seed(STATES[name])
    assert [r.tensor for r in result] == ["state"] and not result.unseen
    assert of_seed(lambda seed: STATES[name](4)).ok


def test_what_has_no_state_is_named_as_not_looked_at():
    result = of_seed(random.Random)
    assert result.ok and result.unseen == {"state": "Random has no state_dict()"}
    assert of_seed(lambda seed: [1, 1.0][seed == 7]).ok, "1 and 1.0 are equal"


def test_the_position_of_numpys_generator_is_compared():
    def step():
        return {"drawn": np.random.rand()}

    def drawn_twice(saved):
        np.random.set_state(saved)
        return step(), step

    np.random.seed(0)
    result = ng.check_resume(step, np.random.get_state, drawn_twice)
    assert "generators" in [r.tensor for r in result]
