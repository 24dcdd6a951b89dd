"""A step beside its rule: silence for every healthy optimizer and storage, and each fault by its
tensor and its number.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from gauges.recording.plain_loop import Loop
from narrowgauge.analysis.reading import Reading, joined
from narrowgauge.spec.storages import STORAGES


def ours(kind: Any, storage: str = "float32", **options: Any) -> dict[str, Any]:
    dtype = getattr(torch, STORAGES[storage].visible)
    return {"optimizer": kind, "storage": storage, "compile": False, "dtype": dtype, **options}


# The corpus of healthy loops has the other optimizers. Ours are judged by their audit.
HEALTHY: dict[str, dict[str, Any]] = {
    "adamw, bfloat16 weights": {"dtype": torch.bfloat16, "lr": 1e-2},
    "adamw, fused float16 whose eps is zero there": {"fused": True, "dtype": torch.float16},
    "adamw, uphill": {"maximize": True},
    "amsgrad": {"amsgrad": True},
    "adam, decay in the gradient": {"optimizer": torch.optim.Adam},
    "rmsprop": {"optimizer": torch.optim.RMSprop, "momentum": 0.5, "centered": True},
    "nadam": {"optimizer": torch.optim.NAdam},
    "sgd": {"optimizer": torch.optim.SGD, "momentum": 0.9, "dampening": 0.5},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_step_is_within_rounding(name: str) -> None:
    loop = Loop(**HEALTHY[name]).run(5)
    assert not loop.readings, loop.readings
    assert loop.watcher.num_compared == 3 * len(list(loop.model.parameters()))


@pytest.mark.parametrize("storage", ["word", "naive", "kahan", "states8"])
def test_gradients_of_any_size_are_healthy_for_our_storages(storage: str) -> None:
    loop = Loop(**ours(ng.AdamW, storage))
    loop.optimizer.on_alarm = lambda alarms: None
    plain = loop.loss
    loop.loss = lambda: 1e3 * plain()  # type: ignore[method-assign]
    assert not loop.run(5).readings


class Compiled(torch.optim.AdamW):
    """Its second step has the error of torch.compile(optimizer.step): bias corrections in float32."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 1 + 1e-5
        result = super().step(closure)
        for group in self.param_groups:
            group["lr"] /= 1 + 1e-5
        return result


def test_bias_corrections_in_float32_are_healthy() -> None:
    assert not Loop(optimizer=Compiled).run(3).readings


class InFewBits(torch.optim.AdamW):
    """Its second moments are kept in 8 bits: floats of two mantissa bits, or even steps."""

    is_even = False

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for state in self.state.values():
            moments = state["exp_avg_sq"]
            scale = moments.max() / 255 if self.is_even else moments.max() / 57344
            kept = (
                (moments / scale).round()
                if self.is_even
                else (moments / scale).to(torch.float8_e5m2)
            )
            moments.copy_(kept.to(moments.dtype) * scale)
        return result


class InEvenSteps(InFewBits):
    """Most second moments become zero."""

    is_even = True


@pytest.mark.parametrize(("kind", "is_fault"), [(InFewBits, False), (InEvenSteps, True)])
def test_a_state_in_few_bits_is_a_note_and_one_in_even_steps_is_a_fault(
    kind: Any, is_fault: bool
) -> None:
    loop = Loop(optimizer=kind).run(5)
    severities = {r.severity for r in loop.readings if r.what == "state"}
    assert "note" in severities and ("error" in severities) == is_fault, loop.readings


# ── faults ────────────────────────────────────────────────────────────────────────────────────────


def patched(change: Callable[[Any], Any]) -> Callable[[Loop], None]:
    """A fault inside the optimizer: its class is patched, so that settings and states differ from
    what it does.
    """

    def plant(loop: Loop) -> None:
        optimizer = loop.optimizer  # its own hook before a step comes after the watcher's
        optimizer.register_step_pre_hook(lambda *_: setattr(optimizer, "undo", change(optimizer)))
        handle = optimizer.register_step_post_hook(lambda *_: optimizer.undo())
        optimizer._optimizer_step_post_hooks.move_to_end(
            handle.id, last=False
        )  # before the watcher's

    return plant


def setting(**values: Any) -> Callable[[Any], Any]:
    """Within the step, groups have other settings than they say."""

    def change(optimizer: Any) -> Any:
        groups = optimizer.param_groups
        before = [{name: row[name] for name in values} for row in groups]
        for row in groups:
            row.update(values)
        return lambda: [row.update(old) for row, old in zip(groups, before, strict=True)]

    return change


def edited(
    edit: Callable[[Tensor, Tensor, dict[str, Any], dict[str, Any]], object],
    only: int | None = None,
) -> Any:
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


FAULTS: dict[str, tuple[Callable[[Any], Any], dict[str, float], str]] = {
    "rate of all": (setting(lr=2e-3), {"step-factor": 2.0}, ""),
    "rate of one": (edited(lambda p, w, *_: p.copy_(w + 1.1 * (p - w)), 3), {"step-factor": 1.1}, "blocks.0.up.weight"),
    "decay lost": (setting(weight_decay=0.0), {"weight-decay": 0.0}, ""),
    "beta1": (setting(betas=(0.8, 0.999)), {"state": 2.0}, ""),
    "frozen": (edited(lambda p, w, *_: p.copy_(w), 5), {"step-factor": 0.0}, "blocks.0.down.weight"),
    "narrow weights": (edited(lambda p, *_: p.copy_(p.bfloat16()), 3), {"weight": None}, "blocks.0.up.weight"),
    "narrow moments": (
        edited(lambda p, w, s, b: s["exp_avg"].copy_(s["exp_avg"].bfloat16()), 4), {"state": None}, "blocks.0.up.bias",
    ),
    "frozen moments": (
        edited(lambda p, w, s, b: s["exp_avg_sq"].copy_(b["exp_avg_sq"]), 2), {"state": 0.0}, "blocks.0.norm.bias",
    ),
    "squares summed": (
        edited(lambda p, w, s, b: s["exp_avg_sq"].copy_(0.999 * b["exp_avg_sq"] + p.grad.square())), {"state": 1000.0}, "",
    ),
    "half the rate, six times the decay": (
        setting(lr=5e-4, weight_decay=0.6), {"step-factor": 0.5, "weight-decay": 0.3}, "",
    ),
    "some rows": (edited(lambda p, w, *_: p[: len(p) // 4].copy_(w[: len(p) // 4]), 4), {"weight": None}, "blocks.0.up.bias"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_step_is_read_with_its_tensor_and_number(fault: str) -> None:
    change, numbers, tensor = FAULTS[fault]
    loop = Loop().run(2)
    assert not loop.readings
    patched(change)(loop)
    values = loop.run(1).numbers()
    assert set(values) == set(numbers), loop.readings
    for kind, value in numbers.items():
        assert value is None or math.isclose(values[kind], value, rel_tol=5e-3, abs_tol=1e-4), (
            values
        )
    if tensor:
        assert [reading.tensor for reading in loop.readings] == [tensor]


def test_a_count_that_moves_otherwise_than_by_one_or_begins_anew_is_read() -> None:
    for count in (9.0, 0.0):
        loop = Loop().run(4)
        for state in loop.optimizer.state.values():
            state["step"].fill_(count if count == 0 else 4.0)
        if count:
            patched(edited(lambda p, weight, state, before: state["step"].fill_(9.0)))(loop)
        assert loop.run(1).numbers()["step-count"] == (count or 1)


@pytest.mark.parametrize(
    "options", [{}, {"optimizer": torch.optim.SGD, "momentum": 0.9, "dampening": 0.5}], ids=str
)
def test_a_parameter_whose_first_gradient_comes_late_is_healthy(options: dict[str, Any]) -> None:
    loop = Loop(**options)
    loop.after_backward = lambda: setattr(loop.model.head.weight, "grad", None)
    loop.run(1).after_backward = lambda: None
    assert not loop.run(1).readings


# ── clipping and loss scaling ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("storage", ["float32", "word"])
def test_the_norm_that_clipping_leaves_is_compared_with_the_limit(storage: str) -> None:
    assert (
        not Loop(**ours(ng.AdamW, storage), max_grad_norm=0.25, watch={"max_grad_norm": 0.25})
        .run(4)
        .readings
    )
    loop = Loop(**ours(ng.AdamW, storage), max_grad_norm=0.25, watch={"max_grad_norm": 0.1}).run(2)
    assert math.isclose(loop.numbers()["clip-norm"], 0.25, rel_tol=1e-3)
    assert not Loop(clip=0.25, watch={"max_grad_norm": 0.25}).run(2).readings
    assert [r.what for r in Loop(watch={"max_grad_norm": 0.25}).run(2).readings] == ["clip-norm"]


@pytest.mark.parametrize("clips_first", [True, False])
def test_gradients_that_are_clipped_before_they_are_unscaled_are_read(clips_first: bool) -> None:
    loop = Loop(optimizer=torch.optim.SGD, watch={"max_grad_norm": 0.1})
    scaler = torch.amp.GradScaler("cpu", 1024.0)
    loss = loop.loss

    def after_backward() -> None:
        if not clips_first:
            scaler.unscale_(loop.optimizer)
        nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)

    loop.loss = lambda: scaler.scale(loss())  # type: ignore[method-assign]
    loop.after_backward = after_backward  # type: ignore[method-assign]
    loop.update = lambda: [scaler.step(loop.optimizer), scaler.update()]  # type: ignore[method-assign,assign]
    readings = loop.run(2).readings
    assert [r.what for r in readings] == ["clip-norm"] * clips_first
    assert not clips_first or "2^10 times" in readings[0].advice


def test_a_clipped_norm_that_its_format_rounds_up_is_no_reading() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    readings = list[Any]()
    watch = ng.watch(model, optimizer, max_grad_norm=0.3)
    watch._log = readings.append  # type: ignore[method-assign]
    for _ in range(3):
        model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)  # the nearest bfloat16 is 0.3008
        optimizer.step()
        optimizer.zero_grad()
    assert not readings


@pytest.mark.parametrize("by", ["torch", "torch, fused"])
def test_a_scaled_loss_is_unscaled_again(by: str) -> None:
    master = ours(ng.AdamW, "float16/master", max_grad_norm=0.25)
    loop = Loop(**{"fused": True} if "fused" in by else master, watch={"max_grad_norm": 100.0})
    scale_by_torch(loop)
    assert not loop.run(4).readings


def scale_by_torch(loop: Loop) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plain = loop.loss
    loop.loss = lambda: scaler.scale(plain())
    loop.update = lambda: (scaler.step(loop.optimizer), scaler.update())


@pytest.mark.parametrize(
    "options", [{"fused": True}, ours(ng.AdamW, "word", max_grad_norm=1.0)], ids=["fused", "ours"]
)
def test_a_skipped_step_is_not_compared(options: dict[str, Any]) -> None:
    loop = Loop(**options)
    if "fused" in options:
        scale_by_torch(loop)
    loop.run(1)
    loop.after_backward = lambda: loop.model.head.weight.grad.fill_(math.inf)
    loop.run(1)
    assert not [r for r in loop.readings if r.what != "nonfinite"]


# ── between two steps ─────────────────────────────────────────────────────────────────────────────


def each_weight(change: Callable[[Tensor], object]) -> Callable[[Loop], object]:
    return lambda loop: [change(p) for p in loop.model.parameters()]


WRITTEN: dict[str, tuple[Callable[[Loop], object], str, str]] = {
    "scaled": (each_weight(lambda p: p.mul_(0.99)), "weights-written", "multiplied by 0.99"),
    "narrow": (each_weight(lambda p: p.copy_(p.bfloat16())), "weights-written", "rounded to bfloat16"),
    "one element": (lambda loop: loop.model.head.weight[0, 0].add_(1.0), "weights-written", "% of the elements"),
    "lost states": (lambda loop: loop.optimizer.state.clear(), "states-written", "it is lost"),
    "other states": (
        lambda loop: [s["exp_avg"].mul_(1.5) for s in loop.optimizer.state.values()], "states-written", "exp_avg were changed",
    ),
    "the same again": (
        lambda loop: loop.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict())), "", "",
    ),
    "there and back": (each_weight(lambda p: p.mul_(1.3).div_(1.3)), "", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_after_a_compared_step_is_read(name: str) -> None:
    write, kind, words = WRITTEN[name]
    loop = Loop().run(3)
    with torch.no_grad():
        write(loop)
    between = [r for r in loop.run(1).readings if r.step == 3]
    assert {r.what for r in between} == ({kind} if kind else set())
    assert all(words in r.advice and r.stage == "between steps" for r in between)


def test_a_state_that_no_rule_reads_is_compared_between_two_steps() -> None:
    loop = Loop(amsgrad=True).run(3)
    for state in loop.optimizer.state.values():
        state["max_exp_avg_sq"].mul_(2)
    (reading,) = loop.run(1).readings
    assert reading.what == "states-written" and "max_exp_avg_sq were changed" in reading.advice


def scaled_rows(loop: Loop, last: int) -> Callable[[], None]:
    """After each step to the last, rows of matrices get a norm of 1, as nGPT's do."""

    def after_update() -> None:
        loop.optimizer.zero_grad()
        if loop.watcher._step <= last:
            for p in loop.model.parameters():
                if p.ndim == 2:
                    p.data.div_(p.data.norm(dim=1, keepdim=True))

    return after_update


def test_what_a_loop_writes_after_each_of_its_first_steps_is_a_note() -> None:
    loop = Loop()
    loop.after_update = scaled_rows(loop, 99)  # type: ignore[method-assign]
    readings = loop.run(5).readings
    assert {(r.what, r.severity) for r in readings} == {("weights-written", "note")}
    loop = Loop()
    loop.after_update = scaled_rows(loop, 1)  # type: ignore[method-assign]
    (reading,) = loop.run(5).readings
    assert (reading.severity, reading.step) == ("warning", 1)


@pytest.mark.parametrize("is_stepped", [True, False])
def test_a_new_parameter_that_no_optimizer_steps_is_read(is_stepped: bool) -> None:
    loop = Loop().run(4)
    head = nn.Parameter(loop.model.head.weight.detach().clone())
    loop.model.head.weight = head
    second_optimizer = torch.optim.SGD([head], lr=0.1)
    update = loop.update
    if is_stepped:
        loop.update = lambda: (update(), second_optimizer.step())  # type: ignore[method-assign,func-returns-value]
    readings = loop.run(3).readings
    assert {r.what for r in readings} == (set() if is_stepped else {"missing-parameters"})
    assert all(r.tensor == "head.weight" for r in readings)


def test_a_step_that_is_taken_back_is_read() -> None:
    loop = Loop().run(2)
    weights = copy.deepcopy(loop.model.state_dict())
    loop.run(1).model.load_state_dict(weights)
    assert "before the step again" in loop.run(1).readings[0].advice


def test_a_checkpoint_that_a_recorder_is_told_of_and_what_is_ignored_are_healthy() -> None:
    loop = Loop().run(2)
    saved = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict()))
    loop.run(2).model.load_state_dict(saved[0])
    loop.optimizer.load_state_dict(saved[1])
    loop.watcher.go_on_after(loop.watcher._step)
    assert not loop.run(2).readings
    loop = Loop(watch={"ignore": ["weights-written"]})
    loop.update = lambda: [
        loop.optimizer.step(),
        *(p.data.mul_(0.9) for p in loop.model.parameters()),
    ]  # type: ignore[method-assign,assign]
    assert not loop.run(5).readings
    with pytest.raises(ng.errors.RecipeError, match="weights-written"):
        Loop(watch={"ignore": ["weights-writen"]})


def test_the_first_step_after_a_checkpoint_is_compared() -> None:
    """microsoft/dion#104: a resume sets the count of steps to zero beside the old moments."""
    loop = Loop().run(5)
    for state in loop.optimizer.state.values():
        state["step"].zero_()
    loop.watcher.go_on_after(loop.watcher._step)
    assert [reading.what for reading in loop.run(2).readings] == ["step-count"]


def test_readings_of_one_factor_are_joined_whatever_its_last_digit() -> None:
    readings = [
        Reading(1, "gradient", name, "step-factor", 0.875 + 1e-7 * n, 1.0, 0.001)
        for n, name in enumerate("abc")
    ]
    (reading,) = joined([*readings, replace(readings[0], tensor="d", value=0.8749999)], 9)
    assert reading.tensor == "a and 3 others"
    assert len(joined([readings[0], replace(readings[0], value=1.25)], 9)) == 2
