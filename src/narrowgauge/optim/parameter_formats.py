"""The formats of a model's parameters: cast them, or round them to a visible format and return what they were.

An optimizer whose storage holds 16 bits rounds float32 parameters in place when it is made, by ``parameter.data = …``: parameters
stay the same objects. It keeps the bits that this cuts.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.dtensor import local_of
from narrowgauge.numerics.rounding import round_to_bfloat16, round_to_float16
from narrowgauge.spec.storages import VISIBLE, Storage
from narrowgauge.torch_names import was_taken_by_fsdp

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
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    cast_statistics(model, lambda values: values.to(dtype))
    return model


def cast_statistics(model: nn.Module, cast: Callable[[Tensor], Tensor]) -> None:
    """Cast the running statistics of batch norms."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None and module.running_var is not None:
            module.running_mean, module.running_var = cast(module.running_mean), cast(module.running_var)


def rounded(values: Tensor, visible: str) -> Tensor:
    """Return float32 values rounded to a visible format, and others unchanged, or in float32."""
    if visible == "float32":
        return values.float()
    return _ROUND[visible](values) if values.dtype is torch.float32 else values


def round_in_place(parameters: Iterable[Tensor], visible: str) -> dict[Tensor, Tensor]:
    """Give parameters and their gradients a visible format, as :func:`rounded`. Return the earlier values in float32."""
    values = {}
    for parameter in parameters:
        values[parameter], new = parameter.data.float(), rounded(parameter.data, visible)
        parameter.data = torch.empty_like(parameter.data, dtype=new.dtype).copy_(new)  # in the strides of the old one
        if parameter.grad is not None:
            parameter.grad = rounded(parameter.grad, visible)
    return values


def rounding_note(values: Mapping[Tensor, Tensor], storages: Mapping[Tensor, Storage]) -> str:
    """Tell what :func:`round_in_place` did to the parameters of an optimizer, and how to keep some as they were."""
    on_grid = sum((value == parameter.data).all().cpu() * value.numel() for parameter, value in values.items())
    total = sum(value.numel() for value in values.values())
    kept = [
        f"'{row.name}' keeps {_kept_bits(row)} of the {VISIBLE[row.visible][1]} bits cut"
        for row in dict.fromkeys(storages.values())
    ]
    is_checkpoint = on_grid > total / 2  # new biases and gains are on the grid too
    return (
        f"Rounded {total:,} float32 weights to {' and '.join(sorted({row.visible for row in storages.values()}))} in place: "
        f"storage {', '.join(kept)}. To keep some in float32, pass keep_float32=, or a param group with storage='float32'."
    ) + (
        f" The cut bits of {on_grid:,} were zero, as of a 16-bit checkpoint: low_bits='random' fills them."
        * is_checkpoint
    )


def _kept_bits(storage: Storage) -> int:
    """Return how many bits of a weight a storage keeps beside the visible ones, of those that rounding cuts."""
    lacking = VISIBLE[storage.visible][1]
    return max(0, min(lacking, int(math.log2(storage.weight.spacings)) - (23 - lacking)))


def refuse_rounding(parameters: Sequence[Tensor], others: Iterable[Tensor]) -> None:
    """Refuse parameters that cannot change their format, because other code holds their memory.

    ``others`` are further parameters of the same optimizer.
    """
    cure = "Make the optimizer before the model is wrapped, or call ng.cast_parameters(model, torch.bfloat16) before."
    keep = "Or keep them in float32: keep_float32=, or a param group with storage='float32'."
    replicated = _in_ddp() if parameters else set()
    for parameter in parameters:
        wrapper = "DistributedDataParallel" if parameter in replicated else ""
        if local_of(parameter) is not parameter:
            wrapper = "fully_shard or parallelize_module"
        elif getattr(parameter, "_fsdp_flattened", False) or was_taken_by_fsdp(parameter):
            wrapper = "FullyShardedDataParallel"
        if wrapper:
            raise RecipeError(
                f"Cannot round a float32 parameter of shape {tuple(parameter.shape)} because {wrapper} has taken it.",
                f"{cure} {keep}",
            )
    spans = sorted(map(_span, {*parameters, *others}), key=lambda span: span[:2])
    members = {*parameters}
    for (_, end, before), (start, _, after) in pairwise(spans):
        if start < end and not members.isdisjoint((before, after)):
            raise RecipeError(
                f"Cannot round float32 parameters of shapes {tuple(before.shape)} and {tuple(after.shape)} because they share "
                "their memory.",
                f"Tie modules by one Parameter: output.weight = embedding.weight. {keep}",
            )


def _span(parameter: Tensor) -> tuple[int, int, Tensor]:
    """Return the first address of a parameter and the address after its last element. Nothing of a sharded one counts."""
    if local_of(parameter) is not parameter or not parameter.numel():
        return 0, 0, parameter
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return parameter.data_ptr(), parameter.data_ptr() + (last + 1) * parameter.element_size(), parameter


def _in_ddp() -> set[Tensor]:
    """Return all parameters that DistributedDataParallel averages. It marks none of them: its hooks are lost silently."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return set()
    wrappers = [x for x in gc.get_objects() if issubclass(type(x), nn.parallel.DistributedDataParallel)]
    return {parameter for wrapper in wrappers for parameter in wrapper.parameters()}
