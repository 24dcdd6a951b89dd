"""Storages of float64: the update beside torch's in float64, and what users read, write and load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.spec.storages import STORAGES
from tensors import bits, gaussian

SHAPES = [(33, 17), (5,)]
float64_storages = pytest.mark.parametrize("storage", ["float64", "master64"])


def start(storage: str, **options: Any) -> tuple[list[nn.Parameter], ng.AdamW]:
    """Parameters of odd sizes and their optimizer, at a rate of which float32 would round each
    step.
    """
    dtype = getattr(torch, STORAGES[storage].visible)
    parameters = []
    for k, shape in enumerate(SHAPES):
        parameters.append(nn.Parameter(gaussian(*shape, seed=k, dtype=dtype)))
    return parameters, ng.AdamW(
        parameters,
        lr=1e-5,
        betas=(0.9, 0.999),
        weight_decay=0.1,
        storage=storage,
        **{"low_bits": "zero", **options},
    )


def step(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, number: int) -> None:
    for k, p in enumerate(parameters):
        narrow = gaussian(*p.shape, seed=100 * number + k, scale=0.01, dtype=torch.bfloat16)
        p.grad = narrow.to(p.dtype)
    optimizer.step()


@float64_storages
@pytest.mark.parametrize(
    ("name", "options"),
    [("AdamW", {}), ("Adam", {"weight_decay": 0.1}), ("SGD", {"momentum": 0.9})],
)
def test_torch_in_float64_is_equal_to_fourteen_digits(
    storage: str, name: str, options: dict[str, Any]
) -> None:
    parameters, _ = start(storage)
    wide = [nn.Parameter(p.detach().double()) for p in parameters]
    optimizer = getattr(ng, name)(
        parameters, lr=1e-3, storage=storage, low_bits="zero", audit_every=3, **options
    )
    reference = getattr(torch.optim, name)(wide, lr=1e-3, **options)
    for t in range(20):
        step(parameters, optimizer, t)
        step(wide, reference, t)
    for p, exact in zip(parameters, wide, strict=True):
        stored = optimizer.stored(p)
        torch.testing.assert_close(stored, exact.detach(), rtol=0, atol=1e-14)
        assert torch.equal(p, stored.float().to(p.dtype))
        assert {value.dtype for name, value in optimizer.state[p].items() if name != "step"} == {
            torch.float64
        }
    for reading in ng.audit(optimizer).values():
        assert reading.edq == pytest.approx(1, abs=1e-12)


@float64_storages
def test_adopted_values_are_kept_in_float64_nan_included(storage: str) -> None:
    (weight, _), optimizer = start(storage)
    values = torch.randn(33, 17, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values.view(-1)[:4] = torch.tensor([-torch.nan, torch.inf, -0.0, 1e-300], dtype=torch.float64)
    optimizer.adopt(
        {weight: values}, {weight: {"step": 3, "exp_avg": values, "exp_avg_sq": values.square()}}
    )
    assert weight.isnan().sum() == 1

    def of(name: str) -> Tensor:
        return bits(optimizer.stored(weight, name)).view(-1)[1:]

    assert torch.equal(of("weight"), bits(values).view(-1)[1:])
    assert torch.equal(of("exp_avg"), of("weight"))
    assert bits(optimizer.stored(weight)).view(-1)[0] == 0x7FF8 << 48
    # A state of torch's float64 AdamW arrives whole.
    wide = nn.Parameter(values.nan_to_num(posinf=1.0))
    torch_adamw = torch.optim.AdamW([wide])
    wide.grad = torch.full_like(wide, 1 / 3)
    torch_adamw.step()
    parameters = [nn.Parameter(wide.detach().to(weight.dtype))]
    ours = ng.AdamW(parameters, storage=storage)
    ours.load_state_dict(torch_adamw.state_dict())
    assert torch.equal(ours.stored(parameters[0], "exp_avg"), torch_adamw.state[wide]["exp_avg"])
