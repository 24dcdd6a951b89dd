"""Compare the gradient with the slope of the loss, in training mode and in float64.

Move the shadows of all tensors along one random direction, forward and back by 1e-5 of their size.
The difference of the two losses gives the slope, which the gradient predicts. The step itself
computes at the weights as they are, so choices of indices and masks of dropout stay. Where the two
differ, halve the set of tensors until single tensors are left. A longer step must find the same
slope, or nothing is said.

A wrong backward pass differs: a custom autograd function, a recomputed block with other dropout
masks, a padding index that is a token. So does a detached tensor, which may be on purpose. A loss
that is attached by an autograd function arrives even where nothing is asked: it is subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, joined, of_all
from narrowgauge.checks.fit import fit
from narrowgauge.checks.float32_copy import is_in_function
from narrowgauge.checks.passes import Pass, Passes, scalar
from narrowgauge.checks.shadow import Shadow
from narrowgauge.checks.sites import is_float, storage_key
from narrowgauge.torch_support import torch_names
from narrowgauge.torch_support.torch_hooks import has_own_hooks

STEPS = (1e-5, 1e-7, 1e-3)
"""Lengths of steps along the direction, in units of each tensor's root mean square.

A shorter one crosses fewer kinks, such as changes of routing. The longest must agree with the first
before a tensor is named: float32 inside a loss makes them differ.
"""
_MOST = 8
"""Tensors that are located; the first in backward."""
MOST = 0.7
"""Part of a float32 gradient that is rounding, from which on it is nothing else."""


class Slope:
    """The loss along a random direction, and what the gradient says of it.

    Attributes:
        value: the loss in float64.
        largest: the largest distance that is no difference.

    Raises:
        ArithmeticError: no slope exists, since the loss is not followed or not smooth.
    """

    def __init__(self, passes: Passes, batch: Any) -> None:
        self.passes = passes
        self.batch = batch
        self.largest = 0.0
        stops = _Stops()

        def watched() -> Tensor:
            with stops:
                value = self._loss()
            return passes.ask(value)

        first = self._run(watched)
        self.first = first
        self.value = first.value
        self.stops = stops.count + len(first.mode.stops)
        self.rounded = first.mode.stops[:1]
        if math.isnan(self.value):
            through = ", ".join(first.mode.cuts)
            if through:
                raise ArithmeticError(f"not followed through {through}")
            raise ArithmeticError("the loss is not a number in float64")
        self.products = dict[str, float]()
        self.squares = dict[str, float]()
        self._project(self._run(self._unasked).shadows)
        self.names = list(self.products)

    def _project(self, attached: Mapping[str, Tensor]) -> None:
        """Fill the gradients' products with the direction, and their sizes, without attached ones."""
        first = self.first
        storages = {storage_key(self.passes.leaves[name]) for name in first.gradients}
        for name, p in self.passes.leaves.items():
            gradient = first.shadows.get(name)
            if gradient is None and name in first.gradients:
                continue  # not followed
            if gradient is None and storage_key(p) in storages:
                continue  # another name of the same values, such as a flat partition
            direction = self._direction(name)
            if gradient is None:
                gradient = torch.zeros_like(direction)
            elif name in attached:
                gradient = gradient - attached[name]
            self.products[name] = float((gradient * direction).sum())
            self.squares[name] = float(gradient.square().sum() * direction.square().mean())

    def noise(self) -> list[Reading]:
        """Return readings of matrices whose float32 gradient is rounding alone.

        Biases before a norm, and of keys, have no other gradient. At the least of a loss most
        matrices have none.
        """
        readings = []
        number = 0
        for name, exact in self.first.shadows.items():
            if exact.ndim < 2 or min(exact.shape) < 2 or self.first.mode.units:
                continue
            number += 1
            part = fit(self.first.gradients[name], exact).relative
            if MOST <= part < math.inf:
                place = (
                    f"In float64 this gradient differs by {part:.2g} of its length, so it is rounding "
                    "alone. Look for a term that is constant, as a ratio of a value with itself"
                )
                readings.append(KINDS["rounding"].reading(name, part, 0.0, MOST, place=place))
        return joined(readings, number) if 2 * len(readings) <= number else []

    def _loss(self) -> Tensor:
        model = torch_names.unwrapped_model(self.passes.model)
        return scalar(self.passes.loss(model, self.batch))

    def _unasked(self) -> Tensor:
        """Ask nothing of the loss: what arrives is attached."""
        value = self._loss()
        return self.passes.ask(value, torch.zeros_like(value))

    def _run(self, call: Callable[[], Any], shifts: Any = ()) -> Pass:
        return self.passes.run(call, Shadow(torch.float64, shifts=shifts))

    def _direction(self, name: str) -> Tensor:
        return _random_direction(self.passes.leaves[name], list(self.passes.leaves).index(name))

    def _loss_at(self, names: Sequence[str], step: float) -> float:
        shifts = []
        for name in names:
            p = self.passes.leaves[name]
            shifts.append((p.detach(), step * self._direction(name)))
        with torch.no_grad():
            mode = Shadow(torch.float64, shifts=shifts)
        return self.passes.run(self._loss, mode).value

    def difference(self, names: Sequence[str]) -> tuple[float, float, float] | None:
        """Return the gradient's product with a direction, the slope along it, and the bound;
        ``None`` within the bound.
        """
        product = sum(self.products[name] for name in names)
        size = math.sqrt(sum(self.squares[name] for name in names))
        slopes = []
        slope = math.nan
        bound = 0.0
        for step in STEPS:
            slope = (self._loss_at(names, step) - self._loss_at(names, -step)) / (2 * step)
            slopes.append(slope)
            scale = max(size, abs(slope), 1e-300)
            bound = KINDS["slope"].bound * scale + 64 * abs(self.value) * 2.0**-53 / step
            if abs(slope - product) <= bound:
                self.largest = max(self.largest, abs(slope - product) / scale)
                return None
        if not abs(slopes[0] - slope) <= abs(slope - product) / 4 < math.inf:
            raise ArithmeticError(self._why_none(product))
        return product, slopes[0], bound

    def _why_none(self, product: float) -> str:
        """Return why the loss has no slope here, in the order of likelihood."""
        if not math.isfinite(product):
            bad = [name for name, x in self.squares.items() if not math.isfinite(x)]
            return f"the gradient of {of_all(bad)} is not finite in float64"
        first = self._loss_at([], 0.0)
        second = self._loss_at([], 0.0)
        if first != second:
            return f"two passes at one point differ, by {abs(first - second):.2g}"
        if self.rounded:
            return f"the loss is rounded by {self.rounded[0]}"
        step = 1e-6
        right = (self._loss_at(self.names, step) - first) / step
        left = (first - self._loss_at(self.names, -step)) / step
        says = f"the gradient says {product:.4g}"
        if abs(right - left) > 1e-3 * max(abs(left), abs(right)):
            return f"the loss has a kink here: slopes {left:.4g} and {right:.4g}, {says}"
        return f"steps of different lengths give different slopes; {says}"

    def readings(self) -> list[Reading]:
        """Return at most one reading: of the first tensors in backward whose slope differs."""
        most = 1 if self.stops else _MOST  # a note needs no list, and each set six passes
        sets = [self.names[::-1]]
        wrong = dict[str, tuple[float, float, float]]()
        differs = False
        while sets and len(wrong) < most:
            names = sets.pop()
            try:
                difference = self.difference(names)
            except ArithmeticError:  # no slope of some leaves them out
                if len(names) == len(self.names):
                    raise
                continue
            if difference and len(names) == 1:
                wrong[names[0]] = difference
            elif difference:
                differs = True
                half = len(names) // 2
                sets += [names[half:], names[:half]]
        if differs and not wrong:
            raise ArithmeticError(
                "the slope along all tensors is not the gradient's, and no single tensor differs"
            )
        if not wrong:
            return []
        first, (product, expected, bound) = next(iter(wrong.items()))
        kind = KINDS["slope"]
        stops = ""
        if self.stops:
            stops = "An output is detached or rounded; if that is on purpose, all is well."
        elif _has_equal_hooks(self.passes.leaves[first]):
            kind = replace(
                kind, advice=f"{kind.advice}One function is several of the tensor's hooks."
            )
        elif has_own_hooks(self.passes.leaves[first]):
            stops = "A hook on the tensor changes its gradient; if that is on purpose, all is well."
        if stops:
            kind = replace(kind, severity="note")
        return [kind.reading(of_all(wrong), product, expected, bound, first=first, stops=stops)]


def _random_direction(p: Tensor, seed: int) -> Tensor:
    """Return random numbers of a tensor's size."""
    noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
    size = float(p.detach().double().square().mean().sqrt()) or 0.02
    return noise.to(p.device).double() * size


def _has_equal_hooks(p: Any) -> bool:
    """Return whether one function, with one closure, is several hooks of a parameter's gradient."""
    seen = set()
    for hook in (p._backward_hooks or {}).values():
        if isinstance(hook, FunctionType):
            cells = [
                id(cell.cell_contents) for cell in hook.__closure__ or () if cell != CellType()
            ]
            key = (hook.__code__, *cells)
            if key in seen:
                return True
            seen.add(key)
    return False


class _Stops(TorchFunctionMode):
    """Count results of a forward pass that need a gradient and are detached or rounded, perhaps on
    purpose. A write through ``.data`` is no such result.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stopped = list[Tensor]()
        self._scalars = list[Tensor]()
        """Detached single values, such as a loss to be printed. They count where one is used."""

    @property
    def count(self) -> int:
        return len(self._stopped)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__
        if name.endswith("_") and not name.endswith("__"):
            self._stopped = [x for x in self._stopped if x is not args[0]]
        if not is_float(result):
            return result
        operands = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        needs = any(x.requires_grad for x in operands)
        of_scalars = [x for x in operands if any(x is scalar for scalar in self._scalars)]
        if result.requires_grad:
            self._stopped += of_scalars
            return result
        is_rounded = name in ("round", "sign") or result.element_size() == 1
        # A custom autograd function computes its forward pass without gradients.
        if of_scalars or (needs and (is_rounded or not is_in_function())):
            stopped = self._stopped if result.numel() > 1 else self._scalars
            stopped.append(result)
        return result
