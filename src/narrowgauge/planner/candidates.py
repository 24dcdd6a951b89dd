"""Recipes that are compared: those of a question, or one default list."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from narrowgauge.errors import RecipeError
from narrowgauge.planner.program import Program
from narrowgauge.spec.chips import Chip
from narrowgauge.spec.computes import COMPUTES, Compute, Product
from narrowgauge.spec.kernels import kernel_for, needs_kernel
from narrowgauge.spec.notation import parse, representative_names
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import Storage
from narrowgauge.spec.update_rules import UPDATE_RULES, refuse_pair

DEFAULT_RECIPES = ("bfloat16/master", "bfloat16/word", "bfloat16/compact", "bfloat16/states8", "float8-row/word",
                   "float16/split", "float16/master")  # fmt: skip
"""Recipes that are compared by default, of those that chip and program run."""
_TUNING = ("int8-outlier-codes",)
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


def is_native(product: Product, chip: Chip) -> bool:
    """Tell whether the chip multiplies the operands' codes directly, with a kernel of this version."""
    if needs_kernel(product):
        has_kernel = kernel_for(product, chip.target) is not None
    else:
        has_kernel = product.is_wide or chip.vendor == "NVIDIA"
    formats = {chip.rate_format(cast.format) for cast in (product.left, product.right)}
    return has_kernel and formats <= chip.peak_tflops.keys()


def multiplies(compute: Compute, chip: Chip) -> bool:
    """Tell whether the chip computes every product natively, without emulation."""
    return all(is_native(product, chip) for product in compute.products.values())


def compared_recipes(
    asked: Any, chip: Chip, optimizer: str, program: Program, *, has_adapters: bool
) -> list[Recipe]:
    """Return the recipes of a question on a chip: those that it names, all that the chip
    multiplies natively, or the default ones.
    """
    if asked == "all":
        return list(suited_recipes(_all_names(), chip, optimizer))
    if asked:
        names = [asked] if isinstance(asked, str | Recipe) else asked
        recipes = list(map(parse, names))
        for recipe in recipes:
            _refuse_storage(recipe.storage, optimizer)
        return recipes
    suited = []
    for recipe in suited_recipes(DEFAULT_RECIPES, chip, optimizer):
        is_short = recipe.dtype == "float16" and "bfloat16" in chip.peak_tflops
        is_ours = recipe.storage.short_name != "master"
        is_tuned = has_adapters and not recipe.compute.is_wide
        if not (is_short or is_tuned or (is_ours and not program.ours)):
            suited.append(recipe)
    return suited or [parse("bfloat16/master")]


def _refuse_storage(storage: Storage, optimizer: str) -> None:
    rule = UPDATE_RULES[optimizer]
    row = storage.keeping(rule.moments)
    refuse_pair(optimizer, row, is_matrix=rule.is_matrix, is_adamw=optimizer == "adamw")


def _all_names() -> Iterator[str]:
    """Yield every compute with its storage, and every storage with its compute or bfloat16, but
    computes that change the whole model or are for fine-tuning.
    """
    for name in representative_names():
        compute = COMPUTES[name.partition("/")[0]]
        if not compute.transform and compute.name not in _TUNING:
            yield name


def suited_recipes(names: Iterable[str], chip: Chip, optimizer: str) -> Iterator[Recipe]:
    """Yield the recipes that a chip multiplies natively and that an optimizer steps."""
    for recipe in map(parse, names):
        if multiplies(recipe.compute, chip):
            with suppress(RecipeError):
                _refuse_storage(recipe.storage, optimizer)
                yield recipe
