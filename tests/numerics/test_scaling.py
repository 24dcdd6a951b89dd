"""The loss scale against one kept on paper; its limits, its memory, and that nobody waits for it."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import torch

from narrowgauge.numerics.scaling import LossScaler
from oracles.accumulation import Scale
from tables import exhaustive

BAD = torch.tensor(True)
GOOD = torch.tensor(False)
POLICIES: list[dict[str, Any]] = [
    {},
    {"initial": 2.0**10, "growth_interval": 1, "hysteresis": 1},
    {"initial": 4.0, "growth_interval": 3, "hysteresis": 2},
    {"initial": 2.0**5, "growth_interval": 7, "hysteresis": 3},
    {"initial": 2.0**22, "growth_interval": 4, "hysteresis": 4},
]


def after(scaler: LossScaler, overflows: list[bool]) -> float:
    for overflowed in overflows:
        scaler.update_(BAD if overflowed else GOOD)
    return float(scaler.scale_tensor)


@exhaustive("policy", POLICIES)
@exhaustive("share", [0.05, 0.5, 0.9])
def test_any_sequence_of_overflows_gives_the_scale_kept_on_paper(
    policy: dict[str, Any], share: float
) -> None:
    scaler = LossScaler(**policy)
    chance = random.Random(f"{policy} {share}")
    paper = Scale(
        **{"scale" if name == "initial" else name: value for name, value in policy.items()}
    )
    moved = set()
    for step in range(400):
        overflowed = chance.random() < share
        scaler.update_(BAD if overflowed else GOOD)
        paper.step(overflowed)
        assert scaler.state_dict() == paper.as_dict(), step
        moved.add(paper.scale)
    assert len(moved) > 1 or share < 0.5


def test_the_scale_never_leaves_its_limits_and_never_becomes_zero() -> None:
    """``torch.amp.GradScaler`` is at 0.0 after 200 overflows from 2^16."""
    scaler = LossScaler()
    assert after(scaler, [True] * 200) == 1.0
    assert "floor of the loss scale" in (scaler.report() or "")
    recovered = LossScaler(1.0, growth_interval=1, hysteresis=1)
    assert after(recovered, [True, False]) == 2.0 and recovered.report() is None


def test_scaling_rounds_nothing() -> None:
    loss = torch.randn((), generator=torch.Generator().manual_seed(0), requires_grad=True)
    for exponent in range(25):
        scaled = LossScaler(2.0**exponent).scale(loss)
        assert torch.equal(scaled.detach() * 2.0**-exponent, loss.detach())
        (gradient,) = torch.autograd.grad(scaled, loss)
        assert float(gradient) == 2.0**exponent


def test_a_saved_state_goes_on_as_if_never_saved() -> None:
    chance = random.Random(3)
    sequence = [chance.random() < 0.4 for _ in range(120)]
    policy: dict[str, Any] = {"initial": 256.0, "growth_interval": 4, "hysteresis": 3}
    uninterrupted, first, second = (LossScaler(**policy) for _ in range(3))
    after(uninterrupted, sequence)
    after(first, sequence[:53])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    copied = copy.deepcopy(first)
    for scaler in (second, copied):
        after(scaler, sequence[53:])
        assert scaler.state_dict() == uninterrupted.state_dict()
    assert first.state_dict() != uninterrupted.state_dict()  # copies, not the same tensors


def test_a_state_saved_under_a_longer_interval_grows_at_the_next_good_step() -> None:
    scaler = LossScaler(4.0, growth_interval=2)
    scaler.load_state_dict({**scaler.state_dict(), "good_steps": 5})
    assert after(scaler, [False]) == 8.0
