"""Round a model's parameters to the formats that the model computes with. The optimizer gets the float32 values."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from narrowgauge.numerics.rounding import round_to_bfloat16, round_to_float16
from narrowgauge.spec.recipes import Recipe

_ROUND = {"bfloat16": round_to_bfloat16, "float16": round_to_float16}


def round_parameters(model: nn.Module, recipe: Recipe) -> dict[Tensor, Tensor]:
    """Round parameters and batch norm's statistics to the visible format, in place.

    Return the earlier float32 values of trainable parameters.
    """
    values: dict[Tensor, Tensor] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            values[parameter] = parameter.data.float()
        parameter.data = visible(parameter.data, recipe.storage.visible)
    # As model.bfloat16() does: batch norm multiplies one format only. Other buffers, such as frequencies, stay as they are.
    for module in model.modules() if recipe.dtype == recipe.storage.visible else ():
        if isinstance(module, _BatchNorm) and module.running_mean is not None and module.running_var is not None:
            module.running_mean = visible(module.running_mean, recipe.dtype)
            module.running_var = visible(module.running_var, recipe.dtype)
    return values


def visible(weight: Tensor, dtype: str) -> Tensor:
    """Return a float32 weight, rounded to its visible format. Return a weight in 16 bits unchanged."""
    if dtype == "float32":
        return weight.float()
    return _ROUND[dtype](weight) if weight.dtype is torch.float32 else weight
