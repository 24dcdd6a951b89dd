"""List the linear layers of a model by kind, and how a recipe and its baseline compute each.

A model of 32 blocks has hundreds of linear layers, but only seven kinds. The layers of a kind have names that differ only in
numbers (``model.layers.*.self_attn.q_proj``). Kinds of one shape take the same time and are timed once. q, k and v get the same
tensor. One cast serves all three, and its cost is split between them. The *baseline* of a recipe is bfloat16 with the same
storage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from narrowgauge.planner.roofline import Setting, Shape, setting_of
from narrowgauge.spec.computes import COMPUTES, first_of_input
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import STORAGES


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers of one shape whose names differ only in numbers, ``*`` in ``pattern``."""

    pattern: str
    shape: Shape
    count: int

    @property
    def group(self) -> str:
        """Return a key that is equal for kinds with the same input."""
        return first_of_input(self.pattern)


def kinds_of(model: Any) -> tuple[Kind, ...]:
    """Return the kinds of linear layers of a PyTorch model, in their order."""
    counts: Counter[tuple[str, Shape]] = Counter()
    for name, module in model.named_modules():
        if type(module).__name__ in ("Linear", "Conv1D"):
            is_transposed = type(module).__name__ == "Conv1D"
            rows, columns = module.weight.shape
            shape = Shape(columns, rows, True) if is_transposed else Shape(rows, columns)
            counts[".".join("*" if part.isdigit() else part for part in name.split(".")), shape] += 1
    return tuple(Kind(pattern, shape, count) for (pattern, shape), count in counts.items())


def plain_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe with the plain compute of its own dtype: the same storage, no narrow layers."""
    overrides = tuple(replace(o, compute=None) for o in recipe.overrides if o.storage is not None)
    # A storage that belongs to one compute is plain, and works with no other.
    compute = recipe.compute if recipe.storage.owner else COMPUTES[recipe.dtype]
    return replace(recipe, compute=compute, overrides=overrides)


def baseline_of(recipe: Recipe) -> Recipe:
    """Return the bfloat16 recipe to compare a recipe with: with the same storage, if bfloat16 supports it.

    Example:
        >>> from narrowgauge.spec.notation import parse
        >>> baseline_of(parse("float32/float32")).name, baseline_of(parse("float16/split")).name
        ('bfloat16/float32', 'bfloat16/word')
    """
    if recipe.storage.owner:
        return Recipe(COMPUTES["bfloat16"], STORAGES["word"])
    return replace(plain_recipe(recipe), compute=COMPUTES["bfloat16"])


def timed_recipes(recipes: Sequence[Recipe]) -> list[Recipe]:
    """Return the recipes whose whole steps are timed, without duplicates, the baselines first."""
    return list(dict.fromkeys([*map(baseline_of, recipes), *recipes]))


def settings_of(kinds: Iterable[Kind], recipe: Recipe) -> dict[Kind, Setting]:
    """Return how a recipe computes each kind, as its first layer."""
    return {kind: setting_of(kind.pattern.replace("*", "0"), recipe) for kind in kinds}


def timed_settings(kinds: Sequence[Kind], recipes: Sequence[Recipe]) -> list[tuple[Shape, Setting]]:
    """Return all operations that the costs of these recipes need, without duplicates."""
    needed = (settings_of(kinds, recipe).items() for recipe in timed_recipes(recipes))
    return list(dict.fromkeys((kind.shape, setting) for settings in needed for kind, setting in settings))
