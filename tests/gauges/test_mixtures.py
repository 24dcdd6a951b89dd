"""Narrow experts under gauges: what enters their products is read by the names of their weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

import narrowgauge as ng
from narrowgauge.gauges.attach import Gauges, attach_gauges
from narrowgauge.matmul.experts import grouped_layers_of
from tensors import metric_of

EXPERTS = "model.layers.0.mlp.experts"
SHAPE = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
}  # fmt: skip


def trained(every: int) -> tuple[list[Any], Gauges, dict[str, Tensor]]:
    """Losses and weights of two steps, the gauges, and what entered the projections in the second."""
    torch.manual_seed(0)
    model, optimizer = ng.prepare(
        MixtralForCausalLM(MixtralConfig(**SHAPE)).train(), "int8-row/word", lr=1e-2
    )
    seen: dict[str, Tensor] = {}
    for name, layer in grouped_layers_of(model).items():
        layer.register_forward_pre_hook(
            lambda _, args, name=name: seen.update({name: args[0].detach()})
        )
    gauges = attach_gauges(model, optimizer, every=every)
    tokens = torch.arange(48).reshape(2, 24) % 32
    run = []
    for _ in range(2):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.append(loss.detach())
    return [*run, *(p.detach() for p in model.parameters())], gauges, seen


def test_operands_are_read_and_the_run_is_the_same() -> None:
    plain, _, _ = trained(0)
    watched, gauges, seen = trained(2)
    assert all(map(torch.equal, plain, watched))
    row = gauges.last
    assert row is not None
    for name in (f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"):
        for kind in ("input", "output_grad"):
            assert (metric_of(row, "tensors", f"{kind}:{name}", "amax") or 0) > 0
            assert 25 < (metric_of(row, "tensors", f"{kind}:{name}", "sqnr_db") or 0) < 55
        largest = seen[name].abs().max().item()
        assert metric_of(row, "tensors", f"input:{name}", "amax") == pytest.approx(
            largest, rel=1e-3
        )
