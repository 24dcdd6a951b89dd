"""Lightning's Trainer with bfloat16 weights and our optimizers: the bits of a loop of one's own,
and the record.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

import narrowgauge as ng
from integrations.bfloat16_loop import LR, STEPS, llama, same_weights, sequences, trained
from narrowgauge.integrations.lightning import NarrowgaugeMonitor

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*num_workers.*"),
]


class Module(pl.LightningModule):
    """A language model; nothing here but the optimizer knows a format."""

    def __init__(self, compute: str | None = None, **options: Any) -> None:
        super().__init__()
        self.model = llama(compute)
        self.options = options
        self.losses = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        # Also where a fit resumes within an epoch.
        batch = sequences(4 * STEPS).split(4)[self.global_step]
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(float(loss.detach()))
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss)

    def configure_optimizers(self) -> Any:
        return ng.AdamW(self.parameters(), lr=LR, **{"storage": "word", **self.options})


def fit(module: Module, steps: int = STEPS, resume: Any = None, **options: Any) -> pl.Trainer:
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = {"max_epochs": -1, **dict.fromkeys(off, False), **options}
    trainer = pl.Trainer(max_steps=steps, accelerator="cpu", **quiet)
    batches = DataLoader(sequences(4 * STEPS).split(4), batch_size=None)
    trainer.fit(
        module,
        batches,
        DataLoader([sequences(4)], batch_size=None),
        ckpt_path=resume,
        weights_only=False,
    )
    return trainer


def test_losses_and_weights_are_those_of_a_loop_of_ones_own():
    module = Module("float8-row", storage="compact")
    fit(module)
    model = llama("float8-row")
    optimizer = ng.AdamW(model.parameters(), lr=LR, storage="compact")
    assert module.losses == trained(model, optimizer, sequences(4 * STEPS).split(4))
    assert same_weights(module.model, model)


def test_a_fit_is_recorded_and_resumed_with_the_same_bits(tmp_path):
    def monitored(steps=STEPS, **options):
        monitor = NarrowgaugeMonitor(tmp_path / "run", tokens=torch.numel)
        module = Module(audit_every=2)
        return module, fit(module, steps, callbacks=[monitor], **options)

    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    whole, _ = monitored(logger=logger, log_every_n_steps=1, val_check_interval=3)
    run = ng.read_run(tmp_path / "run")
    assert [row["loss"] for row in run.steps] == whole.losses
    assert [row["tokens"] for row in run.steps] == [68 * (step + 1) for step in range(STEPS)]
    assert len(run.evals) == 2
    assert not [event for event in run.events if event["severity"] != "note"]
    assert "edq" in (Path(logger.log_dir) / "metrics.csv").read_text()
    monitored(3)[1].save_checkpoint(tmp_path / "three.ckpt")
    again, _ = monitored(resume=tmp_path / "three.ckpt")
    second = ng.read_run(tmp_path / "run-2")
    assert len(second.steps) == STEPS
    assert second.summary["weights_fingerprint"] == run.summary["weights_fingerprint"]
    assert same_weights(again.model, whole.model)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "32-true"])
@pytest.mark.filterwarnings("ignore:Rounded:UserWarning")
def test_each_precision_trains_a_float32_module(precision):
    """Losses stay near those of torch's AdamW in the same precision."""
    losses = []
    for kind in (ng.AdamW, torch.optim.AdamW):
        module = Module()
        ng.cast_parameters(module.model, torch.float32)
        optimizer = kind(module.parameters(), lr=LR)
        module.configure_optimizers = lambda optimizer=optimizer: optimizer
        fit(module, precision=precision)
        losses.append(module.losses)
    assert losses[0] == pytest.approx(losses[1], abs=0.02) and losses[0][-1] < losses[0][0]


class Pair(Module):
    """Two optimizers, which the module steps itself. One is torch's."""

    automatic_optimization = False

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        head, *rest = reversed([*self.parameters()])
        return [ng.AdamW(rest, lr=LR), torch.optim.SGD([head], lr=LR)]


def test_a_fit_with_two_optimizers_is_recorded(tmp_path):
    fit(Pair(), 2 * STEPS, callbacks=[NarrowgaugeMonitor(tmp_path)])
    assert [row["step"] for row in ng.read_run(tmp_path).steps] == [*range(1, STEPS + 1)]
