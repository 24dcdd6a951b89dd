"""Gauges on a model: what they read is there, what they watch is not changed, and a fault is read where it was put."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.gauges import tensor_metrics
from narrowgauge.gauges.attach import GaugeNotice, Gauges, attach_gauges
from narrowgauge.runs.schema import metric_of


class Block(nn.Module):
    """Two linear layers with something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made(recipe: str = "bfloat16/word", **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return ng.prepare(Small(), recipe, lr=1e-3, audit_every=options.pop("audit_every", 2), **options)


def trained(model: nn.Module, optimizer: Any, steps: int, size: float = 1.0, forward: Any = None) -> list[float]:
    losses = []
    generator = torch.Generator().manual_seed(1)
    run = model if forward is None else forward
    for _ in range(steps):
        x = size * torch.randn(4, 16, 32, generator=generator)
        loss = run(x.to(next(model.parameters()).dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def read(recipe: str, steps: int = 2, **options: Any) -> tuple[dict[str, Any], Gauges]:
    model, optimizer = made(recipe)
    gauges = attach_gauges(model, optimizer, every=2)
    trained(model, optimizer, steps, **options)
    assert gauges.last is not None
    return gauges.last, gauges


def test_readings_are_those_of_the_tensors() -> None:
    model, optimizer = made(audit_every=1)
    seen: dict[str, Tensor] = {}
    model.blocks[1].down.register_forward_pre_hook(lambda m, args: seen.update(x=args[0].detach()))
    gauges = attach_gauges(model, optimizer, every=1)
    weight = model.blocks[1].down.weight.detach().clone()
    trained(model, optimizer, 1)
    row = gauges.last
    assert row is not None and row["step"] == 1
    assert metric_of(row, "tensors", "input:blocks.1.down", "amax") == pytest.approx(
        seen["x"].abs().max().item(), rel=1e-3
    )
    rms = weight.float().square().mean().sqrt().item()
    assert metric_of(row, "tensors", "weight:blocks.1.down.weight", "rms") == pytest.approx(rms, rel=2**-8)
    outlier = weight.float().abs().max().item() / rms
    assert metric_of(row, "tensors", "weight:blocks.1.down.weight", "outlier") == pytest.approx(outlier, rel=2**-8)
    assert metric_of(row, "tensors", "input:blocks.1.down", "nonfinite") == 0
    # Three inputs of 32 features and two of 64, of 64 tokens each; every third value counts, and hardly one is zero.
    counted = 3 * -(-64 * 32 // tensor_metrics.COUNTED) + 2 * -(-64 * 64 // tensor_metrics.COUNTED)
    assert 0 <= counted - sum(row["histograms"]["input"]) <= 4
    assert set(row["updates"]) == {name for name, _ in model.named_parameters()}


def test_a_pass_without_gradients_is_not_read() -> None:
    model, optimizer = made()
    gauges = attach_gauges(model, optimizer, every=1)
    x = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    loss = model(x).float().square().mean()
    with torch.no_grad():
        model(100 * x)
    loss.backward()
    optimizer.step()
    assert gauges.last is not None
    amax = metric_of(gauges.last, "tensors", "input:blocks.0.up", "amax")
    assert amax == pytest.approx(x.abs().max().item(), rel=1e-3)


def test_a_loop_that_goes_on_samples_at_the_same_steps() -> None:
    model, optimizer = made()
    rows: list[Any] = []
    gauges = attach_gauges(model, optimizer, every=3, on_row=rows.append)
    gauges.step = 4
    trained(model, optimizer, 5)
    assert [row["step"] for row in rows] == [6, 9]


def test_the_heads_logits_are_those_of_the_sampled_inputs() -> None:
    model, optimizer = made()
    seen: dict[str, Tensor] = {}
    model.get_output_embeddings = lambda: model.head
    model.head.register_forward_pre_hook(lambda m, args: seen.update(x=args[0].detach()))
    gauges = attach_gauges(model, optimizer, every=1)
    trained(model, optimizer, 1)
    logits = F.linear(seen["x"].flatten(0, 1)[:8].float(), model.head.weight.float(), model.head.bias.float())
    expected = logits.abs().max().item(), abs(logits.logsumexp(-1).mean().item())
    assert gauges.last is not None and gauges.last["logits"]["head"] == pytest.approx(expected, rel=0.02)


DECAYED = functools.partial(torch.optim.Adam, weight_decay=0.1)  # of the gradient and its decay are the moments


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor, torch.optim.NAdam, DECAYED])
def test_any_module_and_any_optimizer(kind: Any) -> None:
    torch.manual_seed(0)
    model = Small()
    optimizer = kind(model.parameters(), lr=1e-3)
    gauges = attach_gauges(model, optimizer, every=2)
    trained(model, optimizer, 4)
    row = gauges.last
    assert row is not None and (metric_of(row, "tensors", "grad:head.weight", "rms") or 0) > 0
    if kind is torch.optim.AdamW:
        assert metric_of(row, "moments", "head.weight", "bias") == pytest.approx(1.0, rel=1e-5)
    else:  # other rules may square something else than the gradient
        assert "moments" not in row


def test_what_a_cast_loses_is_read_from_its_own_scale() -> None:
    row, _ = read("float8-row/word")
    sqnr = metric_of(row, "tensors", "input:blocks.0.up", "sqnr_db")
    assert sqnr is not None and 28 < sqnr < 36  # e4m3 scaled by row: 31.5 for normal values
    assert metric_of(row, "tensors", "input:blocks.0.up", "overflow") == 0.0
    plain, _ = read("bfloat16/word")
    assert metric_of(plain, "tensors", "input:blocks.0.up", "sqnr_db") is None


@pytest.mark.parametrize(("storage", "freezes"), [("naive", True), ("word", False)])
def test_second_moments_that_freeze_are_seen(storage: str, freezes: bool) -> None:
    """Gradients fall to a tenth; at beta2 0.999 a bfloat16 second moment stays where it was."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(16, 32).bfloat16())
    model = nn.ParameterDict({"w": weight})
    optimizer = ng.AdamW(model.named_parameters(), lr=1e-4, betas=(0.9, 0.999), storage=storage, audit_every=0)
    gauges = attach_gauges(model, optimizer, every=100)
    gradient = torch.randn(16, 32).bfloat16()
    for step in range(300):
        weight.grad = gradient * (1.0 if step < 100 else 0.1)
        optimizer.step()
    row = gauges.last
    assert row is not None
    bias, frozen = metric_of(row, "moments", "w", "bias"), metric_of(row, "moments", "w", "frozen_fraction")
    assert bias is not None and frozen is not None
    if freezes:
        assert frozen > 0.9 and abs(bias - 1) > 0.05
    else:
        assert frozen < 0.5 and bias == pytest.approx(1.0, abs=0.05)


def test_second_moments_of_clipped_gradients_and_skipped_steps_are_exact() -> None:
    model, optimizer = made("float32/float32", max_grad_norm=1e-3)
    gauges = attach_gauges(model, optimizer, every=6)
    for steps, limit in ((2, math.inf), (1, -1.0), (3, math.inf)):
        optimizer.skip_above = limit
        trained(model, optimizer, steps)
    assert gauges.last is not None and float(optimizer.grad_norm) > 0.01 and optimizer.num_skipped == 1
    assert metric_of(gauges.last, "moments", "head.weight", "bias") == pytest.approx(1.0, rel=1e-5)


# ── what users do ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_training_in_eval_mode_is_told_as_such() -> None:
    model, optimizer = made()
    attach_gauges(model, optimizer, every=1)
    model.eval()
    with pytest.warns(GaugeNotice, match="in eval mode, and only training is watched"):
        trained(model, optimizer, 1)
