"""The forward and backward passes of a captured step, taken again without a trace in the run.

The model is called as it is, with copies of its parameters and buffers, the captured inputs and the captured state of the
random generators. Hooks of this package on its modules are left out, since gauges would count the passes; hooks of users
stay, since they may compute part of the model. Afterwards generators, buffers and training modes are as they were.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from narrowgauge.recompute.capture import ForwardCall, float_outputs, random_signs

Tensors = dict[str, Tensor]
MOST_PARAMETERS = 1 << 28
"""Elements of the parameters that are copied in a step."""


def unwrapped_model(model: nn.Module) -> nn.Module:
    """The model inside ``torch.compile`` and ``DistributedDataParallel``."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ == "DistributedDataParallel":
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def random_states(device: torch.device) -> dict[str, Tensor]:
    """The state of the generators that a forward pass may draw from."""
    found = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def other_random_states(device: torch.device) -> dict[str, Tensor]:
    """States of the same generators, which no run is in."""
    devices = [torch.device("cpu"), *([device] if device.type == "cuda" else [])]
    return {each.type: torch.Generator(each).manual_seed(0x5EED).get_state() for each in devices}


@contextmanager
def _random_as(call: ForwardCall) -> Iterator[None]:
    before = random_states(call.device)
    _set_random(call.random, call.device)
    try:
        yield
    finally:
        _set_random(before, call.device)


def _set_random(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _is_own(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith("narrowgauge.")


@contextmanager
def without_own_hooks(model: nn.Module) -> Iterator[None]:
    """Take the forward hooks of this package off all modules, and put them back in their order."""
    kept = []
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            if any(map(_is_own, hooks.values())):
                kept.append((hooks, list(hooks.items())))
                for key in [key for key, hook in hooks.items() if _is_own(hook)]:
                    del hooks[key]
    try:
        yield
    finally:
        for hooks, entries in kept:
            hooks.clear()
            hooks.update(entries)


@contextmanager
def in_mode(model: nn.Module, is_training: bool) -> Iterator[None]:
    """Set every module's training mode, and put each back as it was."""
    before = [(module, module.training) for module in model.modules()]
    model.train(is_training)
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


def _autocast(call: ForwardCall) -> AbstractContextManager[Any]:
    if call.autocast is None:
        return torch.autocast(call.device.type, enabled=False) if torch.is_autocast_enabled() else nullcontext()
    return torch.autocast(call.device.type, dtype=call.autocast)


def chosen_parameters(model: nn.Module, step: int) -> list[str]:
    """The parameters of which copies are made in a step: all, or of a larger model some, others in other steps."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    if sum(sizes.values()) <= MOST_PARAMETERS:
        return list(sizes)
    taken, room = set[str](), MOST_PARAMETERS
    for name in sorted(sizes, key=lambda each: zlib.crc32(f"{step} {each}".encode())):
        if sizes[name] <= room:
            taken.add(name)
            room -= sizes[name]
    return [name for name in sizes if name in taken]


def parameters_of(model: nn.Module, names: Iterable[str]) -> Tensors:
    """Copies of some parameters, which gradients are wanted of where the run wants them."""
    own = dict(model.named_parameters())
    return {name: own[name].detach().clone().requires_grad_(own[name].requires_grad) for name in names}


def outputs_again(model: nn.Module, parameters: Tensors, call: ForwardCall) -> Tensors:
    """The floating-point outputs of a forward pass with other parameters; the run's own are not touched.

    Args:
        model: unwrapped.
        parameters: by the model's names; for the others the model's own are taken.
    """
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    with _random_as(call), without_own_hooks(model), _autocast(call):
        output = functional_call(model, (parameters, buffers), call.args, call.kwargs)
    return float_outputs(output)


def gradients_again(model: nn.Module, parameters: Tensors, call: ForwardCall) -> dict[str, Tensor | None]:
    """The gradients of one forward pass, from what arrived at its outputs in the run.

    Args:
        model: unwrapped.
        parameters: by the model's names; those with ``requires_grad`` get a gradient.
    Returns:
        By name; ``None`` for a parameter that no output depends on.
    """
    with torch.enable_grad():
        outputs = outputs_again(model, parameters, call)
        places = call.roots
        wanted = {name: p for name, p in parameters.items() if p.requires_grad}
        found = torch.autograd.grad(
            [outputs[place] for place in places],
            list(wanted.values()),
            [_arrived(call, place, outputs[place]) for place in places],
            allow_unused=True,
        )
    return dict(zip(wanted, found, strict=True))


def reached(model: nn.Module, call: ForwardCall, names: Iterable[str]) -> set[str]:
    """Those parameters, of some by name, on which the outputs depend when the model is called with its own."""
    wanted = set(names)
    own = {name: p for name, p in model.named_parameters() if name in wanted}
    if not own:
        return set()
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    with torch.enable_grad(), _random_as(call), without_own_hooks(model), _autocast(call):
        outputs = float_outputs(functional_call(model, buffers, call.args, call.kwargs))
        found: Any = torch.autograd.grad(
            [outputs[place].sum() for place in call.roots], list(own.values()), allow_unused=True
        )
    return {name for name, gradient in zip(own, found, strict=True) if gradient is not None}


def _arrived(call: ForwardCall, place: str, output: Tensor) -> Tensor:
    """What arrived at an output in the run; of logits that were not kept, what their cross entropy sends back."""
    if place in call.gradients:
        return call.gradients[place]
    assert call.cross_entropy is not None
    return call.cross_entropy.gradient(output)


def moved_by_half_a_spacing(parameters: Tensors, seed: int = 0) -> Tensors:
    """Copies of parameters, each value moved up or down by half a spacing of float32, and rounded to its format.

    Of a 16-bit format, which half a spacing of float32 would not move, 1 of 64 values at random moves by a whole spacing.
    """
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, p in parameters.items():
        signs = random_signs(p.shape, generator).to(p.device).to(torch.float32)
        unit = torch.finfo(p.dtype).eps
        if p.dtype in (torch.bfloat16, torch.float16):
            chosen = torch.randint(0, 64, p.shape, generator=generator, dtype=torch.int8).to(p.device) == 0
            signs = signs * chosen
        moved = (p.detach().to(torch.float64 if p.dtype is torch.float64 else torch.float32) * (1 + unit * signs)).to(
            p.dtype
        )
        result[name] = moved.requires_grad_(p.requires_grad)
    return result
