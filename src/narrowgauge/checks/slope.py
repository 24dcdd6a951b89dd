"""Compare the gradient with the slope of the loss, in training mode, on a float64 copy of the
model.

Move all tensors along one random direction, forward and back by 1e-5 of their size. The difference
of the two losses gives the slope, which the gradient predicts. Dropout draws the same masks in each
pass. Where the two differ, halve the set of tensors until single tensors are left. A longer step
must find the same slope, or nothing is said.

A wrong backward pass differs: a custom autograd function, a recomputed block with other dropout
masks, a padding index that is a token. So does a detached tensor, which may be on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, of_all
from narrowgauge.checks.float32_copy import (
    Loss,
    Widened,
    cast,
    gradients_of,
    is_called_from,
    scalar,
)
from narrowgauge.checks.shadow import is_float, user_line
from narrowgauge.matmul.linear import NarrowLayer
from narrowgauge.torch_support.put_back import objects_of, put_back

STEPS = (1e-5, 1e-7, 1e-3)
"""Lengths of steps along the direction, in units of each tensor's root mean square.

A shorter one crosses fewer kinks, such as changes of routing. The longest must agree with the first
before a tensor is named: float32 inside a loss makes them differ.
"""
_MOST = 8
"""Tensors that are located; the first in backward."""


def slope_readings(
    model: nn.Module, leaves: Mapping[str, Any], batch: Any, loss: Loss
) -> tuple[list[Reading], list[str], float]:
    """Compare the gradient of a float32 copy, and of leaves beside it, with the slope of the loss.

    Both are float64 meanwhile.

    Args:
        leaves: the copy's parameters that train, and others, by name.
    Returns:
        At most one reading, a line about what was compared, and the loss.
    Raises:
        ArithmeticError: no slope exists, since the loss is not smooth or not the same in each pass.
    """
    default = torch.get_default_dtype()
    plain_dtypes = {m: m.plain_dtype for m in model.modules() if isinstance(m, NarrowLayer)}
    objects = [*(x for _, x in objects_of(model)), *leaves.values()]
    data = {x: x.data for x in objects if is_float(x)}
    wrong = dict[str, tuple[float, float, float]]()
    try:
        torch.set_default_dtype(torch.float64)
        for x, values in data.items():
            x.data = values.double()
        for layer in plain_dtypes:
            layer.plain_dtype = torch.float64
        slope = _Slope(model, leaves, cast(batch, torch.float64), loss)
        sets = [list(leaves)[::-1]]  # in the order of backward
        differs = False
        while sets and len(wrong) < _MOST:
            names = sets.pop()
            try:
                difference = slope.difference(names)
            except ArithmeticError:  # no slope of some leaves them out
                if len(names) == len(leaves):
                    raise
                continue
            if difference and len(names) == 1:
                wrong[names[0]] = difference
            elif difference:
                differs = True
                half = len(names) // 2
                sets += [names[half:], names[:half]]
    finally:
        torch.set_default_dtype(default)
        for x, values in data.items():
            x.data = values
        for layer, dtype in plain_dtypes.items():
            layer.plain_dtype = dtype
    if differs and not wrong:
        raise ArithmeticError(
            "the slope along all tensors is not the gradient's, and no single tensor differs"
        )
    if not wrong:
        line = f"slope: the loss changes as the gradient of {len(leaves)} tensors says, within {slope.largest:.0e}"
        return [], [f"{line}, in training mode"], slope.loss_value
    first, (product, expected, bound) = next(iter(wrong.items()))
    kind = KINDS["slope"]
    stops = ""
    if slope.stops:
        kind = replace(kind, severity="note")
        stops = "An output is detached or rounded; if that is on purpose, all is well."
    reading = kind.reading(of_all(wrong), product, expected, bound, first=first, stops=stops)
    return [reading], [], slope.loss_value


class _Slope:
    """The loss along a random direction, and what the gradient says of it.

    Attributes:
        stops: number of tensors that need a gradient and were detached.
        largest: the largest distance that is no difference.
    """

    def __init__(self, model: nn.Module, leaves: Mapping[str, Any], batch: Any, loss: Loss) -> None:
        self.model = model
        self.leaves = leaves
        self.batch = batch
        self.loss = loss
        self.largest = 0.0
        self.start = {name: p.detach().clone() for name, p in leaves.items()}
        self.seeds = dict(zip(leaves, range(len(leaves)), strict=True))
        stops = _Stops()

        def watched(model: nn.Module, batch: Any) -> Tensor:
            with stops:
                return loss(model, batch)

        gradients, self.loss_value = gradients_of(
            model, leaves, batch, watched, Widened(torch.float64)
        )
        self.stops = stops.count
        self.products = dict[str, float]()
        self.squares = dict[str, float]()
        for name, gradient in gradients.items():
            direction = self._direction(name)
            self.products[name] = float((gradient * direction).sum())
            self.squares[name] = float(gradient.square().sum() * direction.square().mean())

    def _direction(self, name: str) -> Tensor:
        start = self.start[name]
        generator = torch.Generator(start.device).manual_seed(self.seeds[name])
        noise = torch.randn(start.shape, generator=generator, device=start.device)
        return noise * (float(start.square().mean().sqrt()) or 0.02)

    @torch.no_grad()
    def _loss_at(self, names: Sequence[str], step: float) -> float:
        try:
            for name in names:
                self.leaves[name].copy_(self.start[name] + step * self._direction(name))
            with torch.enable_grad(), put_back(self.model), Widened(torch.float64):
                return float(scalar(self.loss(self.model, self.batch)).detach())
        finally:
            for name in names:
                self.leaves[name].copy_(self.start[name])

    def _why_none(self, product: float) -> str:
        """Return why the loss has no slope here, by measurements in float64, in the order of their
        likelihood.
        """
        if not math.isfinite(product):
            bad = [name for name, x in self.squares.items() if not math.isfinite(x)]
            return f"the gradient of {of_all(bad)} is not finite in float64"
        first = self._loss_at([], 0.0)
        second = self._loss_at([], 0.0)
        if first != second:
            return f"two passes at one point differ, by {abs(first - second):.2g}"
        census = _Census()
        with put_back(self.model), census:
            self.loss(self.model, self.batch)
        if census.rounded:
            return f"the loss is rounded by {census.rounded[0]}"
        if census.narrow:
            return f"a part is computed in a narrower format by {census.narrow[0]}"
        step = 1e-6
        right_slope = (self._loss_at(list(self.leaves), step) - first) / step
        left_slope = (first - self._loss_at(list(self.leaves), -step)) / step
        if abs(right_slope - left_slope) > 1e-3 * max(abs(left_slope), abs(right_slope)):
            return f"the loss has a kink here: slopes {left_slope:.4g} and {right_slope:.4g}, the gradient says {product:.4g}"
        return f"steps of different lengths give different slopes; the gradient says {product:.4g}"

    def difference(self, names: Sequence[str]) -> tuple[float, float, float] | None:
        """Return the gradient's product with a direction, the slope along it, and the bound;
        ``None`` within the bound.
        """
        product = 0.0
        square = 0.0
        for name in names:
            product += self.products[name]
            square += self.squares[name]
        size = math.sqrt(square)
        slopes = []
        slope = math.nan
        bound = 0.0
        for step in STEPS:
            slope = (self._loss_at(names, step) - self._loss_at(names, -step)) / (2 * step)
            slopes.append(slope)
            scale = max(size, abs(slope), 1e-300)
            bound = KINDS["slope"].bound * scale + 64 * abs(self.loss_value) * 2.0**-53 / step
            if abs(slope - product) <= bound:
                self.largest = max(self.largest, abs(slope - product) / scale)
                return None
        if not abs(slopes[0] - slope) <= abs(slope - product) / 4 < math.inf:
            raise ArithmeticError(self._why_none(product))
        return product, slopes[0], bound


class _Census(Widened):
    """Note the operations of a float64 pass that round, or give a narrower format."""

    def __init__(self) -> None:
        super().__init__(torch.float64)
        self.rounded = list[str]()
        self.narrow = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if name in ("round", "floor", "ceil", "trunc", "sign"):
            self.rounded.append(f"{name} in {user_line()[0]}")
        if is_float(result) and result.dtype is not torch.float64 and result.numel() > 1:
            self.narrow.append(f"{name} in {user_line()[0]}")
        return result


class _Stops(TorchFunctionMode):
    """Count results of a forward pass that need a gradient and are detached or rounded, perhaps on
    purpose.
    """

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_float(result) and result.numel() > 1 and not result.requires_grad:
            needs = any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(args))
            is_rounded = func.__name__ in ("round", "sign") or result.element_size() == 1
            # A custom autograd function computes its forward pass without gradients.
            self.count += needs and (
                is_rounded or not is_called_from(torch.autograd.function.__file__, "apply")
            )
        return result
