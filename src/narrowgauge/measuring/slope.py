"""Compare the gradient of the plain loss with the slope of the loss along a random direction.

The step runs at the user's weights; their shadows are shifted. So nothing is moved, random draws are
the same, and the difference is exact to float64. What the user detaches is a constant. A custom
autograd function may take a detached copy of its operand: where constants disagree, nothing is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.measuring.beside import is_finite
from narrowgauge.measuring.passes import Findings, Pass, Passes, concatenated
from narrowgauge.measuring.policies.wide import Wide
from narrowgauge.measuring.reading import of_all
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


class Slope:
    """The slope of the plain loss, and what its gradient says.

    Attributes:
        names: the tensors that are moved. ``hooked`` are those whose gradient a hook may change.
        predicted: the slope by the gradient. ``measured`` is that of the loss.
        off: their difference over their size.
    """

    predicted = measured = off = limit = 0.0
    seed = SEED

    def __init__(self, passes: Passes, batch: Any, has_constants: bool) -> None:
        self.passes = passes
        self.batch = batch
        self.has_constants = has_constants
        first = self._run(passes.plain(batch))
        self.exact = first.shadows
        self.value = first.value
        self.cuts = first.wide.cuts
        finite = math.isfinite(self.value) and all(map(is_finite, self.exact.values()))
        self.is_known = finite and bool(self.exact)
        self.hooked = []
        self.names = []
        for name, p in passes.leaves.items():
            hooks = (p._backward_hooks or {}).values()
            if not all(isinstance(hook, OwnHook) for hook in hooks):
                self.hooked.append(name)
            elif is_finite(p) and (name in self.exact or name not in first.gradients):
                self.names.append(name)
        self.disagrees = self.is_known and self.differs(self.names)
        if self.disagrees:
            self._leave_out_attached()
            self.disagrees = self.differs(self.names)

    def _run(self, call: Callable[[], Any], shifts: Any = ()) -> Pass:
        wide = Wide(shifts=shifts, is_smooth=True)
        return self.passes.run(call, wide, has_constants=self.has_constants)

    def _leave_out_attached(self) -> None:
        """Leave out gradients that arrive where nothing is asked, as of losses attached in backward."""
        unasked = self._run(self.passes.plain(self.batch, 0.0)).shadows
        for name in self.exact:
            self.exact[name] = self.exact[name] - unasked.get(name, 0.0)

    def _direction(self, name: str) -> Tensor:
        p = self.passes.leaves[name].detach()
        number = list(self.passes.leaves).index(name)
        generator = torch.Generator().manual_seed(self.seed + number)
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.device)
        size = float(p.double().square().mean().sqrt())
        return noise * (size or 0.02)

    def _loss_at(self, names: Sequence[str], step: float) -> float:
        passes = self.passes
        shifts = [(passes.leaves[name], step * self._direction(name)) for name in names]
        return self._run(lambda: passes.loss(passes.model, self.batch), shifts).value

    def differs(self, names: Sequence[str]) -> bool:
        """Return whether the loss changes otherwise than the gradient says, at two steps alike."""
        self.predicted = 0.0
        squares = 0.0
        for name in names:
            if name in self.exact:
                direction = self._direction(name)
                self.predicted += float((self.exact[name] * direction).sum())
                squares += float(self.exact[name].square().sum() * direction.square().mean())
        slopes = []
        for step in (STEP, STEP / 10):
            change = self._loss_at(names, step) - self._loss_at(names, -step)
            self.measured = change / (2 * step)
            slopes.append(self.measured)
            noise = 64 * abs(self.value) * 2.0**-53 / step / BOUND
            size = max(math.sqrt(squares), abs(self.measured), noise)
            self.off = abs(self.measured - self.predicted) / (size or 1.0)
            if not abs(self.measured - self.predicted) > (self.limit or BOUND * size):
                return False
        # A kink lies within the larger step where the two slopes differ.
        return abs(slopes[0] - slopes[1]) <= abs(slopes[1] - self.predicted) / 4

    def last_wrong(self) -> list[str]:
        """Return the last tensor in forward whose slope is another, by halving; empty if none is."""
        self.limit = abs(self.measured - self.predicted) / PART
        names = self.names[::-1]
        while len(names) > 1:
            half = names[: (len(names) + 1) // 2]
            names = names[len(half) :]
            if self._is_wrong(half):
                names = half
        if self._is_wrong(names):
            return names
        return []

    def _is_wrong(self, names: Sequence[str]) -> bool:
        """Return whether some tensors differ along one of two directions: along one they may cancel."""
        for seed in (SEED, 2 * SEED):
            self.seed = seed
            if self.differs(names):
                return True
        return False


def compare_slope(passes: Passes, findings: Findings) -> None:
    """Tell where the loss does not change as its gradient says."""
    batch = concatenated(passes.parts)
    if batch is None:
        batch = passes.parts[0]
    slope = Slope(passes, batch, True)
    if slope.disagrees:
        slope = Slope(passes, batch, False)
    wrong = []
    if slope.disagrees:
        wrong = slope.last_wrong()
    if not slope.is_known:
        reason = "it is not finite"
        if slope.cuts:
            reason = f"not followed through {', '.join(slope.cuts)}"
        findings.unseen["the slope of the loss"] = reason
    elif wrong:
        findings.add("slope", wrong, slope.predicted, slope.measured, BOUND * abs(slope.measured))
    elif slope.disagrees:
        findings.unseen["the slope of the loss"] = "no tensor alone has another one"
    else:
        findings.lines.append(
            f"slope: the loss changes as the gradient of {len(slope.names)} tensors says, "
            f"within {slope.off:.1g}"
        )
    if slope.hooked:
        findings.unseen[f"the slope along {of_all(slope.hooked)}"] = (
            "a hook may change its gradient"
        )
