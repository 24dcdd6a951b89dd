"""A check inside Lightning, Hugging Face's Trainer and Accelerate: nothing where they are set up well, and what is not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from few_objects import few_objects as few_objects

pytestmark = pytest.mark.filterwarnings("ignore")

INSTALLS = "narrowgauge[{}] is not installed: ./dev test integrations installs it"
INPUTS = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def names(found: ng.Findings) -> list[str]:
    return [each.name for each in found]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))


# ── Lightning ───────────────────────────────────────────────────────────────────────────────────────────────────────


def lightning_findings(tmp_path: Path, optimizer_of: Any, **options: Any) -> ng.Findings:
    lightning = pytest.importorskip("lightning", reason=INSTALLS.format("lightning"))

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        def configure_optimizers(self) -> Any:
            self.layers, optimizer = optimizer_of(self.layers)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            dtype = next(self.layers.parameters()).dtype
            return self.layers(batch.to(dtype)).float().square().mean()

    class Watching(lightning.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.findings = ng.check(module, trainer.optimizers)

            self.findings.__enter__()

        def on_train_end(self, *_: Any) -> None:
            self.findings.close()

    watching = Watching()
    trainer = lightning.Trainer(
        max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, callbacks=[watching], **options,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(INPUTS, batch_size=4))
    assert watching.findings._end is None
    return watching.findings


def prepare(model: nn.Module) -> Any:
    return ng.prepare(model, "bfloat16/word", max_grad_norm=1.0, compile=False)


def adamw(model: nn.Module) -> Any:
    return model, ng.AdamW(model.parameters(), lr=1e-3, storage="float32")


@pytest.mark.parametrize("optimizer_of", [prepare, adamw])
def test_lightning_is_clean(tmp_path: Path, optimizer_of: Any) -> None:
    assert not names(lightning_findings(tmp_path, optimizer_of))


def test_lightning_that_clips_too_is_found(tmp_path: Path) -> None:
    assert names(lightning_findings(tmp_path, prepare, gradient_clip_val=0.01)) == ["second-clipping"]


def test_lightning_that_casts_again_is_found(tmp_path: Path) -> None:
    assert names(lightning_findings(tmp_path, prepare, precision="bf16-mixed")) == ["autocast-over-narrow"]


# ── Hugging Face's Trainer ──────────────────────────────────────────────────────────────────────────────────────────


def trainer_findings(tmp_path: Path, recipe: str, **options: Any) -> ng.Findings:
    pytest.importorskip("accelerate", reason=INSTALLS.format("huggingface"))
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model, optimizer = ng.prepare(LlamaForCausalLM(config), recipe, max_grad_norm=1.0, compile=False)
    tokens = torch.randint(0, 32, (16, 8), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    found: list[ng.Findings] = []

    class Watching(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            found.append(ng.check(objects["model"], objects["optimizer"]).__enter__())

        def on_train_end(self, *_: Any, **__: Any) -> None:
            found[0].close()

    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, logging_strategy="no", **{"max_grad_norm": 0.0, **options},
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, schedule), callbacks=[Watching()]).train()
    return found[0]


def test_an_optimizer_that_computes_its_own_rate_is_clean() -> None:
    from transformers import Adafactor

    model = layers()
    optimizer = Adafactor(model.parameters())
    with ng.check(model, optimizer) as watched:
        for _ in range(3):
            model(INPUTS).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not names(watched) and "lr none" in str(watched)


@pytest.mark.parametrize("recipe", ["bfloat16/word", "float32/float32"])
def test_the_trainer_is_clean(tmp_path: Path, recipe: str) -> None:
    assert not names(trainer_findings(tmp_path, recipe, gradient_accumulation_steps=2))


def test_the_trainer_that_clips_and_casts_too_is_found(tmp_path: Path) -> None:
    found = trainer_findings(tmp_path, "bfloat16/word", max_grad_norm=0.01, bf16=True)
    assert names(found) == ["autocast-over-narrow", "second-clipping"]


# ── Accelerate ──────────────────────────────────────────────────────────────────────────────────────────────────────


def accelerate_findings(recipe: str, overflow: bool = False, **options: Any) -> ng.Findings:
    accelerate = pytest.importorskip("accelerate", reason=INSTALLS.format("huggingface"))
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
    model, optimizer = ng.prepare(layers(), recipe, max_grad_norm=1.0, compile=False)
    data = torch.utils.data.DataLoader(INPUTS, batch_size=2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    with ng.check(model, optimizer) as watched:
        for batch in data:
            with accelerator.accumulate(model):
                dtype = next(model.parameters()).dtype
                factor = math.inf if overflow and accelerator.sync_gradients else 1.0
                accelerator.backward(model(batch.to(dtype)).float().square().mean() * factor)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    accelerate.state.AcceleratorState._reset_state(True)
    return watched


@pytest.mark.parametrize("recipe", ["bfloat16/word", "float32/float32"])
def test_accelerate_is_clean(recipe: str) -> None:
    assert not names(accelerate_findings(recipe))


def test_accelerate_that_casts_again_is_found() -> None:
    assert names(accelerate_findings("bfloat16/word", mixed_precision="bf16")) == ["autocast-over-narrow"]


def test_a_schedule_of_accelerate_that_moves_though_the_optimizer_skipped_is_found() -> None:
    assert names(accelerate_findings("bfloat16/word", overflow=True)) == ["schedule-on-skip"]
