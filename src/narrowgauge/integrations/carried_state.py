"""State that travels in an optimizer's ``state_dict()`` through loops that save weights and optimizer alone.

Besides them, the same bits after a resume need the step that stochastic casts are keyed by, the amax histories of delayed
scales, and the loss scale. Our own trainer saves these beside the optimizer; a framework that saves
``optimizer.state_dict()`` and nothing else of ours saves them here.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from narrowgauge.integrations.framework_optimizers import restore_audit, saved_audit
from narrowgauge.matmul.swapping import linears_of
from narrowgauge.optim.optimizer import Optimizer

KEY = "narrowgauge"


def carry_state(optimizer: Optimizer, model: nn.Module) -> None:
    """Let an optimizer's ``state_dict()`` hold, and ``load_state_dict`` restore, what a resumed run needs besides.

    Args:
        optimizer: of ours.
        model: the model whose parameters it steps, prepared.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model, optimizer = ng.prepare(torch.nn.Linear(16, 4), "int8/word")
        >>> carry_state(optimizer, model)
        >>> optimizer.state_dict()["narrowgauge"]["matmul_step"]
        0
    """

    def add(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, KEY: carried(optimizer, model)}

    given: dict[str, Any] = {}

    def take(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        given.clear()
        given.update(state_dict.get(KEY, {}))
        return {name: value for name, value in state_dict.items() if name != KEY}

    def put(_: Any) -> None:
        # Only now: loading states begins an audit of its own.
        restore(optimizer, model, given)

    optimizer.register_state_dict_post_hook(add)
    optimizer.register_load_state_dict_pre_hook(take)
    optimizer.register_load_state_dict_post_hook(put)


def carried(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """What a resumed run needs besides weights and states: numbers, and tensors of amax histories."""
    state = saved_audit(optimizer)
    if optimizer.loss_scaler is not None:
        state["loss_scaler"] = optimizer.loss_scaler.state_dict()
    linears = linears_of(model)
    return state if linears is None else {**state, **linears.state_dict()}


def restore(optimizer: Optimizer, model: nn.Module, state: dict[str, Any]) -> None:
    """Give back what :func:`carried` returned."""
    if "windows" in state:
        restore_audit(optimizer, state)
    if optimizer.loss_scaler is not None and "loss_scaler" in state:
        optimizer.loss_scaler.load_state_dict(state["loss_scaler"])
    linears = linears_of(model)
    if linears is not None and "matmul_step" in state:
        linears.load_state_dict(state)
