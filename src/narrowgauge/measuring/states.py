"""What an optimizer stores of a parameter, as tensors that can be read."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.optim.optimizer import Optimizer

STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def plain(value: Any) -> Any:
    """Return a value of an optimizer's state as it can be read: a plain tensor, dequantized if it
    holds codes.

    A tensor of another class is ``None``: its elements are unknown.
    """
    if not isinstance(value, Tensor) or type(value) in (Tensor, torch.nn.Parameter):
        return value
    if is_sharded(value):
        return value
    if type(value).dequantize is not Tensor.dequantize:
        return value.dequantize()
    return None


def stored_by(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Return the stored tensors of a parameter by name: any optimizer's states, and the weight with
    its tail for ours.
    """
    if not isinstance(optimizer, Optimizer):
        return {k: plain(value) for k, value in optimizer.state.get(parameter, {}).items()}
    stored: dict[str, Any] = {}
    for name in ("weight", *STATES) if optimizer.num_steps(parameter) else ("weight",):
        with suppress(KeyError):  # another rule has other states, and a frozen parameter none
            stored[name] = optimizer.stored(parameter, name)
    return stored
