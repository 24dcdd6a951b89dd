"""A Mac's GPU is refused at every door, in one line; no Mac is needed, since fake tensors may be on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import narrowgauge as ng
from narrowgauge.errors import ChipError
from narrowgauge.matmul.experts import GroupedLinear
from narrowgauge.numerics.devices import require_float64
from narrowgauge.spec.computes import COMPUTES

WHY = r"device 'mps' was requested, a Mac's GPU, which has no float64.*Train on the Mac's CPU"


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def model_on(device: str) -> nn.Module:
    """Of two linear layers, which nothing initializes: a fake tensor takes no random numbers there."""
    layers = [nn.Linear(32, 32, bias=False, device="meta") for _ in range(2)]
    for layer in layers:
        layer.weight = nn.Parameter(torch.empty(32, 32, dtype=torch.bfloat16, device=device))
    return nn.Sequential(*layers)


@pytest.mark.parametrize(
    "optimizer", [ng.AdamW, ng.Adam, ng.SGD, ng.Lion, ng.Muon, ng.Adafactor, ng.optim.GaLore, ng.optim.GradNormLoRP]
)
def test_optimizers_refuse_a_parameter_on_mps_and_stay_as_they_were(optimizer: Callable[..., ng.Optimizer]) -> None:
    weights = [nn.Parameter(torch.empty(8, 8, dtype=torch.bfloat16, device=device)) for device in ("mps", "cpu")]
    with pytest.raises(ChipError, match=WHY):
        optimizer(weights, lr=1e-3)
    made = optimizer(weights[1:], lr=1e-3)
    with pytest.raises(ChipError, match=WHY):
        made.add_param_group({"params": weights[:1]})
    assert [group["params"] for group in made.param_groups] == [weights[1:]]


def test_a_parameter_on_mps_that_takes_the_place_of_another_is_not_stepped() -> None:
    weight, moved = (nn.Parameter(torch.empty(8, 8, dtype=torch.bfloat16, device=device)) for device in ("cpu", "mps"))
    optimizer = ng.AdamW([weight], lr=1e-3)
    optimizer.param_groups[0]["params"] = [moved]
    moved.grad = torch.empty_like(moved)
    with pytest.raises(ChipError, match=WHY):
        optimizer.step()


DOORS: dict[str, Callable[[nn.Module, torch.optim.Optimizer, Path], object]] = {
    "prepare": lambda model, optimizer, folder: ng.prepare(model, "bfloat16/word"),
    "swap_linears": lambda model, optimizer, folder: ng.swap_linears(model, "float8-row"),
    "swap_experts": lambda model, optimizer, folder: ng.matmul.swap_experts(model, "int8-row"),
    "quantize_for_inference": lambda model, optimizer, folder: ng.quantize_for_inference(model),
    "GradientAccumulator": lambda model, optimizer, folder: ng.GradientAccumulator(model.parameters()),
    "attach_gauges": lambda model, optimizer, folder: ng.attach_gauges(model, optimizer),
    "RunRecorder": lambda model, optimizer, folder: ng.RunRecorder(folder / "run", model, optimizer),
    "check": lambda model, optimizer, folder: ng.check(model, optimizer),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_model_on_mps_is_refused_and_left_alone(door: str, tmp_path: Path) -> None:
    model = model_on("mps")
    with pytest.raises(ChipError, match=WHY):
        DOORS[door](model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    assert [type(layer) for layer in model] == [nn.Linear] * 2  # type: ignore[attr-defined]
    assert not list(tmp_path.iterdir())


def test_a_narrow_layer_is_not_moved_to_mps() -> None:
    layer = GroupedLinear(4, "experts", COMPUTES["int8-row"])  # has buffers alone: fake parameters cannot be moved
    with pytest.raises(ChipError, match=WHY):
        layer.to_empty(device="mps")


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta", "xpu"])
def test_other_devices_pass(device: str) -> None:
    require_float64([Tensor(), None, torch.empty(2, device=device)])
