"""The optimizer among others: tied, frozen and late weights, groups, torch's own hooks and schedules, a scaled loss.

None of this looks at what a rule computes or a storage keeps, so it is asked of a few pairs.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from optim.pairs import build, everything, parameters
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


def test_tied_weights_are_one() -> None:
    """As ``named_parameters`` gives them, and given twice, of which torch warns: clipped, stepped and counted once."""
    rule, storage = "adamw", "word"
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


# ── torch's own optimizer ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_wrong_group_leaves_the_optimizer_as_it_was() -> None:
    optimizer = build("adamw", parameters("word"), "word")
    for group in ({"params": parameters("float32")}, {"params": parameters("exact"), "storage": "exakt"}):
        with pytest.raises(ng.errors.RecipeError):
            optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    take_steps(optimizer, range(1))


@pytest.mark.parametrize(("rule", "storage"), [("adamw", "word"), ("muon", "kahan")])
def test_steps_have_the_same_bits_under_any_default_dtype(rule: str, storage: str) -> None:
    """A default dtype is the user's to choose: no step may depend on it."""
    found = []
    for dtype in (torch.float32, torch.float64):
        optimizer = build(rule, parameters(storage), storage, max_grad_norm=0.5, audit_every=3)
        slopes = [step_gradients(parameters_of(optimizer), step) for step in range(3)]
        torch.set_default_dtype(dtype)
        try:
            for step in slopes:
                for p, slope in zip(parameters_of(optimizer), step, strict=True):
                    p.grad = slope
                optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        assert optimizer.last_audit is not None
        found.append({**everything(optimizer), "audit": optimizer.last_audit})
    assert_same_bits(*found)


# ── a scaled loss ───────────────────────────────────────────────────────────────────────────────────────────────────

SCALED = [
    ("adamw", "float16/split", "ours"), ("lion", "float16/split", "torch's"),
    ("adamw", "float16/split", "torch's, ours idle"),
    ("adamw", "float32", "torch's, unscaled before"),  # which torch does for float32 alone
]  # fmt: skip


@pytest.mark.parametrize(("rule", "storage", "kind"), SCALED)
def test_an_overflow_is_a_step_attempted_and_not_taken(rule: str, storage: str, kind: str) -> None:
    """The same bits as without a scale, with a schedule that counts all four steps and a rule that counts three."""
    scaler = ng.LossScaler(2.0**6, hysteresis=1) if "ours" in kind else None
    ours = scaler if kind == "ours" else None
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    scaled = build(rule, parameters(storage), storage, loss_scaler=scaler)
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
    if "idle" in kind:
        assert scaler is not None and scaler.state_dict() == ng.LossScaler(2.0**6, hysteresis=1).state_dict()
    assert_same_bits(everything(scaled), everything(plain))


@pytest.mark.filterwarnings("ignore:optimizer contains")
def test_a_parameter_that_is_listed_twice_takes_no_others_name() -> None:
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = ng.AdamW([("first", first), ("first", first), ("second", second)], storage="float32", compile=False)
    assert optimizer.parameter_names() == {first: "first", second: "second"}
