"""An optimizer's step computed again: equal for every healthy optimizer, and each fault by its own name and size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import narrowgauge as ng
from narrowgauge.recompute.piece_results import EQUAL, NOT_CHECKED
from narrowgauge.recompute.task import task
from recompute.audited_loop import Loop

HEALTHY: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw, bfloat16 weights": {"dtype": torch.bfloat16, "lr": 1e-2},
    "adamw, one tensor at a time": {"foreach": False},
    "adamw, fused": {"fused": True},
    "adam": {"optimizer": torch.optim.Adam},
    "sgd": {"optimizer": torch.optim.SGD, "lr": 0.1},
    "sgd with momentum": {"optimizer": torch.optim.SGD, "lr": 0.1, "momentum": 0.9, "nesterov": True},
    "ours": {"optimizer": ng.AdamW, "storage": "float32"},
    "lion": {"optimizer": ng.Lion, "storage": "float32", "lr": 1e-4},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_step_is_equal_to_rounding(name: str) -> None:
    loop = Loop(**HEALTHY[name]).run(5)
    updates = [each for results in loop.results.values() for each in results if each.piece == "update"]
    assert [each.status for each in updates] == [EQUAL, EQUAL], updates
    assert all(0 < each.difference <= each.envelope for each in updates), "rounding was not met: the test is empty"
    assert not loop.findings()


@pytest.mark.parametrize("options", [{"optimizer": torch.optim.RMSprop}, {"amsgrad": True, "lr": 1e-2}], ids=str)
def test_nothing_is_said_of_an_optimizer_without_a_definition(options: dict[str, Any]) -> None:
    loop = Loop(**options).run(6)
    assert [each.status for each in loop.results[6] if each.piece == "update"] == [NOT_CHECKED]
    assert not loop.findings()


def patched(change: Callable[[Any], Any]) -> Callable[[Loop], None]:
    """A fault inside the optimizer: its class is patched, so that settings and states differ from what it does."""

    def plant(loop: Loop) -> None:
        optimizer = loop.optimizer

        def begin(*_: Any) -> None:
            optimizer.undo = change(optimizer)

        def end(*_: Any) -> None:
            optimizer.undo()

        optimizer.register_step_pre_hook(begin)  # after the audit's
        handle = optimizer.register_step_post_hook(end)
        optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # before the audit's

    return plant


def setting(**values: Any) -> Callable[[Any], Any]:
    """Within the step, all groups have other settings than they say."""

    def change(optimizer: Any) -> Any:
        before = [{name: group[name] for name in values} for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group.update(values)

        def undo() -> None:
            for group, old in zip(optimizer.param_groups, before, strict=True):
                group.update(old)

        return undo

    return change


def edited(edit: Callable[[Tensor, Tensor, dict[str, Any], dict[str, Any]], object], only: int | None = None) -> Any:
    """After the step, parameters are edited: (parameter, weight before, state, state before)."""

    def change(optimizer: Any) -> Any:
        chosen = [p for group in optimizer.param_groups for p in group["params"]]
        chosen = chosen if only is None else [chosen[only]]
        weights = [p.detach().clone() for p in chosen]
        states = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in chosen]

        def undo() -> None:
            with torch.no_grad():
                for p, weight, state in zip(chosen, weights, states, strict=True):
                    edit(p, weight, optimizer.state[p], state)

        return undo

    return change


def test_a_parameter_that_is_never_stepped_is_named_and_the_others_are_compared() -> None:
    """Its gradient is hidden from the optimizer, which keeps no states of it."""

    def hide(optimizer: Any) -> Any:
        parameter = optimizer.param_groups[0]["params"][3]
        gradient, parameter.grad = parameter.grad, None
        return lambda: setattr(parameter, "grad", gradient)

    loop = Loop()
    patched(hide)(loop)
    loop.run(3)
    found = [each for each in loop.results[2] if each.piece == "update"]
    assert [(each.status, each.cause, len(each.where)) for each in found] == [("departs", "frozen", 1)], found


def scaled(factor: float) -> Any:
    return lambda p, weight, state, before: p.copy_(weight + factor * (p - weight))


def counted(number: int) -> Callable[[Any], Any]:
    def change(optimizer: Any) -> Any:
        states = list(optimizer.state.values())
        before = [state["step"].clone() for state in states]
        for state in states:
            state["step"].fill_(number)

        def undo() -> None:
            for state, count in zip(states, before, strict=True):
                state["step"].copy_(count + 1)

        return undo

    return change


def other_step(divisor: Callable[[Tensor, float], Tensor], eps: float = 1e-8) -> Any:
    """AdamW's step with another divisor than root + eps."""

    def edit(p: Tensor, weight: Tensor, state: dict[str, Any], before: dict[str, Any]) -> None:
        count = int(state["step"])
        first = state["exp_avg"].double() / (1 - 0.9**count)
        root = (state["exp_avg_sq"].double() / (1 - 0.999**count)).sqrt()
        p.copy_(weight.double() * (1 - 1e-4) - 1e-3 * first / divisor(root, eps))

    return edit


def corrected_by(correct: Callable[[Tensor, float, int], Tensor]) -> Any:
    """AdamW's step with other corrections of the moments' bias."""

    def edit(p: Tensor, weight: Tensor, state: dict[str, Any], before: dict[str, Any]) -> None:
        first = correct(state["exp_avg"].double(), 0.9, int(state["step"]))
        second = correct(state["exp_avg_sq"].double(), 0.999, int(state["step"]))
        p.copy_(weight.double() * (1 - 1e-4) - 1e-3 * first / (second.sqrt() + 1e-8))

    return edited(edit)


def beside_decay(factor: float) -> Any:
    """The gradient's part of the step is multiplied, and weight decay is as given."""
    kept = 1 - 1e-4
    return edited(lambda p, weight, *_: p.copy_(kept * weight + factor * (p - kept * weight)))


def zeroed(name: str) -> Any:
    return edited(lambda p, weight, state, before: state[name].zero_())


def gradients_of_the_step_before() -> Callable[[Any], Any]:
    kept: dict[Tensor, Tensor] = {}

    def change(optimizer: Any) -> Any:
        own = {p: p.grad for group in optimizer.param_groups for p in group["params"]}
        for p, gradient in own.items():
            p.grad = kept.get(p, gradient)
        kept.update(own)

        def undo() -> None:
            for p, gradient in own.items():
                p.grad = gradient

        return undo

    return change


FAULTS: dict[str, tuple[Callable[[Any], Any], str, dict[str, Any]]] = {
    "rate of all": (setting(lr=2e-3), "rate", {"factor": 2.0}),
    "rate of one": (edited(scaled(1.1), 3), "rate", {"factor": 1.1}),
    "decay lost": (setting(weight_decay=0.0), "decay-lost", {}),
    "decay": (setting(weight_decay=0.3), "decay", {"value": 0.3}),
    "eps": (setting(eps=1e-5), "eps", {"value": 1e-5}),
    "beta1": (setting(betas=(0.8, 0.999)), "beta", {"value": 0.8}),
    "beta2": (setting(betas=(0.9, 0.95)), "beta", {"value": 0.95}),
    "sign": (setting(maximize=True), "gradient-scaled", {"factor": -1.0}),
    "frozen": (edited(lambda p, weight, state, before: p.copy_(weight), 5), "frozen", {}),
    "scaled weights": (edited(lambda p, *_: p.mul_(3.0)), "weights-scaled", {"factor": 3.0}),
    "count": (counted(0), "step-count", {"count": 1}),
    "narrow weights": (edited(lambda p, *_: p.copy_(p.bfloat16())), "weight-narrow", {"format": "bfloat16"}),
    "narrow moments": (
        edited(lambda p, w, state, before: state["exp_avg"].copy_(state["exp_avg"].bfloat16())),
        "state-narrow",
        {"format": "bfloat16", "state": "exp_avg"},
    ),
    "frozen moments": (
        edited(lambda p, w, state, before: state["exp_avg_sq"].copy_(before["exp_avg_sq"]), 2),
        "state-frozen",
        {"state": "exp_avg_sq"},
    ),
    "zeroed moments": (zeroed("exp_avg"), "state-zero", {"state": "exp_avg"}),
    "zeroed squares": (zeroed("exp_avg_sq"), "state-zero", {"state": "exp_avg_sq"}),
    "moments begun anew": (
        edited(lambda p, w, state, before: state["exp_avg"].copy_(p.grad).mul_(0.1)), "state-lost", {"state": "exp_avg"},
    ),
    "gradients of the step before": (gradients_of_the_step_before(), "gradient-stale", {"share": 1.0}),
    "squares summed": (
        edited(lambda p, w, state, before: state["exp_avg_sq"].copy_(0.999 * before["exp_avg_sq"] + p.grad.square())),
        "state-other-factors",
        {"state": "exp_avg_sq", "kept": 0.999, "taken": 1.0},
    ),
    "up the gradient": (beside_decay(-1.0), "sign", {}),
    "half of the step": (beside_decay(0.5), "step-scaled", {"factor": 0.5}),
    "decay alone": (beside_decay(0.0), "step-lost", {}),
    "half the rate and six times the decay": (
        setting(lr=5e-4, weight_decay=0.6), "rate-and-decay", {"factor": 0.5, "value": 0.6},
    ),
    "bias as it is": (corrected_by(lambda t, beta, n: t), "no-bias-correction", {"of": "both"}),
    "bias of the mean as it is": (
        corrected_by(lambda t, beta, n: t if beta == 0.9 else t / (1 - beta**n)), "no-bias-correction", {"of": "exp_avg"},
    ),
    "bias of the squares as it is": (
        corrected_by(lambda t, beta, n: t if beta != 0.9 else t / (1 - beta**n)), "no-bias-correction", {"of": "exp_avg_sq"},
    ),
    "bias multiplied": (
        corrected_by(lambda t, beta, n: t * (1 - beta**n)), "correction-other", {"by": "* (1 - beta**step)"},
    ),
    "one minus twice": (
        corrected_by(lambda t, beta, n: t / beta**n), "correction-other", {"by": "/ beta**step"},
    ),
    "bias of another beta2": (
        corrected_by(lambda t, beta, n: t / (1 - min(beta, 0.95) ** n)),
        "correction-other",
        {"by": "/ (1 - 0.95**step)"},
    ),
    "epsilon subtracted": (edited(other_step(lambda root, eps: root - eps)), "eps", {"value": -1e-8}),
    "decay without the weight": (
        edited(lambda p, weight, *_: p.add_(weight, alpha=1e-4).sub_(1e-4)), "decay-of-other", {"value": 0.1, "term": "1"},
    ),
    "decay of signs": (
        edited(lambda p, weight, *_: p.add_(weight, alpha=1e-4).sub_(weight.sign(), alpha=1e-4)),
        "decay-of-other",
        {"value": 0.1, "term": "sign(weight)"},
    ),
    "some rows": (
        edited(lambda p, weight, *_: p[: len(p) // 4].copy_(weight[: len(p) // 4]), 4), "part", {"share": 0.25},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_step_is_named_with_its_size(fault: str) -> None:
    change, cause, values = FAULTS[fault]
    loop = Loop(every=4)
    loop.run(2)
    assert not loop.findings()
    patched(change)(loop)
    loop.run(2)
    found = [each for each in loop.results[4] if each.cause == cause]
    assert found, loop.results[4]
    assert {each.cause for each in loop.results[4] if each.cause} == {cause}
    for name, value in values.items():
        now = found[0].values[name]
        assert math.isclose(now, value, rel_tol=5e-3) if isinstance(value, float) else now == value, (name, now)
    if fault in ("rate of one", "frozen", "frozen moments", "some rows"):
        assert len(found[0].where) == 1


def test_a_step_that_is_no_variant_of_the_rule_has_no_name() -> None:
    """Where the second moment is small beside eps, such a step is near several variants by chance, another of each parameter."""
    loop = Loop(every=4, eps=1e-2).run(2)
    patched(edited(other_step(lambda root, eps: root.pow(4) + eps, 1e-2)))(loop)
    loop.run(2)
    found = loop.findings()
    assert found and {each.name for each in found} == {"update-departs"}, found


def test_a_parameter_that_groups_list_twice_is_named() -> None:
    loop = Loop()
    loop.optimizer.param_groups[0]["params"].append(loop.model.head.weight)
    (found,) = loop.run(2).findings()
    assert (found.name, found.where) == ("listed-often", "head.weight") and " 2 times" in found.message


def test_a_step_along_the_momentum_before_it_is_named() -> None:
    def sgd(parameters: Any, **settings: Any) -> torch.optim.SGD:
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)

    loop = Loop(every=4, optimizer=sgd).run(2)
    assert not loop.findings()
    patched(edited(lambda p, weight, state, before: p.copy_(weight - 1e-3 * before["momentum_buffer"])))(loop)
    assert loop.run(2).names() == {"stale-moment"}


def test_the_rate_of_another_group_is_named() -> None:
    def two_groups(parameters: Any, **settings: Any) -> torch.optim.AdamW:
        own = list(parameters)
        return torch.optim.AdamW([{"params": own[:9]}, {"params": own[9:], "lr": 1e-4}], **settings)

    loop = Loop(every=4, optimizer=two_groups).run(2)
    patched(setting(lr=1e-3))(loop)
    loop.run(2)
    (found,) = [each for each in loop.results[4] if each.status == "departs"]
    assert (found.cause, found.values["group"], found.values["of"]) == ("rate-of-other-group", 1, 0)
    assert len(found.where) == len(loop.optimizer.param_groups[1]["params"])


def test_a_step_that_bfloat16_rounds_away_is_a_note() -> None:
    found = Loop(dtype=torch.bfloat16, lr=1e-3).run(2).findings()
    assert [(each.name, each.severity, each.value) for each in found] == [("lost-in-dtype", "note", 1.0)]
    assert "norm" in found[0].where and "qkv.weight" not in found[0].where


def test_a_parameter_of_no_group_is_named() -> None:
    loop = Loop()
    loop.optimizer.param_groups[0]["params"].pop()
    loop.run(3)
    assert [(each.name, each.where) for each in loop.findings()] == [("no-group", "head.weight")]


@pytest.mark.parametrize("has_gradient", [False, True])
def test_a_frozen_parameter_that_decays_is_named(has_gradient: bool) -> None:
    loop = Loop()
    head = loop.model.head.weight.requires_grad_(False)

    def zeros() -> None:
        head.grad = torch.zeros_like(head) if has_gradient else None

    loop.after_backward = zeros  # type: ignore[method-assign]
    loop.run(2)
    assert loop.names() == ({"frozen-moves"} if has_gradient else set())


def test_a_group_that_is_removed_or_replaced_later_ends_no_run() -> None:
    loop = Loop().run(2)
    half = loop.optimizer.param_groups[0]["params"]
    loop.optimizer.add_param_group({"params": [half.pop()], "lr": 1e-4})
    loop.run(2)
    del loop.optimizer.param_groups[0]
    loop.run(3)
    assert loop.names() == {"no-group"} and 6 in loop.results


def test_declared_decay_groups_are_compared() -> None:
    assert not Loop(task=task(decay_groups="all")).run(2).findings()
    found = Loop(task=task(decay_groups="matrices")).run(2).findings()
    assert [each.name for each in found] == ["decay-unwanted"] and "norm" in found[0].where
    found = Loop(task=task(decay_groups="matrices-not-embeddings")).run(2).findings()
    assert "embedding.weight" in found[0].where


def test_a_matrix_without_its_declared_decay_is_named() -> None:
    def without_head(parameters: Any, **settings: Any) -> torch.optim.AdamW:
        *matrices, head = (p for p in parameters if p.ndim > 1)
        return torch.optim.AdamW([{"params": matrices}, {"params": [head], "weight_decay": 0.0}], **settings)

    loop = Loop(optimizer=without_head, task=task(decay_groups="matrices"))
    for p in loop.model.parameters():
        p.requires_grad_(p.ndim > 1)
    assert [(each.name, each.where) for each in loop.run(2).findings()] == [("decay-wanted", "head.weight")]


def test_a_declared_setting_that_groups_do_not_have_is_named() -> None:
    (found,) = Loop(task=task(settings={"betas": (0.9, 0.95), "eps": 1e-8})).run(2).findings()
    assert found.name == "setting-other" and "betas = (0.9, 0.999)" in found.message


def test_an_unknown_declaration_is_refused() -> None:
    with pytest.raises(ng.NarrowgaugeError, match="decay_groups 'matrics'"):
        task(decay_groups="matrics")
