"""Run a model without leaving a trace in it: repeat a failed step, or compare a step with float32."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_BUILT_IN = vars(nn.Module()).keys()
"""Attributes of every module: hooks, parameters, buffers and submodules."""
_PLAIN = (type, FunctionType, MethodType, ModuleType, str, bytes, int, float, complex, type(None))


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
def put_back(
    model: nn.Module, parameters: Iterable[Tensor] = (), optimizers: Iterable[torch.optim.Optimizer] = ()
) -> Iterator[dict[str, str]]:
    """Start without gradients. Restore gradients, buffers, modes, attributes and random generators at the end, bit for bit.

    Args:
        parameters: others whose gradients are restored.
        optimizers: their states and settings are restored, should they step.
    Returns:
        The attributes that cannot be restored, with the reason.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> with put_back(model):
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> model.weight.grad is None
        True
    """
    restore, unrestored, seen = list[Callable[[], object]](), dict[str, str](), set[int]()
    for tensor in (*model.parameters(), *parameters, *model.buffers()):
        _remember(tensor, "", restore, unrestored, seen)
    for place, module in model.named_modules():
        attributes = vars(module)
        restore += [partial(_refill, values, dict(values)) for values in (attributes, module._buffers)]
        for name, value in attributes.items():
            if name not in _BUILT_IN and not isinstance(value, nn.Module):
                _remember(value, f"{place}.{name}".lstrip("."), restore, unrestored, seen)
    try:
        with generators_put_back(), ExitStack() as hooks:
            for optimizer in optimizers:
                handle = optimizer.register_step_pre_hook(partial(_remember_states, restore=restore, seen=seen))
                hooks.callback(handle.remove)
            yield unrestored
    finally:
        with torch.no_grad():
            for call in reversed(restore):
                call()


def _refill(container: Any, saved: Any) -> None:
    container.clear()
    (container.extend if hasattr(container, "extend") else container.update)(saved)


def _write_back(tensor: Tensor, values: Tensor) -> None:
    if not torch.equal(tensor, values):  # an expanded tensor cannot be written
        tensor.copy_(values)


def _remember(value: Any, name: str, restore: list[Any], unrestored: dict[str, str], seen: set[int]) -> None:
    """Add what restores a tensor, its gradient, or a Python object: a container, a generator, an object's attributes."""
    kind = type(value)
    if isinstance(value, _PLAIN) or id(value) in seen or kind.__module__.startswith("transformers"):
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):  # in a plain list, say
        for tensor in (*value.parameters(), *value.buffers()):
            _remember(tensor, name, restore, unrestored, seen)
    elif isinstance(value, Tensor):
        if value.is_leaf and value.requires_grad:
            restore.append(partial(setattr, value, "grad", value.grad))
            value.grad = None
        elif value.is_leaf and not isinstance(value, nn.Parameter):
            restore.append(partial(_write_back, value, value.detach().clone()))
    elif isinstance(value, torch.Generator):
        restore.append(partial(value.set_state, value.get_state()))
    elif hasattr(kind, "getstate") and hasattr(kind, "setstate"):
        restore.append(partial(value.setstate, value.getstate()))
    elif hasattr(kind, "bit_generator"):  # of NumPy
        restore.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
    elif hasattr(kind, "__next__"):
        unrestored[f"{name} of the model"] = "an iterator cannot be put back"
    elif isinstance(value, (dict, list, set, deque)):
        restore.append(partial(_refill, value, copy.copy(value)))
        for item in value.values() if isinstance(value, dict) else value:
            _remember(item, name, restore, unrestored, seen)
    elif hasattr(value, "__dict__") and not kind.__module__.startswith("torch"):
        restore.append(partial(_refill, vars(value), dict(vars(value))))
        for item in vars(value).values():
            _remember(item, name, restore, unrestored, seen)


def _remember_states(optimizer: torch.optim.Optimizer, *_: Any, restore: list[Any], seen: set[int]) -> None:
    """Before an optimizer's first step, add what restores its states and settings."""
    if id(optimizer) not in seen:
        seen.add(id(optimizer))
        memo = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        states = {p: copy.deepcopy(state, memo) for p, state in optimizer.state.items()}
        restore.append(partial(_refill, optimizer.state, states))
        restore += [partial(_refill, group, dict(group)) for group in optimizer.param_groups]
