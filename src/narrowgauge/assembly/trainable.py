"""Refuse models that a recipe cannot train, before any change. Each error names the first offending name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.sharding import has_shards, require_mesh
from narrowgauge.errors import RecipeError
from narrowgauge.machine import require_float64
from narrowgauge.matmul.swapping import linear_names
from narrowgauge.spec import computes
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.recipes import Recipe


def require_trainable(model: nn.Module, recipe: Recipe, mesh: Any, shard: str) -> None:
    """Refuse a model that a recipe cannot train."""
    name, kind = recipe.name, type(model).__name__
    if isinstance(model, nn.parallel.DistributedDataParallel) or has_shards(model):
        raise RecipeError(
            f"Cannot prepare this {kind} by recipe '{name}' because fully_shard or DistributedDataParallel has taken its "
            "parameters already.",
            "Prepare the model first: mesh=… shards it, and DistributedDataParallel may wrap it then. Or leave it as it is, and "
            "take ng.swap_linears, ng.AdamW and ng.reduce_gradients_with.",
        )
    parameters = dict(model.named_parameters())
    require_float64(parameters.values())
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise RecipeError(
            f"Cannot train this {kind} by recipe '{name}': all of its {len(parameters)} parameters are frozen.",
            "Call requires_grad_() on those to train.",
        )
    for owner, parameter in parameters.items():
        if parameter.dtype not in (torch.float32, getattr(torch, recipe.storage.visible)):
            raise RecipeError(
                f"Cannot train '{owner}' of this {kind} by recipe '{name}' because it is {dtype_name(parameter.dtype)}.",
                "Call model.float() first.",
            )
    _check_tied(model, recipe)
    _check_patterns(model, recipe, list(parameters))
    for compute in recipe.computes:
        computes.check_layers(compute, linear_names(model), kind)
    for owner, module in model.named_modules():
        _check_module(owner, module, recipe)
    _check_ranks(recipe, mesh, shard)


def _check_tied(model: nn.Module, recipe: Recipe) -> None:
    """Refuse to keep only one name of a tied parameter."""
    first: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied = first.setdefault(parameter, name)
        if recipe.keeps(tied) != recipe.keeps(name):
            raise RecipeError(
                f"Cannot keep only one of '{tied}' and '{name}' because they share one tensor.",
                "Keep both modules or neither.",
            )


def _check_patterns(model: nn.Module, recipe: Recipe, names: list[str]) -> None:
    """Refuse patterns that match nothing, and overrides of another visible format."""
    modules, linears = [name for name, _ in model.named_modules() if name], linear_names(model)
    for pattern in recipe.keep:
        single = Recipe(recipe.compute, recipe.storage, keep=(pattern,))
        if not any(single.keeps(name) for name in [*names, *modules]):
            raise _no_match(f"keep pattern '{pattern}'", "module", model, modules)
    for override in recipe.overrides:
        what = f"override pattern '{override.pattern}'"
        if override.compute is not None and not any(map(override.matches, linears)):
            raise _no_match(what, "linear layer", model, linears)
        if override.storage is not None and not any(map(override.matches, names)):
            raise _no_match(what, "parameter", model, names)
        if override.storage is not None and override.storage.visible != recipe.storage.visible:
            raise RecipeError(
                f"Cannot store {override.storage.visible} by override '{override.pattern}' in a model of "
                f"{recipe.storage.visible}.",
                "Name the modules in keep = [...] to leave them in float32.",
            )


def _no_match(what: str, kind: str, model: nn.Module, names: list[str]) -> RecipeError:
    advice = f"Its names look like '{names[0]}' and '{names[-1]}'." if names else ""
    return RecipeError(f"{what} matches no {kind} of {type(model).__name__}.", advice)


def _check_module(name: str, module: nn.Module, recipe: Recipe) -> None:
    """Refuse sparse gradients. Refuse running statistics if bits must not depend on ranks."""
    kind = type(module).__name__
    if getattr(module, "sparse", False) and any(p.requires_grad for p in module.parameters()):
        raise RecipeError(
            f"Cannot step '{name}', a {kind} with sparse gradients, by recipe '{recipe.name}'.",
            "Build it with sparse=False.",
        )
    has_statistics = isinstance(module, _BatchNorm) and module.training and module.track_running_stats
    if recipe.reduction.order_invariant and has_statistics:
        raise RecipeError(
            f"Cannot give the same bits on any number of ranks by recipe '{recipe.name}' because '{name}' is a {kind}, whose "
            "running statistics depend on which micro-batches a rank has seen.",
            "Replace it by a layer norm or group norm, or take another reduction.",
        )


def _check_ranks(recipe: Recipe, mesh: Any, shard: str) -> None:
    """Refuse ranks over which gradients cannot be summed as a recipe says."""
    ranks = all_ranks()
    if mesh is not None:
        if mesh.get_coordinate() is None:
            raise RecipeError(
                f"Cannot prepare a model on rank {ranks.rank} because the mesh has only ranks {mesh.mesh.flatten().tolist()}.",
                "Call prepare on the ranks of the mesh alone.",
            )
        require_mesh(mesh, shard)
    elif recipe.reduction.name != "native" and ranks.size > 1:
        raise RecipeError(
            f"Cannot sum gradients over {ranks.size} ranks by recipe '{recipe.name}' without a mesh.",
            'Pass mesh=init_device_mesh(…), with shard="none" to keep the model whole on every rank.',
        )
