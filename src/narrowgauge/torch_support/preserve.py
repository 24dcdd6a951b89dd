"""Run a model without leaving a trace in it: repeat a failed step, or compare a step with float32."""

import copy
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def generator_states() -> dict[str, list[Any]]:
    """Return the states of the random generators of this process, as lists that compare by value."""
    numpy_state: Any = np.random.get_state()
    states = {
        "torch": torch.get_rng_state().tolist(),
        "numpy": [*numpy_state[1].tolist(), numpy_state[2]],
        "python": [*random.getstate()[1]],
    }
    if torch.cuda.is_initialized():
        states["cuda"] = [state.tolist() for state in torch.cuda.get_rng_state_all()]
    return states


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Restore the random generators of PyTorch, Python and NumPy at the end."""
    devices = range(0)
    if torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
    python = random.getstate()
    numpy = np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def preserve_model(model: nn.Module, parameters: Iterable[Tensor] = ()) -> Iterator[None]:
    """Start without gradients.

    At the end restore gradients, buffers, attributes of modules (with their modes) and random
    generators, bit for bit. ``parameters`` are others whose gradients are restored.
    """
    restore = []
    for module in model.modules():
        attributes = vars(module)
        for value in (attributes, *attributes.values()):
            if isinstance(value, (dict, list, set)):
                restore.append(partial(_refill, value, copy.copy(value)))
        for buffer in module.buffers(recurse=False):
            restore.append(partial(_write_back, buffer, buffer.detach().clone()))
    for p in (*model.parameters(), *parameters):
        restore.append(partial(setattr, p, "grad", p.grad))
        p.grad = None
    try:
        with preserve_generators():
            yield
    finally:
        with torch.no_grad():
            for call in reversed(restore):
                call()


def _refill(container: Any, saved: Any) -> None:
    container.clear()
    add = container.extend if isinstance(container, list) else container.update
    add(saved)


def _write_back(tensor: Tensor, values: Tensor) -> None:
    if not torch.equal(tensor, values):  # an expanded tensor cannot be written
        tensor.copy_(values)
