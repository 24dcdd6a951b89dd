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
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.recipes import Recipe


def require_trainable(model: nn.Module, recipe: Recipe, mesh: Any, shard: str) -> None:
    """Refuse a model that a recipe cannot train, in what its optimizer does not refuse."""
    this = f"this {type(model).__name__} by recipe '{recipe.name}'"
    if isinstance(model, nn.parallel.DistributedDataParallel) or has_shards(model):
        raise RecipeError(
            f"Cannot prepare {this} because fully_shard, parallelize_module or "
            "DistributedDataParallel has taken its parameters already.",
            "Prepare the model first: mesh=… shards it, and DistributedDataParallel may wrap it "
            "then. Or leave it as it is, and "
            "take ng.swap_linears, ng.AdamW and ng.reduce_gradients_with.",
        )
    visible = recipe.storage.visible
    if visible not in ("float32", recipe.dtype):
        raise RecipeError(
            f"Cannot train by recipe '{recipe.name}' because it computes in {recipe.dtype} with "
            f"{visible} weights, and autocast casts from float32 alone.",
            f"Take a compute in {visible}, or the storage 'float32'.",
        )
    for name, parameter in model.named_parameters():
        is_known = parameter.dtype in (torch.float32, getattr(torch, visible))
        if parameter.requires_grad and not is_known:
            raise RecipeError(
                f"Cannot train '{name}' of {this} because it is {dtype_name(parameter.dtype)}.",
                "Call model.float() first.",
            )
    for name, module in model.named_modules():
        has_statistics = isinstance(module, _BatchNorm) and module.track_running_stats
        if recipe.reduction.order_invariant and has_statistics and module.training:
            raise RecipeError(
                f"Cannot give {this} the same bits on any number of ranks because '{name}' has "
                "running statistics, which depend on which micro-batches a rank has seen.",
                "Replace it by a layer norm or group norm, or take another reduction.",
            )
        kinds = [type(hook).__name__ for hook in (module, *module._forward_pre_hooks.values())]
        if visible != "float32" and {"SpectralNorm", "_SpectralNorm"}.intersection(kinds):
            raise RecipeError(
                f"Cannot round '{name}' of {this} because spectral_norm multiplies it by float32 "
                "vectors.",
                "Take ng.AdamW(model.named_parameters(), keep_float32=lambda name, p: 'orig' in "
                "name), under autocast.",
            )
    if mesh is None:
        _require_one_rank(recipe)
    else:
        _require_rank_of(mesh, model, recipe, shard)


def _require_one_rank(recipe: Recipe) -> None:
    if recipe.reduction.name != "native" and all_ranks().size > 1:
        raise RecipeError(
            f"Cannot sum gradients over {all_ranks().size} ranks by recipe '{recipe.name}' without "
            "a mesh.",
            'Pass mesh=init_device_mesh(…), with shard="none" to keep the model whole on every rank.',
        )


def _require_rank_of(mesh: Any, model: nn.Module, recipe: Recipe, shard: str) -> None:
    require_mesh(mesh, shard)
    if mesh.get_coordinate() is None:
        raise RecipeError(
            f"Cannot prepare a model on rank {all_ranks().rank} because the mesh has only ranks "
            f"{mesh.mesh.flatten().tolist()}.",
            "Call prepare on the ranks of the mesh alone.",
        )
    if shard == "none" and not recipe.reduction.order_invariant:
        raise RecipeError(
            f"Cannot sum the gradients of replicas by recipe '{recipe.name}' because "
            "DistributedDataParallel does.",
            "Leave out mesh=, and wrap the prepared model in it.",
        )
    for name, parameter in model.named_parameters():
        if shard != "none" and not parameter.ndim:
            raise RecipeError(
                f"Cannot shard '{name}' because it has no dimension.", "Give it the shape [1]."
            )
