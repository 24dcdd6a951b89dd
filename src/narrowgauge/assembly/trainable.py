"""Refuse models that a recipe cannot train, before any change. Each error names the first offending name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from narrowgauge.distributed.exchanges import EXCHANGES
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.reduction import inner_of
from narrowgauge.distributed.sharding import has_shards, require_mesh
from narrowgauge.errors import RecipeError
from narrowgauge.machine import require_float64
from narrowgauge.matmul.swapping import linear_names
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.recipes import Recipe


def require_trainable(model: nn.Module, recipe: Recipe, mesh: Any, shard: str) -> None:
    """Refuse a model, perhaps inside DistributedDataParallel, that a recipe cannot train."""
    inner = inner_of(model)
    name, kind = recipe.name, type(inner).__name__
    if recipe.reduction.name not in EXCHANGES:
        raise RecipeError(
            f"Cannot sum gradients by '{recipe.reduction.name}' of recipe '{name}', which is not implemented.",
            "narrowgauge show reductions lists the others.",
        )
    parameters = dict(inner.named_parameters())
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
    _check_patterns(inner, recipe)
    for owner, module in inner.named_modules():
        _check_module(owner, module, recipe)
    _check_ranks(model, recipe, mesh)
    if mesh is not None:
        _check_mesh(inner, mesh, shard)


def _check_patterns(model: nn.Module, recipe: Recipe) -> None:
    """Refuse overrides that match no layer."""
    linears = linear_names(model)
    for override in recipe.overrides:
        if not any(map(override.matches, linears)):
            raise RecipeError(
                f"override pattern '{override.pattern}' matches no linear layer of {type(model).__name__}.",
                f"Its names look like '{linears[0]}' and '{linears[-1]}'." if linears else "",
            )


def _check_module(name: str, module: nn.Module, recipe: Recipe) -> None:
    """Refuse sparse gradients. Refuse modules with memory if bits must not depend on ranks."""
    kind = type(module).__name__
    if getattr(module, "sparse", False) and any(p.requires_grad for p in module.parameters()):
        raise RecipeError(
            f"Cannot step '{name}', a {kind} with sparse gradients, by recipe '{recipe.name}'.",
            "Build it with sparse=False.",
        )
    if recipe.reduction.order_invariant and (dependence := depends_on_order(module)):
        reason, advice = dependence
        raise RecipeError(
            f"Cannot give the same bits on any number of ranks by recipe '{recipe.name}' because '{name}' is a {kind}, {reason}.",
            f"{advice}, or take another reduction.",
        )


def depends_on_order(module: nn.Module) -> tuple[str, str] | None:
    """Return why a module's output depends on earlier micro-batches, and what to do. Return ``None`` if it does not."""
    if isinstance(module, _BatchNorm) and module.training and module.track_running_stats:
        reason = "whose running statistics depend on which micro-batches a rank has seen"
        return reason, "Replace it by a layer norm or group norm"
    if isinstance(module, _DropoutNd) and module.p > 0:
        return "which draws random numbers in the order of a rank's own micro-batches", "Set its p to 0"
    return None


def _check_ranks(model: nn.Module, recipe: Recipe, mesh: Any) -> None:
    """Refuse a model whose gradients cannot be summed over ranks as a recipe says."""
    inner, size = inner_of(model), all_ranks().size
    if inner is not model:
        if mesh is not None or any(dtype_name(p.dtype) != recipe.storage.visible for p in inner.parameters()):
            raise RecipeError(
                f"Cannot prepare a model inside DistributedDataParallel by recipe '{recipe.name}' because DDP's buckets fit "
                "the parameters as they are.",
                'Prepare the model first and wrap it then, or replace the wrapper by mesh=…, shard="none".',
            )
    elif mesh is None and recipe.reduction.name != "native" and size > 1 and not has_shards(model):
        raise RecipeError(
            f"Cannot sum gradients over {size} ranks by recipe '{recipe.name}' without a mesh.",
            'Pass mesh=init_device_mesh(…), with shard="none" to keep the model whole on every rank.',
        )


def _check_mesh(model: nn.Module, mesh: Any, shard: str) -> None:
    """Refuse a mesh without this rank."""
    if mesh.get_coordinate() is None:
        raise RecipeError(
            f"Cannot prepare a model on rank {all_ranks().rank} because the mesh has only ranks {mesh.mesh.flatten().tolist()}.",
            "Call prepare on the ranks of the mesh alone.",
        )
    require_mesh(model, mesh, shard)
