"""The audit where parameters and batches lie on another device than the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from narrowgauge.recompute.piece_results import EQUAL
from narrowgauge.recompute.step_watcher import StepWatcher
from recompute.audited_loop import Loop
from recompute.pretended_device import DEVICE, Elsewhere, PretendedDevice, move


@pytest.fixture(autouse=True)
def without_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch knows no autocast of the pretended device."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: False)


def there(plant: Callable[[Loop], None] = lambda loop: None, clip: float = 1.0) -> Loop:
    with PretendedDevice():
        loop = Loop(every=0, clip=clip)
        move(loop.model)
        loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-3, weight_decay=0.1, foreach=False)
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
