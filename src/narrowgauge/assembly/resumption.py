"""The loss scale of a run, in the optimizer's ``state_dict()``.

A resumed run needs it for the same bits. It is in the first param group, since
``torch.distributed.checkpoint`` saves only parameters and groups. The step that keys the random
bits of layers is there too, see :mod:`narrowgauge.matmul.clock`. The model's ``state_dict()`` does
not hold them, since other code loads that with ``strict=True``.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

from narrowgauge.numerics.scaling import LossScaler
from narrowgauge.optim.optimizer import Optimizer

KEY = "loss_scaler"


def carry_loss_scale(optimizer: Optimizer) -> None:
    """Add the loss scale to an optimizer's ``state_dict()``, and restore it in ``load_state_dict``.

    A Narrowgauge ``state_dict`` without it, such as an edited one, loads with a warning.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model, optimizer = ng.prepare(torch.nn.Linear(16, 4), "float16/split")
        >>> sorted(optimizer.state_dict()["param_groups"][0]["loss_scaler"])
        ['good_steps', 'lives', 'num_held', 'num_overflows', 'scale']
    """
    scaler = optimizer.loss_scaler
    if scaler is None:
        return
    loaded: dict[str, Any] = {}
    optimizer.register_state_dict_post_hook(partial(_add, scaler))
    optimizer.register_load_state_dict_pre_hook(partial(_take, loaded))
    optimizer.register_load_state_dict_post_hook(partial(_put, scaler, loaded))
    optimizer.param_groups[0][KEY] = {}  # a flattened checkpoint restores only keys of live groups


def _add(scaler: LossScaler, _: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    first, *rest = state_dict["param_groups"]
    return {**state_dict, "param_groups": [{**first, KEY: scaler.state_dict()}, *rest]}


def _take(loaded: dict[str, Any], _: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    groups = [dict(group) for group in state_dict["param_groups"]]
    loaded.clear()
    loaded.update(groups[0].pop(KEY, {}))
    return {**state_dict, "param_groups": groups}


def _put(scaler: LossScaler, loaded: dict[str, Any], optimizer: Optimizer) -> None:
    optimizer.param_groups[0][KEY] = {}
    if loaded:
        scaler.load_state_dict(loaded)
        return
    warnings.warn(
        f"the loaded optimizer state lacks {KEY}, so training continues with other bits. Save "
        "optimizer.state_dict() unedited.",
        stacklevel=4,
    )
