"""Gauges on a model: what they read is there, what they watch is not changed, and a fault is read
where it was put.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.gauges import tensor_metrics
from narrowgauge.gauges.attach import GaugeNotice, attach_gauges
from tensors import metric_of


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
    return ng.prepare(small(), recipe, **{"lr": 1e-3, "audit_every": 2, **options})


def trained(model: nn.Module, optimizer: Any, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(4, 16, 32, generator=generator)
        model(x.to(next(model.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_readings_are_those_of_the_tensors() -> None:
    model, optimizer = prepared(audit_every=1)
    seen: dict[str, Tensor] = {}
    model.down.register_forward_pre_hook(lambda m, args: seen.update(x=args[0].detach()))
    gauges = attach_gauges(model, optimizer, every=1)
    weight = model.down.weight.detach().float()
    trained(model, optimizer, 1)
    row = gauges.last
    assert row is not None and row["step"] == 1
    largest = seen["x"].abs().max().item()
    rms = weight.square().mean().sqrt().item()
    for tensor, metric, value in (
        ("input:down", "amax", largest), ("input:down", "nonfinite", 0), ("weight:down.weight", "rms", rms),
        ("weight:down.weight", "outlier", weight.abs().max().item() / rms),
    ):  # fmt: skip
        assert metric_of(row, "tensors", tensor, metric) == pytest.approx(value, rel=2**-8), (
            tensor,
            metric,
        )
    # Two inputs of 32 features and one of 64, of 64 tokens each; every third value counts, and
    # hardly one is zero.
    counted = 2 * -(-64 * 32 // tensor_metrics.COUNTED) + -(-64 * 64 // tensor_metrics.COUNTED)
    assert 0 <= counted - sum(row["histograms"]["input"]) <= 4
    assert set(row["updates"]) == {name for name, _ in model.named_parameters()}


def test_a_pass_without_gradients_is_not_read() -> None:
    model, optimizer = prepared()
    gauges = attach_gauges(model, optimizer, every=1)
    x = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    loss = model(x).float().square().mean()
    with torch.no_grad():
        model(100 * x)
    loss.backward()
    optimizer.step()
    assert gauges.last is not None
    amax = metric_of(gauges.last, "tensors", "input:up", "amax")
    assert amax == pytest.approx(x.abs().max().item(), rel=1e-3)


def test_an_input_is_read_as_autocast_casts_it() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gauges = attach_gauges(model, optimizer, every=1)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.full((4, 32), 1 + 2.0**-9)).sum().backward()
    optimizer.step()
    assert gauges.last is not None and metric_of(gauges.last, "tensors", "input:up", "amax") == 1.0


def test_a_loop_that_goes_on_samples_at_the_same_steps() -> None:
    model = small()
    rows = list[Any]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gauges = attach_gauges(model, optimizer, every=3, on_row=rows.append)
    trained(model, optimizer, 2)
    gauges.restart(4)
    trained(model, optimizer, 5)
    assert [row["step"] for row in rows] == [6, 9]


def test_the_heads_logits_are_those_of_the_sampled_inputs() -> None:
    model, optimizer = prepared()
    seen: dict[str, Tensor] = {}
    model.get_output_embeddings = lambda: model.head
    model.head.register_forward_pre_hook(lambda m, args: seen.update(x=args[0].detach()))
    gauges = attach_gauges(model, optimizer, every=1)
    trained(model, optimizer, 1)
    logits = F.linear(
        seen["x"].flatten(0, 1)[:8].float(), model.head.weight.float(), model.head.bias.float()
    )
    expected = logits.abs().max().item(), abs(logits.logsumexp(-1).mean().item())
    assert gauges.last is not None and gauges.last["logits"]["head"] == pytest.approx(
        expected, rel=0.02
    )


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor, torch.optim.NAdam])
def test_any_module_and_any_optimizer(kind: Any) -> None:
    model = small()
    optimizer = kind(model.parameters(), lr=1e-3)
    gauges = attach_gauges(model, optimizer, every=2)
    trained(model, optimizer, 4)
    row = gauges.last
    assert row is not None and (metric_of(row, "tensors", "grad:head.weight", "rms") or 0) > 0
    assert ("exp_avg_sq" in row["histograms"]) == (kind is not torch.optim.Adafactor)


@pytest.mark.parametrize(
    ("recipe", "least", "most"), [("float8-row/word", 28, 36), ("bfloat16/word", None, None)]
)
def test_what_a_cast_loses_is_read_from_its_own_scale(
    recipe: str, least: int | None, most: int | None
) -> None:
    """By row e4m3 has 31.5 dB for normal values."""
    model, optimizer = prepared(recipe)
    gauges = attach_gauges(model, optimizer, every=2)
    trained(model, optimizer, 2)
    sqnr, overflow = (
        metric_of(gauges.last or {}, "tensors", "input:up", name)
        for name in ("sqnr_db", "overflow")
    )
    assert (
        (sqnr, overflow) == (None, None)
        if least is None
        else least < (sqnr or 0) < (most or 0) and overflow == 0
    )


def test_training_in_eval_mode_is_told_as_such() -> None:
    model, optimizer = prepared()
    attach_gauges(model, optimizer, every=1)
    model.eval()
    with pytest.warns(GaugeNotice, match="in eval mode, and only training is watched"):
        trained(model, optimizer, 1)
