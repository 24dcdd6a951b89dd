"""Cutting a model's weights to the formats in which the model sees them; the float32 values are for the optimizer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from narrowgauge.distributed.sharding import groups_of, has_shards
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.rounding import round_to_bfloat16, round_to_float16
from narrowgauge.numerics.shards import is_sharded, local_of, placed_like
from narrowgauge.spec.recipes import Recipe

_ROUND = {"bfloat16": round_to_bfloat16, "float16": round_to_float16}


def cut_parameters(model: nn.Module, recipe: Recipe) -> dict[Tensor, Tensor]:
    """Round every parameter to its visible format; returns the float32 values of the trainable ones."""
    if has_shards(model):
        return _cut_shards(model, recipe)
    values: dict[Tensor, Tensor] = {}
    for name, parameter in model.named_parameters():
        storage = recipe.storage_of(name, parameter.ndim)
        if parameter.requires_grad:
            values[parameter] = parameter.data.float()
        parameter.data = visible(parameter.data, storage.visible)
    return values


def visible(weight: Tensor, dtype: str) -> Tensor:
    """A float32 weight rounded to its visible format; one of another format as it is."""
    if dtype == "float32":
        return weight.float()
    return _ROUND[dtype](weight) if weight.dtype is torch.float32 else weight


def _cut_shards(model: nn.Module, recipe: Recipe) -> dict[Tensor, Tensor]:
    """:func:`cut_parameters` of a model that the caller has sharded: each of its groups must stay in one format."""
    visible = {n: recipe.storage_of(n, p.ndim).visible for n, p in model.named_parameters(remove_duplicate=False)}
    for unit, members in groups_of(model).items():
        prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is unit)
        formats = {visible[prefix + name] for name, parameter in members if is_sharded(parameter)}
        if len(formats) > 1:
            raise RecipeError(
                f"recipe '{recipe.name}' stores {' and '.join(sorted(formats))} weights in '{prefix[:-1] or 'the model'}', "
                "whose parameters fully_shard gathers together, in one format.",
                "Pass the model as it is before fully_shard, with mesh=...: it is then sharded by format.",
            )
    values: dict[Tensor, Tensor] = {}
    replaced: dict[Tensor, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in replaced:
                replaced[parameter] = _cut_shard(parameter, visible[f"{prefix}.{name}" if prefix else name])
                if parameter.requires_grad:
                    values[replaced[parameter]] = parameter.data.float()
            setattr(module, name, replaced[parameter])
    return values


def _cut_shard(parameter: nn.Parameter, dtype: str) -> nn.Parameter:
    """A parameter in its visible format: itself, or a new one where a DTensor changes its format."""
    if str(parameter.dtype).removeprefix("torch.") == dtype:
        return parameter
    if not is_sharded(parameter):
        parameter.data = visible(parameter.data, dtype)
        return parameter
    cut = placed_like(parameter, visible(local_of(parameter.detach()), dtype))
    return nn.Parameter(cut, requires_grad=parameter.requires_grad)
