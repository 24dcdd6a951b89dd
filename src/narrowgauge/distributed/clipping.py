"""PyTorch's ``clip_grad_norm_`` of gradients that were summed exactly: the norm takes no order either.

Of shards, PyTorch adds up each rank's part of the norm in the order of the ranks, in the gradient's format: its last bits, and
with them every gradient that is clipped, depend on the number of ranks. So the norm of such gradients is taken as
:mod:`narrowgauge.numerics.summation` takes it; all others are PyTorch's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from narrowgauge import _torch
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.shards import is_sharded, norm_of_all

_KNOWN = (torch.bfloat16, torch.float16, torch.float32)


@functools.cache
def take_norms(is_summed: Callable[[Iterable[Tensor]], bool]) -> None:
    """Let ``clip_grad_norm_`` and ``get_total_norm`` take the norm of some gradients exactly, from now on.

    Args:
        is_summed: whether gradients are among those.
    """
    _torch.replace_total_norm(lambda original: functools.partial(_total_norm, original, is_summed))


def _total_norm(
    original: Callable[..., Tensor],
    is_summed: Callable[[Iterable[Tensor]], bool],
    tensors: Any,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """The norm of tensors, as ``torch.nn.utils.get_total_norm`` returns it: a DTensor where they are."""
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    order = float(norm_type)
    is_ours = order != math.inf and is_summed(tensors) and all(t.dtype in _KNOWN for t in tensors)
    if not is_ours:  # a maximum takes no order anyway
        return original(tensors, norm_type, error_if_nonfinite, foreach)
    if order != 2.0:
        raise RecipeError(
            f"the norm of order {order:g} was requested of gradients that an order-free reduction has summed, and its sum would "
            "depend on the number of ranks.",
            "Clip by norm_type=2.0 or 'inf', or with max_grad_norm= of the optimizer.",
        )
    with torch.no_grad():
        norm = norm_of_all(tensors)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(f"The total norm of order {order} for gradients is non-finite, so it cannot be clipped.")
    return _replicated(norm, tensors[0]) if all(map(is_sharded, tensors)) else norm


def _replicated(value: Tensor, like: Any) -> Tensor:
    """A value that all ranks have, as a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    result: Tensor = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return result
