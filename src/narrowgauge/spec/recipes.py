"""Recipes: a compute, a storage and a reduction, with other computes for some layers.

A recipe has up to three parts, ``compute/storage/reduction``: how operands enter a matmul, how
weights and moments are stored, and how gradients are summed across ranks. Each part is an entry of
a small table: N + M + K entries give N × M × K recipes. :mod:`narrowgauge.spec.notation` reads
recipes from names and TOML tables.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field, replace
from typing import Any

from narrowgauge.errors import RecipeError
from narrowgauge.spec.computes import COMPUTES, Compute
from narrowgauge.spec.storages import STORAGES, Storage
from narrowgauge.spec.sums import REDUCTIONS, Reduction


@dataclass(frozen=True, slots=True)
class Override:
    """Another compute for the linear layers whose names match ``pattern`` (shell wildcards; ``*``
    also matches dots).
    """

    pattern: str
    compute: Compute

    def matches(self, name: str) -> bool:
        return fnmatch.fnmatchcase(name, self.pattern)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The formats of a whole model: a compute, a storage and a reduction, with exceptions.

    Args:
        compute: how operands enter matmuls.
        storage: how weights and moments are stored.
        reduction: how gradients are summed across ranks.
        overrides: other computes by pattern of name; the last match wins.
        label: a user's name, to distinguish recipes of the same full name; ignored by comparisons.
    Raises:
        RecipeError: the parts contradict each other.
    Example:
        >>> from narrowgauge.spec.notation import parse
        >>> parse("bf16/word").name, parse("bf16/word").bytes_per_param
        ('bfloat16/word', 8.0)
    """

    compute: Compute
    storage: Storage
    reduction: Reduction = REDUCTIONS["native"]
    overrides: tuple[Override, ...] = ()
    label: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        _check_pair(self.compute, self.storage)
        for override in self.overrides:
            _check_override(self, override)

    @property
    def name(self) -> str:
        """Return the full name, ``compute/storage``, followed by the reduction if it is not native."""
        name = f"{self.compute.name}/{self.storage.short_name}"
        if self.reduction.name != "native":
            name += f"/{self.reduction.name}"
        return name

    @property
    def title(self) -> str:
        """Return the display name: the full name, and for a recipe with exceptions its label, or
        "with override".
        """
        if not self.overrides:
            return self.name
        if self.label:
            return f"{self.name} ({self.label})"
        return f"{self.name} with override"

    @property
    def bytes_per_param(self) -> float:
        """Bytes per parameter of weight, gradient and states, for matrices."""
        return self.storage.bytes_per_param

    @property
    def computes(self) -> tuple[Compute, ...]:
        """Return all computes of the recipe without duplicates, the main one first."""
        computes = [override.compute for override in self.overrides]
        return tuple(dict.fromkeys([self.compute, *computes]))

    @property
    def dtype(self) -> str:
        """Return the dtype of plain linear layers, norms and all else outside the casts, whatever
        the weights' format.
        """
        return self.compute.dtype

    def compute_of(self, name: str, *, is_kept: bool = False) -> Compute:
        """Return the compute of the linear layer of that dotted name: of the last matching
        override, or the recipe's.

        A layer that ``is_kept`` wide, by its place in the model, has the plain compute of ``dtype``.

        Example:
            >>> from narrowgauge.spec.notation import parse
            >>> recipe = parse("float8-row/word")
            >>> recipe.compute_of("model.layers.0.mlp.up_proj").name, recipe.compute_of("lm_head", is_kept=True).name
            ('float8-row', 'bfloat16')
        """
        for override in reversed(self.overrides):
            if override.matches(name):
                if override.compute.dtype == self.dtype:
                    return override.compute
                return replace(override.compute, dtype=self.dtype)
        if is_kept and not self.compute.is_wide:
            return COMPUTES[self.dtype]
        return self.compute

    def to_value(self) -> str | dict[str, Any]:
        """Return the full name of a recipe without overrides, else a TOML table.

        :func:`~narrowgauge.spec.notation.parse` reads both back as an equal recipe.
        """
        if not self.overrides:
            return self.name
        value: dict[str, Any] = {"recipe": self.name}
        if self.label:
            value["name"] = self.label
        value["override"] = []
        for override in self.overrides:
            row = {"pattern": override.pattern, "compute": override.compute.name}
            value["override"].append(row)
        return value


def is_pair(compute: Compute, storage: Storage) -> bool:
    """Tell whether a compute supports a storage."""
    if storage.owner:
        return storage.owner == compute.name
    return not compute.owns_storages and f"{compute.name}/{storage.name}" not in STORAGES


def _check_pair(compute: Compute, storage: Storage) -> None:
    """Refuse a storage that belongs to another compute, or that this compute does not support."""
    if is_pair(compute, storage):
        return
    if storage.owner:
        advice = f"Take compute '{storage.owner}'."
    else:
        fitting = [repr(row.short_name) for row in STORAGES.values() if is_pair(compute, row)]
        advice = f"Take storage {', '.join(fitting)}."
    raise RecipeError(
        f"Cannot use compute '{compute.name}' with storage '{storage.name}' because it does not "
        "support it.",
        advice,
    )


def _check_override(recipe: Recipe, override: Override) -> None:
    """Refuse a compute to which a model prepared for the main compute cannot switch."""
    main = recipe.compute
    compute = override.compute
    requested = f"override '{override.pattern}' has compute '{compute.name}'"
    if compute != main and compute.owns_storages:
        raise RecipeError(
            f"{requested} in a recipe of '{main.name}'; it takes its own storages only.",
            "Take another.",
        )
    if compute.transform != main.transform:
        raise RecipeError(
            f"{requested}, whose transform is '{compute.transform or 'none'}', in a recipe of "
            f"'{main.name}', whose transform is "
            f"'{main.transform or 'none'}'.",
            "A transform changes the whole model once: take computes with the same transform.",
        )
    if recipe.storage.visible == "float32" and compute.dtype != main.dtype:
        raise RecipeError(
            f"{requested} of {compute.dtype} in a recipe of '{main.name}', which casts "
            f"{recipe.storage.visible} weights to "
            f"{main.dtype}.",
            "Take computes of one dtype, or a storage of narrow weights such as 'word'.",
        )
