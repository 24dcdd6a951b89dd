"""Storages of float64: what users read, write and load."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import narrowgauge as ng
from optim.pairs import parameters
from tensors import bits


def test_adopted_values_are_kept_in_float64_nan_included() -> None:
    (weight,) = parameters("float64", [(33, 17)])
    optimizer = ng.AdamW([weight], storage="float64", low_bits="zero")
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
    copied = nn.Parameter(wide.detach().to(weight.dtype))
    ours = ng.AdamW([copied], storage="float64")
    ours.load_state_dict(torch_adamw.state_dict())
    assert torch.equal(ours.stored(copied, "exp_avg"), torch_adamw.state[wide]["exp_avg"])
