"""Compare the gradient of the plain loss with the slope of the loss along a random direction.

The step runs at the user's weights; their shadows are shifted. So nothing is moved, random draws are
the same, and the difference is exact to float64. What the user detaches is a constant. A custom
autograd function may take a detached copy of its operand: where constants disagree, nothing is one.
"""

import math
import zlib
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from narrowgauge.measuring.check.dispatch import is_finite
from narrowgauge.measuring.check.passes import IS_ZERO, Pass, Passes, concatenated
from narrowgauge.measuring.check.policies.float64_shadow import Float64Shadow
from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.reading import Readings
from narrowgauge.runs.text import plural
from narrowgauge.torch_support.torch_hooks import OwnHook

BOUND = KINDS["slope"].bound
STEP = 1e-5
"""Of the size of each weight: the third root of float64's unit roundoff, where a central difference
is most exact.
"""
NOISE = 64
"""Roundings of float64 in a loss: their difference is no slope."""
KINK = 1 / 4
"""Difference of two slopes, to both sides or at two steps, over their distance from the gradient: a
larger one is of a kink. Two kinks have 0.6 and 25, ten wrong gradients at most 0.0012.
"""
PART = 64
"""A tensor is named if it has this part of the difference: the last one may have little of it."""
SEED = 7_919_003
"""Unlike a user's seed: weights drawn with the same numbers would be parallel to the direction."""


class Slope(NamedTuple):
    """The change of a loss along a direction.

    Args:
        predicted: by the gradient.
        measured: of the loss.
        off: their distance over their size.
        differs: whether that is beyond a limit, at two steps alike.
    """

    predicted: float
    measured: float
    off: float
    differs: bool


class Along:
    """The plain loss along random directions.

    Args:
        has_constants: what is detached is a constant.

    Attributes:
        moved: the weights along which the slope is asked, by name.
        first: the pass at the weights.
        exact: the gradient of the loss.
        padding: the row of an embedding that its own declaration leaves without a gradient.
    """

    def __init__(self, passes: Passes, batch: Any, has_constants: bool) -> None:
        self.passes = passes
        self.batch = batch
        self.has_constants = has_constants
        first = self._run(passes.plain(batch))
        self.first = first
        self.exact = first.shadows
        self.moved: dict[str, Any] = {}
        for name, p in passes.leaves.items():
            if not all(isinstance(hook, OwnHook) for hook in (p._backward_hooks or {}).values()):
                raise ArithmeticError("a hook may change a gradient")
            if is_finite(p) and (name in first.shadows or name not in first.gradients):
                self.moved[name] = p
        self.padding: dict[Any, int] = {}
        for module in passes.model.modules():
            if (
                isinstance(module, (nn.Embedding, nn.EmbeddingBag))
                and module.padding_idx is not None
            ):
                self.padding[module.weight] = module.padding_idx
        are_finite = math.isfinite(first.value) and all(map(is_finite, first.shadows.values()))
        if not first.shadows or not are_finite:
            reason = "it is not finite, or has no gradient"
            if first.shadow.cuts:
                reason = f"not followed through {', '.join(first.shadow.cuts)}"
            raise ArithmeticError(reason)

    def _run(self, call: Callable[[], Any], shifts: Any = ()) -> Pass:
        shadow = Float64Shadow(shifts=shifts, is_smooth=True)
        return self.passes.run(call, shadow, is_alone=True, has_constants=self.has_constants)

    def _loss_at(self, directions: list[tuple[Any, Tensor]], step: float) -> float:
        shifts = [(p, step * x) for p, x in directions]
        return self._run(lambda: self.passes.plain_loss(self.batch), shifts).value

    def whole(self) -> Slope:
        """Return the slope along all weights. If the gradient has another one, leave out what arrives where
        nothing is asked, as of losses attached in backward.
        """
        slope = self.slope(self.moved)
        if slope.differs:
            for name, gradient in self._run(self.passes.plain(self.batch, 0.0)).shadows.items():
                self.exact[name] -= gradient
            slope = self.slope(self.moved)
        return slope

    def slope(self, names: Collection[str], limit: float = 0.0) -> Slope:
        """Return the slope along a random direction of some tensors.

        Args:
            limit: of the distance; by default a part of the size.
        """
        directions = []
        predicted = squares = 0.0
        for name in names:
            p = self.moved[name]
            direction = _direction(p, SEED + zlib.crc32(name.encode()))
            if p in self.padding:
                direction[self.padding[p]] = 0.0
            directions.append((p, direction))
            if name in self.exact:
                predicted += float((self.exact[name] * direction).sum())
                squares += float(self.exact[name].square().sum() * direction.square().mean())
        slopes = []
        measured = size = distance = bend = 0.0
        for step in (STEP, STEP / 10):
            above = self._loss_at(directions, step)
            below = self._loss_at(directions, -step)
            measured = (above - below) / (2 * step)
            slopes.append(measured)
            bend = abs(above + below - 2 * self.first.value) / step
            noise = NOISE * abs(above) * 2.0**-53 / step / BOUND
            size = max(math.sqrt(squares), abs(measured), noise) or 1.0
            distance = abs(measured - predicted)
            if not distance > (limit or BOUND * size):
                return Slope(predicted, measured, distance / size, False)
        # A kink lies within the larger step where the two slopes differ, and at the weights, as of a
        # ReLU of exact zeros, where the slopes to both sides do.
        is_kink = max(abs(slopes[0] - slopes[1]), bend) > KINK * distance
        return Slope(predicted, measured, distance / size, not is_kink)

    def last_wrong(self, limit: float) -> tuple[str, Slope]:
        """Return the last tensor in forward whose slope is another, by halving."""
        names = [*self.moved][::-1]
        while len(names) > 1:
            half = names[: len(names) // 2]
            names = half if self.slope(half, limit).differs else names[len(half) :]
        slope = self.slope(names, limit)
        if not slope.differs:
            raise ArithmeticError("no tensor alone has another one")
        return names[0], slope


def compare_slope(passes: Passes, result: Readings) -> None:
    """Tell where the loss of all micro-batches does not change as its gradient says.

    Raises:
        ArithmeticError: why that cannot be measured.
    """
    batch = concatenated(passes.all_parts)
    if batch is None:
        batch = passes.all_parts[0]
    along = Along(passes, batch, True)
    slope = along.whole()
    if slope.differs:
        along = Along(passes, batch, False)
        slope = along.whole()
    quantizers = along.first.shadow.quantizers
    if slope.differs and quantizers:
        raise ArithmeticError(f"not followed through the roundings of {', '.join(quantizers)}")
    if not slope.differs:
        if slope.off > BOUND:
            raise ArithmeticError("the loss has a kink at the weights or near them")
        if not slope.predicted and not slope.measured:
            raise ArithmeticError(IS_ZERO)
        result.lines.append(
            f"slope: the loss changes as the gradient of {plural(len(along.moved), 'tensor')} "
            f"says, within {slope.off:.1g}"
        )
        return
    name, slope = along.last_wrong(abs(slope.measured - slope.predicted) / PART)
    result.add("slope", name, slope.predicted, slope.measured, BOUND * abs(slope.measured))


def _direction(p: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.device)
    return noise * (float(p.detach().double().square().mean().sqrt()) or 0.02)
