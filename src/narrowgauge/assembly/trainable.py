"""What ``prepare`` refuses: models that a recipe cannot train, and patterns that match nothing.

Each error names the first offending parameter or module, and is raised before anything is changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from narrowgauge.distributed.exchanges import EXCHANGES
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.reduction import inner_of
from narrowgauge.distributed.sharding import has_shards
from narrowgauge.errors import RecipeError
from narrowgauge.matmul.swapping import linear_names
from narrowgauge.numerics.devices import require_float64
from narrowgauge.spec import computes
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.recipes import Recipe


def require_trainable(model: nn.Module, recipe: Recipe) -> None:
    """Refuse a model that a recipe cannot train."""
    if recipe.reduction.name not in EXCHANGES:
        raise RecipeError(
            f"recipe '{recipe.name}' sums gradients across ranks by '{recipe.reduction.name}', which is not implemented.",
            "narrowgauge show reductions lists those that are.",
        )
    require_float64(model.parameters())
    names = [name for name, _ in model.named_parameters()]
    if not names:
        raise RecipeError(f"recipe '{recipe.name}' was given a {type(model).__name__} without parameters.")
    known = {torch.float32, getattr(torch, recipe.storage.visible)}
    for name, parameter in model.named_parameters():
        if parameter.dtype not in known:
            raise RecipeError(
                f"recipe '{recipe.name}' takes a float32 model, and '{name}' of {type(model).__name__} is "
                f"{dtype_name(parameter.dtype)}.",
                "Call model.float() first.",
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecipeError(
            f"recipe '{recipe.name}' was given a {type(model).__name__} whose {len(names)} parameters are all frozen.",
            "Call requires_grad_() on those to train.",
        )
    _check_tied(model, recipe)
    _check_patterns(model, recipe, names)
    for compute in recipe.computes:
        computes.check_layers(compute, linear_names(model), type(model).__name__)
    _check_statistics(model, recipe)
    _check_sparse(model, recipe)
    if recipe.reduction.order_invariant:
        _check_leaves(model, recipe)


def _check_patterns(model: nn.Module, recipe: Recipe, names: list[str]) -> None:
    """Refuse patterns that match nothing, and overrides of another visible format."""
    modules = [name for name, _ in model.named_modules() if name]
    for pattern in recipe.keep:
        single = Recipe(recipe.compute, recipe.storage, keep=(pattern,))
        if not any(single.keeps(name) for name in [*names, *modules]):
            raise RecipeError(f"keep pattern '{pattern}' matches no module of {type(model).__name__}.", _first(modules))
    linears = linear_names(model)
    for override in recipe.overrides:
        if override.compute is not None and not any(override.matches(name) for name in linears):
            raise RecipeError(
                f"override pattern '{override.pattern}' matches no linear layer of {type(model).__name__}.",
                _first(linears),
            )
        if override.storage is None:
            continue
        if not any(override.matches(name) for name in names):
            raise RecipeError(
                f"override pattern '{override.pattern}' matches no parameter of {type(model).__name__}.", _first(names)
            )
        if override.storage.visible != recipe.storage.visible:
            raise RecipeError(
                f"override '{override.pattern}' stores {override.storage.visible} in a model of "
                f"{recipe.storage.visible}.",
                "Name the modules in keep = [...] to leave them in float32.",
            )


def _check_tied(model: nn.Module, recipe: Recipe) -> None:
    """Both names of a tied parameter must be kept, or neither."""
    first: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(parameter, name)
        if recipe.keeps(other) != recipe.keeps(name):
            raise RecipeError(
                f"keep = {list(recipe.keep)} matches only one of '{other}' and '{name}' of {type(model).__name__}, "
                "which share one tensor.",
                "Keep both modules or neither.",
            )


def _check_statistics(model: nn.Module, recipe: Recipe) -> None:
    """Batch norm needs weights and running statistics of one dtype, and buffers are never rounded; float64 widens them."""
    if recipe.dtype == "float64":
        return
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or not module.affine or module.running_mean is None:
            continue
        visible = recipe.storage_of(f"{name}.weight" if name else "weight", 1).visible
        visible = visible if visible == "float32" else recipe.dtype
        found = dtype_name(module.running_mean.dtype)
        if found == visible:
            continue
        if visible == "float32":
            advice = "Call model.float() first."
        else:
            advice = f'Keep it in float32 with keep = ["{name}"].' if name else "Use recipe 'float32'."
        raise RecipeError(
            f"recipe '{recipe.name}' gives {visible} weights to '{name}', a {type(module).__name__} whose running "
            f"statistics are {found}; PyTorch does not compute with mixed dtypes here.",
            advice,
        )


def _check_sparse(model: nn.Module, recipe: Recipe) -> None:
    """Refuse sparse gradients; those of a tied weight, which a layer uses too, are dense."""
    holders: dict[Tensor, list[str]] = {}
    dense: set[Tensor] = set()
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            holders.setdefault(parameter, []).append(f"{name}.{own}".removeprefix("."))
            if not getattr(module, "sparse", False):
                dense.add(parameter)
    for parameter, names in holders.items():
        if parameter.requires_grad and parameter not in dense:
            raise RecipeError(
                f"recipe '{recipe.name}' sums and steps dense gradients, and those of '{names[0]}' of {type(model).__name__} are "
                "sparse.",
                "Build the embedding with sparse=False.",
            )


def require_contiguous(model: nn.Module, recipe: Recipe) -> None:
    """Refuse to shard a non-contiguous parameter: FSDP2 would gather it in another layout, in which products round differently.

    Rounding makes the others contiguous, sharded or not.
    """
    for name, parameter in model.named_parameters():
        stays = dtype_name(parameter.dtype) == recipe.storage_of(name, parameter.ndim).visible
        if stays and not parameter.is_contiguous():
            raise RecipeError(
                f"parameter '{name}' of {type(model).__name__} has shape {tuple(parameter.shape)} and strides "
                f"{parameter.stride()}, and FSDP2 shards contiguous parameters alone.",
                "Make it contiguous: parameter.data = parameter.data.contiguous().",
            )


def _check_leaves(model: nn.Module, recipe: Recipe) -> None:
    """Refuse modules through which one micro-batch changes what another computes."""
    for name, module in model.named_modules():
        if found := depends_on_order(module):
            reason, advice = found
            raise RecipeError(
                f"recipe '{recipe.name}' gives the same bits on any number of ranks, and '{name}' is a "
                f"{type(module).__name__}, {reason}.",
                f"{advice}, or take another reduction.",
            )


def depends_on_order(module: nn.Module) -> tuple[str, str] | None:
    """Why a module's output for a micro-batch depends on earlier ones, and what to do; ``None`` if it does not."""
    if isinstance(module, _BatchNorm) and module.training and module.track_running_stats:
        reason = "whose running statistics depend on which micro-batches a rank has seen"
        return reason, "Replace it by a layer norm or group norm"
    if isinstance(module, _DropoutNd) and module.p > 0:
        return "which draws random numbers in the order of a rank's own micro-batches", "Set its p to 0"
    return None


def require_summable(model: nn.Module, recipe: Recipe, mesh: Any) -> None:
    """Refuse a model, perhaps inside DistributedDataParallel, whose gradients cannot be summed over ranks as a recipe says."""
    name, inner = recipe.name, inner_of(model)
    if inner is not model:
        wanted = {n: recipe.storage_of(n, p.ndim).visible for n, p in inner.named_parameters()}
        if mesh is not None or any(dtype_name(p.dtype) != wanted[n] for n, p in inner.named_parameters()):
            raise RecipeError(
                f"recipe '{name}' was given a model inside DistributedDataParallel, whose buckets were made for the "
                "parameters as they were.",
                'Prepare the model first and wrap it then, or replace the wrapper by mesh=…, shard="none".',
            )
    elif mesh is None and recipe.reduction.name != "native" and all_ranks().size > 1 and not has_shards(model):
        raise RecipeError(
            f"recipe '{name}' sums gradients over ranks, and {all_ranks().size} ranks were found but no mesh.",
            'Pass mesh=init_device_mesh(…), with shard="none" to keep the model whole on every rank.',
        )


def _first(names: list[str]) -> str:
    return f"Its names look like '{names[0]}' and '{names[-1]}'." if names else ""
