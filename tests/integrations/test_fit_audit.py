"""Steps of a Lightning fit computed again: a standard fit names nothing, and a planted fault is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

import narrowgauge as ng
from few_objects import few_objects as few_objects
from narrowgauge.integrations.lightning import NarrowgaugeMonitor, StepAudit
from narrowgauge.runs.departure_table import DEPARTURES
from recompute.audited_loop import Model, batches, next_token


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Model()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return next_token(self.model(batch[:, :-1]), batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)


class Unclipped(Module):
    """A fault of what carries the clipping out."""

    def on_train_start(self) -> None:
        self.trainer.precision_plugin.clip_gradients = lambda *_, **__: None


class OneLayer(Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.model.head.weight.grad.mul_(1.1)


class ClipsItself(Module):
    """Healthy: its own clipping is not the Trainer's."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


def fit(module: Any, *callbacks: Any, **options: Any) -> Any:
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    source = batches()
    data = DataLoader([batch for batch, _ in zip(source, range(16), strict=False)], batch_size=None)
    given: dict[str, Any] = {"max_steps": 4, "max_epochs": -1, "accelerator": "cpu", **dict.fromkeys(off, False)}
    pl.Trainer(callbacks=list(callbacks), **{**given, **options}).fit(module, data)
    return module


def weights(module: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


HEALTHY: dict[str, tuple[type, dict[str, Any]]] = {
    "as it is": (Module, {}),
    "clipped": (Module, {"gradient_clip_val": 0.25, "accumulate_grad_batches": 2}),
    "values clipped": (Module, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
    "bfloat16 autocast": (Module, {"precision": "bf16-mixed"}),
    "clips itself": (ClipsItself, {"gradient_clip_val": 0.25}),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_standard_fit_names_nothing_and_keeps_its_bits(name: str) -> None:
    kind, options = HEALTHY[name]
    audit = StepAudit(every=2)
    module = fit(kind(), audit, **options)
    assert not audit.findings, audit.findings
    assert not {"loss", "gradient", "update", "between"} & set(audit.unchecked), audit.unchecked
    assert torch.equal(weights(module), weights(fit(kind(), **options)))
    assert not module.model._forward_hooks


FAULTS: dict[str, tuple[type, dict[str, Any], set[tuple[str, str]]]] = {
    "not clipped": (Unclipped, {"gradient_clip_val": 0.05}, {("clip-missing", "")}),
    "one layer": (OneLayer, {}, {("gradient-scaled", "head.weight")}),
    "one layer, then clipped": (OneLayer, {"gradient_clip_val": 1e3}, {("gradient-scaled", "head.weight")}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_monitor_writes_departures_as_events(fault: str, tmp_path: Path) -> None:
    kind, options, names = FAULTS[fault]
    with pytest.warns(ng.RunNotice, match=r"was not clipped|times what it should be"):
        fit(kind(), NarrowgaugeMonitor(tmp_path / "run", audit_every=2), **options)
    events = ng.read_run(tmp_path / "run").events
    assert {
        (each["detector"], each.get("tensor") or "") for each in events if each.get("detector") in DEPARTURES
    } == names
    fit(Module(), NarrowgaugeMonitor(tmp_path / "healthy", audit_every=2))
    assert not [each for each in ng.read_run(tmp_path / "healthy").events if each.get("detector") in DEPARTURES]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_fit_is_named(fault: str) -> None:
    kind, options, names = FAULTS[fault]
    audit = StepAudit(every=2)
    with pytest.warns(UserWarning, match=next(iter(names))[0]):
        fit(kind(), audit, **options)
    assert {(each.name, each.where) for each in audit.findings} == names, audit.findings
