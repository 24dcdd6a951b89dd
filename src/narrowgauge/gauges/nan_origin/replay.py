"""Replay: a step that went wrong, done again with every operation watched.

A NaN in the loss says nothing about where it began: within a few operations it is everywhere. Watching every operation finds the
first, but costs too much for every step; so nothing is watched until a step has failed, and then the same step is computed once
more. It is computed eagerly, operation by operation, also where the model is compiled, since inside a fused kernel there is
nothing to watch. That may give other bits than the compiled step did, so whether it fails too is part of the answer
(:func:`replay`).

The step must be one that can be computed again: the same batch, the same weights, no update.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from narrowgauge.gauges.nan_origin.bad_value import BadValue, Operand
from narrowgauge.gauges.nan_origin.operations import kinds_of
from narrowgauge.gauges.nan_origin.watching import Watch

__all__ = ["BadValue", "Operand", "Replay", "first_bad_value", "replay"]


def first_bad_value(model: nn.Module, step: Callable[[], Any]) -> BadValue | None:
    """The operation that made the first NaN or infinity to reach a step's loss or gradients.

    Law: the step is computed eagerly, compiled parts too. Parameters' gradients, buffers and PyTorch's random numbers are
    afterwards what they were, bit for bit; nothing stays installed, and nothing compiles anew. An infinity that reaches
    neither the loss nor a gradient (an attention mask) is not reported.

    Args:
        model: whose modules, parameters and buffers are named in the answer.
        step: computes forward and backward of the whole step, all its micro-batches, from gradients that are ``None``;
            returns the loss, or several. It must not change the weights.
    Returns:
        What is known of it, or ``None`` where loss and gradients are finite.

    Cost: nothing before it is called; then the step eagerly, with one more read of every result and, on a GPU, a wait for
    every operation. An eager step may need more memory than a compiled one.
    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).half()
        >>> with torch.no_grad():
        ...     _ = model[2].weight.fill_(6e4)
        >>> def step():
        ...     loss = model(torch.ones(2, 4).half() * 100).sum()
        ...     loss.backward()
        ...     return loss
        >>> bad = first_bad_value(model, step)
        >>> bad.module, bad.operation, bad.what, bad.operands[2].name, bad.operands[2].amax
        ('2', 'aten.addmm', 'inf', '2.weight', 60000.0)
    """
    with _untouched(model):
        with torch.compiler.set_stance("force_eager"), Watch(model) as watch:
            loss = step()
        return watch.verdict(loss)


@dataclass(frozen=True)
class Replay:
    """What doing a failed step again has shown.

    Args:
        reproduced: ``eager``: computed eagerly it fails too, and ``bad`` says where; ``compiled``: only as it was run;
            ``not``: not at all.
        bad: the first bad value.
        found: what was not finite as it was run: ``the loss``, ``the gradient of NAME``.
    """

    reproduced: Literal["eager", "compiled", "not"]
    bad: BadValue | None = None
    found: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        """One or two sentences."""
        if self.bad is not None:
            return self.bad.message
        if self.reproduced == "not":
            return (
                "The same step computed again is finite, eagerly and as it was run: a transient fault (memory, processor) or "
                "a nondeterministic kernel is likely. Go on from the last checkpoint; if it comes back, test the machine."
            )
        more = f" and {len(self.found) - 1} more" if len(self.found) > 1 else ""
        return (
            f"Computed eagerly the step is finite; as it was run {self.found[0]}{more} is not: only the compiled kernels "
            "give it, which leave out roundings and add in another order. Go on without compiling, or with "
            "TORCHINDUCTOR_EMULATE_PRECISION_CASTS=1 in the environment, which keeps the roundings."
        )


def replay(
    model: nn.Module,
    step: Callable[[], Any],
    compiled_step: Callable[[], Any] | None = None,
    *,
    say: Callable[[str], object] | None = None,
) -> Replay:
    """Do a failed step again: eagerly and watched and, where that is finite, as it was run.

    Law: as for :func:`first_bad_value`, for both.

    Args:
        model, step: as for :func:`first_bad_value`.
        compiled_step: the step as it was run; ``None``: ``step`` itself, whose compiled parts are then compiled.
        say: gets a sentence before each of the two.
    Returns:
        Which of them failed, and the first bad value where it was found.

    Cost: one or two steps; see :func:`first_bad_value`.
    Example:
        >>> model, failures = nn.Linear(2, 1), [math.nan]
        >>> def step():
        ...     loss = model(torch.ones(1, 2)).sum() + (failures.pop() if failures else 0.0)
        ...     loss.backward()
        ...     return loss
        >>> step().isnan().item(), replay(model, step).reproduced
        (True, 'not')
    """
    say = say or (lambda _: None)
    say("The step is done again eagerly, and every operation watched.")
    bad = first_bad_value(model, step)
    if bad is not None:
        return Replay("eager", bad)
    say("Eagerly it is finite; it is done again as it was run.")
    found = _failures(model, compiled_step or step)
    return Replay("compiled", found=found) if found else Replay("not")


def _failures(model: nn.Module, step: Callable[[], Any]) -> tuple[str, ...]:
    """What is not finite after a step that nobody watches."""
    with _untouched(model):
        values = tree_leaves(step())
        tensors = [value for value in values if isinstance(value, Tensor)]
        numbers = [value for value in values if isinstance(value, float)]
        found = ["the loss"] if any(map(kinds_of, tensors)) or not all(map(math.isfinite, numbers)) else []
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and kinds_of(parameter.grad):
                found.append(f"the gradient of {name}")
        return tuple(found)


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Within it there are no gradients yet; afterwards gradients, buffers and random numbers are what they were."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        with torch.random.fork_rng(devices):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, name, buffer, kept in buffers:
            module._buffers[name] = buffer
            if not _same_bits(buffer, kept):
                with torch.no_grad():
                    buffer.copy_(kept)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether nothing has to be put back; what has no plain bytes is put back always."""
    if type(one) is not Tensor or one.layout is not torch.strided:
        return False
    return one.shape == other.shape and torch.equal(
        *(x.contiguous().reshape(-1).view(torch.uint8) for x in (one, other))
    )
