"""What Lightning's callback does by itself, under a stand-in for the ``Trainer``: tests inside Lightning run less often."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.integrations.lightning.monitor import RunMonitor


def fitted(folder: Path, start: int, stop: int) -> None:
    """A fit from one step to another."""
    model = nn.Linear(4, 4)
    trainer = SimpleNamespace(
        optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)], precision_plugin=None, loggers=[], interrupted=False,
        is_global_zero=True, global_step=start, max_steps=4,
    )  # fmt: skip
    monitor = RunMonitor(folder)
    monitor.on_train_start(trainer, model)
    for step in range(start, stop):
        loss = model(torch.ones(1, 4)).square().sum()
        loss.backward()
        monitor.on_before_optimizer_step(trainer, model, trainer.optimizers[0])
        trainer.optimizers[0].step()
        trainer.global_step = step + 1
        monitor.on_train_batch_end(trainer, model, {"loss": loss}, None, step)
    monitor.on_train_end(trainer, model)


def test_a_resumed_fit_goes_on_in_the_last_folder_and_a_new_one_takes_another(tmp_path: Path) -> None:
    fitted(tmp_path / "run", 0, 3)
    fitted(tmp_path / "run", 2, 4)
    assert [row["step"] for row in ng.read_run(tmp_path / "run").steps] == [1, 2, 3, 4]
    fitted(tmp_path / "run", 0, 1)
    assert [row["step"] for row in ng.read_run(tmp_path / "run-2").steps] == [1]
    assert len(ng.read_run(tmp_path / "run").steps) == 4
