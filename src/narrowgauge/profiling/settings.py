"""How each kind of linear layer is computed in a recipe, and in the plain recipes that it is compared with.

A recipe is compared with bfloat16 over the same storage, its *yardstick*. What its step takes beside linear layers is read from
its *base*: the same recipe with the plain row of its own dtype, which differs from the yardstick only where that dtype is not
bfloat16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from narrowgauge.profiling.layer_plan import Kind, Shape
from narrowgauge.spec.computes import COMPUTES, Compute
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import STORAGES

ELSEWHERE = "Predict it for a machine that is not here: --chip NAME (narrowgauge show chips)."
"""Advice where a model is too large to be measured."""


class Setting(NamedTuple):
    """How a linear layer is computed.

    Attributes:
        row: of computes.
        stream: dtype of its input and output.
        weights: dtype of its weight.
    """

    row: str
    stream: str = "bfloat16"
    weights: str = "bfloat16"

    @property
    def is_plain(self) -> bool:
        """Whether PyTorch's own linear function computes it."""
        return self.row == self.stream


Rows = Mapping[Kind, Setting]


def casts_made(row: Compute) -> tuple[str, ...]:
    """The casts that a row makes: those left out that another's codes serve for, and those that only round to 16 or 32 bits.

    Example:
        >>> casts_made(COMPUTES["float8-tensor"])
        ('output.left', 'output.right', 'grad_input.left')
    """
    served = {
        "grad_input.right": row.reuses_weight,
        "grad_weight.left": row.reuses_grad,
        "grad_weight.right": row.output.left.serves(row.grad_weight.right),
    }
    return tuple(name for name, cast in row.casts.items() if not served.get(name) and not cast.is_wide)


def base_of(recipe: Recipe) -> Recipe:
    """The plain recipe whose step tells what all but the linear layers take: the same storage, in its own dtype."""
    overrides = tuple(dataclasses.replace(o, compute=None) for o in recipe.overrides if o.storage is not None)
    # A storage that belongs to one compute is plain, and goes with no other.
    row = recipe.compute if "/" in recipe.storage.name else COMPUTES[recipe.dtype]
    return dataclasses.replace(recipe, compute=row, overrides=overrides, phases=(), evaluation=None)


def yardstick_of(recipe: Recipe) -> Recipe:
    """The bfloat16 recipe that a recipe is compared with: of the same storage, where bfloat16 goes with it.

    Example:
        >>> from narrowgauge.spec.notation import parse
        >>> yardstick_of(parse("float32/float32")).name, yardstick_of(parse("float16/split")).name
        ('bfloat16/float32', 'bfloat16/word')
    """
    if "/" in recipe.storage.name:
        return Recipe(COMPUTES["bfloat16"], STORAGES["word"])
    return dataclasses.replace(base_of(recipe), compute=COMPUTES["bfloat16"])


def rows_of(kinds: Iterable[Kind], recipe: Recipe) -> dict[Kind, Setting]:
    """How a recipe computes each kind."""

    def setting(name: str) -> Setting:
        weights, row = recipe.storage_of(f"{name}.weight", 2).visible, recipe.compute_of(name).name
        # What a recipe keeps is computed in its weights' own float32.
        stream = "float32" if recipe.keeps(name) else recipe.dtype
        # The rows that differ from their dtype's plain one by a storage alone.
        return Setting(stream if row in ("float8", "float16-throughout") else row, stream, weights)

    return {kind: setting(kind.name) for kind in kinds}


def settings_of(kinds: Sequence[Kind], recipes: Iterable[Recipe]) -> list[tuple[Shape, Setting]]:
    """Everything whose seconds the costs of these recipes need, none twice."""
    needed: dict[tuple[Shape, Setting], None] = {}
    for recipe in recipes:
        own = rows_of(kinds, recipe)
        plain = {kind: setting._replace(row=setting.stream) for kind, setting in own.items()}
        for rows in (own, plain, rows_of(kinds, base_of(recipe)), rows_of(kinds, yardstick_of(recipe))):
            needed |= {(kind.shape, setting): None for kind, setting in rows.items()}
    return list(needed)
