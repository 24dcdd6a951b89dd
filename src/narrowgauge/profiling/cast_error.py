"""Measure what the casts of each layer lose on real text: noise, overflow and underflow.

For each recipe a few training steps run in its plain recipe, uncompiled. The input, weight and output gradient of every linear
layer are also cast as in the recipe's compute, without changing the training. Delayed scales come from earlier batches.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from narrowgauge.matmul.layer_matmuls import scales_to_fold, without_outliers
from narrowgauge.matmul.linear import is_linear, is_transposed
from narrowgauge.numerics.metrics import cast_and_sum, cast_loss
from narrowgauge.planner.roofline import setting_of
from narrowgauge.profiling.layers import plain_recipe
from narrowgauge.spec.computes import SLOTS, casts_made, named
from narrowgauge.spec.recipes import Recipe
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.dataset import prepare_data
from narrowgauge.trainer.language_model import vocabulary_size
from narrowgauge.trainer.session import Session, build
from narrowgauge.trainer.step import train_step

NUM_BATCHES = 3


@dataclass(frozen=True)
class Loss:
    """The losses of one cast of one layer.

    Args:
        cast: its slot, ``output.left`` … ``grad_weight.right``.
        operand: ``input``, ``weight`` or ``gradient``.
        sqnr_db: signal to quantization noise, decibels.
        overflow: fraction of values beyond the format's largest.
        underflow: fraction of nonzero values that become zero.
    """

    layer: str
    cast: str
    operand: str
    sqnr_db: float
    overflow: float
    underflow: float


def loss_of(sums: Tensor, layer: str, slot: str) -> Loss:
    """Return the losses of a cast from its sums over batches, see :data:`narrowgauge.numerics.metrics.CAST_SUMS`."""
    return Loss(layer, slot, SLOTS[slot].tensor, *cast_loss(sums))


@dataclass
class CastErrorHooks:
    """Hooks on the linear layers of a model in training, which add up what casts lose.

    Attributes:
        computes: name of the compute to try, by layer.
        sums: by layer and slot.
        largest: amax of each tensor over all batches so far, by layer and tensor.
        outers: outer scale of each operand, by layer and slot.
    """

    computes: dict[str, str]
    sums: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    largest: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    outers: dict[tuple[str, str], Tensor | None] = field(default_factory=dict)

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Measure every forward and backward pass within it."""
        layers = [(name, module) for name, module in model.named_modules() if name in self.computes]
        handles = [module.register_forward_hook(self._hook(name)) for name, module in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Any:
        def after(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            weight = cast(Tensor, module.weight).detach()
            self._add(name, "input", inputs[0].detach().flatten(0, -2))
            self._add(name, "weight", weight.t() if is_transposed(module) else weight)
            if output.requires_grad:
                output.register_hook(lambda grad: self._add(name, "gradient", grad.detach().flatten(0, -2)))

        return after

    @torch.no_grad()
    def _add(self, layer: str, tensor: str, x: Tensor) -> None:
        compute = named(self.computes[layer])
        for slot in casts_made(compute):
            if SLOTS[slot].tensor == tensor:
                slot_cast, fold = compute.casts[slot], None
                if SLOTS[slot].side == "left":  # the right operand's scales may be multiplied into it
                    matmul = SLOTS[slot].matmul
                    right = self.outers.get((layer, compute.cast_slots[f"{matmul}.right"]))
                    fold = scales_to_fold(right, compute, matmul)
                amax = self.largest.get((layer, tensor)) if slot_cast.scaling == "delayed" else None
                source = without_outliers(x, slot_cast.outliers) if slot_cast.outliers else x
                sums, self.outers[layer, slot] = cast_and_sum(source, slot_cast, SLOTS[slot].dim, fold=fold, amax=amax)
                self.sums[layer, slot] = sums.sum(0) + self.sums.get((layer, slot), 0.0)
        amax, before = x.abs().amax().float().view(1, 1), self.largest.get((layer, tensor))
        self.largest[layer, tensor] = amax if before is None else torch.maximum(before, amax)


def losses(recipes: Sequence[Recipe], config: TrainConfig) -> list[tuple[Loss, ...]]:
    """Return the losses of each recipe's casts on a run's first batches, worst first. ``config.recipe`` is not used."""
    with tempfile.TemporaryDirectory() as folder:
        data = prepare_data(config.data, vocab_size=vocabulary_size(config.model), seed=config.seed)
        plain = replace(config, compile=False, audit_every=0)
        sessions = (build(replace(plain, recipe=plain_recipe(recipe)), Path(folder), data) for recipe in recipes)
        return [_losses_in(session, recipe) for session, recipe in zip(sessions, recipes, strict=True)]


def _losses_in(session: Session, recipe: Recipe) -> tuple[Loss, ...]:
    layers = [name for name, module in session.model.named_modules() if is_linear(module)]
    settings = {layer: setting_of(layer, recipe) for layer in layers}
    hooks = CastErrorHooks({layer: setting.compute for layer, setting in settings.items() if not setting.is_plain})
    if hooks.computes:
        with hooks.attached(session.model):
            for _ in range(NUM_BATCHES):
                train_step(session)
    lost = [loss_of(sums, layer, slot) for (layer, slot), sums in hooks.sums.items()]
    return tuple(sorted(lost, key=lambda loss: loss.sqnr_db))
