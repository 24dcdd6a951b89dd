"""A context leaves nothing behind: after it the package's modules and the process's settings are as
before, whether its block ended or raised.

Every context manager of the package is found by itself.
"""

import importlib
import inspect
import logging
import os
import pkgutil
import random
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import narrowgauge
from narrowgauge.errors import DataError

ARGUMENTS = {
    "disk_errors": (Path("a"),),
    "explained": ("nowhere",),
    "random_numbers": (0, 1, 2),
    "threads_of": (True,),
    "reason_for_none": ("area", {}),
    "recorded": ({}, {}),
    "layers_told": (SimpleNamespace(layer_output=print, layer_gradients=print),),
    "preserve_model": (nn.Linear(2, 2),),
    "_of_the_copy": (nn.Linear(2, 2),),
    "RandomRounding": (0, 0.0),
    "PolicyMode": (),
    "_weights_put_back": ({},),
    "_taken": ({}, None),
    "FirstBad": (nn.Linear(2, 2),),
}
"""Of contexts that have required parameters."""
ELSEWHERE = {
    "new_folder": "makes a folder (tests/runs)",
    "Sites": "the base of others",
    "Record": "writes a folder (tests/runs)",
    "RunRecorder": "writes a folder (tests/measuring)",
}
"""Contexts of something that lives outside the process's settings, with the place of their tests."""
PLAIN = (bool, int, float, str, type(None))


@cache
def contexts():
    """Return the functions and classes of the package that make a context, by name."""
    result = {}
    for info in pkgutil.walk_packages(narrowgauge.__path__, "narrowgauge."):
        if "integrations" in info.name or "__main__" in info.name:
            continue
        try:
            module = importlib.import_module(info.name)
        except ModuleNotFoundError as error:  # of a package that is not installed
            assert "narrowgauge" not in str(error.name)
            continue
        for name, value in vars(module).items():
            made = getattr(value, "__wrapped__", None)
            is_own = getattr(value, "__module__", "") == info.name
            enter = getattr(value, "__enter__", None) if inspect.isclass(value) else None
            is_class = getattr(enter, "__module__", "").startswith("narrowgauge")
            is_context = is_class or inspect.isgeneratorfunction(made)
            if is_own and is_context and name not in ELSEWHERE:
                result[name] = value
    return result


def left_behind() -> dict[str, Any]:
    """Return what a context may change: plain values and sizes of the package's modules, and the
    settings of the process.
    """
    state = {
        "environment": dict(os.environ),
        "warnings": len(warnings.filters),
        "torch's logger": logging.getLogger("torch").level,
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "flash attention": torch.backends.cuda.flash_sdp_enabled(),
        "modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "torch's numbers": torch.get_rng_state().tolist(),
        "Python's numbers": random.getstate(),
        "NumPy's numbers": repr(np.random.get_state()),
    }
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("narrowgauge."):
            for name, value in vars(module).items():
                if isinstance(value, PLAIN):
                    state[f"{module_name}.{name}"] = value
                elif isinstance(value, dict | list | set):
                    state[f"{module_name}.{name}"] = len(value)
                elif callable(value):  # which a context may replace
                    state[f"{module_name}.{name}"] = id(value)
    return state


def entered(make: Callable[..., Any], arguments: tuple[Any, ...], raises: bool) -> None:
    raised = KeyError("inside")
    try:
        with make(*arguments):
            torch.rand(1)
            if raises:
                raise raised
    except (KeyError, DataError) as error:
        assert raised in (error, error.__cause__)  # as it was, or explained in one line


@pytest.mark.parametrize("raises", [False, True])
def test_a_context_leaves_nothing_behind(raises):
    assert len(contexts()) >= 5
    faults = []
    for name, make in contexts().items():
        arguments = ARGUMENTS.get(name, ())
        entered(make, arguments, raises=False)  # what is imported or made once is there now
        torch.manual_seed(0)
        before = left_behind()
        entered(make, arguments, raises)
        torch.manual_seed(0)
        after = left_behind()
        for key in before.keys() | after.keys():
            if before.get(key) != after.get(key):
                faults.append(
                    f"{name}: {key} was {before.get(key)!r:.80}, is {after.get(key)!r:.80}"
                )
    assert not faults, "\n".join(faults)
