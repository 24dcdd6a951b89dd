"""List the linear layers of a model by kind, and the baseline of a recipe.

A model of 32 blocks has hundreds of linear layers, but only seven kinds. The layers of a kind have one shape, and names that
differ only in numbers (``model.layers.*.self_attn.q_proj``). The *baseline* of a recipe is bfloat16 with the same storage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from narrowgauge.matmul.linear import is_linear, is_transposed
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import STORAGES


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers of one shape whose names differ only in numbers, ``*`` in ``pattern``."""

    pattern: str
    out_features: int
    in_features: int
    names: tuple[str, ...]


def kinds_of(model: Any) -> tuple[Kind, ...]:
    """Return the kinds of linear layers of a PyTorch model, in their order."""
    names: dict[tuple[str, int, int], list[str]] = {}
    for name, module in model.named_modules():
        if is_linear(module):
            pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
            rows, columns = module.weight.shape
            sides = (columns, rows) if is_transposed(module) else (rows, columns)
            names.setdefault((pattern, *sides), []).append(name)
    return tuple(Kind(*key, tuple(layers)) for key, layers in names.items())


def baseline_of(recipe: Recipe) -> Recipe:
    """Return the bfloat16 recipe to compare a recipe with: with the same storage, if bfloat16 supports it.

    Example:
        >>> from narrowgauge.spec.notation import parse
        >>> baseline_of(parse("float32/float32")).name, baseline_of(parse("float16/split")).name
        ('bfloat16/float32', 'bfloat16/word')
    """
    if recipe.storage.owner:
        return Recipe(COMPUTES["bfloat16"], STORAGES["word"])
    return replace(recipe, compute=COMPUTES["bfloat16"], overrides=())
