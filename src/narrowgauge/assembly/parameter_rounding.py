"""Round a model's parameters to the formats that the model computes with. The optimizer gets the float32 values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.rounding import round_to_bfloat16, round_to_float16
from narrowgauge.spec.recipes import Recipe

_ROUND = {"bfloat16": round_to_bfloat16, "float16": round_to_float16}


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the floating-point parameters of a model in place, and leave its buffers.

    ``model.bfloat16()`` and ``model.half()`` round buffers too. Rotary frequencies in bfloat16 turn position 2,048 by up to 2
    radians.

    Args:
        model: any module. Tied parameters stay tied. An optimizer's parameters stay the same objects.
        dtype: such as ``torch.bfloat16``. The running statistics of batch norms get it too: PyTorch multiplies one format only.
    Returns:
        The same model.
    Raises:
        RecipeError: the dtype is not a floating-point dtype.
    Example:
        >>> import torch, narrowgauge as ng
        >>> model = torch.nn.Linear(4, 4)
        >>> model.register_buffer("frequencies", torch.rand(4))
        >>> model = ng.cast_parameters(model, torch.bfloat16)
        >>> model.weight.dtype, model.frequencies.dtype
        (torch.bfloat16, torch.float32)
    """
    if not getattr(dtype, "is_floating_point", False):
        raise RecipeError(
            f"Cannot cast parameters to {dtype!r}.", "Take a floating-point dtype such as torch.bfloat16."
        )
    _cast(model, lambda values: values.to(dtype))
    return model


def round_parameters(model: nn.Module, recipe: Recipe) -> dict[Tensor, Tensor]:
    """Round parameters and batch norm's statistics to the visible format, in place.

    Return the earlier float32 values of trainable parameters.
    """
    values: dict[Tensor, Tensor] = {p: p.data.float() for p in model.parameters() if p.requires_grad}
    _cast(model, partial(_visible, dtype=recipe.storage.visible), recipe.dtype == recipe.storage.visible)
    return values


def _cast(model: nn.Module, cast: Callable[[Tensor], Tensor], with_statistics: bool = True) -> None:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = cast(parameter.data)
    for module in model.modules() if with_statistics else ():
        if isinstance(module, _BatchNorm) and module.running_mean is not None and module.running_var is not None:
            module.running_mean, module.running_var = cast(module.running_mean), cast(module.running_var)


def _visible(weight: Tensor, dtype: str) -> Tensor:
    """Return a float32 weight, rounded to its visible format. Return a weight in 16 bits unchanged."""
    if dtype == "float32":
        return weight.float()
    return _ROUND[dtype](weight) if weight.dtype is torch.float32 else weight
