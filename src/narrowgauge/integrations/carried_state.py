"""State that travels in an optimizer's ``state_dict()`` through loops that save weights and optimizer alone.

Besides them, the same bits after a resume need the step that stochastic casts are keyed by, the amax histories of delayed
scales, and the loss scale. Our own trainer saves these beside the optimizer; a framework that saves
``optimizer.state_dict()`` and nothing else of ours saves them here.
"""

from __future__ import annotations

from typing import Any

from torch import nn

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
        return {**state_dict, KEY: _taken(optimizer, model)}

    def take(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        _give_back(optimizer, model, state_dict.get(KEY, {}))
        return {name: value for name, value in state_dict.items() if name != KEY}

    optimizer.register_state_dict_post_hook(add)
    optimizer.register_load_state_dict_pre_hook(take)


def _taken(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    optimizer.settle()
    state: dict[str, Any] = {"num_skipped": optimizer.num_skipped}
    if optimizer.loss_scaler is not None:
        state["loss_scaler"] = optimizer.loss_scaler.state_dict()
    linears = linears_of(model)
    return state if linears is None else {**state, **linears.state_dict()}


def _give_back(optimizer: Optimizer, model: nn.Module, state: dict[str, Any]) -> None:
    optimizer.num_skipped = state.get("num_skipped", optimizer.num_skipped)
    if optimizer.loss_scaler is not None and "loss_scaler" in state:
        optimizer.loss_scaler.load_state_dict(state["loss_scaler"])
    linears = linears_of(model)
    if linears is not None and "matmul_step" in state:
        linears.load_state_dict(state)
