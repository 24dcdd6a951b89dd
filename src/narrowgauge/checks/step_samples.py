"""Elements of an optimizer's parameters, states and gradients, in bounded memory.

The update of most optimizers is elementwise, so a few thousand elements of each parameter show it.
Nothing here changes a tensor of the run.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from narrowgauge.numerics.dtensor import is_sharded, local_of
from narrowgauge.optim.optimizer import Optimizer

ELEMENTS = 1 << 12
"""Elements that are kept of each parameter."""
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


def evenly_spread(tensor: Tensor) -> Tensor:
    """Return evenly spread elements of this rank's shard, 1-D: a view where possible, the same
    places at every call.

    The stride is coprime to the last dim, so the elements cover every column.
    """
    flat = local_of(tensor.detach()).reshape(-1)
    stride = max(1, -(-flat.numel() // ELEMENTS))
    columns = tensor.shape[-1] if tensor.ndim else 1
    while stride > 1 and math.gcd(stride, columns) > 1:
        stride += 1
    return flat[::stride]


def spread(tensor: Tensor) -> Tensor:
    """Copy evenly spread elements of this rank's shard to the CPU, 1-D."""
    return evenly_spread(tensor).clone().cpu()


def weight_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor:
    """Return the stored weight. For our optimizers include its tail or other low bits."""
    if isinstance(optimizer, Optimizer):
        return optimizer.stored(parameter)
    return parameter


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
