"""The optimizer among others: tied, frozen and late weights, groups, torch's own hooks and schedules, a scaled loss.

None of this looks at what a rule computes or a storage keeps, so it is asked of a few pairs.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from optim.pairs import FEW, RULES, Shape, build, everything, parameters
from tensors import assert_same_bits, parameters_of, step_gradients, take_steps

# ── weights: tied, frozen, late, in groups ──────────────────────────────────────────────────────────────────────────


class Tied(nn.Module):
    """An embedding whose weight is also the output's."""

    def __init__(self, storage: str) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(12, 10), nn.Linear(10, 12, bias=False)
        self.embedding.weight = self.output.weight = parameters(storage, [(12, 10)])[0]

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.output(self.embedding(tokens))
        return output.float().square().mean()


@FEW
def test_tied_weights_are_one(rule: str, storage: str) -> None:
    """As ``named_parameters`` gives them, and given twice, of which torch warns: clipped, stepped and counted once."""
    model, plain = Tied(storage), parameters(storage, [(12, 10)])
    optimizer, twin = (build(rule, p, storage, max_grad_norm=0.1) for p in (model.named_parameters(), plain))
    names = Tied(storage).named_parameters(remove_duplicate=False)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        doubled = build(rule, list(names), storage, max_grad_norm=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.arange(4) + step).backward()
        for each in (twin, doubled):
            parameters_of(each)[0].grad = parameters_of(optimizer)[0].grad
        for each in (optimizer, twin, doubled):
            each.step()
    assert model.embedding.weight is model.output.weight
    for each in (optimizer, doubled):
        assert_same_bits(everything(twin), everything(each))
        assert list(each.parameter_names().values()) == ["embedding.weight"]


@FEW
def test_frozen_weights_stay_and_may_thaw(rule: str, storage: str) -> None:
    optimizer = build(rule, parameters(storage), storage)
    first, *rest = parameters_of(optimizer)
    first.requires_grad_(False)
    before = first.detach().clone()
    for step in range(2):
        for p, gradient in zip(rest, step_gradients(rest, step), strict=True):
            p.grad = gradient
        optimizer.step()
    assert torch.equal(first, before) and 0 not in optimizer.state_dict()["state"]
    first.requires_grad_(True)
    take_steps(optimizer, range(2, 3))
    assert [float(optimizer.state_dict()["state"][k]["step"]) for k in range(3)] == [1.0, 3.0, 3.0]
    assert not torch.equal(optimizer.stored(first), before.float())


@FEW
def test_parameters_added_later_are_as_if_there_from_the_start(rule: str, storage: str) -> None:
    late = {"lr": 0.05, "storage": "exact"} if storage != "float16/split" else {"lr": 0.05}
    grown, whole = build(rule, parameters(storage)[:2], storage), build(rule, parameters(storage)[:2], storage)
    whole.add_param_group({"params": parameters(storage)[2:], **late})
    take_steps(grown, range(2))
    for step in range(2):
        for p, gradient in zip(parameters_of(whole), step_gradients(parameters_of(grown), step), strict=False):
            p.grad = gradient
        whole.step()
    grown.add_param_group({"params": parameters(storage)[2:], **late})
    for optimizer in (grown, whole):
        take_steps(optimizer, range(2, 4))
    assert_same_bits(everything(grown), everything(whole))


@FEW
def test_groups_are_optimizers_of_their_own(rule: str, storage: str) -> None:
    options = [{"lr": 0.3}, {"lr": 0.01, "maximize": True}, {"lr": 0.0, "seed": 5}]
    together = build(
        rule, [{"params": [p], **mine} for p, mine in zip(parameters(storage), options, strict=True)], storage
    )
    apart = [build(rule, [p], storage, **mine) for p, mine in zip(parameters(storage), options, strict=True)]
    for step in range(3):
        slopes = step_gradients(parameters_of(together), step)
        for p, gradient in zip(parameters_of(together), slopes, strict=True):
            p.grad = gradient
        together.step()
        for optimizer, gradient in zip(apart, slopes, strict=True):
            parameters_of(optimizer)[0].grad = gradient
            optimizer.step()
    whole = everything(together)
    for k, optimizer in enumerate(apart):
        mine = {name.replace("0 ", f"{k} ", 1): value for name, value in everything(optimizer).items()}
        assert_same_bits(mine, {name: value for name, value in whole.items() if name.startswith(f"{k} ")})


# ── torch's own optimizer ───────────────────────────────────────────────────────────────────────────────────────────


@FEW
def test_a_tensor_rate_and_a_schedule(rule: str, storage: str) -> None:
    """A rate is read at each step; a schedule changes a tensor in place."""
    plain = build(rule, parameters(storage), storage, lr=0.25)
    moved = build(rule, parameters(storage), storage, lr=torch.tensor(0.25))
    for optimizer in (plain, moved):
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(3):
            take_steps(optimizer, range(step, step + 1))
            schedule.step()
    rates = [optimizer.param_groups[0]["lr"] for optimizer in (plain, moved)]
    assert rates == [2.0**-5, 2.0**-5] and isinstance(rates[1], Tensor)
    assert_same_bits(everything(plain), everything(moved))


@FEW
def test_before_the_first_step_there_is_no_state(rule: str, storage: str) -> None:
    optimizer = build(rule, parameters(storage), storage)
    assert optimizer.defaults.items() >= {**RULES[rule].options, "storage": storage, "maximize": False}.items()
    assert optimizer.param_groups[0].items() >= optimizer.defaults.items()
    assert not optimizer.state and optimizer.state_dict()["state"] == {}
    assert ng.audit(optimizer) == {} and optimizer.num_skipped == 0
    assert all(torch.equal(optimizer.stored(p), p.detach().float()) for p in parameters_of(optimizer))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()  # no step_gradients at all
    optimizer.zero_grad()
    assert not optimizer.state


def test_states_are_numbered_in_the_order_of_the_parameters() -> None:
    """However steps join them: large and small ones, odd ones and vectors take turns here."""
    shapes: list[Shape] = [(3,), (80, 64), (3, 3), (), (64, 80), (5,)]
    optimizer = build("adamw", parameters("word", shapes), "word")
    for p in parameters_of(optimizer)[::-1]:  # states come to be in another order
        p.grad = torch.ones_like(p)
        optimizer.step()
    state = optimizer.state_dict()["state"]
    assert [float(state[k]["step"]) for k in range(6)] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    for k, shape in enumerate(shapes):
        assert {tuple(value.shape) for name, value in state[k].items() if name != "step"} == {shape}


def test_hooks_around_a_step_are_called() -> None:
    optimizer, called = build("adamw", parameters("word"), "word"), []
    before = optimizer.register_step_pre_hook(lambda mine, args, kwargs: called.append(("pre", mine, args, kwargs)))
    optimizer.register_step_post_hook(lambda mine, args, kwargs: called.append(("post", mine, args, kwargs)))
    take_steps(optimizer, range(1))
    assert called == [("pre", optimizer, (optimizer,), {}), ("post", optimizer, (optimizer,), {})]
    before.remove()
    take_steps(optimizer, range(1))
    assert [name for name, *_ in called] == ["pre", "post", "post"]


@FEW
def test_hooks_around_a_state_see_and_change_all_of_it(rule: str, storage: str) -> None:
    optimizer = build(rule, parameters(storage), storage)
    take_steps(optimizer, range(2))
    plain, seen = optimizer.state_dict(), []

    def renamed(mine: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "state": {str(k): entry for k, entry in state["state"].items()}}

    def undone(mine: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "state": {int(k): entry for k, entry in state["state"].items()}}

    twin = build(rule, [nn.Parameter(p.detach().clone()) for p in parameters_of(optimizer)], storage)
    optimizer.register_state_dict_pre_hook(lambda mine: seen.append("before"))
    optimizer.register_state_dict_post_hook(renamed)
    twin.register_load_state_dict_pre_hook(undone)
    twin.register_load_state_dict_post_hook(lambda mine: seen.append(mine.state_dict()["state"].keys()))
    saved = optimizer.state_dict()
    assert list(saved["state"]) == ["0", "1", "2"]
    for k, entry in plain["state"].items():
        assert_same_bits(entry, saved["state"][str(k)])
    twin.load_state_dict(saved)
    assert seen == ["before", plain["state"].keys()]


# ── a scaled loss ───────────────────────────────────────────────────────────────────────────────────────────────────

SCALED = [
    *((rule, storage, scaler) for rule, storage in (("adamw", "float16/split"), ("lion", "float16/split"),
      ("adamw", "float16/master"), ("sgd", "float32")) for scaler in ("ours", "torch's")),
    ("adamw", "float32", "torch's, unscaled before"),  # which torch does for float32 alone
]  # fmt: skip


@pytest.mark.parametrize(("rule", "storage", "kind"), SCALED)
def test_an_overflow_is_a_step_attempted_and_not_taken(rule: str, storage: str, kind: str) -> None:
    """The same bits as without a scale, with a schedule that counts all four steps and a rule that counts three."""
    ours = ng.LossScaler(2.0**6, hysteresis=1) if kind == "ours" else None
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    scaled = build(rule, parameters(storage), storage, loss_scaler=ours)
    plain = build(rule, parameters(storage), storage, max_grad_norm=math.inf)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (scaled, plain)]
    for step in range(4):
        slopes = step_gradients(parameters_of(plain), step)
        if step == 1:
            slopes[2] *= math.inf
        scaled.zero_grad()
        for p, q, slope in zip(parameters_of(scaled), parameters_of(plain), slopes, strict=True):
            q.grad = slope
            loss = (p * slope).float().sum()
            (ours or theirs).scale(loss).backward()
        if ours is not None:
            scaled.step()
        else:
            if "before" in kind:
                theirs.unscale_(scaled)
            theirs.step(scaled)
            theirs.update()
        plain.step()
        for schedule in schedules:
            schedule.step()
    # Where GradScaler unscales step_gradients itself, it does not even ask for a step that overflowed.
    asked = ours is not None or storage != "float32"
    assert (scaled.last_overflow, scaled.num_skipped) == ((["param 2"], 1) if asked else ([], 0))
    assert [schedule.last_epoch for schedule in schedules] == [4, 4]
    assert float(scaled.state_dict()["state"][0]["step"]) == 3.0
    assert (ours.scale_tensor.item() if ours is not None else theirs.get_scale()) == 2.0**5
    assert_same_bits(everything(scaled), everything(plain))
