"""Run a model without leaving a trace in it: repeat a failed step, or compare a step with float32."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Start without gradients. Restore gradients, buffers, modes and random generators at the end, bit for bit.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> with put_back(model):
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> model.weight.grad is None
        True
    """
    gradients = [(p, p.grad) for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    python = random.getstate()
    try:
        for p, _ in gradients:
            p.grad = None
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        for p, gradient in gradients:
            p.grad = gradient
        for module, is_training in modes:
            module.training = is_training  # not train(), which some modules override
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                buffer.copy_(value)
