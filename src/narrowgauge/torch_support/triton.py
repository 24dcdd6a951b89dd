"""Triton, the language of GPUs: where its kernels run, and how they are loaded.

A launch with :data:`LAUNCH` fuses no multiply-add. Triton's interpreter runs the same text on a CPU.
"""

import importlib.util
import sys
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

LAUNCH = {"enable_fp_fusion": False}
"""Options of every launch: a fused multiply-add would not round the product."""
INTERPRET = False
"""Run kernels on CPU tensors, in Triton's interpreter. Tests set it."""


def runs_on(device: torch.device) -> bool:
    """Return whether Triton's kernels run on a device."""
    return device.type == "cuda" or INTERPRET


@cache
def load(name: str, interpret: bool = False) -> ModuleType:
    """Return a module of ``@triton.jit`` functions, compiled at their first launch, or interpreted.

    Its ``larger_of`` and ``sum_of`` are for ``tl.reduce``.
    """
    if not interpret:
        return import_module(name)
    import triton

    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks up its module.
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        with triton.knobs.runtime.scope():
            triton.knobs.runtime.interpret = True
            spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
    # Private names, which the interpreter reduces by NumPy. Instead: the functions of the module, a
    # thousand times as slow.
    module.larger_of = triton.language.standard._elementwise_max  # type: ignore[attr-defined]
    module.sum_of = triton.language.standard._sum_combine  # type: ignore[attr-defined]
    return module
