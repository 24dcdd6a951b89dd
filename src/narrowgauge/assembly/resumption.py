"""State of a run, other than weights and moments, in the optimizer's ``state_dict()``.

A resumed run needs three things for the same bits: the step that keys random bits, the step of a stochastic reduction, and the
loss scale. Their seeds are the optimizer's, in its param groups. This state is in the
first param group, since ``torch.distributed.checkpoint`` saves only parameters and groups. The model's ``state_dict()`` does
not hold it, since other code loads that with ``strict=True``. The trainer saves this state in its checkpoints.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from narrowgauge.matmul.swapping import linears_of
from narrowgauge.optim.optimizer import Optimizer

KEY = "narrowgauge"


def carry_state(optimizer: Optimizer, model: nn.Module) -> None:
    """Add this state to an optimizer's ``state_dict()``, and restore it in ``load_state_dict``.

    A Narrowgauge ``state_dict`` without it, such as an edited one, loads with a warning.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model, optimizer = ng.prepare(torch.nn.Linear(16, 4), "int8/word")
        >>> optimizer.state_dict()["param_groups"][0]["narrowgauge"]["matmul_step"]
        0
    """
    loaded: dict[str, Any] = {}
    optimizer.register_state_dict_post_hook(partial(_add, model))
    optimizer.register_load_state_dict_pre_hook(partial(_take, loaded))
    optimizer.register_load_state_dict_post_hook(partial(_put, model, loaded))
    _announce(optimizer, model)


def _announce(optimizer: Optimizer, model: nn.Module) -> None:
    """Give the live group the key. A flattened checkpoint of PyTorch restores only keys that it finds there."""
    if carried(optimizer, model):
        optimizer.param_groups[0][KEY] = {}


def _add(model: nn.Module, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    groups, state = state_dict["param_groups"], carried(optimizer, model)
    return (
        {**state_dict, "param_groups": [{**groups[0], KEY: state}, *groups[1:]]}
        if state
        else state_dict
    )


def _take(
    loaded: dict[str, Any], optimizer: Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any]:
    groups = state_dict["param_groups"]
    loaded.clear()
    loaded.update(groups[0].get(KEY, {}))
    rest = [{name: value for name, value in group.items() if name != KEY} for group in groups]
    return {**state_dict, "param_groups": rest}


def _put(model: nn.Module, loaded: dict[str, Any], optimizer: Optimizer) -> None:
    restore(optimizer, model, loaded)
    _announce(optimizer, model)
    lacks = sorted(carried(optimizer, model).keys() - loaded.keys())
    if lacks:
        warnings.warn(
            f"the loaded optimizer state lacks {', '.join(lacks)}, so training continues with other bits. Save "
            "optimizer.state_dict() unedited.",
            stacklevel=4,
        )


def carried(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return this state as numbers and tensors. It is empty for a recipe that needs none."""
    state: dict[str, Any] = {}
    if optimizer.loss_scaler is not None:
        state["loss_scaler"] = optimizer.loss_scaler.state_dict()
    linears = linears_of(model)
    # A step of these layers depends on the number of earlier steps, in every earlier compute.
    if linears is not None and any(layer.is_keyed for layer in linears.layers.values()):
        state |= linears.state_dict()
    return state


def restore(optimizer: Optimizer, model: nn.Module, state: Mapping[str, Any]) -> None:
    """Restore the result of :func:`carried` into an optimizer whose param groups were loaded."""
    if optimizer.loss_scaler is not None and "loss_scaler" in state:
        optimizer.loss_scaler.load_state_dict(state["loss_scaler"])
    linears = linears_of(model)
    if linears is not None and "matmul_step" in state:
        linears.clock.set(seed=optimizer.param_groups[0]["seed"])
        linears.load_state_dict(state)
