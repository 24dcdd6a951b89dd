"""Round a model's parameters to the formats that the model computes with. The optimizer gets the float32 values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from narrowgauge import torch_names
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.dtensor import is_sharded, local_of, placed_like
from narrowgauge.numerics.rounding import at_least_float32, round_to_bfloat16, round_to_float16
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.recipes import Recipe

_ROUND = {"bfloat16": round_to_bfloat16, "float16": round_to_float16}


def round_parameters(model: nn.Module, recipe: Recipe) -> dict[Tensor, Tensor]:
    """Round every parameter to its visible format, in place. Return the earlier values of trainable ones, at least float32.

    Settle a model that the caller has sharded first (:func:`narrowgauge.distributed.sharding.settle`).
    """
    dtype, values = recipe.storage.visible, dict[Tensor, Tensor]()
    for parameter in model.parameters():
        if parameter.requires_grad:
            values[parameter] = at_least_float32(parameter.data)
        if is_sharded(parameter):
            _round_shard(parameter, dtype, recipe)
        else:
            parameter.data = visible(parameter.data, dtype)
    for _, group in torch_names.fsdp_groups(model):
        torch_names.renew_fsdp_group(group)
    return values


def visible(weight: Tensor, dtype: str) -> Tensor:
    """Return a float32 weight, rounded to its visible format. Return a weight in 16 bits unchanged."""
    if dtype == "float32":
        return weight.float()
    return _ROUND[dtype](weight) if weight.dtype is torch.float32 else weight


def _round_shard(parameter: nn.Parameter, dtype: str, recipe: Recipe) -> None:
    """Round a DTensor. It stays the same object, as with ``module.to(dtype)``."""
    if dtype_name(parameter.dtype) == dtype:
        return
    cut = placed_like(parameter, visible(local_of(parameter.detach()), dtype))
    try:
        torch.utils.swap_tensors(parameter, nn.Parameter(cut, requires_grad=parameter.requires_grad))
    except RuntimeError as error:  # weak references, which compiled code holds, or a graph
        raise RecipeError(
            f"recipe '{recipe.name}' stores {dtype} weights, and a sharded parameter of shape {tuple(parameter.shape)} cannot "
            f"change its format in place: {error}.",
            "Prepare the model before compiled code or a hook refers to its parameters.",
        ) from error
