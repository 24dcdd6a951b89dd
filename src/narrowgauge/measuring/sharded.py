"""Copy a sharded model into one process."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.numerics.dtensor import whole
from narrowgauge.torch_support.put_back import objects_of
from narrowgauge.torch_support.torch_names import fsdp_groups, fsdp_parameters, unwrapped_model


def gathered_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy of a sharded model in its own formats, unsharded, without wrappers,
    compiled code or FSDP2's hooks.

    All ranks make the call.
    """
    model = unwrapped_model(model)
    memo: dict[int, Any] = {}
    gathered = _gathered_dtypes(model)
    for _, x in objects_of(model):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            continue
        values = whole(x.detach()).clone().to(gathered.get(x, x.dtype))
        if isinstance(x, nn.Parameter):
            memo[id(x)] = nn.Parameter(values, x.requires_grad)
        else:  # results of an earlier pass, such as an auxiliary loss, become constants
            memo[id(x)] = values.requires_grad_(x.is_leaf and x.requires_grad)
    classes = {}
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
    dtypes: dict[Tensor, torch.dtype] = {}
    for _, group in fsdp_groups(model):
        dtype = getattr(getattr(group, "mp_policy", None), "param_dtype", None)
        if dtype is not None:
            dtypes |= dict.fromkeys(fsdp_parameters(group), dtype)
    return dtypes
