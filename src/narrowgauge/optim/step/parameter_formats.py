"""The formats of a model's parameters: cast them, or round them to a visible format and return what
they were.

An optimizer whose storage holds 16 bits rounds float32 parameters in place when it is made, by
``parameter.data = …``: parameters stay the same objects. It keeps the bits that this cuts.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.dtensor import local_of
from narrowgauge.numerics.rounding import narrowed


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the floating-point parameters of a model in place, and leave its buffers.

    ``model.bfloat16()`` and ``model.half()`` round buffers too. Rotary frequencies in bfloat16 turn
    position 2,048 by up to 2 radians.

    Args:
        model: any module. Tied parameters stay tied. An optimizer's parameters stay the same
            objects.
        dtype: such as ``torch.bfloat16``. The running statistics of batch norms get it too: PyTorch
            multiplies one format only.
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
            f"Cannot cast parameters to {dtype!r}.",
            "Take a floating-point dtype such as torch.bfloat16.",
        )
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    cast_statistics(model, dtype)
    return model


def batch_norms(model: nn.Module) -> list[Any]:
    """Return the batch norms with running statistics. PyTorch multiplies one format only: theirs."""
    return [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    ]


def cast_statistics(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the running statistics of batch norms."""
    for module in batch_norms(model):
        module.running_mean = module.running_mean.to(dtype)
        module.running_var = module.running_var.to(dtype)


def rounded(values: Tensor, visible: str) -> Tensor:
    """Return float32 values rounded to a visible format, and others unchanged, or in float32."""
    if visible == "float32":
        return values.float()
    if values.dtype is torch.float32:
        return narrowed(values, getattr(torch, visible))
    return values


def round_in_place(formats: Mapping[Tensor, str]) -> dict[Tensor, Tensor]:
    """Give each parameter and its gradient a visible format, as :func:`rounded`.

    Return the earlier values in float32.
    """
    values = {}
    for parameter, visible in formats.items():
        values[parameter] = parameter.data.float()
        new = rounded(parameter.data, visible)
        # In the strides of the old one.
        parameter.data = torch.empty_like(parameter.data, dtype=new.dtype).copy_(new)
        if parameter.grad is not None:
            parameter.grad = rounded(parameter.grad, visible)
    return values


ROUNDED = (
    "Rounded {:,} float32 weights in place to the format of {}. To keep some in float32, put them "
    "into a param group with storage='float32'. Train under autocast. For averages take "
    "ng.AveragedModel; round reference models too, by ng.cast_parameters. Another optimizer on these "
    "weights begins without the bits that were cut: to repeat a run, build the model anew."
)
KEPT = (
    "Kept float32 weights as they are, because there is a process group, and ranks that share weights "
    "must agree on their format: '{0.name}' takes {0.bytes_per_param:g} bytes a parameter with its "
    "gradient, '{1.name}' {1.bytes_per_param:g}. For '{1.name}', call ng.cast_parameters(model, "
    "torch.{1.visible}) before the model is wrapped or sharded."
)


LONGEST_VECTOR = 2**20
"""No bias or gain has as many elements: a longer vector is a flat part of a model, as ZeRO makes."""


def is_vector(parameter: Tensor) -> bool:
    """Return whether a parameter is a bias or a gain. The length is that of the whole parameter."""
    return parameter.ndim < 2 and parameter.numel() < LONGEST_VECTOR


def is_shared_by_ranks() -> bool:
    """Return whether ranks may share parameters, whose format then must stay."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def refuse_overlap(parameter: Tensor) -> None:
    """Refuse a parameter whose elements share memory, as those of an expanded tensor: each would be
    stepped alone.
    """
    local = local_of(parameter.detach())
    reach = 0
    for stride, size in sorted(zip(local.stride(), local.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise RecipeError(
                f"Cannot step a parameter of shape {tuple(parameter.shape)} because its elements "
                "share memory, as those of an expanded tensor.",
                "Make the parameter from tensor.contiguous(), or expand a smaller one in forward().",
            )
        reach += stride * (size - 1)


def refuse_shared_memory(parameters: Iterable[Tensor]) -> None:
    """Refuse parameters without memory, and those that share it: rounded ones would be tied no more,
    and one that is passed twice would be stepped twice.
    """
    addresses = set()
    for parameter in parameters:
        local = local_of(parameter.detach())
        address = local.data_ptr()  # 0 of a tensor that holds others, as torchao's, too
        if not local.numel() or not (address or parameter.requires_grad):
            continue
        if not address:
            raise RecipeError(
                f"Cannot store a {type(local).__name__} that has no memory of its own, as on the meta "
                "device.",
                "Give the model its memory (to_empty) and values first, and build the optimizer after. "
                "Freeze codes of other libraries.",
            )
        if parameter.requires_grad:
            refuse_overlap(parameter)
        if address in addresses:
            raise RecipeError(
                f"Cannot step a parameter of shape {tuple(parameter.shape)} because it is passed "
                "twice, or another parameter has its memory.",
                "Pass each once: dict.fromkeys(parameters). Tie modules by one Parameter: "
                "output.weight = embedding.weight.",
            )
        addresses.add(address)
