"""Validation, averages, schedules, the learning-rate finder, compiled modules: what a Trainer has besides its steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "lightning.pytorch", reason="narrowgauge[lightning] is not installed: ./dev test integrations installs it"
)

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.tuner import Tuner

import narrowgauge as ng
from integrations.lightning_runs import LitReference, fit, loader, plugin_of, same, stored, trainer_of
from integrations.own_trainer import reference
from narrowgauge.assembly.parameter_rounding import visible
from narrowgauge.integrations.lightning.packages import joined
from narrowgauge.integrations.lightning.precision import NarrowgaugePrecision, RecipePrecision
from narrowgauge.spec.notation import parse, representative_names

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*num_workers.*"),
    pytest.mark.filterwarnings("ignore:.*treespec.*"),
]


def test_validation_test_and_prediction_leave_training_as_it_is() -> None:
    run = reference("float8-delayed/word", 4)
    module = LitReference(run)
    trainer = trainer_of(plugin_of(run), 4, val_check_interval=2)
    trainer.fit(module, loader(), loader(1))
    assert module.losses == run.losses and same(module.model.state_dict(), run.state)
    found = trainer.test(module, loader(1), verbose=False)[0]["val_loss"]
    again = trainer_of(plugin_of(run), 4)
    assert again.validate(module, loader(1), verbose=False)[0]["val_loss"] == found < run.losses[0]
    assert again.predict(module, loader(1))[0].dtype is torch.bfloat16


class Regression(pl.LightningModule):
    """As in Lightning's own introduction: a forward, which prediction calls, and two children."""

    def __init__(self, make: Callable[[pl.LightningModule], Any] | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.LayerNorm(32), torch.nn.GELU())
        self.head = torch.nn.Linear(32, 1)
        self.make, self.losses = make, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = (self(batch).float() - 1).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val_loss", (self(batch).float() - 1).square().mean())

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return self.make(self) if self.make else None


def of_ones_own(module: pl.LightningModule) -> ng.AdamW:
    """The documented line, in every recipe: no storage is named."""
    return ng.AdamW(module.parameters(), lr=1e-2)


LIVED = [(name, of_ones_own) for name in representative_names() if parse(name).compute.transform != "unit"]
LIVED += [
    (name, None) for name in ("bfloat16-mixed", "float32", "bfloat16/word", "float16/split", "float8-delayed/compact")
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("recipe", "make"), LIVED, ids=[f"{name}-{'own' if make else 'none'}" for name, make in LIVED])
def test_each_recipe_fits_validates_tests_predicts_and_resumes(recipe: str, make: Any, tmp_path: Path) -> None:
    def trainer(epochs: int) -> pl.Trainer:
        plugin = NarrowgaugePrecision(recipe) if make else NarrowgaugePrecision(recipe, lr=1e-2)
        return trainer_of(plugin, -1, max_epochs=epochs)

    module, first = Regression(make), trainer(1)
    first.fit(module, rows_of_numbers(2), rows_of_numbers(1))
    found = first.validate(module, rows_of_numbers(1), verbose=False)[0]["val_loss"]
    assert first.test(module, rows_of_numbers(1), verbose=False)[0]["val_loss"] == found
    predicted = first.predict(module, rows_of_numbers(1))
    assert float((predicted[0].float() - 1).square().mean()) == pytest.approx(found, rel=1e-2)
    first.save_checkpoint(tmp_path / "one.ckpt")
    rest, whole = Regression(make), Regression(make)
    trainer(2).fit(rest, rows_of_numbers(2), ckpt_path=tmp_path / "one.ckpt", weights_only=False)
    last = trainer(2)
    last.fit(whole, rows_of_numbers(2))
    assert module.losses + rest.losses == whole.losses and same(rest.state_dict(), whole.state_dict())
    storage = parse(recipe).storage.name
    assert {group["storage"] for group in last.optimizers[0].param_groups} == {storage}


def is_stored(trainer: pl.Trainer, module: Any) -> bool:
    """Whether matrices are stored as they are seen; a master of a vector is replaced in the next step."""
    seen = dict(module.model.named_parameters())
    return all(
        torch.equal(visible(value, "bfloat16"), seen[n])
        for n, value in stored(trainer, module).items()
        if value.ndim > 1
    )


class Small(pl.LightningModule):
    """A model without buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = (self.model(batch).float() - 1).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.model(batch)

    def configure_optimizers(self) -> Any:
        return ng.AdamW(self.parameters(), lr=1e-2)


def rows_of_numbers(count: int = 8) -> torch.utils.data.DataLoader:
    numbers = torch.randn(count, 4, 32, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader(list(numbers), batch_size=None)


def test_averages_are_taken_and_given_back_without_a_trace() -> None:
    plain, averaged = Small(), Small()
    trainer_of(NarrowgaugePrecision("int8-row/word"), 8).fit(plain, rows_of_numbers())
    trainer = trainer_of(
        NarrowgaugePrecision("int8-row/word"), 8, val_check_interval=2, callbacks=[EMAWeightAveraging(decay=0.5)]
    )
    trainer.fit(averaged, rows_of_numbers(), rows_of_numbers())
    assert averaged.losses == plain.losses  # weights were swapped for validations, and the tails stayed
    trainer.optimizers[0].refresh()  # that callback writes through .data, which nobody can notice
    assert is_stored(trainer, averaged)
    assert not same(averaged.model.state_dict(), plain.model.state_dict())


def test_an_average_that_would_mix_buffers_is_refused() -> None:
    with pytest.raises(ng.errors.RecipeError, match="EMAWeightAveraging was requested for a model with buffers"):
        fit(reference("int8-row/states8", 4), callbacks=[EMAWeightAveraging()])


def test_stochastic_weight_averaging_sets_the_weights_at_the_end() -> None:
    run = reference("bfloat16/word", 4)
    module = LitReference(run)
    trainer = trainer_of(
        plugin_of(run), -1, max_epochs=4, callbacks=[StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=2)]
    )
    trainer.fit(module, loader(1))
    assert not same(module.model.state_dict(), run.state)
    assert is_stored(trainer, module)


def test_the_learning_rate_finder_puts_everything_back(tmp_path: Path) -> None:
    run = reference("bfloat16/word", 4)

    class Free(LitReference):
        lr = 1e-3

        def on_train_batch_start(self, *_: Any) -> None:
            pass

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.run.loss(self.model, self.run.batches[0])

        def configure_optimizers(self) -> Any:
            return ng.AdamW(self.parameters(), lr=self.lr)

    module = Free(run)
    trainer = trainer_of(plugin_of(run), 4, default_root_dir=tmp_path)
    found = Tuner(trainer).lr_find(module, loader(), num_training=4, update_attr=False, early_stop_threshold=None)
    assert found is not None and len(found.results["loss"]) == 4
    fresh, _ = fit(run, module=Free(run))
    trainer.fit(module, loader())
    assert same(module.model.state_dict(), fresh.model.state_dict())


def test_a_schedule_and_the_recipes_own_optimizer(tmp_path: Path) -> None:
    run = reference("bfloat16/word", 4)

    class Scheduled(LitReference):
        def configure_optimizers(self) -> Any:
            optimizer = self.trainer.precision_plugin.optimizer(self, lr=1e-2)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.run.rates[min(step, 3)] / 1e-2)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def on_train_batch_start(self, *_: Any) -> None:
            pass

    saved = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, save_top_k=-1)
    module, _ = fit(run, module=Scheduled(run), enable_checkpointing=True, callbacks=[saved])
    assert module.losses == pytest.approx(run.losses, abs=2e-4)
    rest, _ = fit(run, module=Scheduled(run), resume=next(tmp_path.glob("*step=2.ckpt")))
    assert rest.losses == module.losses[2:] and same(rest.model.state_dict(), module.model.state_dict())


def test_a_compiled_module_learns_alike() -> None:
    weights = []
    for compiled in (False, True):
        module = Small()
        made = torch.compile(module, backend="aot_eager") if compiled else module
        trainer_of(NarrowgaugePrecision("bfloat16/word"), 8).fit(made, rows_of_numbers())
        weights.append([p.detach().float() for p in module.parameters()])
    assert all(torch.allclose(a, b, atol=2e-2) for a, b in zip(*weights, strict=True))
    assert module.model[0].weight.dtype is torch.bfloat16


def test_lightnings_other_package_has_a_plugin_of_its_own_classes() -> None:
    other = pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed: lightning brings it")
    run = reference("bfloat16/word", 4)

    class Other(other.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = run.model()

        training_step, on_train_batch_start = LitReference.training_step, LitReference.on_train_batch_start
        configure_optimizers = LitReference.configure_optimizers

    module = Other()
    module.run, module.make, module.losses = run, None, []
    plugin = joined(RecipePrecision, "NarrowgaugePrecision", "plugins.precision", "Precision", "pytorch_lightning")
    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    chosen = plugin(run.recipe, **run.prepare_settings)
    trainer = other.Trainer(plugins=chosen, max_steps=4, max_epochs=-1, accelerator="cpu", **options)
    trainer.fit(module, loader())
    assert module.losses == run.losses and plugin is not NarrowgaugePrecision
