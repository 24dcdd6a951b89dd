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
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from narrowgauge._torch import plain_name
from narrowgauge.gauges.recorder import board_of, is_sampled, mark_gradient, mark_tensor
from narrowgauge.matmul.experts import grouped_layers_of
from narrowgauge.matmul.grouped import GroupedLinear
from narrowgauge.matmul.linear import SIBLINGS


def mark_linear(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """The forward hook of every watched linear layer: one function, so that layers share compiled code."""
    if not is_sampled(module):
        return None
    place = place_of(module, 0)
    if place is not None:
        mark_tensor(as_multiplied(args[0]), place)
    return mark_gradient(output, place_of(module, 1))


def mark_hidden(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """The forward hook of a language model's body: what leaves it enters the head, which a chunked loss does not call."""
    if is_sampled(model):
        mark_tensor(as_multiplied(output[0]), place_of(model, 0))


def place_of(module: nn.Module, kind: int) -> Tensor | None:
    """A module's place on the board, by its number in ``gauge_places``; a copy of a watched module may have none."""
    places: Any = getattr(module, "gauge_places", None)
    found: Tensor | None = None if places is None else places[kind]
    return found


def is_taken(module: nn.Module) -> bool:
    """Whether gauges that are still there have places for a module; those of a copied module are nobody's."""
    places = getattr(module, "gauge_places", None) or ()
    return any(board_of(place)[0] is not None for place in places if place is not None)


def as_multiplied(x: Tensor) -> Tensor:
    """What is in memory of a layer's input: under autocast what it becomes, not what it was."""
    if x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def mark_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """The forward hook of a module whose output was asked for."""
    if is_sampled(module):
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(first, Tensor) and first.is_floating_point():
            mark_tensor(first, place_of(module, 3))


def multiplies(module: nn.Module) -> bool:
    """Whether a module is a linear layer of any kind, transformers' ``Conv1D`` and projections of narrow experts among them."""
    kinds = type(module).__mro__
    if isinstance(module, NonDynamicallyQuantizableLinear):  # nn.MultiheadAttention takes its weight and calls it never
        return False
    return isinstance(module, (nn.Linear, GroupedLinear)) or any(kind.__name__ == "Conv1D" for kind in kinds)


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """A model's modules by name; the projections of narrow experts have the names of their weights."""
    names = {id(module): name for name, module in grouped_layers_of(model).items()}
    return {plain_name(names.get(id(module), name)): module for name, module in model.named_modules()}


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def shares_input(name: str, layers: dict[str, nn.Module]) -> bool:
    """Whether a sibling that was chosen before has the same input."""
    parent, _, own = name.rpartition(".")
    prefix = f"{parent}." if parent else ""
    return any(own in others and f"{prefix}{first}" in layers for first, *others in SIBLINGS)
