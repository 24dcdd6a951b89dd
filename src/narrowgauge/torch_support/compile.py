"""Run functions of tensors as ``torch.compile`` compiles them, and as they are where that gives
other bits.

At the first use of each pattern of dtypes, compiled code runs on ordinary and on edge values
(:mod:`narrowgauge.torch_support.proof`). If its bits differ from the function's, the function runs
uncompiled, with one warning.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from narrowgauge.torch_support.proof import TORCH, draw, first_difference, prove
from narrowgauge.torch_support.torch_names import is_traced

COMPILE_ELEMENTS = 1 << 18
"""On a CPU, compile for at least this many elements.

Fewer do not win back the seconds of compiling.
"""
SMALL_SIDE = 256
"""Shorten longer sides to about this to compare compiled code with its function."""
OPTIONS: dict[str, Any] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}
"""Options of Inductor: on a GPU its defaults divide approximately and flush subnormals."""


def call_compiled(size: int, function: Callable[..., Any], *arguments: Tensor | None) -> Any:
    """Call a function, compiled if ``size`` elements are enough to pay for it.

    Pass the same function object for the same lines and constants: each is compiled once.
    """
    # Before sizes are compared: a comparison would bind a traced length to one side of the bound.
    if is_traced():
        return function(*arguments)
    is_cpu = all(x is None or x.is_cpu for x in arguments)
    if is_cpu and size < COMPILE_ELEMENTS:
        return function(*arguments)
    return compiled(function)(*arguments)


@cache
def compiled(function: Callable[..., Any]) -> Compiled:
    """Return a function compiled for arguments of any size. Its first call takes seconds.

    Args:
        function: pure except for writing into its arguments, without Python branches on values.
    """
    return Compiled(function)


class Compiled:
    """Call compiled code where it has the bits of its function, and elsewhere the function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        def call(*arguments: Tensor | None) -> Any:
            return function(*arguments)

        # Code that was compiled before is looked up, and counted, by the code object.
        self.name = getattr(function, "__name__", type(function).__name__)
        code = call.__code__.replace(co_name=self.name)
        alone = types.FunctionType(code, globals(), self.name, None, call.__closure__)
        self.function = function
        self.run: Callable[..., Any] = torch.compile(alone, dynamic=True, options=OPTIONS)

    def __call__(self, *arguments: Tensor | None) -> Any:
        # A Parameter would be compiled anew.
        plain = [x if x is None else x.detach() for x in arguments]
        with torch.no_grad():
            if self.is_equal(plain):
                return self.run(*plain)
            return self.function(*plain)

    def is_equal(self, arguments: Sequence[Tensor | None]) -> bool:
        """Return whether compiled code gives the function's bits. Compare at the first use."""
        pattern = tuple([x if x is None else (x.dtype, x.ndim, x.device) for x in arguments])
        return not prove(self.name, (self, pattern), TORCH, lambda: self._compare(arguments))

    def _compare(self, arguments: Sequence[Tensor | None]) -> str:
        cut: Callable[[int], int] = _cut
        try:
            self.function(*_case(arguments, False, cut))
        except (RuntimeError, ValueError):
            cut = int  # sides that belong together
        for edges in (False, True):
            case = _case(arguments, edges, cut)
            results = []
            for call in (self.function, self.run):
                copies = [x if x is None else x.clone() for x in case]
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the compiler's own
                    leaves = torch.utils._pytree.tree_leaves((call(*copies), copies))
                results.append([x for x in leaves if x is not None])
            for place, (expected, actual) in enumerate(zip(*results, strict=True)):
                difference = first_difference(f"result {place}", actual, expected)
                if difference:
                    return difference
        return ""


def _case(
    arguments: Sequence[Tensor | None], edges: bool, cut: Callable[[int], int]
) -> list[Tensor | None]:
    """Draw tensors with the dtypes and memory orders of others, with shorter sides.

    Keep tensors with few values, such as scales and seeds.
    """
    case: list[Tensor | None] = []
    for seed, like in enumerate(arguments):
        if like is None:
            case.append(None)
        elif like.numel() <= 16:
            case.append(like.clone())
        else:
            part = torch.empty_like(like[tuple([slice(cut(side)) for side in like.shape])])
            case.append(part.copy_(draw(like.dtype, part.shape, edges=edges, seed=seed)))
    return case


def _cut(side: int) -> int:
    if side > 2 * SMALL_SIDE:
        return SMALL_SIDE + side % SMALL_SIDE
    return side
