"""Between two steps: weights, states, averages; and passes without gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import narrowgauge as ng
from narrowgauge.recompute.departures import unchecked
from narrowgauge.recompute.piece_results import EQUAL
from narrowgauge.recompute.step_watcher import StepWatcher
from narrowgauge.recompute.task import task
from recompute.audited_loop import Loop


def test_nothing_changes_between_healthy_steps() -> None:
    loop = Loop().run(5)
    found = [each.status for results in loop.results.values() for each in results if each.piece == "between"]
    assert found == [EQUAL, EQUAL]


def each_weight(change: Callable[[torch.Tensor], object]) -> Callable[[Loop], None]:
    def after(loop: Loop) -> None:
        with torch.no_grad():
            for p in loop.model.parameters():
                change(p)

    return after


def lose_states(loop: Loop) -> None:
    for state in loop.optimizer.state.values():
        state["exp_avg"].zero_()


FAULTS: dict[str, tuple[Callable[[Loop], None], set[str]]] = {
    "scaled": (each_weight(lambda p: p.mul_(0.99)), {"weights-scaled"}),
    "narrow": (each_weight(lambda p: p.copy_(p.bfloat16())), {"weight-narrow"}),
    "cut": (each_weight(lambda p: p.clamp_(-0.05, 0.05)), {"weights-written", "weights-scaled"}),
    "states": (lose_states, {"states-lost"}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_change_between_steps_is_named(name: str) -> None:
    edit, causes = FAULTS[name]
    loop = Loop(every=4)
    loop.run(3)
    assert not loop.findings()
    after = loop.after_update

    def both() -> None:
        after()
        edit(loop)

    loop.after_update = both  # type: ignore[method-assign]
    loop.run(2)
    assert loop.names() and loop.names() <= causes, loop.results[4]


def test_a_step_that_is_taken_back_is_named() -> None:
    loop = Loop(every=4).run(3)
    kept = copy.deepcopy(loop.model.state_dict())
    loop.run(1).model.load_state_dict(kept)
    assert loop.run(1).names() == {"step-undone"}


WRITTEN: dict[str, tuple[Callable[[Loop], object], set[str]]] = {
    "lost states": (lambda loop: loop.optimizer.state.clear(), {"states-lost"}),
    "narrow weights": (each_weight(lambda p: p.copy_(p.half())), {"weight-narrow"}),
    "other states": (
        lambda loop: [state["exp_avg"].mul_(1.5) for state in loop.optimizer.state.values()],
        {"states-written"},
    ),
    "the same again": (
        lambda loop: (
            loop.model.load_state_dict(copy.deepcopy(loop.model.state_dict())),
            loop.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict())),
        ),
        set(),
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_between_steps_that_are_not_audited_is_named(name: str) -> None:
    write, causes = WRITTEN[name]
    loop = Loop(every=100).run(4)
    with torch.no_grad():
        write(loop)
    loop.run(1)
    assert {each.name for each in loop.findings() if each.step == 4} == causes


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, ng.AdamW])
def test_an_earlier_checkpoint_loaded_between_steps_is_healthy(optimizer: type[torch.optim.Optimizer]) -> None:
    options = {"storage": "word", "dtype": torch.bfloat16} if optimizer is ng.AdamW else {}
    loop = Loop(every=100, optimizer=optimizer, **options).run(2)
    saved = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict()))
    loop.run(2)
    loop.model.load_state_dict(saved[0])
    loop.optimizer.load_state_dict(saved[1])
    loop.run(2)
    assert loop.names() == set()


@pytest.mark.parametrize("is_written", [False, True])
def test_the_visible_weights_of_our_optimizers_are_followed(is_written: bool) -> None:
    loop = Loop(every=100, optimizer=ng.AdamW, storage="word", dtype=torch.bfloat16).run(4)
    if is_written:
        each_weight(lambda p: p.mul_(1.5))(loop)
    loop.run(1)
    assert loop.names() == ({"weights-scaled"} if is_written else set())


AVERAGES: dict[str, tuple[Callable[[Any, Any], None], set[str]]] = {
    "healthy": (lambda average, model: average.update_parameters(model), set()),
    "still": (lambda average, model: None, {"average-still"}),
    "a sum": (
        lambda average, model: [a.data.mul_(0.9).add_(p.data, alpha=0.2) for a, p in _pairs(average, model)],  # type: ignore[dict-item, func-returns-value]
        {"average-other"},
    ),
    "away from the weights": (
        lambda average, model: [a.data.mul_(1.1).sub_(p.data, alpha=0.1) for a, p in _pairs(average, model)],  # type: ignore[dict-item, func-returns-value]
        {"average-other"},
    ),
}


def _pairs(average: Any, model: Any) -> Any:
    return zip(average.parameters(), model.parameters(), strict=True)


@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_that_is_none_is_named(name: str) -> None:
    update, causes = AVERAGES[name]
    loop = Loop(every=0)
    average = AveragedModel(copy.deepcopy(loop.model), avg_fn=get_ema_avg_fn(0.9))
    average.update_parameters(loop.model)
    loop = Loop(every=2, task=task(averages=average))
    after = loop.after_update

    def both() -> None:
        after()
        update(average, loop.model)

    loop.after_update = both  # type: ignore[method-assign]
    loop.run(7)
    assert loop.names() == causes


@pytest.mark.parametrize("is_training", [False, True])
def test_an_evaluation_in_training_mode_is_named(is_training: bool) -> None:
    loop = Loop(dropout=0.1).run(2)
    loop.model.train(is_training)
    with torch.no_grad():
        loop.model(next(loop.data)[:, :-1])
    loop.model.train()
    loop.run(2)
    assert loop.names() == ({"evaluated-in-training"} if is_training else set())
    assert is_training is any("dropout" in each.where for each in loop.findings())


def test_an_average_that_begins_late_has_not_stood_still() -> None:
    loop = Loop(every=0)
    average = AveragedModel(loop.model)
    loop.watcher = StepWatcher(loop.model, loop.optimizer, 1, loop.keep, task(averages=average))
    update = loop.after_update

    def after_update() -> None:
        update()
        if loop.step > 6:
            average.update_parameters(loop.model)

    loop.after_update = after_update  # type: ignore[method-assign]
    assert not loop.run(10).findings()


def test_weights_that_are_written_on_purpose_are_declared() -> None:
    for declared, names in ((task(), {"weights-scaled"}), (task(weights="own"), set())):
        loop = Loop(every=2, task=declared)
        update = loop.after_update

        def after_update(loop: Loop = loop, update: Any = update) -> None:
            update()
            with torch.no_grad():
                for p in loop.model.parameters():
                    p.mul_(0.9)

        loop.after_update = after_update  # type: ignore[method-assign]
        assert loop.run(5).names() == names


def test_gradients_that_are_changed_on_purpose_are_declared() -> None:
    for declared, names in ((task(), {"gradient-departs"}), (task(gradient="own"), set())):
        loop = Loop(every=2, task=declared)

        def centralize(loop: Loop = loop) -> None:
            for p in loop.model.parameters():
                if p.ndim > 1:
                    p.grad.sub_(p.grad.mean(1, keepdim=True))

        loop.after_backward = centralize  # type: ignore[method-assign]
        assert loop.run(3).names() == names
        if not names:
            assert "on purpose" in unchecked(loop.results[2])["gradient"]


def test_weights_that_go_elsewhere_and_back_are_the_same() -> None:
    loop = Loop()
    before = loop.after_update

    def swap() -> None:
        before()
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.mul_(1.3).div_(1.3)

    loop.after_update = swap  # type: ignore[method-assign]
    loop.run(4)
    assert not loop.findings()
