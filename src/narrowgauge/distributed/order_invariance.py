"""Keep an exact sum of gradients independent of the order of ranks and micro-batches, and of how they are distributed.

A *leaf* is the gradient of one micro-batch. The sum of a step depends only on its leaves if each leaf depends on its sequences
alone and is added separately. So no micro-batch may draw from a generator that earlier work on this rank has advanced. No rank
may add up gradients before it sends them. The clipping norm must not depend on order either (:func:`take_norms`).
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge import torch_names
from narrowgauge.distributed.sharding import fsdp_modules
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.numerics.exact_sums import exact_norm
from narrowgauge.torch_hooks import OwnHook


def generator_state(device: torch.device) -> tuple[bytes, ...]:
    """Return the state of the host's and the device's default generators, from which a forward pass draws.

    The result is empty while CUDA captures a graph, since the state cannot be read then. Cost: 5 µs.
    """
    states = [torch.default_generator.get_state()]
    if device.type not in ("cpu", "meta"):
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return ()
        states.append(torch.get_device_module(device.type).get_rng_state(device))
    # Not as tensors: a forward pass may run in a mode that refuses real tensors.
    return tuple(ctypes.string_at(state.data_ptr(), state.numel()) for state in states)


def follow_forwards(model: nn.Module, check: Callable[[], None]) -> list[Callable[[], None]]:
    """Call ``check`` before each forward pass in training of a model, or of a module in it that loops call directly.

    Modules inside a ``torch.compile`` graph are not followed, nor passes that a checkpoint repeats in backward.

    Returns:
        Functions that undo it.
    """

    def enter(module: nn.Module, *_: Any) -> None:
        if module.training and torch.is_grad_enabled() and torch_names.current_backward() == -1:
            check()

    modules = dict.fromkeys([model, *_called(model), *fsdp_modules(model)])
    return [module.register_forward_pre_hook(_Hook(enter), prepend=True).remove for module in modules]


class _Hook(OwnHook):
    """A module hook that compilers skip."""

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling():
            super().__call__(*args)


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module's children. Replace containers that cannot be called by their members."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called(child)
        else:
            yield child


# ── the norm by which gradients are clipped ────────────────────────────────────────────────────────────────────────────
#
# PyTorch adds the ranks' parts of a norm in rank order, in the gradient's format. So the last bits of the norm, and of every
# clipped gradient, depend on the number of ranks. The norm of exactly summed gradients is therefore an exact sum too
# (:mod:`narrowgauge.numerics.exact_sums`). All other norms are PyTorch's.


_KNOWN = (torch.bfloat16, torch.float16, torch.float32)
_users: set[object] = set()
_restore: list[Callable[[], None]] = []


def take_norms(is_summed: Callable[[Iterable[Tensor]], bool]) -> Callable[[], None]:
    """Make ``clip_grad_norm_`` and ``get_total_norm`` compute exact norms for gradients that ``is_summed`` accepts.

    PyTorch's norm is back once all who have called this have called the function that they got.
    """
    user = object()
    if not _users:
        _restore.append(torch_names.replace_total_norm(lambda norm: functools.partial(_total_norm, norm, is_summed)))
    _users.add(user)

    def leave() -> None:
        _users.discard(user)
        if not _users and _restore:
            _restore.pop()()

    return leave


def _total_norm(
    original: Callable[..., Tensor],
    is_summed: Callable[[Iterable[Tensor]], bool],
    tensors: Any,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Return the norm of tensors like ``torch.nn.utils.get_total_norm``: a DTensor if all tensors are DTensors."""
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    order = float(norm_type)
    is_ours = order != math.inf and is_summed(tensors) and all(t.dtype in _KNOWN for t in tensors)
    if not is_ours:  # a maximum does not depend on order
        return original(tensors, norm_type, error_if_nonfinite, foreach)
    if order != 2.0:
        raise RecipeError(
            f"the norm of order {order:g} was requested of gradients that an order-invariant reduction has summed, and its sum "
            "would depend on the number of ranks.",
            "Clip by norm_type=2.0 or 'inf', or with max_grad_norm= of the optimizer.",
        )
    with torch.no_grad():
        norm = exact_norm(tensors)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(f"The total norm of order {order} for gradients is non-finite, so it cannot be clipped.")
    return _replicated(norm, tensors[0]) if all(map(is_sharded, tensors)) else norm


def _replicated(value: Tensor, like: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    result: Tensor = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return result
