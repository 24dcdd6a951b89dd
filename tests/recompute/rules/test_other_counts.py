"""Where Adam's epsilon stands and how its steps are counted: each fault by its name and number, and no healthy step by either."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from narrowgauge.recompute.piece_results import PieceResult
from narrowgauge.recompute.rules.other_counts import shared_counts
from narrowgauge.recompute.step_watcher import StepWatcher
from recompute.audited_loop import Loop

Count = Callable[["WrittenAdamW", Tensor, int], int]


class WrittenAdamW(torch.optim.AdamW):
    """AdamW written by hand: what it divides by and what it counts can be replaced."""

    denominator: Callable[[Tensor, float, float], Tensor] = staticmethod(lambda v, c, eps: (v / c).sqrt() + eps)
    count: Count = staticmethod(lambda optimizer, p, own: own)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), rate = group["betas"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                number = self.count(self, p, int(state["step"]))
                p.mul_(1 - rate * group["weight_decay"])
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                first = state["exp_avg"] / (1 - beta1**number)
                p.sub_(rate * first / self.denominator(state["exp_avg_sq"], 1 - beta2**number, group["eps"]))


def halved(loop: Loop) -> Loop:
    """Matrices in a group with decay, vectors in one without."""
    every = loop.optimizer.param_groups[0]
    vectors = [p for p in every["params"] if p.ndim == 1]
    every["params"] = [p for p in every["params"] if p.ndim > 1]
    loop.optimizer.add_param_group({"params": vectors, "weight_decay": 0.0})
    return loop


def updates(loop: Loop) -> list[PieceResult]:
    return [each for results in loop.results.values() for each in results if each.piece == "update" and each.cause]


def loop_with(every: int = 4, **faults: Any) -> Loop:
    loop = halved(Loop(every=every, optimizer=WrittenAdamW, betas=(0.9, 0.95), eps=faults.pop("eps", 1e-8)))
    for name, value in faults.items():
        setattr(loop.optimizer, name, value)
    return loop


def test_one_written_by_hand_is_equal() -> None:
    assert not loop_with().run(8).findings()


PLACES: dict[str, tuple[Any, float, str]] = {
    "eps was added to the root of": (lambda v, c, eps: (v.sqrt() + eps) / c**0.5, 1e-4, "eps-before-correction"),
    "eps was added to": (lambda v, c, eps: ((v + eps) / c).sqrt(), 1e-7, "eps-before-correction"),
    "eps² was added to": (lambda v, c, eps: ((v + eps**2) / c).sqrt(), 1e-3, "eps-before-correction"),
    "eps": (lambda v, c, eps: (v / c + eps).sqrt(), 1e-6, "eps-inside-root"),
    "eps²": (lambda v, c, eps: (v / c + eps**2).sqrt(), 1e-3, "eps-inside-root"),
}


@pytest.mark.parametrize("what", PLACES)
def test_an_epsilon_in_another_place_is_named(what: str) -> None:
    denominator, eps, cause = PLACES[what]
    found = updates(loop_with(denominator=denominator, eps=eps).run(4))
    assert {(each.cause, *each.values.values()) for each in found} == {(cause, what)}, found


@pytest.mark.parametrize("eps", [1e-8, 1e-3])
def test_a_count_that_began_anew_is_named_with_its_number(eps: float) -> None:
    draw = random.Random(int(1e8 * eps))
    at, steps = draw.randrange(9, 17), 4 * draw.randrange(5, 8)
    found = updates(loop_with(count=lambda optimizer, p, own: own - at if own > at else own, eps=eps).run(steps))
    assert {each.cause for each in found} == {"step-count"}, found
    assert all(each.values["count"] == each.step - at and not each.where for each in found)


def test_a_count_of_one_group_is_named_with_that_group() -> None:
    def count(optimizer: WrittenAdamW, p: Tensor, own: int) -> int:
        return own - 9 if own > 9 and p.ndim == 1 else own

    loop = loop_with(count=count).run(16)
    found = updates(loop)
    assert {(each.cause, each.values["count"]) for each in found} == {("step-count", 3), ("step-count", 7)}, found
    assert all(len(each.where) == len(loop.optimizer.param_groups[1]["params"]) for each in found)


@pytest.mark.parametrize("by", ["group", "parameter", "micro-batch"])
def test_a_count_that_parts_share_is_named(by: str) -> None:
    raised = {"group": 0, "parameter": 0, "micro-batch": 0}
    last: list[int] = []

    def count(optimizer: WrittenAdamW, p: Tensor, own: int) -> int:
        number = next(i for i, group in enumerate(optimizer.param_groups) if any(p is each for each in group["params"]))
        raised["parameter"] += 1
        raised["group"] += last != [own, number]
        last[:] = [own, number]
        raised["micro-batch"] = 3 * own
        return raised[by]

    loop = loop_with(count=count)
    loop.micro_batches = 3
    found = updates(loop.run(4))
    causes = {each.cause for each in found}
    assert "count-shared" in causes and causes <= {"count-shared", "step-count"}, found
    assert {each.values["by"] for each in found if each.cause == "count-shared"} == {by}


def test_shared_counts_leave_out_what_is_next_to_the_right_one() -> None:
    assert shared_counts(4, (0, 1), (0, 1), 1) == ()
    assert dict(shared_counts(4, (1, 2), (0, 1), 2)) == {"group": 8, "micro-batch": 8}


@pytest.mark.parametrize("factor", [0.5, 0.87, 1.1, 2.0])
def test_a_rate_is_not_taken_for_a_count(factor: float) -> None:
    """With 20 earlier counts, some are near any factor: the step tells them apart."""
    loop = loop_with(every=12)
    denominator = loop.optimizer.denominator
    loop.optimizer.denominator = lambda v, c, eps: denominator(v, c, eps) / factor
    assert {each.cause for each in updates(loop.run(24))} <= {"rate", "step-scaled", "eps"}, updates(loop)


def moved(**edits: Callable[[Tensor], object]) -> Callable[[Loop], None]:
    def after(loop: Loop) -> None:
        for state in loop.optimizer.state.values():
            for name, edit in edits.items():
                edit(state[name])

    return after


@pytest.mark.parametrize("step", [1, 2])
def test_moments_that_are_older_than_their_count_are_named(step: int) -> None:
    """A checkpoint without the count: a new watcher has seen nothing from before, and audits its first or second step."""
    before = Loop(every=0).run(6)
    after = Loop(every=0)
    after.model, after.optimizer = before.model, before.optimizer
    moved(step=lambda t: t.zero_())(after)
    after.watcher = StepWatcher(after.model, after.optimizer, 1, after.keep, first=step)
    found = updates(after.run(step))
    assert [(each.cause, each.values["count"]) for each in found] == [("count-anew", step)], found


def test_a_count_that_began_before_the_first_step_is_named() -> None:
    loop = Loop(every=2)
    for p in loop.model.parameters():
        loop.optimizer.state[p] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros_like(p)}
        loop.optimizer.state[p]["exp_avg_sq"] = torch.zeros_like(p)
    found = updates(loop.run(2))
    assert [(each.cause, each.values["count"], each.values["wanted"]) for each in found] == [("step-count", 3, 2)]


def test_a_count_that_moves_by_two_is_named() -> None:
    loop = Loop(every=2)
    loop.optimizer.register_step_pre_hook(lambda *_: moved(step=lambda t: t.add_(1))(loop))
    assert "count-moved" in {each.cause for each in updates(loop.run(4))}


def test_an_adapter_whose_first_gradient_is_zero_has_a_right_count() -> None:
    loop = Loop(every=1)
    first = next(loop.model.parameters())

    def zero() -> None:
        if loop.step == 1:
            first.grad.zero_()  # type: ignore[union-attr]

    loop.after_backward = zero  # type: ignore[method-assign]
    assert not updates(loop.run(4))
