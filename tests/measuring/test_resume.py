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
    forget: str = "", saved: Any = None, kind: Any = torch.optim.AdamW
) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
    """A loop with dropout, a schedule, a loss scale and a data order of its own; ``forget`` is not
    restored.
    """
    if saved is None:
        torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = kind(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    objects: dict[str, Any] = dict(
        zip(STATEFUL, (model, optimizer, schedule, scaler), strict=True), position=0
    )
    if saved is not None:
        for name in STATEFUL:
            if name != forget:
                objects[name].load_state_dict(saved[name])
        objects["position"] = 0 if forget == "position" else saved["position"]
        if forget != "generators":
            torch.set_rng_state(saved["rng"])

    def step() -> dict[str, Any]:
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(objects["position"]))
        objects["position"] += 1
        scaler.scale(model(batch).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        return {**objects, "batch": batch}

    return objects, step


def certificate(forget: str, **options: Any) -> Any:
    objects, step = loop(**options)

    def save() -> dict[str, Any]:
        states = {name: copy.deepcopy(objects[name].state_dict()) for name in STATEFUL}
        return {**states, "position": objects["position"], "rng": torch.get_rng_state()}

    return ng.check_resume(step, save, lambda saved: loop(forget, saved, **options))


@pytest.mark.parametrize("forget", [*STATEFUL, "position", "generators"])
def test_what_a_resume_forgets_is_named(forget: str) -> None:
    result = certificate(forget)
    name = "optimizer.exp_avg" if forget == "optimizer" else forget
    assert not result.ok and name in [r.tensor for r in result], result
    assert all(
        r.tensor.startswith(forget) or r.tensor.startswith("optimizer.lr") for r in result
    ), result


def test_a_whole_resume_is_the_same_run() -> None:
    result = certificate("")
    assert result.ok and "every state has the bits" in str(result)
    assert len(result.lines) == 2 and all(
        line.endswith("have the same bits") for line in result.lines
    )
    assert certificate(
        "", kind=lambda p, lr: ng.AdamW(p, lr=lr, storage="float32", compile=False)
    ).ok


def test_the_cause_comes_before_what_follows_from_it() -> None:
    """A place in the data that the loop does not return: a step later the batch differs, and so do
    states and weights.
    """
    objects, step = loop()

    def seen(step: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        return lambda: {name: value for name, value in step().items() if name != "position"}

    def save() -> dict[str, Any]:
        states = {name: copy.deepcopy(objects[name].state_dict()) for name in STATEFUL}
        return {**states, "position": objects["position"], "rng": torch.get_rng_state()}

    def load(saved: Any) -> Any:
        fresh, fresh_step = loop("position", saved)
        return fresh, seen(fresh_step)

    result = ng.check_resume(seen(step), save, load, steps=2)
    assert [r.tensor for r in result] == [
        "batch",
        "optimizer.exp_avg",
        "optimizer.exp_avg_sq",
        "model",
    ], result
    assert any("2 steps after the load" in line for line in result.lines)
    assert "Look at what is not" in result.lines[-1]


class Epoch:
    """A loader whose place in an epoch is lost at the second resume: it counts from the resume, not
    from the start.
    """

    def __init__(self, saved: int = 0, *, counts_from_start: bool = True) -> None:
        self.start = self.place = saved
        self.counts_from_start = counts_from_start
        self.batch = None

    def state(self) -> dict[str, Any]:
        return {"batch": self.batch}

    def step(self) -> dict[str, Any]:
        self.batch = torch.tensor(self.place % 5)
        self.place = self.place + 1
        return self.state()

    def save(self) -> int:
        return self.place if self.counts_from_start else self.place - self.start


@pytest.mark.parametrize("counts_from_start", [True, False])
def test_a_second_resume_in_an_epoch_is_taken(counts_from_start: bool) -> None:
    """KempnerInstitute/KempnerForge#57.

    A batch that is None after the load is not compared there.
    """
    run = Epoch(counts_from_start=counts_from_start)

    def load(saved: int) -> Any:
        fresh = Epoch(saved, counts_from_start=counts_from_start)
        return fresh.state(), fresh.step, fresh.save

    assert ng.check_resume(run.step, run.save, load, steps=3).ok
    run = Epoch(counts_from_start=counts_from_start)
    result = ng.check_resume(run.step, run.save, load, steps=3, resumes=2)
    assert result.ok == counts_from_start
    if not result.ok:
        assert any("3 steps after load 2" in line for line in result.lines)


def test_an_epoch_that_is_not_restored_is_seen_by_the_steps_that_cross_it() -> None:
    def loop(place: int, order: int, epoch: int) -> Callable[[], dict[str, Any]]:
        state = {"place": place, "order": order, "epoch": epoch}

        def step() -> dict[str, Any]:
            if state["place"] == 4:
                state.update(place=0, order=state["epoch"] + 1, epoch=state["epoch"] + 1)
            state["place"] += 1
            return {"batch": torch.tensor(10 * state["order"] + state["place"])}

        return step

    for steps, is_ok in ((1, True), (4, False)):
        load = lambda saved: ({"batch": None}, loop(*saved, epoch=0))  # noqa: E731
        assert ng.check_resume(loop(0, 3, 3), lambda: (1, 3), load, steps=steps).ok == is_ok


def test_a_counter_that_a_load_casts_is_a_difference() -> None:
    """microsoft/dion#104: a step counter in bfloat16 stands still at 256."""
    saved, fresh = (
        {"count": torch.tensor([8.0], dtype=dtype)} for dtype in (torch.float32, torch.bfloat16)
    )
    result = ng.check_resume(lambda: saved, lambda: None, lambda _: (fresh, lambda: fresh))
    assert (
        "float32 of norm 8 was saved, bfloat16 of norm 8" in result.lines[-1] and len(result) == 1
    )


def test_states_that_torch_casts_at_a_load_are_not_the_same_value() -> None:
    """pytorch/pytorch#43706: float32 moments of bfloat16 weights come back as bfloat16."""
    weight = nn.Parameter(torch.randn(64).bfloat16())
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = torch.randn(64)

    def step() -> dict[str, Any]:
        return {"optimizer": optimizer}

    def load(saved: Any) -> Any:
        fresh = torch.optim.SGD([nn.Parameter(weight.detach().clone())], lr=0.1, momentum=0.9)
        fresh.load_state_dict(saved)
        return {"optimizer": fresh}, lambda: {"optimizer": fresh}

    result = ng.check_resume(step, lambda: copy.deepcopy(optimizer.state_dict()), load)
    (line,) = [line for line in result.lines if line.startswith("optimizer.momentum_buffer: ")]
    assert "float32 of norm" in line and "bfloat16 of norm" in line


STATES: dict[str, Callable[[int], Any]] = {
    "a long list": lambda seed: [*range(100), seed],
    "a long list of dicts": lambda seed: [{"lr": seed}] * 20,
    "a number of NumPy": np.int64,
    "a set": lambda seed: {1, seed},
    "an object": random.Random,
}


@pytest.mark.parametrize("name", STATES)
def test_every_state_is_compared_or_named_as_not_looked_at(name: str) -> None:
    saved, fresh = ({"state": STATES[name](seed)} for seed in (3, 7))
    result = ng.check_resume(lambda: saved, lambda: None, lambda _: (fresh, lambda: fresh))
    is_unseen = name == "an object"
    assert [r.tensor for r in result] == ([] if is_unseen else ["state"])
    assert result.unseen == ({"state": "Random has no state_dict()"} if is_unseen else {})


def test_the_position_of_numpys_generator_is_compared() -> None:
    def step() -> dict[str, Any]:
        return {"drawn": np.random.rand()}

    def load(saved: Any) -> Any:
        np.random.set_state(saved)
        return step(), step  # draws once too often

    np.random.seed(0)
    assert "generators" in [r.tensor for r in ng.check_resume(step, np.random.get_state, load)]


def test_variables_around_a_step_are_held_too() -> None:
    def loop(place: int) -> Callable[[], dict[str, Any]]:
        data = np.arange(5)

        def step() -> dict[str, Any]:
            nonlocal place
            place += 1
            return {"weight": torch.ones(2)} if place else {"later": later, "data": data}

        if place < 0:
            later = 1  # an empty cell
        return step

    result = ng.check_resume(loop(3), lambda: None, lambda _: ({"weight": torch.ones(2)}, loop(0)))
    told = "not returned by the step, and 4 was saved, 0 is there after the load"
    assert result.ok and result.unseen == {"place": told}


@pytest.mark.parametrize("forgets", [True, False])
def test_what_a_step_holds_and_does_not_return_is_named(forgets: bool) -> None:
    class Run:
        def __init__(self, epoch: int, average: float) -> None:
            self.epoch, self.average, self.batch = epoch, torch.tensor(average), None
            self.generator = torch.Generator().manual_seed(epoch)

        def step(self) -> dict[str, Any]:
            self.epoch = self.epoch + 1
            self.average = self.average + 1
            return {"weight": torch.ones(2)}

    run = Run(3, 0.0)
    rest = {"weight": torch.ones(2)}
    load = lambda saved: (rest, (Run(0, 0.0) if forgets else saved).step)  # noqa: E731
    result = ng.check_resume(run.step, lambda: copy.deepcopy(run), load)
    assert result.ok
    assert list(result.unseen) == (["epoch", "generator", "average"] if forgets else [])


@pytest.mark.parametrize("forgets", ["", "schedule", "batch"])
def test_a_step_that_returns_its_loss_is_compared_by_what_it_holds(forgets: str) -> None:
    def loop(saved: Any = None) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        batch = torch.Generator().manual_seed(1)
        if saved is not None:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            if forgets != "schedule":
                schedule.load_state_dict(saved["schedule"])
            if forgets != "batch":
                batch.set_state(saved["batch"])

        def step() -> Any:
            loss = model(torch.randn(8, 4, generator=batch)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            return loss.detach()

        def save() -> dict[str, Any]:
            states = {"model": model, "optimizer": optimizer, "schedule": schedule}
            copies = {name: copy.deepcopy(x.state_dict()) for name, x in states.items()}
            return {**copies, "batch": batch.get_state()}

        return step, save

    result = ng.check_resume(*loop(), lambda saved: (None, loop(saved)[0]), steps=2)
    assert [r.tensor for r in result] == ([forgets] if forgets else []), result


def test_a_load_that_returns_no_step_is_refused() -> None:
    with pytest.raises(ng.errors.RecipeError, match="load returned no step"):
        ng.check_resume(dict, lambda: None, lambda saved: {})
