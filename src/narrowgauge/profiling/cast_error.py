"""Measure what the casts of each layer lose on real text: noise, overflow and underflow.

A few training steps run in the plain recipe, uncompiled. The input, weight and output gradient of every linear layer are also
cast as in each requested compute, without changing the training. Delayed scales come from earlier batches.
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
        computes: names of the computes to try, by layer.
        sums: by layer, compute and slot.
        largest: amax of each tensor over all batches so far, by layer and tensor.
        outers: outer scale of each operand, by layer, compute and slot.
    """

    computes: dict[str, list[str]]
    sums: dict[tuple[str, str, str], Tensor] = field(default_factory=dict)
    largest: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    outers: dict[tuple[str, str, str], Tensor | None] = field(default_factory=dict)

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Measure every forward and backward pass within it."""
        layers = [(n, m) for n, m in model.named_modules() if is_linear(m) and self.computes.get(n)]
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
        for name in self.computes[layer]:
            compute = named(name)
            for slot in casts_made(compute):
                if SLOTS[slot].tensor == tensor:
                    slot_cast = compute.casts[slot]
                    amax = self.largest.get((layer, tensor)) if slot_cast.scaling == "delayed" else None
                    source = without_outliers(x, slot_cast.outliers) if slot_cast.outliers else x
                    fold = self._fold(layer, name, slot)
                    sums, self.outers[layer, name, slot] = cast_and_sum(
                        source, slot_cast, SLOTS[slot].dim, fold=fold, amax=amax
                    )
                    self.sums[layer, name, slot] = sums.sum(0) + self.sums.get((layer, name, slot), 0.0)
        amax, before = x.abs().amax().float().view(1, 1), self.largest.get((layer, tensor))
        self.largest[layer, tensor] = amax if before is None else torch.maximum(before, amax)

    def _fold(self, layer: str, name: str, slot: str) -> Tensor | None:
        """Return the right operand's scales, where they are multiplied into the left one."""
        matmul, compute = SLOTS[slot].matmul, named(name)
        if SLOTS[slot].side == "right":
            return None
        return scales_to_fold(self.outers.get((layer, name, compute.cast_slots[f"{matmul}.right"])), compute, matmul)


def losses(recipes: Sequence[Recipe], config: TrainConfig) -> list[tuple[Loss, ...]]:
    """Return the losses of each recipe's casts on a run's first batches, worst first. ``config.recipe`` is not used."""
    lost: dict[Recipe, tuple[Loss, ...]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = prepare_data(config.data, vocab_size=vocabulary_size(config.model), seed=config.seed)
        for plain in dict.fromkeys(map(plain_recipe, recipes)):
            same = [recipe for recipe in recipes if plain_recipe(recipe) == plain]
            session = build(replace(config, recipe=plain, compile=False, audit_every=0), Path(folder), data)
            lost |= _losses_in(session, same)
    return [lost[recipe] for recipe in recipes]


def _losses_in(session: Session, recipes: Sequence[Recipe]) -> dict[Recipe, tuple[Loss, ...]]:
    layers = [name for name, module in session.model.named_modules() if is_linear(module)]
    settings = {recipe: {layer: setting_of(layer, recipe) for layer in layers} for recipe in recipes}
    # The name of each layer's compute, empty where it is plain.
    computes = {
        r: {n: "" if s.is_plain else s.compute for n, s in by_layer.items()} for r, by_layer in settings.items()
    }
    tried = {n: list(dict.fromkeys(by_layer[n] for by_layer in computes.values() if by_layer[n])) for n in layers}
    hooks = CastErrorHooks(tried)
    with hooks.attached(session.model):
        for _ in range(NUM_BATCHES):
            train_step(session)
    lost: dict[Recipe, tuple[Loss, ...]] = {}
    for recipe, by_layer in computes.items():
        sums = hooks.sums.items()
        casts = [loss_of(s, layer, slot) for (layer, name, slot), s in sums if by_layer[layer] == name]
        lost[recipe] = tuple(sorted(casts, key=lambda loss: loss.sqnr_db))
    return lost
