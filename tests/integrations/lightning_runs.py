"""A LightningModule that trains the reference's tiny Llama on the reference's batches, and Trainers without ornaments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from integrations.own_trainer import OwnRun
from narrowgauge.integrations.lightning import NarrowgaugePrecision


class LitReference(pl.LightningModule):
    """The reference's model and loss; ``make`` makes its optimizer, or nothing."""

    def __init__(self, run: OwnRun, make: Callable[[pl.LightningModule], Any] | None = None) -> None:
        super().__init__()
        self.run, self.make, self.losses = run, make, []
        self.model = run.model()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        count = self.trainer.accumulate_grad_batches
        tokens = self.run.batches[self.global_step]
        loss = self.run.loss(self.model, tokens.chunk(count)[index % count]) * count
        self.losses.append(float(loss.detach()))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val_loss", self.run.loss(self.model, self.run.batches[0]))

    test_step = validation_step

    def predict_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.model(self.run.batches[0][:, :-1]).logits

    def on_train_batch_start(self, *_: Any) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] = self.run.rates[self.global_step] * group.get("lr_factor", 1.0)

    def configure_optimizers(self) -> Any:
        return self.make(self) if self.make else None


def loader(count: int = 16, size: int = 4) -> DataLoader:
    """Batches that say only how many sequences there are; the reference's own are taken by step."""
    return DataLoader([torch.zeros(size, 1)] * count, batch_size=None)


def plugin_of(run: OwnRun, **options: Any) -> NarrowgaugePrecision:
    return NarrowgaugePrecision(run.recipe, **{**run.prepare_settings, **options})


def trainer_of(plugin: Any, steps: int, **options: Any) -> pl.Trainer:
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet: dict[str, Any] = {"max_epochs": -1, **dict.fromkeys(off, False)}
    return pl.Trainer(plugins=plugin, max_steps=steps, accelerator="cpu", **{**quiet, **options})


def fit(
    run: OwnRun,
    make: Callable[[pl.LightningModule], Any] | None = None,
    *,
    steps: int = 0,
    resume: Any = None,
    plugin: Any = None,
    module: pl.LightningModule | None = None,
    **options: Any,
) -> tuple[Any, pl.Trainer]:
    """Train as the reference did; the module and the Trainer."""
    module = module or LitReference(run, make)
    trainer = trainer_of(plugin or plugin_of(run), steps or len(run.batches), **options)
    trainer.fit(module, loader(size=4 // trainer.accumulate_grad_batches), ckpt_path=resume, weights_only=False)
    return module, trainer


def stored(trainer: pl.Trainer, module: Any) -> dict[str, torch.Tensor]:
    """The weights as the optimizer stores them."""
    return {name: trainer.optimizers[0].stored(p) for name, p in module.model.named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
