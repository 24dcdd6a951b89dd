"""Gauges on a model: what they read is there, what they watch is not changed, and a fault is read
where it was put.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import narrowgauge as ng
from narrowgauge.measuring.casts import Gauges
from narrowgauge.measuring.hooks import Hub
from narrowgauge.runs.schema import Row
from tensors import metric_of

WIDTH = 32
HEADS = 4
LENGTH = 16
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": HEADS,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def small() -> nn.Sequential:
    torch.manual_seed(0)
    layers = {
        "up": nn.Linear(32, 64),
        "between": nn.SiLU(),
        "down": nn.Linear(64, 32),
        "head": nn.Linear(32, 8),
    }
    return nn.Sequential(OrderedDict(layers))


def prepared(recipe: str = "bfloat16/word", **options: Any) -> tuple[nn.Module, Any]:
    return ng.prepare(small(), recipe, **{"lr": 1e-3, "audit_every": 1, **options})


def attached(model: nn.Module, optimizer: Any, every: int = 1) -> tuple[Gauges, list[Row]]:
    rows: list[Row] = []
    return Gauges(Hub(model, [optimizer], nn.Identity()), optimizer, every, rows.append), rows


def trained(model: nn.Module, optimizer: Any, steps: int = 1) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(4, 16, 32, generator=generator)
        model(x.to(next(model.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_readings_are_those_of_the_tensors() -> None:
    model, optimizer = prepared("float8-row/word")
    seen: dict[str, Tensor] = {}
    model.down.register_forward_pre_hook(lambda m, args: seen.update(x=args[0].detach()))
    _, rows = attached(model, optimizer)
    trained(model, optimizer)
    (row,) = rows
    assert row["step"] == 1
    values = seen["x"].float()
    outlier = float(values.abs().max() / values.square().mean().sqrt())
    assert metric_of(row, "tensors", "input:down", "outlier") == pytest.approx(outlier, rel=2**-8)
    # By row e4m3 has 31.5 dB for normal values.
    assert 28 < (metric_of(row, "tensors", "input:down", "sqnr_db") or 0) < 36
    assert metric_of(row, "tensors", "input:down", "overflow") == 0


def test_inputs_are_those_of_training() -> None:
    model = nn.Sequential(nn.Linear(32, 8)).bfloat16()
    ng.swap_linears(model, "float8-row")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, rows = attached(model, optimizer)
    x = torch.ones(4, 32, dtype=torch.bfloat16)
    other = x.clone()
    other[0, 0] = 64
    loss = model(x).float().square().mean()
    copy.deepcopy(model)(other).sum().backward()
    with torch.no_grad():
        model(other)
    model.eval()(other)
    loss.backward()
    optimizer.step()
    assert metric_of(rows[0], "tensors", "input:0", "outlier") == pytest.approx(1)


def test_a_loop_that_goes_on_samples_at_the_same_steps_until_the_end() -> None:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gauges, rows = attached(model, optimizer, every=3)
    trained(model, optimizer, 2)
    gauges.step = 4
    trained(model, optimizer, 5)
    assert [row["step"] for row in rows] == [6, 9]
    assert all("tensors" not in row for row in rows), "no cast loses anything"
    gauges.end()
    assert not any(module._forward_hooks for module in model.modules())
    trained(model, optimizer, 3)
    assert len(rows) == 2


def test_experts_are_read_by_the_names_of_their_weights() -> None:
    experts = "model.layers.0.mlp.experts"
    shape = {**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**shape)).train()
    model, optimizer = ng.prepare(model, "int8-row/word", lr=1e-2)
    _, rows = attached(model, optimizer)
    tokens = torch.arange(48).reshape(2, 24) % 32
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    for name in (f"{experts}.gate_up_proj", f"{experts}.down_proj"):
        for kind in ("input", "output_grad"):
            assert 25 < (metric_of(rows[0], "tensors", f"{kind}:{name}", "sqnr_db") or 0) < 55


# ── attention ─────────────────────────────────────────────────────────────────────────────────────


MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "norms after projections": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_bound_of_attention_is_the_product_of_the_largest_norms(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().train()
    operands = list[Tensor]()
    kernel = F.scaled_dot_product_attention

    def recording_kernel(query: Tensor, key: Tensor, *args: Any, **options: Any) -> Tensor:
        operands.extend([query, key])
        return kernel(query, key, *args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recording_kernel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, rows = attached(model, optimizer)
    output = model(input_ids=torch.arange(2 * LENGTH).reshape(2, LENGTH))
    output.logits.square().sum().backward()
    optimizer.step()
    query, key = (x.detach().float() for x in operands)
    largest = [float(x.norm(dim=-1).max()) for x in (query, key)]
    ((bound,),) = rows[0]["attention"].values()
    assert bound == pytest.approx(largest[0] * largest[1] * (WIDTH / HEADS) ** -0.5, rel=1e-3)
    repeated = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = query @ repeated.transpose(-1, -2) * (WIDTH / HEADS) ** -0.5
    assert float(logits.abs().max()) <= bound * 1.001
