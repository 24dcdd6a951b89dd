"""Logs that other frameworks' own writers made, read as runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import narrowgauge as ng

pytestmark = pytest.mark.frameworks

ROWS = torch.linspace(-1, 1, 48).view(12, 4)


@pytest.fixture(scope="module")
def lightning_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``csv/version_0`` and ``events/version_0`` of one run of 12 steps, and the losses that it saw."""
    import lightning
    from lightning.pytorch.callbacks import LearningRateMonitor
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    seen: list[float] = []

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.layer(batch[0]).square().mean()
            self.log("train_loss", loss)
            seen.append(loss.item())
            return loss  # type: ignore[no-any-return]

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.layer(batch[0]).square().mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    folder = tmp_path_factory.mktemp("lightning")
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ROWS), batch_size=2)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", log_every_n_steps=1, callbacks=[LearningRateMonitor("step")], num_sanity_val_steps=0,
        logger=[CSVLogger(folder, "csv"), TensorBoardLogger(folder, "events")], enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), batches, batches)
    (folder / "seen.json").write_text(json.dumps(seen))
    return folder


@pytest.mark.parametrize("kind", ["csv", "events"])
def test_lightnings_loggers_give_every_step_its_loss(kind: str, lightning_logs: Path) -> None:
    run = ng.read_run(lightning_logs / kind / "version_0")
    seen = json.loads((lightning_logs / "seen.json").read_text())
    assert [row["step"] for row in run.steps] == list(range(1, 13))
    assert [row["loss"] for row in run.steps] == pytest.approx(seen, rel=1e-6)
    assert [row["lr"] for row in run.steps] == pytest.approx([0.1] * 12)
    assert [row["step"] for row in run.evals] == [6, 12]
    assert run.summary == {"steps": 12, "val_loss": run.evals[-1]["val_loss"]}
    assert not any("grad_norm" in row or "edq" in row for row in run.steps)


def test_hugging_faces_trainer_state_is_a_run_that_knows_whether_it_ended(tmp_path: Path) -> None:
    import transformers

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
            return {"loss": (self.layer(x) - x.sum(-1, keepdim=True)).square().mean()}

    data = [{"x": row, "labels": row[:1]} for row in ROWS]
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=6, per_device_train_batch_size=2, logging_steps=1, eval_steps=3,
        eval_strategy="steps", save_steps=3, report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=0.1,
    )  # fmt: skip
    trainer = transformers.Trainer(Net(), settings, train_dataset=data, eval_dataset=data)
    trainer.train()
    run = ng.read_run(tmp_path / "out")  # the folder with checkpoint-3 and checkpoint-6
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert [(row["step"], row["loss"], row["lr"], row["grad_norm"]) for row in run.steps] == [
        (row["step"], row["loss"], row["learning_rate"], row["grad_norm"]) for row in logged
    ]
    assert [row["step"] for row in run.evals] == [3, 6] and run.summary is not None
    assert run.config == {"steps": 6} and run.path.name == "out"
    halfway = ng.read_run(tmp_path / "out" / "checkpoint-3" / "trainer_state.json")
    assert halfway.summary is None and len(halfway.steps) == 3
