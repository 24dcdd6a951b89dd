"""A user's own module: its step is counted on fake tensors, as it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.planner.module import LiveBytes, ModulePlan


def network() -> nn.Sequential:
    block = [nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)]
    return nn.Sequential(nn.Embedding(500, 64), *block, nn.Linear(64, 500))


TOKENS = torch.zeros(4, 64, dtype=torch.int64)


def planned(module: nn.Module, batch: Any = TOKENS, **asked: Any) -> ModulePlan:
    result = ng.plan(module, batch=batch, chip="H100-SXM", **asked)
    assert isinstance(result, ModulePlan)
    return result


def test_the_peak_and_the_operations_are_those_of_a_real_step() -> None:
    module = network()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    plan = planned(module)
    live = LiveBytes(module)
    with live:
        output = module(TOKENS)
        output.float().sum().backward()
    assert plan.step_bytes == pytest.approx(live.peak, rel=0.02)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    matmuls = 2 * 64 * 256 + 64 * 500
    assert plan.operations == pytest.approx(6 * matmuls * TOKENS.numel(), rel=0.05)


def test_ranks_divide_the_state() -> None:
    module = network().to(torch.bfloat16)
    count = sum(p.numel() for p in module.parameters())
    for chips in (1, 4):
        plan = planned(module, chips=chips, storage="word")
        assert plan.state_bytes == 6 * count / chips and plan.fits
    module[-1].requires_grad_(False)
    assert planned(module).trained_parameters == count - 64 * 500 - 500


def test_what_cannot_be_counted_is_refused() -> None:
    for asked in ({"batch": torch.zeros(2, 3)}, {"storage": "wrd"}):
        with pytest.raises(NarrowgaugeError):
            planned(network(), **asked)
