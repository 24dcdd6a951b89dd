"""Tensors that say they are on another device and compute on the CPU, as those of a GPU would where there is none.

Like a GPU's, they cannot be mixed with tensors of the CPU, and PyTorch says so in an error. The device is ``meta``, as
autograd runs that one's backward passes in the caller's thread.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
_MIXES = ("aten.copy_", "aten._to_copy", "aten.index")
"""What takes tensors of the CPU beside others; an index may lie there."""


class Elsewhere(Tensor):
    """A tensor of the pretended device.

    Args:
        inner: its values, on the CPU.
    """

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        made: Elsewhere = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=DEVICE,
        )
        made.inner = inner
        return made

    def tolist(self) -> Any:
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class PretendedDevice(TorchDispatchMode):
    """Makes tensors there, too, where a function is told to."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    is_there = any(isinstance(each, Elsewhere) for each in given)
    is_mixed = any(not isinstance(each, Elsewhere) and each.ndim for each in given)
    if is_there and is_mixed and not str(func).startswith(_MIXES):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found two: {func}")
    if str(func).startswith("aten._pin_memory"):  # as of a GPU's driver, which is not here
        return args[0]
    kwargs.pop("pin_memory", None)
    if (device := kwargs.get("device")) is not None:
        is_there = torch.device(device) == DEVICE
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = tree_map(lambda each: each.inner if isinstance(each, Elsewhere) else each, (args, kwargs))
    result = func(*args, **kwargs)
    if not is_there:
        return result
    if func._schema.is_mutable and isinstance(result, Tensor):
        return next((each for each in given if isinstance(each, Elsewhere) and each.inner is result), result)
    return tree_map(lambda each: Elsewhere(each) if isinstance(each, Tensor) else each, result)


def move(model: nn.Module) -> None:
    """Put a model's parameters there, in place of those that it has."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(Elsewhere(parameter.detach()))
