"""Clip by the exact norm of all gradients, and decide whether to skip a step.

The norm (:mod:`narrowgauge.numerics.exact_sums`) depends only on the gradients' values. So clipping
gives the same result with any number of ranks or threads. All numbers stay on the device: the host
does not wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from narrowgauge.numerics.dtensor import local_of
from narrowgauge.numerics.exact_sums import exact_squares
from narrowgauge.numerics.rounding import reciprocal, sqrt
from narrowgauge.optim.norm import SquaresTable, sums_on
from narrowgauge.torch_support.torch_names import to_device


def decide(norm: Tensor, options: Iterable[Tensor]) -> Tensor:
    """Compute the factor of the gradients and whether to skip the step; return float32 ``[3]``.

    The result holds: the factor, 1 to skip, and the norm of the unscaled gradients. ``options``
    are three float32, 0-d: ``max_norm``, which may be infinite, the loss scale, and ``found_inf``
    of ``torch.amp.GradScaler``, which is not 0 if it found a gradient that is not finite.
    """
    max_norm, grad_scale, found_inf = options
    scale = reciprocal(grad_scale)
    unscaled = norm / grad_scale
    finite = norm.isfinite()
    clip = (reciprocal(norm * scale + 1e-6) * max_norm).clamp(max=1.0)
    skip = (found_inf != 0) | ~finite
    scale = torch.where(finite & (max_norm < math.inf), scale * clip, scale)
    return torch.stack([scale, skip.to(scale.dtype), unscaled])


@torch.no_grad()
def step_control(
    gradients: Sequence[Tensor], tables: dict[torch.device, SquaresTable] | None, *,
    max_norm: float | None, grad_scale: Tensor | None = None, found_inf: Tensor | None = None,
    squares: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the scalars of ``CONTROL``, float32 ``[2]``, and the norm of all unscaled gradients if
    it is used. Then a step whose norm is not finite is skipped.

    Args:
        gradients: on one device.
        tables: of the kernels that compute norms, kept between steps; ``None`` uses no kernel.
        max_norm: clip to it, as ``torch.nn.utils.clip_grad_norm_`` does; ``None`` does not clip.
        grad_scale, found_inf: the loss scale of a ``torch.amp.GradScaler``, and not 0 if it found a
            gradient that is not finite; 0-d.
        squares: the exact sum of the squares of the gradients, if it is known.
    """
    device = local_of(gradients[0]).device
    values = [1.0, 0.0, math.inf if max_norm is None else max_norm]
    limits = to_device(torch.tensor(values, dtype=torch.float32, device="cpu"), device)
    if max_norm is None and grad_scale is found_inf is None:
        return limits[:2], None
    scale, is_bad, limit = limits.unbind()
    norm = torch.zeros_like(limit)
    if max_norm is not None:
        table = None
        if squares is None and tables is not None and sums_on(gradients):
            if device not in tables:
                tables[device] = SquaresTable(device)
            table = tables[device]
        if squares is None:
            squares = exact_squares(gradients, table=table)
        norm = sqrt(squares).float()
    if grad_scale is not None:
        scale = grad_scale.to(limit).view(())
    if found_inf is not None:
        is_bad = found_inf.to(limit).view(())
    decision = decide(norm, (limit, scale, is_bad))
    return decision[:2], decision[2] if max_norm is not None else None
