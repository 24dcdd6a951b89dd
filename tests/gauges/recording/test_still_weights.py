"""Trained weights that a recorded loop leaves as they were: an event at its end, and the cause that the diagnosis names."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.is_detached = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        y: Tensor = self.second(hidden.detach() if self.is_detached else hidden)
        return y


def still(folder: Path, change: Callable[[_Two], object], steps: int = 12, **given: Any) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = _Two()
    change(model)
    make = given.pop("optimizer", lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2))
    optimizer = make(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ng.RunNotice)
        with ng.RunRecorder(folder, model, optimizer, **given) as recorder:
            for _ in range(steps):
                loss = (model(torch.randn(4, 8).to(model.first.weight.dtype)) - 1).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.step(loss)
    return [event for event in ng.read_run(folder).events if event.get("detector") == "standing-still"]


def detach(model: _Two) -> None:
    model.is_detached = True


def test_a_detached_layer_is_told_at_the_end_and_named(tmp_path: Path) -> None:
    (event,) = still(tmp_path / "run", detach)
    assert event["tensor"] == "weight:first.weight" and event["value"] == 2.0 and event["step"] == 12
    assert event["message"].startswith("first.weight and 1 more trained weights are, to the bit,")
    found = ng.diagnose(ng.read_run(tmp_path / "run")).findings
    assert [each.cause.name for each in found] == ["frozen-parameter"]


HEALTHY: dict[str, tuple[Callable[[_Two], object], dict[str, Any]]] = {
    "all learn": (lambda model: None, {}),
    "frozen on purpose": (lambda model: model.first.requires_grad_(False), {}),
    "not in the optimizer": (detach, {"optimizer": lambda model: torch.optim.SGD(model.second.parameters(), lr=0.1)}),
    "without a rate": (
        detach,
        {
            "optimizer": lambda model: torch.optim.SGD(
                [{"params": model.first.parameters(), "lr": 0.0}, {"params": model.second.parameters()}], lr=0.1
            )
        },
    ),
    "rounded away": (lambda model: model.bfloat16(), {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1e-9)}),
    "few steps": (detach, {"steps": 9}),
    "no fingerprints": (detach, {"fingerprints_every": 0}),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_told_where_it_may_be_meant_or_rounded(tmp_path: Path, name: str) -> None:
    change, given = HEALTHY[name]
    assert not still(tmp_path / "run", change, **given)


def test_the_optimizer_of_another_model_is_told(tmp_path: Path) -> None:
    other = _Two()
    (event,) = still(
        tmp_path / "run", lambda model: None, optimizer=lambda model: torch.optim.SGD(other.parameters(), lr=0.1)
    )
    assert event["value"] == 4.0
