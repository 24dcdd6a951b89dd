"""Run a model without leaving a trace in it: repeat a failed step, or compare a step with float32."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def generators_put_back() -> Iterator[None]:
    """Restore the random generators of PyTorch, Python and NumPy at the end."""
    devices = range(0)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(state)


@contextmanager
def put_back(
    model: nn.Module,
    parameters: Iterable[Tensor] = (),
    optimizers: Iterable[torch.optim.Optimizer] = (),
) -> Iterator[None]:
    """Start without gradients.

    At the end restore gradients, buffers, attributes of modules (with their modes) and random
    generators, bit for bit.

    Args:
        parameters: others whose gradients are restored.
        optimizers: their states and settings are restored, should they step.
    """
    restore: list[Callable[[], object]] = []
    for module in model.modules():
        attributes = vars(module)
        for value in (attributes, *attributes.values(), *module.buffers(recurse=False)):
            restore += _restores(value)
    for p in (*model.parameters(), *parameters):
        restore.append(partial(setattr, p, "grad", p.grad))
        p.grad = None
    stepped = set[torch.optim.Optimizer]()

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer not in stepped:
            stepped.add(optimizer)
            memo: dict[int, Any] = {}
            for group in optimizer.param_groups:
                restore.append(partial(_refill, group, dict(group)))
                for p in group["params"]:
                    memo[id(p)] = p
            states = {p: copy.deepcopy(state, memo) for p, state in optimizer.state.items()}
            restore.append(partial(_refill, optimizer.state, states))

    handles = [optimizer.register_step_pre_hook(before_step) for optimizer in optimizers]
    try:
        with generators_put_back():
            yield
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for call in reversed(restore):
                call()


def _refill(container: Any, saved: Any) -> None:
    container.clear()
    add = container.extend if hasattr(container, "extend") else container.update
    add(saved)


def _write_back(tensor: Tensor, values: Tensor) -> None:
    if not torch.equal(tensor, values):  # an expanded tensor cannot be written
        tensor.copy_(values)


def _restores(value: Any) -> list[Callable[[], object]]:
    """Return the calls that restore a container, a generator or a buffer, but not what it holds."""
    if isinstance(value, (dict, list, set, deque)):
        return [partial(_refill, value, copy.copy(value))]
    if isinstance(value, torch.Generator):
        return [partial(value.set_state, value.get_state())]
    if isinstance(value, Tensor) and value.is_leaf and not isinstance(value, nn.Parameter):
        return [partial(_write_back, value, value.detach().clone())]
    return []
