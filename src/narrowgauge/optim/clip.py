"""Clip by the exact norm of all gradients, and decide whether to skip a step.

The norm (:mod:`narrowgauge.numerics.exact_sums`) depends only on the gradients' values. So clipping
gives the same result with any number of ranks or threads. All numbers stay on the device: the host
does not wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.numerics.dtensor import local_of
from narrowgauge.numerics.exact_sums import exact_squares
from narrowgauge.numerics.rounding import reciprocal, sqrt
from narrowgauge.optim.norm import SquaresTable, sums_on
from narrowgauge.torch_support.torch_names import to_device


class Decision(NamedTuple):
    """Say what a step does with its gradients.

    ``control`` holds the scalars of ``CONTROL``, float32 ``[2]``. ``norm`` is the norm of all
    unscaled gradients, if it is used.
    """

    control: Tensor
    norm: Tensor | None


def decide(norm: Tensor, options: Iterable[Tensor]) -> Tensor:
    """Compute the factor of the gradients and whether to skip the step; return float32 ``[3]``.

    The result holds: the factor, 1 to skip, and the norm of the unscaled gradients. ``options``
    are four float32, 0-d: ``max_norm`` and ``skip_above``, which may be infinite, the loss scale,
    and ``found_inf`` of ``torch.amp.GradScaler``, which is not 0 if it found a gradient that is
    not finite.
    """
    max_norm, skip_above, grad_scale, found_inf = options
    scale = reciprocal(grad_scale)
    unscaled = norm / grad_scale
    finite = norm.isfinite()
    clip = (reciprocal(norm * scale + 1e-6) * max_norm).clamp(max=1.0)
    skip = (found_inf != 0) | ~finite | (unscaled > skip_above)
    scale = torch.where(finite & (max_norm < math.inf), scale * clip, scale)
    return torch.stack([scale, skip.to(scale.dtype), unscaled])


class StepControl:
    """Decide for each step the factor of the gradients and whether to skip."""

    def __init__(self) -> None:
        self._table: SquaresTable | None = None

    @torch.no_grad()
    def __call__(
        self, gradients: Sequence[Tensor], *, has_kernel: bool, max_norm: float | None, skip_above: float,
        grad_scale: Tensor | None = None, found_inf: Tensor | None = None,
    ) -> Decision:  # fmt: skip
        """Decide for all gradients. Skip the step if the norm is above ``skip_above``.

        Args:
            gradients: on one device.
            has_kernel: whether a kernel may compute the norm.
            max_norm: clip to it, as ``torch.nn.utils.clip_grad_norm_`` does; ``None`` does not
                clip.
            grad_scale, found_inf: the loss scale of a ``torch.amp.GradScaler``, and not 0 if it
                found a gradient that is not finite; 0-d.
        """
        needs_norm = max_norm is not None or skip_above < math.inf
        if max_norm is None:
            max_norm = math.inf
        device = local_of(gradients[0]).device
        values = [1.0, 0.0, max_norm, skip_above]
        limits = to_device(torch.tensor(values, dtype=torch.float32, device="cpu"), device)
        if not needs_norm and grad_scale is found_inf is None:
            return Decision(limits[:2], None)
        table = None
        if has_kernel and needs_norm and sums_on(gradients):
            table = self._table_of(device)
        norm = limits.new_zeros(())
        if needs_norm:
            norm = sqrt(exact_squares(gradients, table=table)).float()
        no_scale, no_inf, *options = limits.unbind()
        for scalar, default in ((grad_scale, no_scale), (found_inf, no_inf)):
            if scalar is None:
                scalar = default
            options.append(scalar.to(default).view(()))
        control, unscaled = decide(norm, options).split([2, 1])
        if not needs_norm:
            return Decision(control, None)
        return Decision(control, unscaled.view(()))

    def _table_of(self, device: torch.device) -> SquaresTable:
        if self._table is None or self._table.programs.device != device:
            self._table = SquaresTable(device)
        return self._table
