"""The loss scale against one kept on paper; its limits, its memory, and that nobody waits for it."""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from covering import exhaustive
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.scaling import LossScaler
from oracles.accumulation import Scale

BAD, GOOD = torch.tensor(True), torch.tensor(False)
POLICIES: list[dict[str, Any]] = [
    {},
    {"initial": 2.0**10, "growth_interval": 1, "hysteresis": 1},
    {"initial": 4.0, "growth_interval": 3, "hysteresis": 2, "ceiling": 64.0},
    {"initial": 2.0**5, "growth_interval": 7, "hysteresis": 3, "growth_factor": 8.0, "ceiling": 2.0**7},
    {"initial": 2.0**8, "growth_interval": 5, "hysteresis": 2, "backoff_factor": 2.0**-3, "floor": 2.0**-2},
    {"initial": 2.0**-4, "growth_interval": 4, "hysteresis": 4, "floor": 2.0**-6, "ceiling": 2.0**3},
    {"initial": 1.0, "growth_factor": 1.0, "growth_interval": 2, "hysteresis": 1, "floor": 2.0**-3},
]


def on_paper(policy: dict[str, Any]) -> Scale:
    rules = {
        "initial": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "hysteresis": 2,
        "floor": 1.0, "ceiling": 2.0**24,
    }  # fmt: skip
    rules |= policy
    return Scale(rules.pop("initial"), **rules)


def after(scaler: LossScaler, overflows: list[bool]) -> float:
    for overflowed in overflows:
        scaler.update_(BAD if overflowed else GOOD)
    return float(scaler.scale_tensor)


# ── the rule ────────────────────────────────────────────────────────────────────────────────────────────────────────


@exhaustive("policy", POLICIES)
@exhaustive("share", [0.05, 0.5, 0.9])
def test_any_sequence_of_overflows_gives_the_scale_kept_on_paper(policy: dict[str, Any], share: float) -> None:
    scaler, paper, chance = LossScaler(**policy), on_paper(policy), random.Random(f"{policy} {share}")
    moved = set()
    for step in range(400):
        overflowed = chance.random() < share
        scaler.update_(BAD if overflowed else GOOD)
        paper.step(overflowed)
        assert scaler.state_dict() == paper.as_dict(), step
        moved.add(paper.scale)
    assert len(moved) > 1 or share < 0.5


def test_growth_comes_exactly_at_the_interval_and_an_overflow_starts_the_count_again() -> None:
    scaler = LossScaler(1024.0, growth_interval=5, hysteresis=2)
    assert after(scaler, [False] * 4) == 1024.0
    assert after(scaler, [False]) == 2048.0
    assert after(scaler, [False] * 4) == 2048.0
    assert after(scaler, [True]) == 2048.0  # one life spent
    assert after(scaler, [False] * 4) == 2048.0
    assert after(scaler, [False]) == 4096.0


def test_only_overflows_in_a_row_lower_the_scale() -> None:
    assert after(LossScaler(hysteresis=2), [True, False] * 50) == 2.0**16
    assert after(LossScaler(hysteresis=2), [True, True]) == 2.0**15
    # Lives are not brought back by backing off: what overflows on and on falls step by step.
    assert after(LossScaler(hysteresis=2), [True] * 5) == 2.0**12
    assert after(LossScaler(hysteresis=2), [True, True, False, True]) == 2.0**15
    assert after(LossScaler(hysteresis=1), [True, False, True]) == 2.0**14
    assert after(LossScaler(hysteresis=3), [True, True, False, True, True]) == 2.0**16


def test_the_scale_never_leaves_its_limits_and_never_becomes_zero() -> None:
    """``torch.amp.GradScaler`` is at 0.0 after 200 overflows from 2^16."""
    scaler = LossScaler()
    assert after(scaler, [True] * 200) == 1.0
    assert scaler.at_floor and math.isfinite(float(scaler.inverse))
    assert after(LossScaler(2.0**23, growth_interval=1, growth_factor=4.0), [False] * 50) == 2.0**24
    assert after(LossScaler(4.0, backoff_factor=2.0**-5, hysteresis=1, floor=0.5), [True]) == 0.5


def test_the_floor_is_reported_when_it_is_too_high() -> None:
    scaler = LossScaler(4.0, hysteresis=2)
    assert after(scaler, [True] * 3) == 1.0
    assert scaler.at_floor and scaler.report() is None  # reached, and not yet too high
    after(scaler, [True] * 2)
    message = scaler.report()
    assert message is not None and message.startswith("2 steps overflowed at the floor of the loss scale, 1,")
    assert "\n" not in message and "learning rate" in message
    scaler = LossScaler(2.0, hysteresis=1, growth_interval=1)
    after(scaler, [True, True])
    assert scaler.report() is not None
    assert after(scaler, [False]) == 2.0 and not scaler.at_floor and scaler.report() is None


def test_a_static_scale_stays_and_says_what_overflowed() -> None:
    scaler = LossScaler.static(1024.0)
    assert after(scaler, [False] * 3000) == 1024.0
    assert scaler.report() is None
    assert after(scaler, [True] * 30) == 1024.0
    assert scaler.num_overflows == 30
    assert "the static loss scale 1024" in (scaler.report() or "")


def test_any_kind_of_flag_is_understood() -> None:
    for bad in (torch.tensor(1.0), torch.tensor([True]), torch.tensor(3), torch.tensor(math.nan), torch.tensor([[-1]])):
        assert after_one(bad) == 0.5, bad
    for good in (torch.tensor(0.0), torch.tensor([False]), torch.tensor(0)):
        assert after_one(good) == 1.0, good


def after_one(flag: torch.Tensor) -> float:
    scaler = LossScaler(1.0, hysteresis=1, floor=0.25)
    scaler.update_(flag)
    return float(scaler.scale_tensor)


# ── what it is for ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_scaling_and_its_inverse_round_nothing() -> None:
    loss = torch.randn((), generator=torch.Generator().manual_seed(0), requires_grad=True)
    for exponent in range(-126, 127):
        scaler = LossScaler.static(2.0**exponent)
        assert float(scaler.inverse) == 2.0**-exponent
        if abs(exponent) < 100:
            scaled = scaler.scale(loss)
            assert torch.equal(scaled.detach() * scaler.inverse, loss.detach())
            (gradient,) = torch.autograd.grad(scaled, loss)
            assert float(gradient) == 2.0**exponent


def test_losses_in_lists_and_tuples_are_scaled_each() -> None:
    scaler, losses = LossScaler.static(8.0), [torch.tensor(1.0), torch.tensor(2.0, dtype=torch.bfloat16)]
    assert [float(x) for x in scaler.scale(losses)] == [8.0, 16.0]
    assert isinstance(scaler.scale(tuple(losses)), tuple)
    assert float(losses[0]) == 1.0


def test_small_gradients_survive_in_float16_and_the_scale_finds_its_place() -> None:
    """A gradient of 2^-30 is nothing in float16; scaled it comes back exactly, and a larger one ends the growth."""
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    slopes = torch.tensor([2.0**-30, 2.0**-4])

    def gradient(scaler: LossScaler | None) -> torch.Tensor:
        loss = (weight.float() * slopes).sum()
        weight.grad = None
        (scaler.scale(loss) if scaler else loss).backward()
        assert weight.grad is not None
        return weight.grad.float()

    assert gradient(None).tolist() == [0.0, 2.0**-4]
    scaler = LossScaler(1.0, growth_interval=1, hysteresis=1)
    for _ in range(40):
        slope = gradient(scaler)
        if torch.isfinite(slope).all() and float(scaler.scale_tensor) >= 2.0**6:
            assert torch.equal(slope * scaler.inverse, slopes)
        scaler.update_(~torch.isfinite(slope).all())
    # 2^20 * 2^-4 is past 65504.
    assert float(scaler.scale_tensor) in (2.0**19, 2.0**20)


def test_nobody_waits_for_the_device() -> None:
    """Under FakeTensorMode there are no values, and whoever asks for one fails."""
    with FakeTensorMode():
        scaler = LossScaler()
        scaler.scale(torch.empty((), requires_grad=True)).backward()
        for flag in (torch.empty((), dtype=torch.bool), torch.empty(1)):
            scaler.update_(flag)
        assert scaler.inverse.shape == ()
        with pytest.raises(DataDependentOutputException):
            _ = scaler.at_floor


def test_updates_are_in_place_and_counters_narrow() -> None:
    scaler = LossScaler(hysteresis=1)
    held, dtypes = scaler.scale_tensor, [value.dtype for value in scaler._state.values()]
    after(scaler, [True])
    assert scaler.scale_tensor is held and float(held) == 2.0**15
    assert dtypes == [torch.float32, *[torch.int32] * 4]
    assert [value.dtype for value in scaler._state.values()] == dtypes


def test_the_scale_lives_where_the_first_loss_does() -> None:
    scaler = LossScaler()
    scaler.scale(torch.empty((), device="meta"))
    assert scaler.scale_tensor.device.type == "meta"
    assert LossScaler(device="meta").scale_tensor.device.type == "meta"
    scaler = LossScaler(device="cpu")
    assert scaler.scale(torch.empty((), device="meta")).device.type == "meta"
    assert scaler.scale_tensor.device.type == "cpu"


# ── what is kept, and what is refused ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("way", ["json", "pickle", "deepcopy", "torch.save"])
def test_a_saved_state_goes_on_as_if_never_saved(way: str, tmp_path: Any) -> None:
    chance = random.Random(3)
    sequence = [chance.random() < 0.4 for _ in range(120)]
    policy: dict[str, Any] = {"initial": 256.0, "growth_interval": 4, "hysteresis": 3}
    whole, first = LossScaler(**policy), LossScaler(**policy)
    after(whole, sequence)
    after(first, sequence[:53])
    if way == "json":
        second = LossScaler(**policy)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    elif way == "pickle":
        second = pickle.loads(pickle.dumps(first))
    elif way == "torch.save":
        torch.save(first.state_dict(), tmp_path / "state.pt")
        second = LossScaler(**policy)
        second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    else:
        second = copy.deepcopy(first)
    assert second.state_dict() == first.state_dict()
    after(second, sequence[53:])
    assert second.state_dict() == whole.state_dict()
    assert first.state_dict() != whole.state_dict()  # a copy, not the same tensors


def test_a_state_is_plain_numbers() -> None:
    kinds = {name: type(value) for name, value in LossScaler().state_dict().items()}
    assert kinds.pop("scale") is float and set(kinds.values()) == {int}


def test_a_state_saved_under_a_longer_interval_still_grows() -> None:
    scaler = LossScaler(growth_interval=100)
    after(scaler, [False] * 50)
    shorter = LossScaler(growth_interval=10)
    shorter.load_state_dict(scaler.state_dict())
    assert after(shorter, [False]) == 2.0**17


@exhaustive(
    ("change", "words"),
    [
        ({"scale": 3.0}, "power of two"),
        ({"scale": 0.0}, "power of two"),
        ({"scale": 2.0**30}, "outside|was given to a scaler"),
        ({"lives": None}, "no 'lives'"),
    ],
)
def test_a_state_that_cannot_be_is_refused_and_changes_nothing(change: dict[str, Any], words: str) -> None:
    scaler = LossScaler()
    before = scaler.state_dict()
    state = {name: value for name, value in (before | change).items() if value is not None}
    with pytest.raises(RecipeError, match=words):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before
    with pytest.raises(RecipeError, match="was given to a scaler"):
        LossScaler.static(64.0).load_state_dict(before)


@exhaustive("name", ["initial", "growth_factor", "backoff_factor", "floor", "ceiling"])
@exhaustive("value", [0.0, -2.0, 3.0, 1.5, 0.1, math.nan, math.inf, 2.0**127, 2.0**-127])
def test_what_is_no_power_of_two_is_refused(name: str, value: float) -> None:
    with pytest.raises(RecipeError, match=rf"{name} = .*power of two"):
        LossScaler(**{name: value})


def test_the_nearest_power_of_two_is_offered() -> None:
    with pytest.raises(RecipeError, match="Take 1024"):
        LossScaler.static(1000.0)


@exhaustive(
    "options",
    [
        {"growth_factor": 0.5},
        {"backoff_factor": 2.0},
        {"floor": 2.0**17},
        {"ceiling": 2.0**15},
        {"growth_interval": 0},
        {"hysteresis": 0},
        {"hysteresis": 1.5},
        {"growth_interval": True},
    ],
)
def test_limits_that_contradict_each_other_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RecipeError):
        LossScaler(**options)
