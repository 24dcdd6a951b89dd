"""The audit where parameters and batches lie on another device than the CPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import narrowgauge as ng
from narrowgauge.recompute.piece_results import EQUAL
from narrowgauge.recompute.step_watcher import StepWatcher
from recompute.audited_loop import Loop
from recompute.pretended_device import DEVICE, Elsewhere, PretendedDevice, move


@pytest.fixture(autouse=True)
def of_a_real_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch knows no autocast and no stream of the pretended device, and tensors on it usually have no values."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: False)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: SimpleNamespace(stream_id=0))
    monkeypatch.setattr("narrowgauge.optim.optimizer.check_real", lambda parameter: None)


def torch_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, foreach=False)


def there(
    plant: Callable[[Loop], None] = lambda loop: None,
    clip: float = 1.0,
    dtype: torch.dtype = torch.float32,
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch_adamw,
) -> Loop:
    with PretendedDevice():
        loop = Loop(every=0, clip=clip, dtype=dtype)
        move(loop.model)
        loop.optimizer = optimizer(loop.model.parameters())
        loop.watcher = StepWatcher(loop.model, loop.optimizer, 2, loop.keep)
        batches = loop.data
        loop.data = (Elsewhere(tokens) for tokens in batches)
        plant(loop)
        return loop.run(5)


def test_tensors_of_two_devices_do_not_mix() -> None:
    with PretendedDevice(), pytest.raises(RuntimeError, match="same device"):
        Elsewhere(torch.ones(2, dtype=torch.float32)) + torch.ones(2, dtype=torch.float32)


@pytest.mark.parametrize("clip", [0.0, 0.1], ids=["plain", "clipped"])
def test_every_piece_of_a_healthy_step_is_computed_again(clip: float) -> None:
    loop = there(clip=clip)
    assert all(p.device == DEVICE for p in loop.model.parameters())
    assert not loop.findings()
    pieces = {"loss", "forward", "gradient", "clip", "data", "update", "between"}
    assert {each.piece: each.status for each in loop.results[4]} == dict.fromkeys(pieces, EQUAL), loop.results[4]


@pytest.mark.parametrize("storage", ["word", "compact", "master"])
def test_the_update_of_our_own_optimizers_is_too(storage: str) -> None:
    loop = there(
        dtype=torch.bfloat16,
        optimizer=lambda params: ng.AdamW(params, storage=storage, lr=1e-3, compile=False),
        clip=0.0,
    )
    assert not loop.findings()
    pieces = ("gradient", "clip", "update", "between")
    assert [each.status for each in loop.results[4] if each.piece in pieces] == [EQUAL] * 4, loop.results[4]


def scaled(loop: Loop) -> None:
    loop.after_backward = lambda: loop.model.head.weight.grad.mul_(1.5)  # type: ignore[method-assign, union-attr]


def written(loop: Loop) -> None:
    before = loop.after_update

    def after_update() -> None:
        before()
        with torch.no_grad():
            loop.model.head.weight.mul_(1.01)

    loop.after_update = after_update  # type: ignore[method-assign]


@pytest.mark.parametrize(("plant", "name"), [(scaled, "gradient-scaled"), (written, "weights-scaled")])
def test_a_fault_is_named(plant: Callable[[Loop], None], name: str) -> None:
    assert there(plant).names() == {name}
