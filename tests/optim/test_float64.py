"""Storages of float64: what users read, write and load."""

import torch
from torch import nn

import narrowgauge as ng
from optim.pairs import parameters, step_along
from tensors import bits


def test_adopted_values_are_kept_in_float64_nan_included():
    (weight,) = parameters("float64", [(33, 17)])
    optimizer = ng.AdamW([weight], storage="float64", low_bits="zero")
    values = torch.randn(33, 17, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values.view(-1)[:4] = torch.tensor([-torch.nan, torch.inf, -0.0, 1e-300], dtype=torch.float64)
    optimizer.adopt(
        {weight: values}, {weight: {"step": 3, "exp_avg": values, "exp_avg_sq": values.square()}}
    )
    assert weight.isnan().sum() == 1

    for name in ("weight", "exp_avg"):
        stored = bits(optimizer.stored(weight, name)).view(-1)
        assert stored[0] == 0x7FF8 << 48 and torch.equal(stored[1:], bits(values).view(-1)[1:])


def test_a_state_of_torchs_float64_adamw_arrives_whole():
    wide = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
    theirs = torch.optim.AdamW([wide])
    step_along(theirs, 1 / 3)
    (weight,) = parameters("float64", [(4, 4)])
    ours = ng.AdamW([weight], storage="float64")
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.stored(weight, "exp_avg"), theirs.state[wide]["exp_avg"])
