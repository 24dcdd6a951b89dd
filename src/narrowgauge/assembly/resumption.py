"""What a resumed step takes besides weights and moments, carried in the optimizer's ``state_dict()``.

The same bits after a resume need the step that stochastic casts are keyed by, the amax histories of delayed scales, the step of a
reduction that rounds stochastically, and the loss scale. Our own trainer and some integrations save these beside the optimizer. A
loop that saves ``model.state_dict()`` and ``optimizer.state_dict()`` saves them here, without having to know of them.

They stand in the first param group. The model's ``state_dict()`` stays that of the plain model, which others load with
``strict=True``, and ``torch.distributed.checkpoint`` keeps of an optimizer's state only what belongs to parameters and groups. It
reads a checkpoint into the state of an optimizer at hand, so nothing is added where nothing is needed: then checkpoints that were
written before fit as they did.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from narrowgauge.matmul.swapping import Linears, linears_of
from narrowgauge.optim.optimizer import Optimizer

KEY = "narrowgauge"


def carry_state(optimizer: Optimizer, model: nn.Module) -> None:
    """Let an optimizer's ``state_dict()`` hold, and ``load_state_dict`` restore, what a resumed run needs besides.

    A state without it, from an earlier version or edited, is loaded with a warning.

    Args:
        optimizer: of ours.
        model: the model whose parameters it steps, prepared.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model, optimizer = ng.prepare(torch.nn.Linear(16, 4), "int8/word")
        >>> optimizer.state_dict()["param_groups"][0]["narrowgauge"]["matmul_step"]
        0
    """
    given: dict[str, Any] = {}

    def add(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        groups, state = state_dict["param_groups"], carried(optimizer, model)
        return {**state_dict, "param_groups": [{**groups[0], KEY: state}, *groups[1:]]} if state else state_dict

    def take(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        found, rest = separated(state_dict)
        given.clear()
        given.update(found, is_ours=any("storage" in group for group in rest["param_groups"]))
        return rest

    def put(_: Any) -> None:
        restore(optimizer, model, given)
        if given["is_ours"] and (lacks := sorted(carried(optimizer, model).keys() - given.keys())):
            warnings.warn(
                f"the optimizer state that was loaded lacks {', '.join(lacks)} of this recipe, without which training does not "
                "go on with the same bits: an earlier version saved it, or it was edited. Load ng.linears_of(model)'s and "
                "optimizer.loss_scaler's own state after it, if you saved them.",
                stacklevel=4,
            )

    optimizer.register_state_dict_post_hook(add)
    optimizer.register_load_state_dict_pre_hook(take)
    optimizer.register_load_state_dict_post_hook(put)


def carried(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """What a resumed step takes besides weights and states: numbers, and tensors of amax histories; empty where nothing is."""
    state: dict[str, Any] = {}
    if optimizer.loss_scaler is not None:
        state["loss_scaler"] = optimizer.loss_scaler.state_dict()
    if optimizer.reduction is not None and optimizer.reduction.row.is_stochastic:
        state["reduction_step"] = optimizer.reduction.step
    linears = linears_of(model)
    return state if linears is None or not _remembers(linears) else {**state, **linears.state_dict()}


def separated(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What travels in an optimizer's state, beside the param groups or in one of them, and the state without it."""
    found: dict[str, Any] = {}

    def without(place: dict[str, Any]) -> dict[str, Any]:
        found.update(place.get(KEY, {}))
        return {name: value for name, value in place.items() if name != KEY}

    rest = without(state_dict)
    return found, {**rest, "param_groups": [without(group) for group in rest["param_groups"]]}


def _remembers(linears: Linears) -> bool:
    """Whether a step of these layers depends on earlier ones, or on how many there were, in any compute that they had."""
    return bool(linears.histories()) or any(layer.is_keyed for layer in linears.layers.values())


def restore(optimizer: Optimizer, model: nn.Module, state: dict[str, Any]) -> None:
    """Give back what :func:`carried` returned."""
    if optimizer.loss_scaler is not None and "loss_scaler" in state:
        optimizer.loss_scaler.load_state_dict(state["loss_scaler"])
    if optimizer.reduction is not None and "reduction_step" in state:
        optimizer.reduction.set_step(state["reduction_step"])
    linears = linears_of(model)
    if linears is not None and "matmul_step" in state:
        linears.load_state_dict(state)
