"""Gauges on a model: what they read is there, what they watch is not changed, and a fault is read
where it was put.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
)

import narrowgauge as ng
from narrowgauge.measuring.casts import Gauges, cast_loss
from narrowgauge.measuring.hooks import Hub
from narrowgauge.numerics.quantization import quantize
from narrowgauge.runs.schema import Row
from narrowgauge.spec.computes import COMPUTES
from tensors import metric_of

LENGTH = 16
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def attached(model: nn.Module, every: int = 1) -> tuple[Gauges, torch.optim.Optimizer, list[Row]]:
    rows: list[Row] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Gauges(Hub(model, [optimizer], model), optimizer, every, rows.append), optimizer, rows


def narrow() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 8, dtype=torch.bfloat16))
    ng.swap_linears(model, "float8-row")
    return model


def test_readings_are_those_of_the_tensors_of_training() -> None:
    model = narrow()
    _, optimizer, rows = attached(model)
    x = torch.randn(64, 32).bfloat16()
    loss = model(x).float().square().mean()
    copy.deepcopy(model)(100 * x[:1]).sum().backward()
    with torch.no_grad():
        model(100 * x[:1])
    model.eval()(100 * x[:1])
    loss.backward()
    optimizer.step()
    (row,) = rows
    assert row["step"] == 1
    outlier = float(x.float().abs().max() / x.float().square().mean().sqrt())
    assert metric_of(row, "input:0", "outlier") == pytest.approx(outlier, rel=1e-4)
    # By row e4m3 has 31.5 dB for normal values.
    for name in ("input:0", "output_grad:0"):
        assert 28 < (metric_of(row, name, "sqnr_db") or 0) < 36
        assert metric_of(row, name, "overflow") == 0


def test_a_loop_that_goes_on_samples_at_the_same_steps_until_the_end() -> None:
    model = narrow()
    gauges, optimizer, rows = attached(model, every=3)
    for step in (0, 1, 4, 5, 6, 7, 8):
        gauges.step = step
        model(torch.randn(4, 32).bfloat16()).sum().backward()
        optimizer.step()
    assert [row["step"] for row in rows] == [6, 9]
    gauges.end()
    assert not model[0]._forward_hooks
    optimizer.step()
    assert len(rows) == 2


def test_experts_are_read_by_the_names_of_their_weights() -> None:
    experts = "model.layers.0.mlp.experts"
    shape = {**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**shape)).train()
    ng.swap_linears(model.bfloat16(), "int8-row")
    _, optimizer, rows = attached(model)
    tokens = torch.arange(48).reshape(2, 24) % 32
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    for name in (f"{experts}.gate_up_proj", f"{experts}.down_proj"):
        for kind in ("input", "output_grad"):
            assert 25 < (metric_of(rows[0], f"{kind}:{name}", "sqnr_db") or 0) < 55


@pytest.mark.parametrize("name", ["float8-row", "int8-row"])
def test_sqnr_is_the_ratio_of_powers(name: str) -> None:
    cast = COMPUTES[name].output.left
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    rounded = quantize(x, cast, 1).values()
    ratio = float(x.double().square().sum() / (x.double() - rounded).square().sum())
    assert cast_loss(x, cast)[2] == pytest.approx(10 * math.log10(ratio), rel=1e-9)
