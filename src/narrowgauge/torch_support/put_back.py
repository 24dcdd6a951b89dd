"""Run a model without leaving a trace in it: repeat a failed step, or compare a step with float32."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_BUILT_IN = vars(nn.Module()).keys()
"""Attributes of every module: hooks, parameters, buffers and submodules."""
_PLAIN = (type, FunctionType, MethodType, ModuleType, str, bytes, int, float, complex, type(None))


def objects_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each object that a model holds, with its name: also what lies in plain attributes, such
    as modules in a list.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> model.more = [nn.Linear(1, 1)]
        >>> [name for name, value in objects_of(model) if isinstance(value, nn.Parameter)]
        ['weight', 'bias', 'more.0.weight', 'more.0.bias']
    """
    objects = [("", model)]
    seen = set[int]()
    while objects:
        place, value = objects.pop()
        package = type(value).__module__.partition(".")[0]
        is_module = isinstance(value, nn.Module)
        if (
            isinstance(value, _PLAIN)
            or id(value) in seen
            or (package == "transformers" and not is_module)
        ):
            continue
        seen.add(id(value))
        yield place, value
        items: dict[Any, Any] = {}
        if is_module:
            items = {**value._parameters, **value._buffers, **value._modules}
            for name, item in vars(value).items():
                if name not in _BUILT_IN:
                    items[name] = item
        elif isinstance(value, dict):
            items = value
        elif isinstance(value, (list, tuple, set, deque)):
            items = dict(enumerate(value))
        elif package != "torch":
            items = getattr(value, "__dict__", {})
        objects += reversed([(f"{place}.{name}".lstrip("."), item) for name, item in items.items()])


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
) -> Iterator[dict[str, str]]:
    """Start without gradients.

    Restore gradients, buffers, modes, attributes and random generators at the end, bit for bit.

    Args:
        parameters: others whose gradients are restored.
        optimizers: their states and settings are restored, should they step.
    Returns:
        The attributes that cannot be restored, with the reason.
    """
    restore = list[Callable[[], object]]()
    unrestored = dict[str, str]()
    stepped = set[torch.optim.Optimizer]()
    for name, value in [*objects_of(model), *(("", p) for p in parameters)]:
        if hasattr(type(value), "__next__"):
            unrestored[f"{name} of the model"] = "an iterator cannot be put back"
        restore += _restores(value)

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
            yield unrestored
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


def _restores(value: Any) -> Iterator[Callable[[], object]]:
    """Yield calls that restore an object, but not the objects that it holds.

    Clear a tensor's gradient.
    """
    kind = type(value)
    if isinstance(value, nn.Module):
        yield partial(_refill, vars(value), dict(vars(value)))
        yield partial(_refill, value._buffers, dict(value._buffers))
    elif isinstance(value, Tensor) and value.is_leaf and value.requires_grad:
        yield partial(setattr, value, "grad", value.grad)
        value.grad = None
    elif isinstance(value, Tensor) and value.is_leaf and not isinstance(value, nn.Parameter):
        yield partial(_write_back, value, value.detach().clone())
    elif isinstance(value, torch.Generator):
        yield partial(value.set_state, value.get_state())
    elif hasattr(kind, "getstate"):  # of Python
        yield partial(value.setstate, value.getstate())
    elif hasattr(kind, "bit_generator"):  # of NumPy
        yield partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    elif isinstance(value, (dict, list, set, deque)):
        yield partial(_refill, value, copy.copy(value))
    elif hasattr(value, "__dict__") and not kind.__module__.startswith("torch"):
        yield partial(_refill, vars(value), dict(vars(value)))
