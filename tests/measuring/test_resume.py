"""A resume is the same run, or says which state is not restored."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import narrowgauge as ng

STATEFUL = ("model", "optimizer", "schedule", "scaler")


def loop(
    forget: str = "", saved: Any = None, *, ours: bool = False, returns_loss: bool = False
) -> tuple[dict[str, Any], Callable[[], Any], Callable[[], Any]]:
    """A loop with dropout, a schedule, a loss scale and a data order of its own; ``forget`` is not
    restored.
    """
    if saved is None:
        torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if ours:
        optimizer = ng.AdamW(model.parameters(), lr=1e-2, storage="float32", compile=False)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    objects: dict[str, Any] = dict(
        zip(STATEFUL, (model, optimizer, schedule, scaler), strict=True), position=0
    )
    if saved is not None:
        for name in STATEFUL:
            if name != forget:
                objects[name].load_state_dict(saved[name])
        if forget != "position":
            objects["position"] = saved["position"]
        if forget != "generators":
            torch.set_rng_state(saved["rng"])

    def step() -> Any:
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(objects["position"]))
        objects["position"] += 1
        loss = model(batch).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        return loss.detach() if returns_loss else {**objects, "batch": batch}

    def save() -> dict[str, Any]:
        states = {name: copy.deepcopy(objects[name].state_dict()) for name in STATEFUL}
        return {**states, "position": objects["position"], "rng": torch.get_rng_state()}

    return objects, step, save


@pytest.mark.parametrize("returns_loss", [False, True])
@pytest.mark.parametrize("forget", ["", *STATEFUL, "position", "generators"])
def test_what_a_resume_forgets_is_named(forget: str, returns_loss: bool) -> None:
    """A step that returns its loss is compared by the variables around it."""

    def load(saved: Any) -> Any:
        objects, fresh_step, _ = loop(forget, saved, returns_loss=returns_loss)
        return None if returns_loss else objects, fresh_step

    result = ng.check_resume(*loop(returns_loss=returns_loss)[1:], load)
    named = [r.tensor for r in result]
    if not forget:
        assert result.ok and "every state has the bits" in str(result)
        assert [line.rpartition("states ")[2] for line in result.lines] == [
            "have the same bits"
        ] * 2
        return
    first = {"optimizer": "optimizer.exp_avg", "position": "objects"}.get(forget, forget)
    if forget == "position" and not returns_loss:
        first = "position"
    assert first in named, result
    allowed = (forget, "optimizer.lr", "objects")
    assert all(name.startswith(allowed) for name in named), result


def test_packed_states_of_our_optimizers_are_restored() -> None:
    def load(saved: Any) -> Any:
        return loop("", saved, ours=True)[:2]

    assert ng.check_resume(*loop(ours=True)[1:], load).ok


def test_the_cause_comes_before_what_follows_from_it() -> None:
    """A place in the data that the loop does not return: a step later the batch differs, and so do
    states and weights.
    """
    _, step, save = loop()

    def seen(step: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        return lambda: {name: value for name, value in step().items() if name != "position"}

    def load(saved: Any) -> Any:
        fresh, fresh_step, _ = loop("position", saved)
        return fresh, seen(fresh_step)

    result = ng.check_resume(seen(step), save, load, steps=2)
    names = ["batch", "optimizer.exp_avg", "optimizer.exp_avg_sq", "model"]
    assert [r.tensor for r in result] == names, result
    assert any("2 steps after the load" in line for line in result.lines)


class Epoch:
    """A loader whose place in an epoch is lost at the second resume: it counts from the resume, not
    from the start.
    """

    def __init__(self, saved: int = 0, *, counts_from_start: bool = True) -> None:
        self.start = self.place = saved
        self.counts_from_start = counts_from_start
        self.batch = None

    def step(self) -> dict[str, Any]:
        self.batch = torch.tensor(self.place % 5)
        self.place = self.place + 1
        return {"batch": self.batch}

    def save(self) -> int:
        return self.place if self.counts_from_start else self.place - self.start


@pytest.mark.parametrize("counts_from_start", [True, False])
def test_a_second_resume_in_an_epoch_is_taken(counts_from_start: bool) -> None:
    """KempnerInstitute/KempnerForge#57.

    A batch that is None after the load is not compared there.
    """

    def load(saved: int) -> Any:
        fresh = Epoch(saved, counts_from_start=counts_from_start)
        return {"batch": fresh.batch}, fresh.step, fresh.save

    for resumes in (1, 2):
        run = Epoch(counts_from_start=counts_from_start)
        result = ng.check_resume(run.step, run.save, load, steps=3, resumes=resumes)
        assert result.ok == (counts_from_start or resumes == 1)
    assert result.ok or any("3 steps after load 2" in line for line in result.lines)


def of_seed(state_of: Callable[[int], Any]) -> Any:
    """Check a resume whose state was made from 3 and is made from 7."""
    saved, fresh = ({"state": state_of(seed)} for seed in (3, 7))
    return ng.check_resume(lambda: saved, lambda: None, lambda _: (fresh, lambda: fresh))


STATES: dict[str, Callable[[int], Any]] = {
    "a long list": lambda seed: [*range(100), seed],
    "a long list of dicts": lambda seed: [{"lr": seed}] * 20,
    "a number of NumPy": np.int64,
    "an array": lambda seed: np.arange(seed),
    "an object": random.Random,
}


@pytest.mark.parametrize("name", STATES)
def test_every_state_is_compared_or_named_as_not_looked_at(name: str) -> None:
    result = of_seed(STATES[name])
    is_unseen = name == "an object"
    assert [r.tensor for r in result] == ([] if is_unseen else ["state"])
    assert result.unseen == ({"state": "Random has no state_dict()"} if is_unseen else {})


def test_a_counter_that_a_load_casts_is_a_difference() -> None:
    """microsoft/dion#104: a step counter in bfloat16 stands still at 256."""
    dtypes = {3: torch.float32, 7: torch.bfloat16}
    result = of_seed(lambda seed: torch.tensor([8.0], dtype=dtypes[seed]))
    assert result.lines[-1].startswith("state: float32 of norm 8 #")
    assert " was saved, bfloat16 of norm 8 #" in result.lines[-1] and len(result) == 1
    assert of_seed(lambda seed: [1, 1.0][seed == 7]).ok, "1 and 1.0 are equal"


def test_the_position_of_numpys_generator_is_compared() -> None:
    def step() -> dict[str, Any]:
        return {"drawn": np.random.rand()}

    def load(saved: Any) -> Any:
        np.random.set_state(saved)
        return step(), step  # draws once too often

    np.random.seed(0)
    assert "generators" in [r.tensor for r in ng.check_resume(step, np.random.get_state, load)]
