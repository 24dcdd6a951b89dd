"""Schedules of the learning rate, and optimizers that go on from a checkpoint: what moved otherwise, by its name and number."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from narrowgauge.recompute.piece_results import PieceResult
from narrowgauge.recompute.pieces.schedules import check_resumed, schedules_of
from narrowgauge.recompute.task import Task, task
from recompute.audited_loop import Loop

Made = Callable[[torch.optim.Optimizer], Any]


def decayed(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


MADE: dict[str, Made] = {
    "lambda": decayed,
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 1e-3, total_steps=50, cycle_momentum=False),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "one after the other": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ConstantLR(o, 1.0)], [3]
    ),
    "two at once": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


class Scheduled(Loop):
    """A loop with a schedule that moves ``moves`` times after each step."""

    def __init__(self, made: Made = decayed, declared: Task | None = None, **settings: Any) -> None:
        super().__init__(every=4, micro_batches=settings.pop("micro_batches", 1), task=declared, **settings)
        self.schedule, self.moves = made(self.optimizer), 1

    def after_update(self) -> None:
        super().after_update()
        for _ in range(self.moves):
            self.schedule.step()

    def causes(self) -> list[PieceResult]:
        return [each for results in self.results.values() for each in results if each.cause]


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("declared", ["", "step"])
def test_a_schedule_that_moves_once_a_step_is_healthy(name: str, declared: str) -> None:
    assert not Scheduled(MADE[name], task(schedule=declared)).run(9).causes()


def test_a_schedule_of_epochs_is_healthy() -> None:
    loop = Scheduled()
    loop.moves = 0
    for _ in range(3):
        loop.run(4)
        loop.schedule.step()
    assert not loop.causes()


@pytest.mark.parametrize(
    ("moves", "micro_batches", "cause"),
    [(2, 1, "schedule-many"), (3, 3, "schedule-per-micro-batch"), (5, 2, "schedule-many")],
)
def test_a_schedule_that_moves_more_often_is_named_with_how_often(moves: int, micro_batches: int, cause: str) -> None:
    loop = Scheduled(micro_batches=micro_batches)
    loop.moves = moves
    found = loop.run(8).causes()
    assert [(each.cause, each.values["times"]) for each in found] == [(cause, moves)]


@pytest.mark.parametrize(("declared", "names"), [("", []), ("own", []), ("step", ["schedule-still"])])
def test_a_schedule_that_stands_still_is_named_where_it_was_declared_to_move(declared: str, names: list[str]) -> None:
    loop = Scheduled(declared=task(schedule=declared))
    loop.moves = 0
    assert [each.cause for each in loop.run(8).causes()] == names


def test_what_is_declared_as_meant_is_not_judged() -> None:
    loop = Scheduled(declared=task(schedule="own"))
    loop.moves = 2
    assert not loop.run(8).causes()


@pytest.mark.parametrize("ahead", [True, False])
def test_a_schedule_that_is_a_step_away_is_named(ahead: bool) -> None:
    loop = Scheduled()
    if ahead:
        loop.optimizer._opt_called = True
        loop.schedule.step()
    else:
        loop.moves = 0
        loop.run(1)
        loop.moves = 1
    found = loop.run(8).causes()
    assert {each.cause for each in found} == {"schedule-beside"}
    assert found[0].values["of"] - found[0].values["step"] == (1 if ahead else -1)


@pytest.mark.parametrize("step", [5, 7])
def test_a_schedule_that_begins_anew_beside_the_same_optimizer_is_named(step: int) -> None:
    loop = Scheduled().run(step)
    loop.schedule.load_state_dict(decayed(torch.optim.SGD(loop.model.parameters())).state_dict())
    found = loop.run(8 - step).causes()
    assert [(each.cause, each.values) for each in found] == [("schedule-anew", {"was": step - 1, "now": 0})]


def test_a_schedule_that_goes_back_with_its_optimizer_is_healthy() -> None:
    loop = Scheduled().run(1)
    kept = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict(), loop.schedule.state_dict()))
    loop.run(5)
    loop.model.load_state_dict(kept[0])
    loop.optimizer.load_state_dict(kept[1])
    loop.schedule.load_state_dict(kept[2])
    assert not loop.run(6).causes()


def resumed(edit: Callable[[Scheduled, Any, Any], None], **settings: Any) -> Scheduled:
    """A loop that goes on from step 30 of another in a process of its own, as ``edit`` loads it."""
    before = Scheduled(**settings)
    early = copy.deepcopy((before.optimizer.state_dict(), before.schedule.state_dict()))
    before.watcher.remove()  # type: ignore[union-attr]
    early = copy.deepcopy((before.run(6).optimizer.state_dict(), before.schedule.state_dict()))
    late = before.run(24).optimizer.state_dict(), before.schedule.state_dict()
    after = Scheduled(**settings)
    after.model.load_state_dict(before.model.state_dict())
    edit(after, copy.deepcopy(late), early)
    after.watcher.go_on_from(30)  # type: ignore[union-attr]
    after.step = 30
    return after.run(4)


def everything(loop: Scheduled, late: Any, early: Any) -> None:
    loop.optimizer.load_state_dict(late[0])
    loop.schedule.load_state_dict(late[1])


def no_schedule(loop: Scheduled, late: Any, early: Any) -> None:
    loop.optimizer.load_state_dict(late[0])


def no_states(loop: Scheduled, late: Any, early: Any) -> None:
    loop.schedule.load_state_dict(late[1])


def older_states(loop: Scheduled, late: Any, early: Any) -> None:
    loop.optimizer.load_state_dict(early[0])
    loop.schedule.load_state_dict(late[1])


def a_step_before(loop: Scheduled, late: Any, early: Any) -> None:
    everything(loop, late, early)
    loop.schedule.last_epoch -= 1


SGD = {"optimizer": torch.optim.SGD, "momentum": 0.9, "lr": 0.1}
RESUMED: dict[str, tuple[Any, dict[str, Any], set[str]]] = {
    "everything": (everything, {}, set()),
    "everything of SGD": (everything, SGD, set()),
    "no schedule": (no_schedule, {}, {"schedule-anew"}),
    "no states": (no_states, {}, {"states-lost"}),
    "no states of SGD": (no_states, SGD, {"states-lost"}),
    "older states": (older_states, {}, {"states-of-other-step"}),
    "a step before": (a_step_before, {}, {"schedule-beside"}),
}


@pytest.mark.parametrize("name", RESUMED)
def test_what_a_checkpoint_did_not_hold_is_named(name: str) -> None:
    edit, settings, names = RESUMED[name]
    found = resumed(edit, **settings).causes()
    assert {each.cause for each in found} == names, found
    if name == "older states":
        assert found[0].values == {"step": 30, "at": 6}


def test_older_states_between_two_steps_are_named_with_their_step() -> None:
    loop = Scheduled().run(1)
    kept = copy.deepcopy(loop.optimizer.state_dict())
    loop.run(3)
    loop.optimizer.load_state_dict(kept)
    found = loop.run(1).causes()
    assert [(each.cause, each.values["step"], each.values["at"]) for each in found if each.piece == "between"] == [
        ("states-of-other-step", 4, 1)
    ]


@pytest.mark.parametrize("of", ["the step before", "the first step", "the next step"])
def test_the_rate_of_another_step_is_named_with_that_step(of: str) -> None:
    loop = Scheduled().run(3)
    group = loop.optimizer.param_groups[0]
    wrong = {"the step before": 1e-3 * 0.9**2, "the first step": 1e-3, "the next step": 1e-3 * 0.9**4}[of]
    own: list[float] = []

    def before(*_: Any) -> None:
        own.append(group["lr"])
        group["lr"] = wrong

    def after(*_: Any) -> None:
        group["lr"] = own[0] * 0.9 if of == "the next step" else own[0]

    handles = [loop.optimizer.register_step_pre_hook(before), loop.optimizer.register_step_post_hook(after)]
    loop.optimizer._optimizer_step_post_hooks.move_to_end(handles[1].id, last=False)
    found = [each for each in loop.run(1).causes() if each.piece == "update"]
    step = {"the step before": 3, "the first step": 1, "the next step": 5}[of]
    assert [(each.cause, each.values["of"], each.values["step"]) for each in found] == [("rate-of-other-step", step, 4)]


@pytest.mark.parametrize(("step", "counts", "skipped", "names"), [
    (100, [90, 88], None, []), (100, [40], None, ["states-of-other-step"]), (100, [120], None, ["states-of-other-step"]),
    (100, [97], 3, []), (100, [96], 3, ["states-of-other-step"]), (100, [0], None, ["count-anew"]),
])  # fmt: skip
def test_steps_that_were_left_out_are_no_older_states(
    step: int, counts: list[int], skipped: int | None, names: list[str]
) -> None:
    assert [each.cause for each in check_resumed("adamw", step, counts, [("exp_avg", True)], skipped)] == names


def test_only_whole_schedules_of_an_optimizer_are_found() -> None:
    one, other = Loop(every=0).optimizer, Loop(every=0).optimizer
    whole, plateau = MADE["one after the other"](one), lr_scheduler.ReduceLROnPlateau(one)
    chained = MADE["two at once"](other)
    assert schedules_of(one) == [whole] and plateau is not None
    assert {id(each) for each in schedules_of(other)} == {id(each) for each in chained._schedulers}
