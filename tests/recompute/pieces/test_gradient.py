"""Gradients computed again: what backward left, what became of it before the update, and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.recompute.capture import ParameterSample, StepCapture
from narrowgauge.recompute.departures import unchecked
from narrowgauge.recompute.kept_passes import KeptPasses
from narrowgauge.recompute.piece_results import DEPARTS, EQUAL, NOT_CHECKED
from narrowgauge.recompute.pieces.gradient import check_after_backward
from narrowgauge.recompute.step_watcher import StepWatcher
from narrowgauge.recompute.task import task
from recompute.audited_loop import Loop, next_token

HEALTHY: dict[str, dict[str, Any]] = {
    "plain": {},
    "one micro-batch": {"micro_batches": 1},
    "dropout": {"dropout": 0.2},
    "autocast": {"autocast": True},
    "bfloat16": {"dtype": torch.bfloat16, "lr": 1e-2},
    "clipped": {"clip": 0.5},
    "clipped and declared": {"clip": 0.5, "task": task(max_grad_norm=0.5)},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_gradient_is_equal_and_keeps_the_loops_bits(name: str) -> None:
    loop, alone = Loop(**HEALTHY[name]).run(5), Loop(every=0, **HEALTHY[name]).run(5)
    assert not loop.findings()
    for results in loop.results.values():
        gradients = [each for each in results if each.piece == "gradient"]
        assert [each.status for each in gradients] == [EQUAL] and 0 < gradients[0].envelope < 0.2, gradients
    assert torch.equal(loop.bits(), alone.bits())
    assert loop.watcher is not None and 0 < loop.watcher.nbytes < 1 << 24


def of_ours(parameters: Any, **settings: Any) -> Any:
    return ng.AdamW(parameters, storage="word", **settings)


@pytest.mark.parametrize("clip", [0.0, 0.1], ids=["", "clipped outside"])
@pytest.mark.parametrize(
    ("dtype", "sums", "optimizer"),
    [
        (torch.bfloat16, "float32", of_ours),
        (torch.bfloat16, "kahan", torch.optim.AdamW),
        (torch.float32, "float64", torch.optim.AdamW),
    ],
    ids=["word", "kahan", "float64"],
)
def test_gradients_that_are_summed_outside_of_grad_are_the_steps_own(
    clip: float, dtype: torch.dtype, sums: str, optimizer: Any
) -> None:
    """An accumulator takes each gradient away after its pass, and puts the sum back."""
    loop = Loop(every=1, micro_batches=4, dtype=dtype, clip=clip, optimizer=optimizer, lr=5e-2)
    accumulator = ng.GradientAccumulator(loop.model.parameters(), sums)
    backward = loop.backward

    def summed(tokens: torch.Tensor, number: int) -> None:
        backward(tokens, number)
        accumulator.accumulate()

    loop.backward, loop.after_backward = summed, accumulator.finish  # type: ignore[method-assign]
    loop.run(5)
    assert not loop.findings()
    gradients = [each for results in loop.results.values() for each in results if each.piece == "gradient"]
    assert len(gradients) == 4 and {each.status for each in gradients} == {EQUAL}
    if clip:
        clips = [each.status for results in loop.results.values() for each in results if each.piece == "clip"]
        assert clips == [NOT_CHECKED, EQUAL, EQUAL, EQUAL]  # one clipped step says no limit


@pytest.mark.parametrize("optimizer", [of_ours, torch.optim.AdamW], ids=["ours", "torch"])
def test_clipping_in_bfloat16_rounds_the_norm_and_the_factor(optimizer: Any) -> None:
    loop = Loop(every=1, dtype=torch.bfloat16, lr=1e-2, clip=0.1, optimizer=optimizer).run(6)
    assert not loop.findings()


@pytest.mark.parametrize(("large", "departs"), [(4096, True), (4, False)], ids=["alike", "four large ones"])
def test_a_factor_is_as_rough_as_the_few_elements_that_decide_it(large: int, departs: bool) -> None:
    """Each element that torch clips in bfloat16 is off by up to half a spacing, and few of them make no good mean."""
    spacing = torch.finfo(torch.bfloat16).eps
    plain = torch.full((4096,), 1e-4, dtype=torch.bfloat16)
    plain[:large] = 1.0

    def sample(name: str, gradient: torch.Tensor) -> ParameterSample:
        given = {"gradient": gradient, "gradient_eps": spacing, "computed": plain}
        return ParameterSample(name, plain.shape, torch.bfloat16, {}, plain, {}, **given)

    parameters = {name: sample(name, plain) for name in "abc"} | {
        "embedding": sample("embedding", plain * (1 + spacing))
    }
    found = check_after_backward(StepCapture(1, "adamw", parameters))
    assert [each.where for each in found if each.status == DEPARTS] == [("embedding",)] * departs


def test_removed_hooks_leave_nothing() -> None:
    loop = Loop().run(2)
    assert loop.watcher is not None
    loop.watcher.remove()
    loop.run(4)
    assert list(loop.results) == [2] and len(loop.results[2]) > 3
    assert not loop.model._forward_hooks and not loop.optimizer._optimizer_step_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in loop.model.parameters())


def fault(place: str) -> Callable[[Callable[[Loop], None]], Callable[[Loop], None]]:
    """A fault right after a place of the loop, or instead of it."""

    def decorate(function: Callable[[Loop], None]) -> Callable[[Loop], None]:
        def plant(loop: Loop) -> None:
            before = getattr(loop, place)

            def both(*args: Any) -> None:
                before(*args)
                function(loop)

            setattr(loop, place, both)

        return plant

    return decorate


def times(factor: float, only: int | None = None) -> Callable[[Loop], None]:
    def edit(loop: Loop) -> None:
        for place, p in enumerate(loop.model.parameters()):
            if only is None or place == only:
                assert p.grad is not None
                p.grad.mul_(factor)

    return fault("after_backward")(edit)


def in_backward(factor: float, name: str) -> Callable[[Loop], None]:
    """A hook on one parameter: what autograd itself leaves is wrong."""

    def plant(loop: Loop) -> None:
        dict(loop.model.named_parameters())[name].register_hook(lambda gradient: gradient * factor)

    return plant


def dropped(loop: Loop) -> None:
    backward = loop.backward

    def only_last(tokens: Any, number: int) -> None:
        loop.optimizer.zero_grad()
        backward(tokens, number)

    loop.backward = only_last  # type: ignore[method-assign]


def kept(loop: Loop) -> None:
    def not_zeroed() -> None:
        for p in loop.model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.3)

    loop.after_update = not_zeroed  # type: ignore[method-assign]


def narrow_sums(loop: Loop) -> None:
    """Gradients are rounded after each backward pass, as where each is added to a narrower sum."""
    backward = loop.backward

    def then_round(tokens: Any, number: int) -> None:
        backward(tokens, number)
        narrow_gradients(loop)

    loop.backward = then_round  # type: ignore[method-assign]


def narrow_gradients(loop: Loop) -> None:
    for p in loop.model.parameters():
        if p.grad is not None:
            p.grad.copy_(p.grad.bfloat16())


@fault("after_backward")
def lost(loop: Loop) -> None:
    loop.model.blocks[0].up.weight.grad.zero_()  # type: ignore[union-attr, operator]


@fault("after_backward")
def penalized(loop: Loop) -> None:
    for p in loop.model.parameters():
        if p.grad is not None:
            p.grad.add_(p.detach(), alpha=0.01)


@fault("after_backward")
def underflown(loop: Loop) -> None:
    """What float16 has as subnormal numbers is zero, as where they are flushed."""
    for p in loop.model.parameters():
        if p.grad is not None:
            p.grad[p.grad.abs() < torch.finfo(torch.float16).tiny] = 0.0


def never_filled_again(loop: Loop) -> None:
    """The optimizer reads a buffer that was filled once."""
    kept: dict[Any, torch.Tensor] = {}

    def read() -> None:
        for p in loop.model.parameters():
            if p.grad is not None:
                p.grad.copy_(kept.setdefault(p, p.grad.clone()))

    loop.after_backward = read  # type: ignore[method-assign]


def first_halved(loop: Loop) -> None:
    """What was accumulated is halved, and what is added to it is not."""
    backward = loop.backward

    def then_halve(tokens: Any, number: int) -> None:
        backward(tokens, number)
        if number == 0:
            for p in loop.model.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.5)

    loop.backward = then_halve  # type: ignore[method-assign]


@fault("after_backward")
def thrown_away(loop: Loop) -> None:
    loop.model.head.weight.grad = None


def frozen_in_the_passes(loop: Loop) -> None:
    weight, backward = loop.model.head.weight, loop.backward

    def without(tokens: Any, number: int) -> None:
        weight.requires_grad_(False)
        backward(tokens, number)
        weight.requires_grad_(True)

    loop.backward = without  # type: ignore[method-assign]


def cached(loop: Loop) -> None:
    weight = loop.model.head.weight.detach().clone()
    loop.model.head.forward = lambda x: x @ weight.t()  # type: ignore[method-assign]


def cached_and_penalized(loop: Loop) -> None:
    """The weight itself is in the loss alone, so that it has a gradient, and learns nothing."""
    cached(loop)
    backward = loop.backward

    def with_penalty(tokens: Any, number: int) -> None:
        backward(tokens, number)
        (0.05 * loop.model.head.weight.square().sum()).backward()

    loop.backward = with_penalty  # type: ignore[method-assign]


FAULTS: dict[str, tuple[Callable[[Loop], None], str, dict[str, Any]]] = {
    "all": (times(3.0), "gradient-scaled", {"factor": 3.0, "where": ""}),
    "micro-batches": (times(2.0), "gradient-scaled", {"factor": 2.0, "equals": "micro-batches"}),
    "one": (times(1.02, 4), "gradient-scaled", {"factor": 1.02, "where": "blocks.0.norm2.weight"}),
    "autograd": (
        in_backward(0.5, "blocks.1.qkv.weight"), "gradient-scaled", {"factor": 0.5, "where": "blocks.1.qkv.weight"},
    ),
    "first micro-batch": (dropped, "micro-batch-missing", {"missing": "1"}),
    "kept": (kept, "gradient-kept", {"share": 0.3}),
    "narrow": (fault("after_backward")(narrow_gradients), "gradient-narrow", {"format": "bfloat16"}),
    "narrow sums": (narrow_sums, "gradient-narrow", {"format": "bfloat16"}),
    "zero": (lost, "gradient-zero", {"where": "blocks.0.up.weight"}),
    "penalty": (penalized, "decay-in-gradient", {"value": 0.01}),
    "underflow": (underflown, "gradient-underflow", {"when": "after backward"}),
    "read once": (never_filled_again, "gradient-stale", {"share": 1.0, "where": ""}),
    "half of the first": (first_halved, "micro-batches-weighted", {"factors": "0.5, 1", "where": ""}),
    "thrown away": (thrown_away, "gradient-removed", {"where": "head.weight"}),
    "frozen in the passes": (frozen_in_the_passes, "gradient-missing", {"where": "head.weight"}),
    "copied weight": (cached, "unused", {"where": "head.weight"}),
    "copied weight with a penalty": (cached_and_penalized, "not-in-graph", {"where": "head.weight"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_gradient_is_named_with_its_size(name: str) -> None:
    plant, cause, values = FAULTS[name]
    loop = Loop(every=4).run(2)
    assert not loop.findings()
    plant(loop)
    loop.run(2)
    found = [each for each in loop.results[4] if each.status == "departs"]
    assert {each.cause for each in found} == {cause}, found
    known = {**found[0].values, "where": ", ".join(found[0].where)}
    for key, value in values.items():
        now = known[key]
        assert math.isclose(now, value, rel_tol=2e-2) if isinstance(value, float) else now == value, (key, now)


def test_more_micro_batches_than_were_declared_are_named() -> None:
    found = Loop(micro_batches=3, task=task(micro_batches=2)).run(2).findings()
    assert [each.name for each in found] == ["micro-batches-many"] and "3 micro-batches" in found[0].message
    assert not Loop(micro_batches=2, task=task(micro_batches=3)).run(2).findings(), "an epoch may end with fewer"


@pytest.mark.parametrize("is_declared", [False, True])
def test_a_term_beside_the_loss_is_named_or_declared(is_declared: bool) -> None:
    loop = Loop(task=task(auxiliary=is_declared))
    backward = loop.backward

    def with_penalty(tokens: Any, number: int) -> None:
        backward(tokens, number)
        (0.05 * loop.model.head.weight.square().sum()).backward()

    loop.backward = with_penalty  # type: ignore[method-assign]
    loop.run(2)
    assert loop.names() == (set() if is_declared else {"decay-in-gradient"})


@pytest.mark.parametrize("clip", [0.0, 0.25])
def test_a_factor_is_of_those_that_were_changed_and_not_of_the_others(clip: float) -> None:
    loop = Loop(clip=clip)
    vectors = {name for name, p in loop.model.named_parameters() if p.ndim == 1}
    assert len(vectors) * 2 > len(list(loop.model.parameters())), "they are the majority"

    def tripled() -> None:
        for name, p in loop.model.named_parameters():
            if name in vectors and p.grad is not None:
                p.grad.mul_(3.0)

    loop.after_backward = tripled  # type: ignore[method-assign]
    loop.run(2)
    found = [each for each in loop.results[2] if each.status == "departs"]
    if clip:  # two factors, neither 1: which part was changed is not to be seen
        assert [(each.cause, each.where) for each in found] == [("", ())]
    else:
        assert [(each.cause, set(each.where)) for each in found] == [("gradient-scaled", vectors)]


def test_a_parameter_that_is_held_by_reference_is_used() -> None:
    loop = Loop()
    weight = loop.model.head.weight
    loop.model.head.forward = lambda x: x @ weight.t()  # type: ignore[method-assign]
    loop.run(2)
    assert not loop.findings()


CLIPS: dict[str, tuple[Callable[[Loop], object], str]] = {
    "matrices alone": (
        lambda loop: _clip(loop, nn.utils.get_total_norm([p.grad for p in loop.model.parameters() if p.ndim > 1])),  # type: ignore[misc]
        "clip-norm",
    ),
    "sum of norms": (lambda loop: _clip(loop, sum(p.grad.norm() for p in loop.model.parameters())), "clip-norm"),  # type: ignore[union-attr]
    "each alone": (
        lambda loop: [nn.utils.clip_grad_norm_([p], 0.05) for p in loop.model.parameters()], "clip-each",
    ),
    "one alone, which is all that is above": (
        lambda loop: nn.utils.clip_grad_norm_([loop.model.head.weight], 0.25), "clip-each",
    ),
    "halves": (
        lambda loop: [nn.utils.clip_grad_norm_(half, 0.25) for half in _halves(loop)], "clip-norm",
    ),
    "not at all": (lambda loop: None, "clip-missing"),
    "another limit": (lambda loop: nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1), "clip-limit"),
    "values": (lambda loop: nn.utils.clip_grad_value_(loop.model.parameters(), 1e-3), "clip-values"),
}  # fmt: skip


def _halves(loop: Loop) -> tuple[list[Any], list[Any]]:
    parameters = list(loop.model.parameters())
    return parameters[:9], parameters[9:]


def _clip(loop: Loop, norm: Any) -> None:
    for p in loop.model.parameters():
        assert p.grad is not None
        p.grad.mul_(0.25 / (norm + 1e-6))


@pytest.mark.parametrize("name", CLIPS)
def test_a_fault_of_clipping_is_named(name: str) -> None:
    clip, cause = CLIPS[name]
    loop = Loop(every=4, clip=0.25, task=task(max_grad_norm=0.25)).run(2)
    assert not loop.findings()
    loop.clip_gradients = lambda: clip(loop)  # type: ignore[method-assign, assignment, return-value]
    loop.run(2)
    assert {each.name for each in loop.findings()} == {cause}, loop.results[4]


def scaled(is_unscaled: bool, limit: float | None) -> Loop:
    """A loop under a loss scale that doubles after five steps, with the gradients unscaled before they are clipped or not."""
    loop = Loop(task=task(max_grad_norm=limit))
    scaler, plain = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5), loop.loss
    loop.loss = lambda tokens: scaler.scale(plain(tokens))  # type: ignore[method-assign]

    def clip() -> None:
        if is_unscaled:
            scaler.unscale_(loop.optimizer)
        nn.utils.clip_grad_norm_(loop.model.parameters(), 0.25)

    loop.clip_gradients = clip  # type: ignore[method-assign]
    loop.update = lambda: (scaler.step(loop.optimizer), scaler.update())[1]  # type: ignore[method-assign, func-returns-value]
    return loop.run(8)


@pytest.mark.parametrize(("limit", "steps"), [(0.25, [2, 4, 6, 8]), (None, [6, 8])], ids=["declared", "not declared"])
def test_clipping_before_unscaling_is_named(limit: float | None, steps: list[int]) -> None:
    """Without a declared limit it is one like any other until the scale changes, and the limit with it."""
    assert not scaled(True, limit).findings()
    found = scaled(False, limit).findings()
    assert [(each.name, each.step) for each in found] == [("clip-norm", step) for step in steps]
    assert all("before their scale is taken off" in each.message for each in found)


@pytest.mark.parametrize("divisor", [65536.0, 3.0])
def test_a_divisor_before_clipping_is_no_limit(divisor: float) -> None:
    loop = Loop(task=task(max_grad_norm=0.25))
    times(1 / divisor)(loop)
    (found,) = [each for each in loop.run(2).results[2] if each.status == "departs"]
    assert found.cause == "gradient-scaled" and math.isclose(found.values["factor"], 1 / divisor, rel_tol=1e-6)


def test_weights_of_micro_batches_that_no_parameters_share_are_no_cause() -> None:
    """Each parameter's gradient is another mixture of the passes."""
    loop = Loop(micro_batches=2)
    before = loop.backward

    def mixed(tokens: torch.Tensor, number: int) -> None:
        before(tokens, number)
        if number == 0:
            for place, p in enumerate(loop.model.parameters(), 1):
                if p.grad is not None:
                    p.grad.mul_(1 + 0.1 * place)

    loop.backward = mixed  # type: ignore[method-assign]
    assert loop.run(2).names() == {"gradient-departs"}


def test_a_norm_little_above_the_limit_may_be_one_of_parts_until_no_step_is_clipped() -> None:
    norms: list[float] = []
    loop = Loop(every=0)
    loop.clip_gradients = lambda: norms.append(  # type: ignore[method-assign]
        float(nn.utils.get_total_norm([p.grad for p in loop.model.parameters() if p.grad is not None]))
    )
    loop.run(6)
    loop = Loop(every=2, task=task(max_grad_norm=0.95 * min(norms))).run(4)
    assert not loop.findings() and all("clip" in unchecked(results) for results in loop.results.values())
    assert loop.run(2).names() == {"clip-missing"}


def test_a_limit_that_is_not_declared_is_learnt_from_clipped_steps() -> None:
    loop = Loop(every=2, clip=0.25).run(2)
    assert "clip" in unchecked(loop.results[2]), "one clipped step says no limit"
    loop.run(4)
    assert not loop.findings()
    loop.clip_gradients = lambda: CLIPS["sum of norms"][0](loop)  # type: ignore[method-assign, assignment, return-value]
    loop.run(2)
    assert [each.piece for each in loop.results[8] if each.status == "departs"] == ["clip"]


def test_one_step_with_a_factor_says_no_limit_for_the_others() -> None:
    loop = Loop(every=2).run(2)
    clip = loop.clip_gradients
    loop.clip_gradients = lambda: [p.grad.mul_(0.4) for p in loop.model.parameters()]  # type: ignore[method-assign, assignment, return-value, union-attr]
    loop.run(2)
    loop.clip_gradients = clip  # type: ignore[method-assign]
    loop.run(4)
    assert "clip-missing" not in loop.names()


def test_a_norm_over_gradients_that_the_optimizer_does_not_have_is_not_judged() -> None:
    loop = Loop(every=2, clip=0.25, task=task(max_grad_norm=0.25))
    group = loop.optimizer.param_groups[0]
    group["params"] = [p for p in group["params"] if p is not loop.model.head.weight]
    loop.run(4)
    assert loop.names() == {"no-group"}
    assert "clip" in unchecked(loop.results[2])


def test_what_needs_the_model_is_not_checked_where_it_was_not_called() -> None:
    loop = Loop()

    def inner(tokens: torch.Tensor, number: int) -> None:
        model = loop.model
        x = model.embedding(tokens[:, :-1])
        next_token(model.head(model.norm(x)), tokens).backward()

    loop.backward = inner  # type: ignore[method-assign]
    loop.run(2)
    assert "gradient" in unchecked(loop.results[2]) and not loop.findings()


def test_a_step_whose_closure_makes_the_gradients_is_audited_with_the_same_bits() -> None:
    def run(every: int, fault: float) -> Loop:
        loop = Loop(every=every, micro_batches=1)

        def closure() -> Any:
            loop.optimizer.zero_grad()
            loss = loop.loss(next(loop.data))
            loss.backward()
            loop.model.head.weight.grad.mul_(fault)  # type: ignore[operator, union-attr]
            return loss

        loop.backward = lambda tokens, number: None  # type: ignore[method-assign]
        loop.update = lambda: loop.optimizer.step(closure)  # type: ignore[method-assign]
        loop.after_update = lambda: None  # type: ignore[method-assign]
        return loop.run(4)

    audited = run(2, 1.0)
    assert torch.equal(audited.bits(), run(0, 1.0).bits()) and not audited.findings()
    assert {"loss", "gradient", "update"} <= {each.piece for each in audited.results[4] if each.status == EQUAL}
    assert {(each.name, each.where) for each in run(4, 1.5).findings()} == {("gradient-scaled", "head.weight")}


@pytest.mark.parametrize("is_stuck", [False, True])
def test_the_rows_that_a_closure_takes_are_followed(is_stuck: bool) -> None:
    loop = Loop(every=10, micro_batches=1)
    kept = next(loop.data)

    def closure() -> Any:
        loop.optimizer.zero_grad()
        loss = loop.loss(kept if is_stuck and loop.step > 12 else next(loop.data))
        loss.backward()
        return loss

    loop.backward = lambda tokens, number: None  # type: ignore[method-assign]
    loop.update = lambda: loop.optimizer.step(closure)  # type: ignore[method-assign]
    loop.after_update = lambda: None  # type: ignore[method-assign]
    assert loop.run(30).names() == ({"rows-again"} if is_stuck else set())


@pytest.mark.parametrize(("of", "kept"), [(KeptPasses, "begin"), (KeptPasses, "end"), (StepWatcher, "_keep_gradient")])
def test_an_error_of_the_audits_own_hooks_is_a_reason_and_ends_no_run(
    of: type, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(of, kept, fail)
    loop = Loop().run(3)
    (found,) = (each for each in loop.results[2] if each.piece == "gradient" and each.status == NOT_CHECKED)
    assert found.values["why"] == "MemoryError: no room" and not loop.findings()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_step_that_the_loop_leaves_out_is_none_of_the_next(micro_batches: int, set_to_none: bool) -> None:
    """As a loss scaler leaves out a step whose gradients overflow: they are gone, and the passes of the next step follow."""
    loop = Loop(micro_batches=micro_batches)
    update = loop.update
    loop.update = lambda: None if loop.step in (4, 5, 9) else update()  # type: ignore[method-assign,func-returns-value]
    loop.after_update = lambda: loop.optimizer.zero_grad(set_to_none)  # type: ignore[method-assign]
    loop.run(12)
    assert loop.watcher is not None and loop.watcher.num_steps == 9
    assert not loop.findings()
    compared = [each for step in (4, 8) for each in loop.results[step] if each.piece in ("loss", "gradient")]
    assert compared and all(each.status == "equal" for each in compared), compared


def test_groups_that_are_clipped_alone_are_not_judged_without_a_limit_and_named_with_one() -> None:
    def two_groups(parameters: Any, **settings: Any) -> torch.optim.AdamW:
        own = list(parameters)
        return torch.optim.AdamW([{"params": own[:9]}, {"params": own[9:]}], **settings)

    def clipped(task: Any, limits: tuple[float, float]) -> Loop:
        loop = Loop(optimizer=two_groups, task=task)

        def each_group() -> None:
            for group, limit in zip(loop.optimizer.param_groups, limits, strict=True):
                torch.nn.utils.clip_grad_norm_(group["params"], limit)

        loop.clip_gradients = each_group  # type: ignore[method-assign]
        return loop.run(4)

    for limits in ((0.1, 0.1), (0.1, 1e3), (1e3, 0.1)):
        assert not clipped(None, limits).names() - {"clip-norm"}, limits
    assert clipped(ng.task(max_grad_norm=0.1), (0.1, 0.1)).names() == {"clip-norm"}


def test_passes_that_one_backward_pass_follows_are_all_of_the_step() -> None:
    """As of a loss over two batches; the first steps have one, so that the usual number of passes is one."""
    loop = Loop(micro_batches=1, every=4)
    backward = loop.backward

    def two(tokens: torch.Tensor, number: int) -> None:
        if loop.step == 4:
            (0.5 * loop.loss(tokens) + 0.5 * loop.loss(next(loop.data))).backward()  # type: ignore[call-overload]
        else:
            backward(tokens, number)

    loop.backward = two  # type: ignore[method-assign]
    loop.run(5)
    assert not loop.findings()
    compared = [each for each in loop.results[4] if each.piece in ("loss", "gradient")]
    assert compared and all(each.status == "equal" for each in compared), compared


def test_noise_on_all_elements_is_no_part_that_differs() -> None:
    loop = Loop()
    generator = torch.Generator().manual_seed(0)

    def noise() -> None:
        for parameter in loop.model.parameters():
            if parameter.grad is not None:
                size = parameter.grad.abs().mean() * 1e-3
                parameter.grad.add_(size * torch.randn(parameter.shape, generator=generator))

    loop.after_backward = noise  # type: ignore[method-assign]
    loop.run(4)
    assert loop.names() <= {"gradient-departs"}, loop.names()


def test_gradients_at_other_weights_are_not_those_of_the_step() -> None:
    """As sharpness-aware minimization takes them: up to the worst weights nearby, and back."""
    loop = Loop(micro_batches=1)

    def backward(tokens: torch.Tensor, number: int) -> None:
        params = list(loop.model.parameters())
        loop.loss(tokens).backward()
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in params if p.grad is not None]))
        moves = [0.05 * p.grad / norm for p in params if p.grad is not None]
        with torch.no_grad():
            torch._foreach_add_(params, moves)
        loop.optimizer.zero_grad()
        loop.loss(tokens).backward()
        with torch.no_grad():
            torch._foreach_sub_(params, moves)

    loop.backward = backward  # type: ignore[method-assign]
    loop.run(6)
    assert not loop.findings()


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    loop = Loop()
    plain = loop.model.head.forward
    loop.model.head.bias = nn.Parameter(torch.zeros(48))
    loop.optimizer.add_param_group({"params": [loop.model.head.bias]})
    loop.model.head.forward = lambda x: plain(x) + 0 * loop.model.head.bias  # type: ignore[method-assign, operator]
    loop.clip = 0.1
    loop.run(4)
    assert not loop.findings()


# ── a loss that is scaled by hand ─────────────────────────────────────────────────────────────────────────────────────────


def scaled_and_back(scale: float, limit: float, *, unscaled_first: bool = True, declared: bool = False) -> Loop:
    """A loop that multiplies its loss, and divides its gradients before or after they are clipped."""
    loop = Loop(every=1, task=task(max_grad_norm=limit) if declared else None)
    plain = loop.loss
    loop.loss = lambda tokens: scale * plain(tokens)  # type: ignore[method-assign]

    def divide() -> None:
        for p in loop.model.parameters():
            assert p.grad is not None
            p.grad /= scale

    def clip() -> None:
        if unscaled_first:
            divide()
        nn.utils.clip_grad_norm_(loop.model.parameters(), limit)
        if not unscaled_first:
            divide()

    loop.clip_gradients = clip  # type: ignore[method-assign]
    return loop.run(4)


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize(("scale", "limit"), [(1024.0, 0.1), (1024.0, 1e3), (3.0, 1e3)])
def test_a_loss_that_is_scaled_by_hand_and_back_is_healthy(scale: float, limit: float, declared: bool) -> None:
    loop = scaled_and_back(scale, limit, declared=declared)
    assert not loop.findings()
    assert {each.status for each in loop.results[4] if each.piece == "loss"} == {EQUAL}


def test_clipping_before_a_division_by_hand_is_named() -> None:
    loop = scaled_and_back(1024.0, 0.1, unscaled_first=False, declared=True)
    assert loop.names() == {"clip-norm"}
    (found, *_) = [each for results in loop.results.values() for each in results if each.cause == "clip-norm"]
    assert found.values["over"] == "scaled"


def test_a_factor_of_the_loss_that_stays_is_named() -> None:
    loop = Loop(every=1)
    plain = loop.loss
    loop.loss = lambda tokens: 1024 * plain(tokens)  # type: ignore[method-assign]
    assert loop.run(3).names() == {"loss-scaled"}
