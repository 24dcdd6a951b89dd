"""Record what the modules of a forward pass take and return, and compare two passes place by place.

How much rounding explains is measured: beside one of the passes run float64 shadows
(:mod:`narrowgauge.measuring.policies.wide`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from narrowgauge.measuring.adapters import name_without_adapters
from narrowgauge.measuring.beside import is_float
from narrowgauge.measuring.policies.wide import Wide
from narrowgauge.measuring.units import unit_of

Outputs = dict[str, list[list[Tensor]]]
"""The float tensors of each call at each place, in the order of the first calls."""


class Recording:
    """Record the inputs and outputs of all modules that are called.

    Args:
        forced: of an earlier pass, by place. A module there takes and returns these tensors, after
            the pass's own were recorded. So each place shows what it does itself.
        wide: the shadows of the pass, if it has any.

    Attributes:
        outputs, shadows: of each place.
        unfollowed: places whose shadows are unknown.
        draws: whether the pass drew random numbers.
    """

    def __init__(self, forced: Outputs, wide: Wide | None) -> None:
        self.forced = forced
        self.wide = wide
        self.outputs = Outputs()
        self.shadows = Outputs()
        self.unfollowed = set[str]()
        self.draws = False
        self._names = dict[nn.Module, str]()

    def before(self, module: nn.Module, args: Any) -> Any:
        if module not in self._names:
            for name, member in module.named_modules():
                self._names.setdefault(member, name_without_adapters(name) or "the model")
        return self._keep(f"{self._names[module]}, input", args)

    def after(self, module: nn.Module, args: Any, result: Any) -> Any:
        return self._keep(self._names[module], result)

    def _keep(self, place: str, values: Any) -> Any:
        leaves, spec = tree_flatten(values)
        places = [k for k, x in enumerate(leaves) if is_float(x)]
        # A merged layer is like an adapted one only as a whole.
        if not places or ".base_layer" in place or ".lora_" in place:
            return values
        calls = self.outputs.setdefault(place, [])
        calls.append([leaves[k].detach().clone() for k in places])
        if self.wide is not None:
            shadows = [self.wide.of(leaves[k].detach()).clone() for k in places]
            self.shadows.setdefault(place, []).append(shadows)
            if not all(self.wide.follows(leaves[k]) for k in places):
                self.unfollowed.add(place)
        if place in self.forced:
            exact = self.forced[place][len(calls) - 1]
            for k, x in zip(places, exact, strict=True):
                leaves[k] = x.to(leaves[k].dtype, copy=True)
            values = tree_unflatten(leaves, spec)
        return values


@contextmanager
def recorded(forced: Outputs, wide: Wide | None) -> Iterator[Recording]:
    """Record what modules take and return, by place."""
    recording = Recording(forced, wide)
    handles = [
        global_hooks.register_module_forward_pre_hook(recording.before),
        global_hooks.register_module_forward_hook(recording.after),
    ]
    try:
        yield recording
    finally:
        for handle in handles:
            handle.remove()


def distance(first: Outputs, second: Outputs, place: str) -> float:
    """Return the largest distance of a row at a place of two passes, relative to its length."""
    largest = 0.0
    for x, y in _pairs(first, second, place):
        off = torch.where(x == y, 0.0, y.double() - x.double())
        lengths = torch.atleast_1d(off).nan_to_num(nan=math.inf).norm(dim=-1)
        largest = max(largest, float((lengths / _row_lengths(x)).max()))
    return largest


def _pairs(first: Outputs, second: Outputs, place: str) -> Iterator[tuple[Tensor, Tensor]]:
    for call, other_call in zip(first[place], second[place], strict=True):
        for x, y in zip(call, other_call, strict=True):
            if x.numel():
                yield x, y


def _row_lengths(x: Tensor) -> Tensor:
    """Return the length of each row; of small rows a thousandth of the mean."""
    lengths: Tensor = torch.atleast_1d(x.double()).nan_to_num(posinf=0.0, neginf=0.0).norm(dim=-1)
    floor = 1e-3 * float(lengths.square().mean().sqrt()) + 1e-300
    return lengths.clamp(min=floor)


def unit_at(outputs: Outputs, place: str) -> float:
    """Return the unit roundoff of the coarsest tensor at a place."""
    units = [unit_of(x.dtype) for call in outputs[place] for x in call]
    return max(units)


def shapes_at(outputs: Outputs, place: str) -> list[list[torch.Size]]:
    """Return the shapes of the tensors of each call at a place."""
    shapes = []
    for call in outputs.get(place, []):
        shapes.append([x.shape for x in call])
    return shapes
