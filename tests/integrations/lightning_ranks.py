"""Fits on two ranks under DDP and FSDP2, in a program of its own: Lightning starts the second process. Prints JSON.

python lightning_ranks.py FOLDER RECIPE…
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import narrowgauge as ng
from narrowgauge.distributed.sharding import fingerprint_whole
from narrowgauge.integrations.lightning import NarrowgaugePrecision

SIZE = 32


class Model(pl.LightningModule):
    def __init__(self, sharded: bool) -> None:
        super().__init__()
        # Under DDP ranks may begin apart: they train the first one's weights. FSDP2 shards what each rank was given.
        is_apart = torch.distributed.is_initialized() and not sharded
        torch.manual_seed(torch.distributed.get_rank() if is_apart else 0)
        self.sharded, self.losses = sharded, []
        self.rows = torch.randn(8, 4, SIZE, generator=torch.Generator().manual_seed(0))
        self.model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Tanh(), torch.nn.Linear(SIZE, SIZE))

    def configure_model(self) -> None:
        if self.sharded:
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        # By step, not by loader: a resumed fit begins its loader again.
        batch = self.rows[2 * self.global_step + self.global_rank]
        loss = (self.model(batch.to(torch.bfloat16)).float() - 1).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return ng.AdamW(self.parameters(), lr=1e-2)


def fit(how: str, recipe: str, steps: int, resume: str | None = None) -> tuple[pl.Trainer, Model]:
    strategy = DDPStrategy() if how == "ddp" else ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = pl.Trainer(
        plugins=NarrowgaugePrecision(recipe), strategy=strategy, devices=2, accelerator="cpu", max_epochs=-1,
        max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=True, gradient_clip_val=0.5,
    )  # fmt: skip
    module = Model(how == "fsdp2")
    trainer.fit(module, DataLoader([torch.zeros(4, 1)] * 8, batch_size=None), ckpt_path=resume, weights_only=False)
    return trainer, module


def fits(recipe: str, how: str, folder: Path) -> dict[str, object]:
    """Four steps; and two, saved and resumed to four."""
    whole, module = fit(how, recipe, 4)
    found: dict[str, object] = {"losses": module.losses, "whole": weights_of(whole, module)}
    stopped, first = fit(how, recipe, 2)
    path = str(folder / f"{how}.ckpt")
    stopped.save_checkpoint(path)
    resumed, module = fit(how, recipe, 4, path)
    found |= {"parts": first.losses + module.losses, "resumed": weights_of(resumed, module)}
    ranks: list[object] = [None, None]
    scales = {name: history.tolist() for name, history in ng.matmul.linears_of(module).histories().items()}
    assert scales or "delayed" not in recipe
    torch.distributed.all_gather_object(ranks, (found["resumed"], scales))
    return {**found, "equal": ranks[0] == ranks[1]}


def weights_of(trainer: pl.Trainer, module: Model) -> str:
    """The fingerprint of the stored weights."""
    return fingerprint_whole({name: trainer.optimizers[0].stored(p) for name, p in module.named_parameters()})


def main(folder: str, *recipes: str) -> None:
    found = {}
    for number, recipe in enumerate(recipes):
        place = Path(folder) / str(number)
        place.mkdir(exist_ok=True)
        found[recipe] = {how: fits(recipe, how, place) for how in ("ddp", "fsdp2")}
    if torch.distributed.get_rank() == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
