"""Each module with parameters alone, called on what it received in a forward pass: what its output makes of its weights.

Input and parameters are moved by 2^-18 of each value. The output of a module that multiplies in float32 moves by as much; one
that casts to 16 bits inside stays or jumps by a spacing, which is many times more on the whole. And where all parameters get
other signs and sizes, an output that stays to the bit, though gradients arrive at these parameters, is made of a copy of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from narrowgauge._torch import plain_name
from narrowgauge.recompute.capture import ForwardCall, StepCapture, random_signs
from narrowgauge.recompute.inputs_and_outputs import tensors_in
from narrowgauge.recompute.passes_again import in_mode, outputs_again, without_own_hooks
from narrowgauge.recompute.piece_results import DEPARTS, PieceResult
from narrowgauge.recompute.random_states import kept
from narrowgauge.recompute.side_effects import Before, attributes_as

PIECE = "forward"
Answer = TypeVar("Answer")
NUDGE = 2.0**-18
_LARGE, _FALLS = 2.0**-6, 4.0
AMPLIFIES = 8.0
"""Times more than its inputs that an output moves, from which on that is no float32."""

Given = tuple[tuple[Any, ...], dict[str, Any]]
Inputs = dict[str, tuple[nn.Module, Given]]


def check_modules(step: StepCapture, model: nn.Module, call: ForwardCall) -> list[PieceResult]:
    """What departs in single modules of a model whose parameters are all float32; nothing of another.

    Args:
        step: with its forward passes.
        model: unwrapped.
        call: the inputs of one pass of it.

    Cost: a forward pass, and four of each module.
    """
    if any(p.dtype is not torch.float32 for p in model.parameters()) or any(c.autocast is not None for c in step.calls):
        return []
    received = _received(model, call)
    return [*_narrow_modules(received, step.step), *_cached_weights(received, step.step)]


def _received(model: nn.Module, call: ForwardCall) -> Inputs:
    """What each module with parameters of its own, and without modules inside, received in a forward pass."""
    found: Inputs = {}
    named = {
        module: plain_name(name)
        for name, module in model.named_modules()
        if name and next(module.children(), None) is None and next(module.parameters(), None) is not None
    }

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        found.setdefault(named[module], (module, (args, kwargs)))

    keep.__module__ = "of the audit's own pass"  # it is not left out
    handles = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in named]
    try:
        with torch.no_grad(), in_mode(model, False):
            outputs_again(model, {name: p.detach() for name, p in model.named_parameters()}, call)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _asked(question: Callable[..., Answer], *given: Any) -> Answer | None:
    """What a module answers; nothing where it cannot be called alone."""
    try:
        return question(*given)
    except Exception:
        return None


def _called(module: nn.Module, parameters: dict[str, Tensor], given: Given) -> Tensor | None:
    """The first output of a module with other parameters; its buffers and attributes, and all generators, stay as they are."""
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    with in_mode(module, False), without_own_hooks(module), kept(), attributes_as(Before(), module):
        return next(tensors_in(functional_call(module, (parameters, buffers), *given)), None)


def _output(module: nn.Module, parameters: dict[str, Tensor], given: Given) -> Tensor | None:
    with torch.no_grad():
        return _called(module, parameters, given)


def _own(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


# ── casts inside modules ──────────────────────────────────────────────────────────────────────────────────────────────


def _narrow_modules(received: Inputs, step: int) -> list[PieceResult]:
    amplified = {
        name: ratio
        for name, (module, given) in received.items()
        if (ratio := _asked(_amplification, module, given, NUDGE)) is not None
    }
    odd = {name: ratio for name, ratio in amplified.items() if ratio > AMPLIFIES}
    # What nearly cancels amplifies every nudge alike, and a cast hardly one that is as large as its spacing.
    of_large = {name: _asked(_amplification, *received[name], _LARGE) for name in odd}
    odd = {name: ratio for name, ratio in odd.items() if ratio > _FALLS * (of_large[name] or 0.0)}
    if not odd or len(odd) * 2 > len(amplified):
        return []
    return [PieceResult(PIECE, DEPARTS, tuple(odd), max(odd.values()), AMPLIFIES, "module-cast", step=step)]


def _amplification(module: nn.Module, given: Given, by: float) -> float | None:
    """How many times more a module's output moves than its input and parameters; ``None`` where it takes no floats alone."""
    args, kwargs = given
    if not args or any(isinstance(a, Tensor) and a.dtype is not torch.float32 for a in args):
        return None  # of other dtypes too: a framework may begin autocast inside the model
    if isinstance(module, nn.Embedding):
        return None  # it may count positions from a mask of floats
    generator = torch.Generator().manual_seed(0)

    own = _own(module)
    before = _output(module, own, given)
    moved = {name: nudged(p, generator, by) for name, p in own.items()}
    others = tuple(nudged(a, generator, by) if isinstance(a, Tensor) else a for a in args)
    after = _output(module, moved, (others, kwargs))
    if before is None or after is None or not before.any() or not before.is_floating_point():
        return None
    return float((after.double() - before.double()).norm() / before.double().norm()) / by


def nudged(values: Tensor, generator: torch.Generator, by: float) -> Tensor:
    """Each value moved up or down by a part of itself."""
    signs = random_signs(values.shape, generator).to(values.device)
    return values.detach() * (1 + by * signs.to(values.dtype))


# ── copies of weights ─────────────────────────────────────────────────────────────────────────────────────────────────


def _cached_weights(received: Inputs, step: int) -> list[PieceResult]:
    odd = tuple(name for name, of in received.items() if _asked(_stays, *of))
    return [PieceResult(PIECE, DEPARTS, odd, 1.0, 0.0, "weights-cached", step=step)] if odd else []


def _stays(module: nn.Module, given: Given) -> bool:
    """Whether a module's output is the same to the bit with parameters of other signs and sizes, though they get gradients."""
    if any(t.is_floating_point() and t.dtype is not torch.float32 for t in tensors_in(given)):
        return False  # a framework may begin autocast inside the model
    own = _own(module)
    generator = torch.Generator().manual_seed(0)
    others = {name: -nudged(p, generator, 0.5) - (1.0 if not p.any() else 0.0) for name, p in own.items()}
    before, after = _output(module, own, given), _output(module, others, given)
    if before is None or after is None or not before.any() or not before.equal(after):
        return False
    # Parameters that are held by reference are not those that are given here: no gradient arrives at these.
    with torch.enable_grad():
        trained = {name: p.requires_grad_() for name, p in own.items()}
        output = _called(module, trained, given)
        if output is None or not output.requires_grad:
            return False
        signs = random_signs(output.shape, generator).to(output.device)
        found = torch.autograd.grad((output * signs).sum(), list(trained.values()), materialize_grads=True)
    return any(bool(each.any()) for each in found)
