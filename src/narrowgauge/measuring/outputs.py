"""Record what the modules of a forward pass take and return, and compare two passes place by place.

How much rounding explains is measured: beside one of the passes run float64 shadows
(:mod:`narrowgauge.measuring.policies.wide`).
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from narrowgauge.measuring.adapters import name_without_adapters
from narrowgauge.measuring.beside import is_float
from narrowgauge.measuring.policies.wide import Wide
from narrowgauge.measuring.units import FINEST, unit_of

Outputs = dict[str, list[Tensor]]
"""The float tensors at each place, in the order of the calls."""


class Recording:
    """Record the inputs and outputs of all modules that are called.

    Args:
        forced: of an earlier pass, by place. A module there takes and returns these tensors, after
            the pass's own were recorded. So each place shows what it does itself.
        wide: the shadows of the pass, if it has any.

    Attributes:
        outputs: of each place; later calls of a module are places of their own.
        shadows: of the places whose shadows are known.
        values: what the model returns.
    """

    def __init__(self, forced: Outputs, wide: Wide | None) -> None:
        self.forced = forced
        self.wide = wide
        self.outputs = Outputs()
        self.shadows = Outputs()
        self.values: Any = None
        self._names = dict[nn.Module, str]()
        self._calls = Counter[str]()

    def before(self, module: nn.Module, args: Any) -> Any:
        if module not in self._names:
            for name, member in module.named_modules():
                self._names.setdefault(member, name_without_adapters(name) or "the model")
        return self._record(f"{self._names[module]}, input", args)

    def after(self, module: nn.Module, args: Any, result: Any) -> Any:
        return self._record(self._names[module], result)

    def _record(self, place: str, values: Any) -> Any:
        leaves, spec = tree_flatten(values)
        indices = [k for k, x in enumerate(leaves) if is_float(x)]
        # A merged layer is like an adapted one only as a whole.
        if not indices or ".base_layer" in place or ".lora_" in place:
            return values
        self._calls[place] += 1
        if self._calls[place] > 1:
            place = f"{place}, call {self._calls[place]}"
        tensors = [leaves[k].detach() for k in indices]
        self.outputs[place] = [x.clone() for x in tensors]
        if self.wide is not None and all(map(self.wide.follows, tensors)):
            self.shadows[place] = [self.wide.of(x).clone() for x in tensors]
        if place not in self.forced:
            return values
        for k, x in zip(indices, self.forced[place], strict=True):
            leaves[k] = x.to(leaves[k].dtype, copy=True)
        return tree_unflatten(leaves, spec)

    def unit(self) -> float:
        """Return the unit roundoff of the coarsest output."""
        return max(map(unit_at, self.outputs.values()), default=FINEST)


def unit_at(tensors: list[Tensor]) -> float:
    """Return the unit roundoff of the coarsest of some tensors."""
    return max(unit_of(x.dtype) for x in tensors)


def are_alike(first: list[Tensor] | None, second: list[Tensor] | None) -> bool:
    """Return whether a place of two passes has tensors of the same shapes."""
    return [x.shape for x in first or []] == [x.shape for x in second or []]


def distance(first: list[Tensor], second: list[Tensor]) -> float:
    """Return the largest distance of a row of some tensors from those of another pass, relative to
    its length. Of small rows, take a thousandth of the mean length.
    """
    largest = 0.0
    for x, y in zip(first, second, strict=True):
        if x.numel():
            off = torch.where(x == y, 0.0, y.double() - x.double()).nan_to_num(nan=math.inf)
            row = torch.atleast_1d(x.double()).nan_to_num(posinf=0.0, neginf=0.0)
            lengths = row.norm(dim=-1)
            floor = 1e-3 * float(lengths.square().mean().sqrt()) + 1e-300
            relative = torch.atleast_1d(off).norm(dim=-1) / lengths.clamp(min=floor)
            largest = max(largest, float(relative.max()))
    return largest
