"""Copy a sharded model into one process, and compute in a wide format whatever a model's code asks
for.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from narrowgauge.checks.set_up import NARROW
from narrowgauge.numerics.dtensor import whole
from narrowgauge.torch_support.put_back import objects_of
from narrowgauge.torch_support.torch_names import fsdp_groups, fsdp_parameters, unwrapped_model

_NARROWER = {torch.float32: NARROW, torch.float64: (*NARROW, torch.float32)}


def gathered_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy of a sharded model in its own formats, unsharded, without wrappers,
    compiled code or FSDP2's hooks.

    All ranks make the call.
    """
    model = unwrapped_model(model)
    memo = dict[int, Any]()
    classes = {}
    gathered = _gathered_dtypes(model)
    for _, x in objects_of(model):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            continue
        values = whole(x.detach()).clone().to(gathered.get(x, x.dtype))
        if isinstance(x, nn.Parameter):
            memo[id(x)] = nn.Parameter(values, x.requires_grad)
        else:  # results of an earlier pass, such as an auxiliary loss, become constants
            memo[id(x)] = values.requires_grad_(x.is_leaf and x.requires_grad)
    for module in model.modules():
        if type(module).__name__.startswith("FSDP") and len(type(module).__mro__) > 2:
            classes[module] = type(module)
            for name, value in vars(module).items():
                if "_hooks" in name or name.startswith("__composable_api_state"):
                    memo[id(value)] = OrderedDict()
    try:
        for module, kind in classes.items():
            module.__class__ = kind.__mro__[2]
        return copy.deepcopy(model, memo)
    finally:
        for module, kind in classes.items():
            module.__class__ = kind


def _gathered_dtypes(model: nn.Module) -> dict[Tensor, torch.dtype]:
    """Return the dtype in which FSDP2 gathers each parameter, where its policy names one."""
    dtypes = dict[Tensor, torch.dtype]()
    for _, group in fsdp_groups(model):
        dtype = getattr(getattr(group, "mp_policy", None), "param_dtype", None)
        if dtype is not None:
            dtypes |= dict.fromkeys(fsdp_parameters(group), dtype)
    return dtypes


def cast(values: Any, dtype: torch.dtype) -> Any:
    """Return values with their tensors of narrower formats cast to float32 or float64, and these
    formats' names replaced.
    """
    narrower = _NARROWER[dtype]

    def widened(x: Any) -> Any:
        if isinstance(x, Tensor):
            if x.dtype in narrower:
                return x.to(dtype)
            return x
        if isinstance(x, torch.dtype) and x in narrower:
            return dtype
        return x

    return tree_map(widened, values)


class Widened(TorchDispatchMode):
    """Compute in a wide format, float32 or float64, instead of narrower ones, for casts by autocast
    or by the model.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in _NARROWER[self.dtype]:
            kwargs["dtype"] = self.dtype
        is_fresh = all(value.alias_info is None for value in func._schema.returns)
        if is_fresh and any(
            isinstance(x, Tensor) and x.dtype is self.dtype for x in tree_leaves((args, kwargs))
        ):
            args, kwargs = cast(
                (args, kwargs), self.dtype
            )  # such as a plain attribute beside the weights
        return func(*args, **kwargs)


def is_called_from(file: str | None, function: str = "") -> bool:
    """Return whether a function of a file, or any, is among the callers."""
    frame: Any = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename != file or function not in ("", frame.f_code.co_name)
    ):
        frame = frame.f_back
    return frame is not None


def is_in_function() -> bool:
    """Return whether a custom autograd function computes its forward pass, as a recomputed block does
    without a graph.
    """
    return is_called_from(torch.autograd.function.__file__, "apply")
