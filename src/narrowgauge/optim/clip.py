"""Clip by the exact norm of all gradients, and decide whether to skip a step.

The norm (:mod:`narrowgauge.numerics.exact_sums`) depends only on the gradients' values. So clipping
gives the same result with any number of ranks or threads. All numbers stay on the device: the host
does not wait.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.numerics.rounding import sqrt
from narrowgauge.torch_support.torch_names import host_tensor, to_device

OPTIONS = (math.inf, 1.0, 0.0, 1.0, 1e-6)
"""The numbers beside the norm: the largest norm, the loss scale, and ``found_inf`` of
``torch.amp.GradScaler``, which is not 0 if it found a gradient that is not finite. Then 1, and what
torch adds to a norm.
"""


def decide(library: Any, norm: Any, options: Iterable[Any]) -> tuple[Any, Any, Any]:
    """Return the factor of the gradients, whether to skip the step, and the norm of the unscaled
    gradients: float32, by NumPy on the host and by torch on a device, with the same bits.

    ``options`` are :data:`OPTIONS`, or others in their place.
    """
    max_norm, grad_scale, found_inf, one, least = options
    scale = one / grad_scale
    is_finite = norm < math.inf
    clip = library.minimum(one / (norm * scale + least) * max_norm, one)
    factor = library.where(is_finite & (max_norm < math.inf), scale * clip, scale)
    return factor, (found_inf != 0) | ~is_finite, norm / grad_scale


def step_control(
    squares: Tensor | None, device: torch.device, *, max_norm: float | None, grad_scale: Tensor | None,
    found_inf: Tensor | None,
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
    options: list[Any] = list(OPTIONS)
    if squares is grad_scale is found_inf is None:
        return to_device(host_tensor(options[1:3]), device), None
    if max_norm is not None:
        options[0] = max_norm
    is_host = device.type == "cpu"
    if not is_host:
        options = list(to_device(host_tensor(options), device))
    for place, value in enumerate((grad_scale, found_inf), start=1):
        if value is not None:
            options[place] = float(value) if is_host else value.to(options[0]).view(())
    if is_host:
        numbers = np.array([math.sqrt(squares or 0.0), *options], np.float32)
        with np.errstate(all="ignore"):
            values = [float(x) for x in decide(np, numbers[0], numbers[1:])]
        decision = host_tensor(values)
    else:
        size = options[0].new_zeros(()) if squares is None else sqrt(squares).float()
        decision = torch.stack([x.float() for x in decide(torch, size, options)])
    return decision[:2], None if squares is None else decision[2]
