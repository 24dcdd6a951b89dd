"""Keep an exact sum of gradients independent of the order of ranks and micro-batches, and of how
they are distributed.

A *leaf* is the gradient of one micro-batch. The sum of a step depends only on its leaves if each
leaf depends on its sequences alone and is added separately. So no micro-batch may draw from a
generator that earlier work on this rank has advanced. No rank may add up gradients before it sends
them. Clip by ``max_grad_norm=``
of our optimizers: PyTorch's norm depends on the number of ranks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from narrowgauge.distributed.sharding import fsdp_modules
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.dtensor import gradient_of, local_of
from narrowgauge.spec.formats import dtype_name
from narrowgauge.torch_support import torch_names
from narrowgauge.torch_support.torch_hooks import OwnHook


def generator_state(device: torch.device) -> tuple[bytes, ...]:
    """Return the state of the host's and the device's default generators, from which a forward pass
    draws.

    The result is empty while CUDA captures a graph, since the state cannot be read then. Cost: 5
    µs.
    """
    states = [torch.default_generator.get_state()]
    if device.type not in ("cpu", "meta"):
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return ()
        states.append(torch.get_device_module(device.type).get_rng_state(device))
    # Not as tensors: a forward pass may run in a mode that refuses real tensors.
    return tuple(ctypes.string_at(state.data_ptr(), state.numel()) for state in states)


def follow_forwards(model: nn.Module, check: Callable[[], None]) -> list[Callable[[], None]]:
    """Call ``check`` before each forward pass in training of a model, or of a module in it that
    loops call directly.

    Modules inside a ``torch.compile`` graph are not followed, nor passes that a checkpoint repeats
    in backward.

    Returns:
        Functions that undo it.
    """

    def enter(module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if module.training and torch.is_grad_enabled() and not torch_names.runs_backward():
            check()

    modules = dict.fromkeys([model, *_called(model), *fsdp_modules(model)])
    return [
        module.register_forward_pre_hook(OwnHook(enter), prepend=True).remove for module in modules
    ]


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module's children. Replace containers that cannot be called by their members."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called(child)
        else:
            yield child


def require_own_dtypes(groups: Iterable[tuple[Any, Any]]) -> None:
    """Refuse sums in another dtype than the parameters': on several ranks FSDP2 would round the sum
    once more.
    """
    for module, group in groups:
        for parameter in torch_names.fsdp_parameters(group):
            summed = dtype_name(torch_names.fsdp_sum_dtype(group, parameter))
            stored = dtype_name(parameter.dtype)
            if summed != stored:
                raise RecipeError(
                    f"Cannot sum gradients of {type(module).__name__} exactly because FSDP2 sums "
                    f"them in {summed} and its parameters are {stored}.",
                    f"Take reduce_dtype = {stored} in its MixedPrecisionPolicy; the exact sum needs "
                    "no wider one.",
                )


def refuse_lost(model: nn.Module) -> None:
    """Name the gradients in whose sums a value was lost, which are NaN."""
    names = []
    for name, parameter in model.named_parameters():
        gradient = gradient_of(parameter)
        if gradient is not None and local_of(gradient).isnan().any():
            names.append(name)
    raise RecipeError(
        f"Cannot sum the gradient of '{', '.join(names[:3])}' exactly because values beyond 2^18 "
        "appeared in it after the first step.",
        "Repeat the step: from now on these sums take all of float32's range.",
    )
