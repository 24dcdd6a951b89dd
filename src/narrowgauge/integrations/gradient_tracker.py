"""One parameter's gradient between two steps: how it was summed, and what happened to it after the backward pass.

Hooks on the parameter look and return nothing, so no gradient changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowgauge._torch import current_backward

# A gradient that was multiplied by one number and rounded to bfloat16 is within 2^-9 of it.
UNIFORM = 2.0**-6


class GradientTracker:
    """Follows the gradient of one small parameter.

    Args:
        parameter: a leaf that is trained.

    Attributes:
        num_passes: backward passes that the gradient has summed.
        is_stale: whether the sum began on the gradient of the step before.
        was_zeroed: whether it began on zeros where there might be ``None``.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self.num_passes, self.is_stale, self.was_zeroed = 0, False, False
        self._pass, self._follows_step = -1, False
        self._computed: Tensor | None = None
        self._handles = [
            parameter.register_hook(self._before),
            parameter.register_post_accumulate_grad_hook(self._after),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def stepped(self) -> None:
        """Take note of an optimizer step."""
        self._follows_step, self._computed = True, None

    def factor(self) -> float | None:
        """What the gradient was multiplied by since the backward pass; ``None`` where that was not one number."""
        gradient, computed = self.parameter.grad, self._computed
        if gradient is None or computed is None or gradient.shape != computed.shape:
            return None
        now, then = gradient.detach().double().flatten(), computed.double().flatten()
        length = torch.dot(then, then)
        if not length > 0 or not length.isfinite():
            return None
        factor = torch.dot(now, then) / length
        off = (now - factor * then).norm() / (factor.abs() * then.norm())
        return float(factor) if off < UNIFORM else None

    def _before(self, _: Tensor) -> None:
        if (number := current_backward()) == self._pass:
            return
        self._pass, gradient = number, self.parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            return
        if gradient is None or not gradient.any():
            self.was_zeroed |= gradient is not None and self._follows_step
            self.num_passes, self.is_stale = 0, False
        elif self._follows_step:
            self.is_stale = True
        self.num_passes, self._follows_step = self.num_passes + 1, False

    def _after(self, parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.layout is torch.strided:
            self._computed = parameter.grad.detach().clone()


def common_factor(trackers: Sequence[GradientTracker]) -> float | None:
    """The one number that all gradients were multiplied by since the backward pass; ``None`` if there is none."""
    factors = [factor for tracker in trackers if (factor := tracker.factor()) is not None]
    if not factors or max(factors) - min(factors) > UNIFORM * abs(factors[0]):
        return None
    return factors[0]
