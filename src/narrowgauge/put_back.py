"""Run a model without leaving a trace in it: repeat a failed step, or compare a step with float32."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def generators_put_back() -> Iterator[None]:
    """Restore the random generators of PyTorch, Python and NumPy at the end."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    python, numpy = random.getstate(), sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(state)


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
    try:
        for p, _ in gradients:
            p.grad = None
        with generators_put_back():
            yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient
        for module, is_training in modes:
            module.training = is_training  # not train(), which some modules override
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                buffer.copy_(value)
