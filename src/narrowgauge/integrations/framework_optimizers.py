"""Optimizers that a framework's user has made, for a model that was converted to a recipe before.

The recipe decides how each parameter is stored, where the optimizer's maker named no storage. Another one that was named, be it
the usual ``word``, is a contradiction and is refused, and so is an optimizer that stores only what the model sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge._torch import plain_name
from narrowgauge.assembly.parameter_rounding import visible
from narrowgauge.assembly.preparation import Converted, scales_loss
from narrowgauge.distributed.sharding import has_shards
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.shards import local_of
from narrowgauge.optim.audit import joined_over_ranks
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.validation import EXPECTED, OF_RECIPE, check_rule, check_visible
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import Storage, for_vectors


def require_recipe(optimizer: Any, recipe: Recipe) -> None:
    """Refuse an optimizer that cannot do what a recipe says.

    Raises:
        RecipeError: it is none of ours, and the recipe stores more than the model sees, or scales the loss.
    """
    if isinstance(optimizer, Optimizer) or (recipe.storage.visible == "float32" and not scales_loss(recipe)):
        return
    raise RecipeError(
        f"recipe '{recipe.name}' was given {type(optimizer).__module__}.{type(optimizer).__name__}, which stores weights and "
        "moments in the parameters' own format and unscales no loss.",
        "Return ng.AdamW (or another of Narrowgauge's) from configure_optimizers, or None for the recipe's own.",
    )


def bind(optimizer: Optimizer, converted: Converted, *, first: bool = True) -> None:
    """Let an optimizer store a converted model's parameters as its recipe says, from their float32 values.

    Parameters that have states, or were written to since they were converted, keep what they have.

    Args:
        optimizer: made for the converted parameters.
        converted: the model; the values that are taken over are removed from it.
        first: whether the model's layers count this optimizer's steps.
    Raises:
        RecipeError: a group of another storage, or whose parameters the recipe stores differently; a group without the
            learning-rate factors that the recipe's compute needs.
    """
    names: dict[Tensor, str] = {parameter: plain_name(name) for name, parameter in converted.model.named_parameters()}
    own = [p for group in optimizer.param_groups for p in group["params"] if p in names]
    leave_storage_open(own)
    if not own:
        return
    for group in optimizer.param_groups:
        _store_as(optimizer, group, names, converted)
    optimizer.name_parameters(converted.model)
    values = {p: converted.values.pop(p) for p in own if p in converted.values}
    fresh = {p: v.to(local_of(p).device) for p, v in values.items() if p not in optimizer.state}
    optimizer.adopt({p: v for p, v in fresh.items() if _is_unchanged(p, v)})
    if converted.linears is not None and first:
        converted.linears.follow(optimizer)
    if has_shards(converted.model):
        optimizer.auditor.join = joined_over_ranks(list(optimizer.parameter_names()))


def expect_storage(converted: Converted) -> None:
    """Say how the recipe of a converted model stores its parameters, to the optimizer that is about to be made for them."""
    named = converted.model.named_parameters()
    EXPECTED[converted.model] = {n: converted.recipe.storage_of(plain_name(n), max(2, p.ndim)) for n, p in named}


def leave_storage_open(parameters: Iterable[Tensor]) -> None:
    """End :func:`expect_storage` for parameters that have their optimizer, or get none."""
    gone = set(parameters)
    for model, rows in EXPECTED.items():
        for name, parameter in model.named_parameters():
            if parameter in gone:
                rows.pop(name, None)


def _is_unchanged(parameter: Tensor, value: Tensor) -> bool:
    """Whether a parameter still is what a float32 value was rounded to."""
    shown = local_of(parameter.detach())
    return torch.equal(visible(local_of(value), str(shown.dtype).removeprefix("torch.")), shown)


def _store_as(optimizer: Optimizer, group: dict[str, Any], names: Mapping[Tensor, str], converted: Converted) -> None:
    """Set a group's storage to the recipe's."""
    recipe = converted.recipe
    members = [p for p in group["params"] if p in names]
    # The storage of vectors follows from that of their group.
    wanted = {(row := recipe.storage_of(names[p], max(2, p.ndim))).name: row for p in members}
    if not wanted or any(p in optimizer.state for p in members):
        return
    if len(wanted) > 1:
        raise RecipeError(
            f"a param group holds parameters that recipe '{recipe.name}' stores as {' and '.join(sorted(wanted))}.",
            OF_RECIPE,
        )
    if converted.factors and "lr_factor" not in group:
        raise RecipeError(
            f"recipe '{recipe.name}' multiplies the learning rate of each parameter by a factor, and a param group has none.",
            OF_RECIPE,
        )
    (row,) = wanted.values()
    if group["storage"] != row.name and optimizer.names_storage(group):
        raise RecipeError(
            f"the optimizer was built with storage '{group['storage']}', and recipe '{recipe.name}' stores '{row.name}'.",
            "Leave storage out of the optimizer, or name the same one in the recipe.",
        )
    _check(optimizer, members, row)
    optimizer.rows[row.name], group["storage"] = row, row.name


def _check(optimizer: Optimizer, members: Iterable[Tensor], row: Storage) -> None:
    for parameter in members:
        storage = for_vectors(row) if parameter.ndim < 2 else row
        check_visible(parameter, storage)
        check_rule(optimizer.rule, storage)


def saved_audit(optimizer: Optimizer) -> dict[str, Any]:
    """The windows of an optimizer's audit and its count of skipped steps, which its own state does not hold."""
    optimizer.settle()
    names = optimizer.parameter_names()
    windows = {names[p]: torch.stack(list(rows)) for p, rows in optimizer.auditor.windows.items() if p in names}
    return {"num_skipped": optimizer.num_skipped, "windows": windows}


def restore_audit(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Give an optimizer what :func:`saved_audit` returned."""
    optimizer.num_skipped = int(saved["num_skipped"])
    for parameter, name in optimizer.parameter_names().items():
        if name in saved["windows"]:
            optimizer.auditor.restore(parameter, saved["windows"][name])
