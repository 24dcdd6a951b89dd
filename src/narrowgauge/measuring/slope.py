"""Compare the gradient of the plain loss with the slope of the loss along a random direction.

The step runs at the user's weights; their shadows are shifted. So nothing is moved, random draws are
the same, and the difference is exact to float64. What the user detaches is a constant. A custom
autograd function may take a detached copy of its operand: where constants disagree, nothing is one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.measuring.beside import is_finite
from narrowgauge.measuring.passes import Alone, Findings, Gradients, Pass, Passes, concatenated
from narrowgauge.measuring.policies.wide import Wide
from narrowgauge.torch_support.torch_hooks import OwnHook

BOUND = 2.0**-9
"""Part of the slope: a wrong backward formula below bfloat16's unit roundoff is less than its noise."""
STEP = 1e-5
"""Of the size of each weight: the third root of float64's unit roundoff, where a central difference
is most exact.
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


def compare_slope(passes: Passes, parts: list[Any], findings: Findings) -> None:
    """Tell where the loss of all micro-batches does not change as its gradient says."""
    batch = concatenated(parts)
    if batch is None:
        batch = parts[0]
    try:
        slope, along, moved = _measured(passes, True, batch)
        if slope.differs:
            slope, along, moved = _measured(passes, False, batch)
        if not slope.differs:
            findings.lines.append(
                f"slope: the loss changes as the gradient of {len(moved)} tensors says, "
                f"within {slope.off:.1g}"
            )
            return
        name, slope = _last_wrong(moved, along, abs(slope.measured - slope.predicted) / PART)
        limit = BOUND * abs(slope.measured)
        findings.add("slope", name, slope.predicted, slope.measured, limit)
    except ArithmeticError as reason:
        findings.unseen["the slope of the loss"] = str(reason)


def _measured(
    passes: Passes, has_constants: bool, batch: Any
) -> tuple[Slope, Callable[..., Slope], dict[str, Any]]:
    """Return the slope along all weights, a call for that along others, and the weights."""
    run = partial(_run, passes, has_constants)
    exact, moved = _gradient(passes, run, batch)
    along = partial(_along, partial(run, lambda: passes.plain_loss(batch)), exact)
    slope = along(moved, SEED)
    if slope.differs:
        # Gradients may arrive where nothing is asked, as of losses attached in backward.
        for name, gradient in run(passes.plain(batch, 0.0)).shadows.items():
            exact[name] = exact[name] - gradient
        slope = along(moved, SEED)
    return slope, along, moved


def _run(passes: Passes, has_constants: bool, call: Callable[[], Any], shifts: Any = ()) -> Pass:
    wide = Wide(shifts=shifts, is_smooth=True)
    return passes.run(call, wide, Alone(), has_constants=has_constants)


def _gradient(
    passes: Passes, run: Callable[..., Pass], batch: Any
) -> tuple[Gradients, dict[str, Any]]:
    """Return the gradient of the plain loss, and the weights along which its slope is asked."""
    first = run(passes.plain(batch))
    moved = {}
    for name, p in passes.leaves.items():
        if not all(isinstance(hook, OwnHook) for hook in (p._backward_hooks or {}).values()):
            raise ArithmeticError("a hook may change a gradient")
        if is_finite(p) and (name in first.shadows or name not in first.gradients):
            moved[name] = p
    are_finite = math.isfinite(first.value) and all(map(is_finite, first.shadows.values()))
    if not first.shadows or not are_finite:
        reason = "it is not finite, or has no gradient"
        if first.wide.cuts:
            reason = f"not followed through {', '.join(first.wide.cuts)}"
        raise ArithmeticError(reason)
    return first.shadows, moved


def _along(
    loss_at: Callable[..., Pass],
    exact: Gradients,
    leaves: dict[str, Any],
    seed: int,
    limit: float = 0.0,
) -> Slope:
    """Return the slope along a random direction of some tensors.

    Args:
        exact: the gradient.
        limit: of the distance; by default a part of the size.
    """
    directions: list[tuple[Any, Tensor]] = []
    predicted = squares = 0.0
    for name, p in leaves.items():
        direction = _direction(p, seed + zlib.crc32(name.encode()))
        directions.append((p, direction))
        if name in exact:
            predicted += float((exact[name] * direction).sum())
            squares += float(exact[name].square().sum() * direction.square().mean())
    slopes = []
    measured = size = distance = 0.0
    for step in (STEP, STEP / 10):
        above = loss_at([(p, step * x) for p, x in directions]).value
        below = loss_at([(p, -step * x) for p, x in directions]).value
        measured = (above - below) / (2 * step)
        slopes.append(measured)
        noise = 64 * abs(above) * 2.0**-53 / step / BOUND
        size = max(math.sqrt(squares), abs(measured), noise) or 1.0
        distance = abs(measured - predicted)
        if not distance > (limit or BOUND * size):
            return Slope(predicted, measured, distance / size, False)
    # A kink lies within the larger step where the two slopes differ.
    is_kink = abs(slopes[0] - slopes[1]) > distance / 4
    return Slope(predicted, measured, distance / size, not is_kink)


def _direction(p: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.device)
    return noise * (float(p.detach().double().square().mean().sqrt()) or 0.02)


def _last_wrong(
    leaves: dict[str, Any], along: Callable[..., Slope], limit: float
) -> tuple[str, Slope]:
    """Return the last tensor in forward whose slope is another, by halving."""

    def wrong(names: list[str]) -> Slope | None:
        """Return a slope that differs along one of two directions: along one they may cancel."""
        for seed in (SEED, 2 * SEED):
            slope = along({name: leaves[name] for name in names}, seed, limit)
            if slope.differs:
                return slope
        return None

    names = [*leaves][::-1]
    while len(names) > 1:
        half = names[: (len(names) + 1) // 2]
        names = names[len(half) :]
        if wrong(half):
            names = half
    slope = wrong(names)
    if slope is None:
        raise ArithmeticError("no tensor alone has another one")
    return names[0], slope
