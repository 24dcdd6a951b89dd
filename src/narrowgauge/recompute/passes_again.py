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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from narrowgauge.recompute.capture import TOO_LARGE, ForwardCall, random_signs
from narrowgauge.recompute.inputs_and_outputs import float_outputs
from narrowgauge.recompute.output_samples import OutputSample
from narrowgauge.recompute.random_states import kept
from narrowgauge.recompute.side_effects import attributes_as

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
    """The parameters of which copies are made in a step: all, or of a larger model some that are trained, others in other steps.

    Larger than :data:`MOST_PARAMETERS` none of these is.
    """
    named = dict(model.named_parameters())
    if sum(p.numel() for p in named.values()) <= MOST_PARAMETERS:
        return list(named)
    trained = [name for name, p in named.items() if p.requires_grad]
    taken, room = set[str](), MOST_PARAMETERS
    for name in sorted(trained, key=lambda each: zlib.crc32(f"{step} {each}".encode())):
        if named[name].numel() <= room:
            taken.add(name)
            room -= named[name].numel()
    return [name for name in trained if name in taken]


def parameters_of(model: nn.Module, names: Iterable[str]) -> Tensors:
    """Copies of some parameters, which gradients are wanted of where the run wants them."""
    own = dict(model.named_parameters())
    return {name: own[name].detach().clone().requires_grad_(own[name].requires_grad) for name in names}


def _buffers_of(model: nn.Module, call: ForwardCall) -> Tensors:
    """Copies of all buffers, as they were before the pass."""
    return {name: call.before.buffers.get(name, buffer).detach().clone() for name, buffer in model.named_buffers()}


def outputs_again(model: nn.Module, parameters: Tensors, call: ForwardCall) -> Tensors:
    """The floating-point outputs of a forward pass with other parameters; the run's own are not touched.

    Args:
        model: unwrapped.
        parameters: by the model's names; for the others the model's own are taken.
    """
    buffers = _buffers_of(model, call)
    with kept(call.random), attributes_as(call.before, model), without_own_hooks(model), _autocast(call):
        output = functional_call(model, (parameters, buffers), call.args, call.kwargs)
    return float_outputs(output)


@dataclass
class PassAgain:
    """One forward pass, whose gradients are computed again from what arrived at its outputs in the run.

    Args:
        model: unwrapped.
        call: with what arrived.
        roots: the outputs at which the backward pass began, with what it began with there; ``None`` for what the cross entropy
            of logits sends back. Found by the first pass.
    """

    model: nn.Module
    call: ForwardCall
    roots: dict[str, Tensor | None] | None = None

    def gradients(self, parameters: Tensors) -> dict[str, Tensor | None]:
        """The gradients of parameters.

        Args:
            parameters: by the model's names; those with ``requires_grad`` get a gradient.
        Returns:
            By name; ``None`` for a parameter that no output depends on.
        Raises:
            NotAgain: it is not known what began at an output.
        """
        with torch.enable_grad():
            outputs = outputs_again(self.model, parameters, self.call)
            if self.roots is None:
                self.roots = roots_of(self.call, outputs)
            wanted = {name: p for name, p in parameters.items() if p.requires_grad}
            found = torch.autograd.grad(
                [outputs[place] for place in self.roots],
                list(wanted.values()),
                [self._sent(begun, outputs[place]) for place, begun in self.roots.items()],
                allow_unused=True,
            )
        return dict(zip(wanted, found, strict=True))

    def _sent(self, begun: Tensor | None, output: Tensor) -> Tensor:
        if begun is not None:
            return begun
        assert self.call.cross_entropy is not None
        return self.call.cross_entropy.gradient(output)


class NotAgain(Exception):
    """Why a pass cannot be taken again."""


def roots_of(call: ForwardCall, outputs: Tensors) -> dict[str, Tensor | None]:
    """The outputs at which a backward pass began, with the gradient that began there.

    What arrived at an output may have come through another one: at logits through the loss that the model returns beside them.
    Of that, nothing began there.

    Args:
        outputs: of the pass taken again, with their graph.
    Raises:
        NotAgain: an output was kept in part, and what arrived there is not what came through others.
    """
    nodes = {place: node for place in call.reached if (node := outputs[place].grad_fn) is not None}
    roots: dict[str, Tensor | None] = {}
    # An output depends on none that was computed after it.
    for place in sorted(nodes, key=lambda place: nodes[place]._sequence_nr(), reverse=True):
        through = _through(roots, place, outputs)
        if (arrived := call.gradients.get(place)) is not None:
            begun = arrived if through is None else arrived - through
            if through is None or not _is_rounding(begun, arrived):
                roots[place] = begun
        elif through is None and call.cross_entropy is not None and place == call.logits:
            roots[place] = None
        elif through is None or not _came_through(call.sampled[place], through):
            raise NotAgain(TOO_LARGE)
    return roots


def _came_through(sample: OutputSample, through: Tensor) -> bool:
    arrived = sample.gradients
    return arrived is not None and _is_rounding(arrived - sample.at(through), arrived)


def _through(roots: Mapping[str, Tensor | None], place: str, outputs: Tensors) -> Tensor | None:
    """What arrives at an output through those that a pass is known to begin at; ``None`` where none depends on it."""
    known = {each: begun for each, begun in roots.items() if begun is not None}
    if not known:
        return None
    (found,) = torch.autograd.grad(
        [outputs[each] for each in known], [outputs[place]], list(known.values()), retain_graph=True, allow_unused=True
    )
    return found


def _is_rounding(difference: Tensor, of: Tensor) -> bool:
    return float(difference.norm()) <= 8 * torch.finfo(of.dtype).eps * float(of.norm())


def reached(model: nn.Module, call: ForwardCall, names: Iterable[str]) -> set[str]:
    """Those parameters, of some by name, on which the outputs depend when the model is called with its own."""
    wanted = set(names)
    own = {name: p for name, p in model.named_parameters() if name in wanted}
    if not own:
        return set()
    buffers = _buffers_of(model, call)
    with (
        torch.enable_grad(),
        kept(call.random),
        attributes_as(call.before, model),
        without_own_hooks(model),
        _autocast(call),
    ):
        outputs = float_outputs(functional_call(model, buffers, call.args, call.kwargs))
        found: Any = torch.autograd.grad(
            [outputs[place].sum() for place in call.reached], list(own.values()), allow_unused=True
        )
    return {name for name, gradient in zip(own, found, strict=True) if gradient is not None}


def moved_by_half_a_spacing(parameters: Tensors, seed: int = 0) -> Tensors:
    """Copies of parameters, each value moved up or down by half a spacing of float32, and rounded to its format.

    Of a 16-bit format, which half a spacing of float32 would not move, 1 of 64 values at random moves by a whole spacing.
    """
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, p in parameters.items():
        if not p.is_floating_point():
            result[name] = p
            continue
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
