"""What the casts of each layer lose on real text: noise, what lies beyond a format's end, what becomes zero.

A few training steps are taken in the plain recipe, uncompiled, and every linear layer's input, weight and output gradient
are cast as each row asked for would cast them, beside the training and without a trace in it. Delayed scales come from the
batches before.
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

from narrowgauge.matmul.linear import is_linear
from narrowgauge.matmul.outliers import without_outliers
from narrowgauge.numerics.tensor_stats import cast_and_sum, sqnr_of_sums
from narrowgauge.profiling.layer_plan import Kind, Shape
from narrowgauge.profiling.profile_report import Loss
from narrowgauge.profiling.settings import base_of, casts_made, rows_of
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.variants import named
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data import prepare_data
from narrowgauge.trainer.loop import vocabulary_size
from narrowgauge.trainer.session import Session, build
from narrowgauge.trainer.step import train_step

NUM_BATCHES = 3
OPERANDS = {
    "output.left": ("input", 1),
    "output.right": ("weight", 1),
    "grad_input.left": ("gradient", 1),
    "grad_input.right": ("weight", 0),
    "grad_weight.left": ("gradient", 0),
    "grad_weight.right": ("input", 0),
}
"""Of each cast, which operand it takes and which of its dimensions the matmul contracts."""


def loss_of(sums: Tensor, layer: str, name: str) -> Loss:
    """The readings of a cast's sums over batches, see :data:`narrowgauge.numerics.tensor_stats.CAST_SUMS`."""
    _, _, beyond, zeroed, nonzero, total = sums.tolist()
    shares = beyond / max(total, 1), zeroed / max(nonzero, 1)
    return Loss(layer, name, OPERANDS[name][0], float(sqnr_of_sums(sums)), *shares)


@dataclass
class Watch:
    """The layers of a model in training, each watched for some rows.

    Args:
        rows: the rows of computes to try, by layer.
    """

    rows: dict[str, list[str]]
    sums: dict[tuple[str, str, str], Tensor] = field(default_factory=dict)
    largest: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    outers: dict[tuple[str, str, str], Tensor | None] = field(default_factory=dict)

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Within it, every forward and backward pass is watched."""
        watched = [(n, m) for n, m in model.named_modules() if is_linear(m) and self.rows.get(n)]
        handles = [module.register_forward_hook(self._hook(name)) for name, module in watched]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Any:
        def after(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            weight = cast(Tensor, module.weight).detach()
            x = inputs[0].detach().flatten(0, -2)
            self._read(name, "input", x)
            self._read(name, "weight", weight.t() if type(module).__name__ == "Conv1D" else weight)
            if output.requires_grad:
                output.register_hook(lambda grad: self._read(name, "gradient", grad.detach().flatten(0, -2)))

        return after

    @torch.no_grad()
    def _read(self, layer: str, operand: str, x: Tensor) -> None:
        for row in self.rows[layer]:
            for name in casts_made(named(row)):
                what, dim = OPERANDS[name]
                if what == operand:
                    own = named(row).casts[name]
                    amax = self.largest.get((layer, operand)) if own.scaling == "delayed" else None
                    fold = self._fold(layer, row, name)
                    source = without_outliers(x, own.outliers) if own.outliers else x
                    sums, self.outers[layer, row, name] = cast_and_sum(source, own, dim, fold=fold, amax=amax)
                    self.sums[layer, row, name] = sums.sum(0) + self.sums.get((layer, row, name), 0.0)
        amax, before = x.abs().amax().float().view(1, 1), self.largest.get((layer, operand))
        self.largest[layer, operand] = amax if before is None else torch.maximum(before, amax)

    def _fold(self, layer: str, row: str, name: str) -> Tensor | None:
        """The scales of the right operand, where they go into the left one."""
        place, side = name.split(".")
        if side == "right" or named(row).products[place].right.granularity != "column":
            return None
        source, sides = {"grad_input": ("output.right", (1, -1)), "grad_weight": ("output.left", (-1, 1))}[place]
        outer = self.outers[layer, row, source]
        return None if outer is None else outer.view(sides)


def losses(recipes: Sequence[Recipe], config: TrainConfig) -> list[tuple[Loss, ...]]:
    """What each recipe's casts lose on the first batches of a training.

    Args:
        recipes: whose casts are tried.
        config: the model, the data and the size of a step; its recipe is not read.
    Returns:
        For each recipe the readings of all its casts, worst first.
    """
    found: dict[Recipe, tuple[Loss, ...]] = {}
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = vocabulary_size(config)
        data = prepare_data(config.data, Path(folder), vocab_size=vocabulary, seed=config.seed)
        for base in dict.fromkeys(map(base_of, recipes)):
            own = [recipe for recipe in recipes if base_of(recipe) == base]
            session = build(replace(config, recipe=base, compile=False, audit_every=0), Path(folder), data)
            found |= _losses_beside(session, own)
    return [found[recipe] for recipe in recipes]


def _losses_beside(session: Session, recipes: Sequence[Recipe]) -> dict[Recipe, tuple[Loss, ...]]:
    """The readings of some recipes, from one training."""
    names = [name for name, module in session.model.named_modules() if is_linear(module)]
    chosen = {recipe: _rows(names, recipe) for recipe in recipes}
    watch = Watch({name: list(dict.fromkeys(filter(None, (own[name] for own in chosen.values())))) for name in names})
    with watch.attached(session.model):
        for _ in range(NUM_BATCHES):
            train_step(session)
    return {recipe: _worst_first(watch, own) for recipe, own in chosen.items()}


def _rows(names: Sequence[str], recipe: Recipe) -> dict[str, str]:
    """The row of each layer, nothing where it is plain."""
    # Only the name of a layer decides.
    kinds = {name: Kind(name, Shape(0, 0), 1) for name in names}
    settings = rows_of(kinds.values(), recipe)
    return {name: "" if settings[kind].is_plain else settings[kind].row for name, kind in kinds.items()}


def _worst_first(watch: Watch, rows: dict[str, str]) -> tuple[Loss, ...]:
    readings = [loss_of(s, layer, name) for (layer, row, name), s in watch.sums.items() if row and rows[layer] == row]
    return tuple(sorted(readings, key=lambda loss: loss.sqnr_db))
