"""Refuse models that a recipe cannot train, before any change.

Each error names the first offending name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.sharding import has_shards, require_mesh
from narrowgauge.errors import RecipeError
from narrowgauge.optim.validation import check_real
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.recipes import Recipe
from narrowgauge.torch_support.machine import require_float64


def require_trainable(model: nn.Module, recipe: Recipe, mesh: Any, shard: str) -> None:
    """Refuse a model that a recipe cannot train."""
    name = recipe.name
    kind = type(model).__name__
    if isinstance(model, nn.parallel.DistributedDataParallel) or has_shards(model):
        raise RecipeError(
            f"Cannot prepare this {kind} by recipe '{name}' because fully_shard, "
            "parallelize_module or "
            "DistributedDataParallel has taken its parameters already.",
            "Prepare the model first: mesh=… shards it, and DistributedDataParallel may wrap it "
            "then. Or leave it as it is, and "
            "take ng.swap_linears, ng.AdamW and ng.reduce_gradients_with.",
        )
    visible = recipe.storage.visible
    if visible not in ("float32", recipe.dtype):
        raise RecipeError(
            f"Cannot train by recipe '{name}' because it computes in {recipe.dtype} with {visible} "
            "weights, and autocast casts from float32 alone.",
            f"Take a compute in {visible}, or the storage 'float32'.",
        )
    parameters = dict(model.named_parameters())
    require_float64(parameters.values())
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise RecipeError(
            f"Cannot train this {kind} by recipe '{name}': all of its {len(parameters)} parameters "
            "are frozen.",
            "Call requires_grad_() on those to train.",
        )
    for owner, parameter in parameters.items():
        check_real(parameter)
        is_known = parameter.dtype in (torch.float32, getattr(torch, recipe.storage.visible))
        if parameter.requires_grad and not is_known:
            raise RecipeError(
                f"Cannot train '{owner}' of this {kind} by recipe '{name}' because it is "
                f"{dtype_name(parameter.dtype)}.",
                "Call model.float() first.",
            )
    for owner, module in model.named_modules():
        _check_module(owner, module, recipe)
    _check_ranks(recipe, mesh, shard)


def _check_module(name: str, module: nn.Module, recipe: Recipe) -> None:
    """Refuse sparse gradients. Refuse running statistics if bits must not depend on ranks."""
    kind = type(module).__name__
    if getattr(module, "sparse", False) and any(p.requires_grad for p in module.parameters()):
        raise RecipeError(
            f"Cannot step '{name}', a {kind} with sparse gradients, by recipe '{recipe.name}'.",
            "Build it with sparse=False.",
        )
    hooks = [module, *module._forward_pre_hooks.values()]
    is_spectral = any(type(hook).__name__ in ("SpectralNorm", "_SpectralNorm") for hook in hooks)
    if is_spectral and recipe.storage.visible != "float32":
        raise RecipeError(
            f"Cannot round the weight of '{name}' by recipe '{recipe.name}' because spectral_norm "
            "multiplies it by float32 vectors.",
            "Take ng.AdamW(model.named_parameters(), keep_float32=lambda name, p: 'orig' in name), "
            "under autocast.",
        )
    has_statistics = (
        isinstance(module, _BatchNorm) and module.training and module.track_running_stats
    )
    if recipe.reduction.order_invariant and has_statistics:
        raise RecipeError(
            f"Cannot give the same bits on any number of ranks by recipe '{recipe.name}' because "
            f"'{name}' is a {kind}, whose "
            "running statistics depend on which micro-batches a rank has seen.",
            "Replace it by a layer norm or group norm, or take another reduction.",
        )


def _check_ranks(recipe: Recipe, mesh: Any, shard: str) -> None:
    """Refuse ranks over which gradients cannot be summed as a recipe says."""
    ranks = all_ranks()
    if mesh is not None:
        if mesh.get_coordinate() is None:
            raise RecipeError(
                f"Cannot prepare a model on rank {ranks.rank} because the mesh has only ranks "
                f"{mesh.mesh.flatten().tolist()}.",
                "Call prepare on the ranks of the mesh alone.",
            )
        require_mesh(mesh, shard)
    elif recipe.reduction.name != "native" and ranks.size > 1:
        raise RecipeError(
            f"Cannot sum gradients over {ranks.size} ranks by recipe '{recipe.name}' without a "
            "mesh.",
            'Pass mesh=init_device_mesh(…), with shard="none" to keep the model whole on every rank.',
        )
