"""Fabric with a recipe: the bits of our trainer, checkpoints, and what is refused."""

from __future__ import annotations

import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "lightning.pytorch", reason="narrowgauge[lightning] is not installed: ./dev test integrations installs it"
)

from lightning.fabric import Fabric

import narrowgauge as ng
from integrations.lightning_runs import plugin_of, same
from integrations.own_trainer import OwnRun, reference
from narrowgauge.integrations.lightning import NarrowgaugePrecision
from narrowgauge.spec.notation import parse

pytestmark = pytest.mark.usefixtures("one_thread")


def begin(run: OwnRun, make: Any = None, **options: Any) -> tuple[Fabric, Any, Any, Any]:
    """A Fabric, its plugin, and a model and an optimizer that are set up."""
    plugin = plugin_of(run, **options)
    fabric = Fabric(plugins=plugin, accelerator="cpu", devices=1)
    model = fabric.setup_module(run.model())
    optimizer = fabric.setup_optimizers(make(model) if make else plugin.optimizer(model))
    return fabric, plugin, model, optimizer


def train(run: OwnRun, fabric: Fabric, model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = run.rates[step]
        tokens = run.batches[step]
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum")
        loss = loss / run.settings.tokens_per_step
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("recipe", ["float16/word", "bfloat16-mixed"])
def test_fabric_computes_what_ours_computes(recipe: str) -> None:
    run = reference(recipe, 4)
    fabric, _, model, optimizer = begin(run)
    assert train(run, fabric, model, optimizer, range(4)) == run.losses
    assert same(dict(model.module.state_dict()), run.state)


def test_an_optimizer_of_ones_own_gets_the_float32_weights_at_its_first_step() -> None:
    run = reference("bfloat16/split", 4)
    fabric, _, model, optimizer = begin(run, lambda m: ng.AdamW(m.parameters(), betas=(0.9, 0.95), max_grad_norm=1.0))
    train(run, fabric, model, optimizer, range(1))
    inner = optimizer.optimizer
    assert {group["storage"] for group in inner.param_groups} == {"split"}
    # Weights of 24 bits and more: tails were taken from the float32 values.
    value = inner.stored(model.module.lm_head.weight)
    assert not torch.equal(value, value.bfloat16().float())


@pytest.mark.parametrize("recipe", ["float32", "bfloat16-mixed", "bfloat16/exact", "float16/split"])
def test_the_recipe_says_how_an_optimizer_of_ones_own_stores(recipe: str) -> None:
    run = reference(recipe, 4)
    fabric, _, model, optimizer = begin(run, lambda m: ng.AdamW(m.parameters(), betas=(0.9, 0.95), max_grad_norm=1.0))
    train(run, fabric, model, optimizer, range(1))
    assert {group["storage"] for group in optimizer.optimizer.param_groups} == {parse(recipe).storage.name}
    with pytest.raises(ng.errors.RecipeError, match="built with storage 'word'"):
        begin(reference("bfloat16/exact", 4), lambda m: ng.AdamW(m.parameters(), storage="word"))


def test_a_checkpoint_of_fabrics_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    run = reference("float8-delayed/compact", 4)
    fabric, plugin, model, optimizer = begin(run)
    train(run, fabric, model, optimizer, range(2))
    fabric.save(tmp_path / "two.ckpt", {"model": model, "optimizer": optimizer, "precision": plugin})
    fabric, plugin, model, optimizer = begin(run)
    fabric.load(tmp_path / "two.ckpt", {"model": model, "optimizer": optimizer, "precision": plugin})
    assert train(run, fabric, model, optimizer, range(2, 4)) == run.losses[2:]


def test_gradients_are_clipped_by_one_party() -> None:
    run = reference("bfloat16/word", 4)
    fabric, _, model, optimizer = begin(run)
    with pytest.raises(
        ng.errors.RecipeError, match=r"fabric\.clip_gradients\(\) was requested of an optimizer that clips"
    ):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    run = reference("float16/word", 4)
    fabric, _, model, optimizer = begin(run, max_grad_norm=None)
    with pytest.raises(ng.errors.RecipeError, match="scaled loss"):
        fabric.clip_gradients(model, optimizer, clip_val=1.0)


def test_an_optimizer_for_a_model_that_was_not_set_up_is_refused() -> None:
    with pytest.raises(ng.errors.RecipeError, match="has not converted"):
        plugin_of(reference("bfloat16/word", 4)).optimizer(torch.nn.Linear(2, 2))


def test_what_fabric_tells_no_plugin_is_refused() -> None:
    with pytest.raises(
        ng.errors.RecipeError, match="has reduction 'reproducible', of which Fabric tells a plugin nothing"
    ):
        Fabric(plugins=NarrowgaugePrecision("bfloat16/word/reproducible")).setup_module(torch.nn.Linear(2, 2))
    with pytest.raises(ng.errors.RecipeError, match="accumulation_dtype='float32' was requested in Fabric"):
        Fabric(plugins=NarrowgaugePrecision(accumulation_dtype="float32")).setup_module(torch.nn.Linear(2, 2))


def test_a_plugin_travels_to_processes_and_keeps_no_model_alive() -> None:
    plugin = pickle.loads(pickle.dumps(NarrowgaugePrecision("float16/word")))  # as ddp_spawn sends it
    model = torch.nn.Linear(2, 2)
    known = weakref.ref(plugin.convert_module(model))
    del model
    gc.collect()
    assert plugin.precision == "16-true" and known() is None
