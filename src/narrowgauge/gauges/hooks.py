"""The hooks that gauges put on modules: one function for each kind, so that layers share compiled code.

What differs from layer to layer is an attribute of the module, ``gauge_places``: where on the board its input, the gradient
of its output, its attention and its output are marked; ``None`` where they are not.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.gauges.board import SWITCH, mark_gradient, mark_tensor
from narrowgauge.matmul.linear import SIBLINGS


def mark_linear(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """The forward hook of every watched linear layer: one function, so that layers share compiled code."""
    # In this order, so that code compiled for evaluation is not guarded by the switch.
    if not (torch.is_grad_enabled() and module.training and SWITCH.is_on):
        return None
    place, place_of_grad = module.gauge_places[0], module.gauge_places[1]  # type: ignore[index]
    if place is not None:
        mark_tensor(args[0], place)
    return mark_gradient(output, place_of_grad)


def mark_hidden(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """The forward hook of a language model's body: what leaves it enters the head, which a chunked loss does not call."""
    if torch.is_grad_enabled() and model.training and SWITCH.is_on:
        mark_tensor(output[0], model.gauge_places[0])  # type: ignore[index]


def mark_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if torch.is_grad_enabled() and module.training and SWITCH.is_on:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(first, Tensor) and first.is_floating_point():
            mark_tensor(first, module.gauge_places[3])  # type: ignore[index]


def multiplies(module: nn.Module) -> bool:
    """Whether a module is a linear layer of any kind, transformers' ``Conv1D`` among them."""
    return isinstance(module, nn.Linear) or any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def shares_input(name: str, layers: dict[str, nn.Module]) -> bool:
    """Whether a sibling that was chosen before has the same input."""
    parent, _, own = name.rpartition(".")
    prefix = f"{parent}." if parent else ""
    return any(own in others and f"{prefix}{first}" in layers for first, *others in SIBLINGS)
