"""Candidates: the recipes that a question compares, and which of them are safe to recommend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.planner.job import OPTIMIZER_STATES
from narrowgauge.planner.roofline import multiplies
from narrowgauge.spec.chips import Chip
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import STORAGES, Storage
from narrowgauge.spec.update_rules import UPDATE_RULES, refuse_pair

USUAL_RECIPES = ("bfloat16/word", "bfloat16/exact", "bfloat16/compact", "bfloat16/states8", "float8-row/word",
                 "bfloat16/word/reproducible")  # fmt: skip
"""Recipes of the README, which are the default comparison."""
XLA_RECIPES = ("bfloat16/float32", "bfloat16/master")
"""The default comparison on TPUs, which this project's optimizers do not run on."""
ADAPTER_RECIPES = ("bfloat16/master", "bfloat16/word")
"""The default comparison of adapters, whose states are small."""
FLOAT16_RECIPES = ("float16/split", "float16/master")
"""The default comparison on chips that multiply float16 but not bfloat16."""
STORAGE_RECIPES = [
    f"bfloat16/{row.name}"
    for row in sorted(STORAGES.values(), key=lambda row: -row.bytes_per_param)
    if not row.owner
]
"""A recipe for each storage of bfloat16 weights."""
_TUNING = ("int8-outlier", "int8-outlier-codes")
_USUAL_GRADIENT = -20
"""Power of two of a usual gradient: a norm of 1 over billions of values is 1e-5 each, late in
training 1e-6.
"""


def keeps_rate(storage: Storage) -> bool:
    """Tell whether a storage trains at the rate that was set.

    It keeps small updates, and its second moments are not held above the squares of usual
    gradients. Second moments of float16 without a scale are at least 2^-24, so steps divide by
    roots that are too large.
    """
    second = storage.exp_avg_sq
    floor = second.lowest - second.mantissa_bits
    return storage.keeps_updates and (second.scaled or floor <= 2 * _USUAL_GRADIENT)


def compared_recipes(recipes: Sequence[Recipe], asked: str | Recipe | Sequence[str | Recipe], chip: Chip, optimizer: str, *,
                     has_adapters: bool) -> list[Recipe]:  # fmt: skip
    """Return the recipes of a question on a chip: those that it names, or the usual ones that the
    chip multiplies.
    """
    if recipes:
        return list(recipes)
    if asked == "all":
        return _native_recipes(chip, optimizer)
    names: tuple[str, ...]
    if has_adapters:
        names = ADAPTER_RECIPES
    elif chip.vendor == "Google":
        names = XLA_RECIPES
    elif "bfloat16" in chip.peak_tflops:
        names = USUAL_RECIPES
    else:
        names = FLOAT16_RECIPES
    return suited_recipes(names, chip, optimizer) or _native_recipes(chip, optimizer)


def read_recipes(recipes: str | Recipe | Sequence[str | Recipe], optimizer: str) -> list[Recipe]:
    """Return the recipes of a question. A text is one recipe, ``"all"`` is none.

    Raises:
        RecipeError: the optimizer cannot be planned, or does not support a storage; or layers of a
            recipe differ.
    """
    if optimizer not in OPTIMIZER_STATES:
        raise RecipeError(
            f"Cannot plan optimizer {optimizer!r} because its states are unknown.",
            suggestion(optimizer, OPTIMIZER_STATES) or f"Known: {', '.join(OPTIMIZER_STATES)}.",
        )
    if recipes == "all":
        return []
    names = [recipes] if isinstance(recipes, str | Recipe) else recipes
    parsed = list(map(parse, names))
    for recipe in parsed:
        if recipe.overrides:
            name = replace(recipe, overrides=()).name
            raise RecipeError(
                f"Cannot plan {recipe.title} because its layers differ.",
                f"Plan {name}, and add the rest.",
            )
        _refuse_storage(recipe.storage, optimizer)
    return parsed


def _refuse_storage(storage: Storage, optimizer: str) -> None:
    rule = UPDATE_RULES[optimizer]
    kept_storage = storage.keeping(rule.moments or ())
    refuse_pair(optimizer, kept_storage, is_matrix=rule.is_matrix, is_adamw=optimizer == "adamw")


def _native_recipes(chip: Chip, optimizer: str) -> list[Recipe]:
    """Return every storage of 16-bit weights, and every other compute with its storage, that a chip
    multiplies natively.
    """
    names = [name for name in STORAGES if name.startswith("float16/")]
    if "bfloat16" in chip.peak_tflops:
        names = list(STORAGE_RECIPES)
    for compute in COMPUTES.values():
        # Users must request computes that change the whole model or are for fine-tuning.
        if not compute.transform and compute.name not in _TUNING:
            names.append(f"{compute.name}/{compute.default_storage}")
    return suited_recipes(dict.fromkeys(names), chip, optimizer)


def suited_recipes(names: Iterable[str], chip: Chip | None, optimizer: str) -> list[Recipe]:
    """Return the recipes that a chip (None for any) multiplies natively and that an optimizer
    steps.
    """
    suited = []
    for recipe in map(parse, names):
        if chip is None or multiplies(recipe.compute, chip):
            with contextlib.suppress(RecipeError):
                _refuse_storage(recipe.storage, optimizer)
                suited.append(recipe)
    return suited
