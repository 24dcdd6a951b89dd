"""Clip by the exact norm of all gradients, and decide whether to skip a step.

The norm (:mod:`narrowgauge.numerics.exact_sums`) depends only on the gradients' values. So clipping
gives the same result with any number of ranks or threads. All numbers stay on the device: the host
does not wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.numerics.rounding import reciprocal, sqrt
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


def decide_on_host(norm: float, options: Iterable[float]) -> list[float]:
    """Return what :func:`decide` computes, with the same bits, by NumPy's float32."""
    with np.errstate(all="ignore"):
        size, max_norm, grad_scale, found_inf, one, least = map(
            np.float32, (norm, *options, 1, 1e-6)
        )
        scale = one / grad_scale
        factor = scale
        if size < math.inf and max_norm < math.inf:
            factor = scale * min(one / (size * scale + least) * max_norm, one)
        skip = found_inf != 0 or not size < math.inf
        return [float(factor), float(skip), float(size / grad_scale)]


def step_control(
    squares: Tensor | None, device: torch.device, *, max_norm: float | None, grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the scalars of ``CONTROL``, float32 ``[2]``, and the norm of all unscaled gradients if
    it is used. Then a step whose norm is not finite is skipped.

    Args:
        squares: the exact sum of the squares of the gradients; ``None`` without ``max_norm``.
        device: of the gradients.
        max_norm: clip to it, as ``torch.nn.utils.clip_grad_norm_`` does; ``None`` does not clip.
        grad_scale, found_inf: the loss scale of a ``torch.amp.GradScaler``, and not 0 if it found a
            gradient that is not finite; 0-d.
    """
    options: list[Any] = [math.inf if max_norm is None else max_norm, 1.0, 0.0]
    if squares is grad_scale is found_inf is None:
        return to_device(torch.tensor(options[1:], dtype=torch.float32, device="cpu"), device), None
    is_host = device.type == "cpu"
    if not is_host:
        options = list(to_device(torch.tensor(options, dtype=torch.float32, device="cpu"), device))
    for place, value in enumerate((grad_scale, found_inf), start=1):
        if value is not None:
            options[place] = float(value) if is_host else value.to(options[0]).view(())
    if is_host:
        norm = math.sqrt(squares or 0.0)
        numbers = decide_on_host(norm, options)
        decision = torch.tensor(numbers, dtype=torch.float32, device="cpu")
    else:
        size = options[0].new_zeros(()) if squares is None else sqrt(squares).float()
        decision = decide(size, options)
    return decision[:2], None if squares is None else decision[2]
