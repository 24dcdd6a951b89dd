"""Triton, the language of GPUs: the text of each operation, and functions loaded from a text.

``div_rn`` and ``sqrt_rn`` round as on a CPU. A launch with :data:`LAUNCH` fuses no multiply-add.
Triton's interpreter runs the same text on a CPU.
"""

from __future__ import annotations

import itertools
import linecache
import math
from typing import Any

import torch

from narrowgauge.torch_support.printer import Language

LAUNCH = {"enable_fp_fusion": False}
"""Options of every launch: a fused multiply-add would not round the product."""
INTERPRET = False
"""Run kernels on CPU tensors, in Triton's interpreter. Tests set it."""
_OPERATIONS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "rsub": "{1} - {0}",
    "mul": "{0} * {1}",
    "neg": "-{0}",
    "div": "tl.div_rn({0}, {1})",
    "reciprocal": "tl.div_rn(1.0, {0})",
    "sqrt": "tl.sqrt_rn({0})",
    "abs": "tl.abs({0})",
    "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))",
    "bitwise_and": "{0} & {1}",
    "bitwise_or": "{0} | {1}",
    "bitwise_xor": "{0} ^ {1}",
    "__lshift__": "{0} << {1}",
    "__rshift__": "{0} >> {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "isnan": "{0} != {0}",
    "logical_not": "{0} == 0",
    "where": "tl.where({0}, {1}, {2})",
    "masked_fill": "tl.where({1}, {2}, {0})",
    # To even: below 2^52 a float64 has bits below 1, which the sum rounds off.
    "round": (
        "tl.where(tl.abs({0}) >= 2.0**52, {0}, "
        "tl.where({0} < 0, {0} - 2.0**52 + 2.0**52, {0} + 2.0**52 - 2.0**52))"
    ),
    "view": "{0}.to({type}, bitcast=True)",
    "_to_copy": "{0}.to({type})",
    # PyTorch returns NaN if either is NaN.
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
}
_TYPES = {
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
    torch.bool: "tl.int1",
}
_numbers = itertools.count()


def _literal(value: Any, dtype: torch.dtype) -> str:
    """Return a number as an argument of an operation in a dtype. An int32 has a sign."""
    if dtype is torch.int32 and value is not None:
        return str((int(value) + (1 << 31)) % (1 << 32) - (1 << 31))
    if value is None or not dtype.is_floating_point:
        return str(value)
    return repr(float(value)) if math.isfinite(value) else f"float('{float(value)}')"


TRITON = Language(
    name="Triton",
    operations=_OPERATIONS,
    types=_TYPES,
    literal=_literal,
    assignment="{name} = {value}",
    comment="#",
    device="meta",
)
REDUCERS = """
@triton.jit
def larger_of(a, b):
    return tl.maximum(a, b)


@triton.jit
def sum_of(a, b):
    return a + b
"""
"""Functions for ``tl.reduce``."""


def runs_on(device: torch.device) -> bool:
    """Return whether Triton's kernels run on a device."""
    return device.type == "cuda" or INTERPRET


def load(source: str, *, interpret: bool = False) -> dict[str, Any]:
    """Return the names that a text defines.

    Its ``@triton.jit`` functions are compiled at their first launch, or interpreted.
    """
    import triton

    file = f"<narrowgauge kernel {next(_numbers)}>"  # Triton reads the text of a function there
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    names: dict[str, Any] = {"triton": triton, "tl": triton.language, "__name__": __name__}
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = interpret
        exec(compile(source, file, "exec"), names)
    if interpret:
        # Private names, which the interpreter reduces by NumPy. Instead: the functions of the text,
        # a thousand times as slow.
        names["larger_of"] = triton.language.standard._elementwise_max
        names["sum_of"] = triton.language.standard._sum_combine
    return names
