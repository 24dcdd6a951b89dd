"""Train in Lightning: bfloat16 weights, our optimizer, a run folder beside its own logs.

    python examples/lightning_training.py

A tiny Llama learns a walk over the vocabulary with float8 matmuls and 8 bytes per parameter. Needs
narrowgauge[lightning].
"""

import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import narrowgauge as ng
from narrowgauge.integrations.lightning import NarrowgaugeMonitor

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


class Model(pl.LightningModule):
    """A language model with float8 matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(LlamaConfig(**SHAPE))
        ng.cast_parameters(
            self.model, torch.bfloat16
        )  # precision="bf16-true" would round its rotary frequencies
        ng.swap_linears(self.model, "float8-row")

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return ng.AdamW(self.parameters(), lr=3e-3, storage="word", max_grad_norm=1.0)


def main() -> None:
    pl.seed_everything(0, verbose=False)
    steps = torch.randint(0, 3, (30, 4, 32))
    batches = torch.utils.data.DataLoader(list(steps.cumsum(-1) % 64), batch_size=None)
    folder = Path(tempfile.mkdtemp())
    trainer = pl.Trainer(
        callbacks=[NarrowgaugeMonitor(folder / "run", gauges_every=10, tokens=torch.numel)],
        max_epochs=1, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), batches)
    run = ng.read_run(folder / "run")
    print(
        f"loss {run.steps[0]['loss']:.2f} at first, {run.steps[-1]['loss']:.2f} after "
        f"{len(run.steps)} steps"
    )
    print(f"{run.summary['bytes_per_param']:.1f} bytes per parameter; EDQ {run.summary['edq']:.4f}")


if __name__ == "__main__":
    main()
