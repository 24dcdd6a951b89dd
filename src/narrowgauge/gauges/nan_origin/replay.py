"""Replay: repeat a failed step with every operation traced.

A NaN in the loss does not show its origin, because NaNs spread everywhere within a few operations. Tracing every operation
finds the first failure, but is too expensive for every step. Therefore nothing is traced until a step has failed. Then the
same step runs once more. It runs eagerly even if the model is compiled, because the inside of a fused kernel cannot be traced.
Eager execution may differ in bits from the compiled step. The result says whether the failure was reproduced (:func:`replay`).

The step must be repeatable: the same batch, the same weights, no update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from narrowgauge.gauges.nan_origin.bad_value import BadValue
from narrowgauge.gauges.nan_origin.tracing import NanTracer, nonfinite_kinds
from narrowgauge.put_back import put_back


def first_bad_value(model: nn.Module, step: Callable[[], Any]) -> BadValue | None:
    """Return the operation that made the first NaN or infinity to reach a step's loss or gradients.

    Invariant: the step runs eagerly, including compiled parts. Gradients, buffers and PyTorch's random state are restored
    bit for bit. No hooks remain, and nothing is recompiled. An infinity that reaches neither the loss nor a gradient (an
    attention mask) is not reported.

    Args:
        model: the report names its modules, parameters and buffers.
        step: computes forward and backward of the whole step, with all its micro-batches, from gradients that are ``None``.
            Returns the loss, or several. It must not change the weights.
    Returns:
        The description of the operation, or ``None`` if loss and gradients are finite.

    Cost: nothing until called. Then one eager step with another read of every result and, on a GPU, a synchronization
    per operation. An eager step may need more memory than a compiled one.
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
    with put_back(model):
        with torch.compiler.set_stance("force_eager"), NanTracer(model) as tracer:
            loss = step()
        return tracer.first_cause(loss)


@dataclass(frozen=True)
class Replay:
    """The result of repeating a failed step.

    Args:
        reproduced: ``eager``: the eager step fails too, and ``bad`` describes where; ``compiled``: only the original step
            fails; ``not``: neither fails.
        bad: the first non-finite value.
        found: the non-finite tensor of the original step: ``the loss``, ``the gradient of NAME``.
    """

    reproduced: Literal["eager", "compiled", "not"]
    bad: BadValue | None = None
    found: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        """Return the result in one or two sentences."""
        if self.bad is not None:
            return self.bad.message
        if self.reproduced == "not":
            return (
                "The repeated step is finite, both eagerly and as it was run: a transient hardware fault (memory, processor) or "
                "a nondeterministic kernel is likely. Resume from the last checkpoint; if it recurs, test the machine."
            )
        more = f" and {len(self.found) - 1} more" if len(self.found) > 1 else ""
        return (
            f"The eager step is finite; as it was run, {self.found[0]}{more} is not: only the compiled kernels produce it. "
            "They omit roundings and sum in another order. Resume without compilation, or with "
            "TORCHINDUCTOR_EMULATE_PRECISION_CASTS=1 in the environment, which keeps the roundings."
        )


def replay(
    model: nn.Module,
    step: Callable[[], Any],
    compiled_step: Callable[[], Any] | None = None,
    *,
    say: Callable[[str], object] | None = None,
    agree: Callable[[bool], bool] = bool,
) -> Replay:
    """Repeat a failed step: eagerly with tracing and, if the result is finite, in its original form.

    Invariant: as for :func:`first_bad_value`, for both.

    Args:
        model, step: as for :func:`first_bad_value`.
        compiled_step: the step in its original form; ``None``: ``step`` itself with its compiled parts.
        say: called with a sentence before each of the two.
        agree: turns this rank's result (whether it found something) into whether any rank did. The ranks
            need each other for every step, so all must take the same steps.
    Returns:
        Which of the steps failed, and the first non-finite value if it was found.

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
    say("Repeating the step eagerly with every operation traced.")
    bad = first_bad_value(model, step)
    if agree(bad is not None):
        return Replay("eager", bad)
    say("The eager step is finite; repeating it as it was run.")
    failures = _failures(model, compiled_step or step)
    return Replay("compiled", found=failures) if agree(bool(failures)) else Replay("not")


def _failures(model: nn.Module, step: Callable[[], Any]) -> tuple[str, ...]:
    """Return the non-finite tensors after a step without tracing."""
    with put_back(model):
        values = tree_leaves(step())
        tensors = [value for value in values if isinstance(value, Tensor)]
        numbers = [value for value in values if isinstance(value, float)]
        names = ["the loss"] if any(map(nonfinite_kinds, tensors)) or not all(map(math.isfinite, numbers)) else []
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and nonfinite_kinds(parameter.grad):
                names.append(f"the gradient of {name}")
        return tuple(names)
