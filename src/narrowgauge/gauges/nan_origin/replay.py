"""Repeat a failed step with every operation traced.

A NaN in the loss does not show its origin, because NaNs spread everywhere within a few operations. Tracing every operation
finds the first failure, but is too expensive for every step. So nothing is traced until a step has failed. Then the
same step runs once more. It runs eagerly even if the model is compiled, because the inside of a fused kernel cannot be traced.
Eager execution may differ in bits from the compiled step: then it may be finite.

The step must be repeatable: the same batch, the same weights, no update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from narrowgauge.gauges.nan_origin.bad_value import BadValue
from narrowgauge.gauges.nan_origin.tracing import NanTracer
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
