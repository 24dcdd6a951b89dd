"""Fusion: definitions of several elementwise operations, compiled into one loop where tensors are large.

A *definition* is a pure function of tensors. Compiled or not, it gives the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from narrowgauge._torch.inductor import compile_any_shape
from narrowgauge.machine.cpp_compiler import gpu_compiler_missing, model_compiler_missing, switched_off

COMPILE_ELEMENTS = 1 << 18
"""Definitions and kernels are compiled for at least this many elements; fewer do not win back the seconds of compiling."""


def fused(size: int, definition: Callable[..., Any], *arguments: Tensor | None) -> Any:
    """A definition applied to these arguments, compiled where it works on so many (``size``) elements that this pays.

    Each definition is compiled once, so the same lines and constants must be the same function object.
    """
    if size >= COMPILE_ELEMENTS and can_compile("cpu" if _on_cpu(arguments) else "gpu"):
        return compiled_for_pattern(definition, *arguments)
    return definition(*arguments)


def compiled_for_pattern(definition: Callable[..., Any], *arguments: Tensor | None) -> Any:
    """The definition applied to these arguments, compiled for their pattern and any size.

    PyTorch recompiles a function for each pattern (dtypes, absent arguments, sides of 1, equal sides, memory order) and gives up
    after eight; so each pattern is a function of its own.
    """
    with torch.no_grad():
        return _kernel(definition, _pattern(arguments))(*arguments)


@lru_cache(None)
def _kernel(definition: Callable[..., Any], pattern: tuple[Any, ...]) -> Callable[..., Any]:
    return compile_any_shape(definition, definition.__name__)  # type: ignore[arg-type]


def _pattern(arguments: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    sizes: dict[int, int] = {1: -1}
    described: list[Any] = []
    for argument in arguments:
        if argument is None:
            described.append(None)
            continue
        sides = tuple(sizes.setdefault(size, len(sizes)) for size in argument.shape)
        described.append((argument.dtype, argument.device, sides, argument.is_contiguous()))
    return tuple(described)


def _on_cpu(arguments: tuple[Tensor | None, ...]) -> bool:
    return next(argument.is_cpu for argument in arguments if argument is not None)


@lru_cache(None)
def can_compile(place: Literal["cpu", "gpu"]) -> bool:
    """Whether definitions can be compiled for it here; warns once where not."""
    missing = model_compiler_missing() if place == "cpu" else switched_off() or gpu_compiler_missing()
    if missing:
        warnings.warn(f"{missing}: casts run uncompiled, with the same bits but slower.", stacklevel=3)
    return not missing
