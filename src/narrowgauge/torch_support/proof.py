"""Proof at first use: a kernel, or compiled code, is compared with its definition once.

A compiler may flush subnormals, drop a rounding, fuse a multiplication with an addition, divide
approximately or reorder a comparison. On most values this changes at most the last bit. *Edge
values* expose it: random bits, which have every magnitude and sign, of which half have short
mantissas: so many are ties between two values of a lower-precision format.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from narrowgauge.torch_support.cpp import CompilerError
from narrowgauge.torch_support.machine import compiler_missing, gpu_compiler_missing, switched_off
from narrowgauge.torch_support.triton import runs_on

CPP = "C++"
TRITON = "Triton"
TORCH = "torch.compile"
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers with the bits of a value, by its bytes."""
_lock = threading.RLock()
_reasons: dict[Any, str] = {}
"""Why a kernel is not used, or an empty string: only what every later comparison would find too."""


# ── values ────────────────────────────────────────────────────────────────────────────────────────


def draw(
    dtype: torch.dtype, shape: Sequence[int], *, edges: bool, seed: int = 0, finite: bool = True
) -> Tensor:
    """Draw normal values of a float dtype, or edge values, with infinities and NaN unless
    ``finite``. Draw random bits for other dtypes.

    An int32 holds two bfloat16: positive normal values, since a second moment is not negative.
    """
    shape = tuple(shape)
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.int32 and not edges:
        pairs = torch.randn(*shape[:-1], 2 * shape[-1], generator=generator)
        return pairs.abs().bfloat16().view(torch.int32)
    if not dtype.is_floating_point:
        return _random_bits(dtype, shape, generator)
    if not edges:
        return torch.randn(*shape, generator=generator).to(dtype)
    if dtype.itemsize == 1:
        return draw(torch.bfloat16, shape, edges=True, seed=seed, finite=finite).to(dtype)
    kind = INTEGERS[dtype.itemsize]
    infinity = int(torch.tensor(torch.inf, dtype=dtype).view(kind))
    bits = _random_bits(kind, shape, generator)
    short = torch.randint(8 * dtype.itemsize - 2, shape, generator=generator).to(kind)
    bits = torch.where(_random_bits(torch.bool, shape, generator), bits, bits >> short << short)
    last = torch.iinfo(kind).max
    listed = torch.tensor([0, 1, infinity - 1, infinity, infinity + 1, last], dtype=kind)
    chosen = listed[torch.randint(len(listed), shape, generator=generator)]
    chosen |= bits & torch.iinfo(kind).min
    bits = torch.where(torch.randint(8, shape, generator=generator) == 0, chosen, bits)
    if finite:
        is_finite = (bits & last) < infinity
        bits = torch.where(is_finite, bits, bits & ~(infinity & -infinity))
    return bits.view(dtype)


def _random_bits(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator) == 1
    ends = torch.iinfo(dtype)
    return torch.randint(ends.min, ends.max, shape, generator=generator, dtype=dtype)


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same bits. Any NaN of a float tensor equals any other."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    kind = INTEGERS[a.dtype.itemsize]
    same = a.view(kind) == b.view(kind)
    if a.is_floating_point():
        same |= a.isnan() & b.isnan()
    return bool(same.all())


@contextlib.contextmanager
def usual_defaults() -> Iterator[None]:
    """Hide the user's default dtype, which the compiler gives to some constants, and default
    device, where no case is drawn.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


# ── the comparison ────────────────────────────────────────────────────────────────────────────────


def language_on(device: torch.device) -> str:
    """Return the language of kernels on a device, or an empty string if there is none."""
    if runs_on(device):
        return TRITON
    if device.type == "cpu":
        return CPP
    return ""


def why_not(name: str, key: Any, device: torch.device, compare: Callable[[], bool]) -> str:
    """Return why a kernel cannot be used on a device, or an empty string.

    ``compare`` returns whether it has the bits of its definition. It is called once for a ``key``.
    """
    language = language_on(device)
    if not language:
        return f"there is no kernel for {device.type}"
    if language == CPP and not can_compile("library"):
        return "there is no compiler"
    if device.type == "cuda" and not can_compile("gpu"):
        return "there is no compiler"
    return prove(name, (key, device, language), language, compare)


def prove(name: str, key: Any, language: str, compare: Callable[[], bool]) -> str:
    """Return why a kernel cannot be used, or an empty string: compare it with its definition, once
    for a ``key``. Warn if it cannot be used.

    An error may pass, such as a full disk: then the next call compares again.
    """
    with _lock:
        if key in _reasons:
            return _reasons[key]
        is_final = True
        try:
            with usual_defaults():
                reason = ""
                if not compare():
                    reason = f"{language} compiles {name} to code that gives other bits"
        except Exception as error:  # a broken compiler must not stop a training run
            if _is_out_of_memory(error):
                raise  # another call may have the memory
            is_final = isinstance(error, CompilerError)
            line = str(error).partition("\n")[0][:160]
            reason = f"Cannot compile {name} ({type(error).__name__}: {line})"
        if is_final:
            _reasons[key] = reason
        if reason:
            factor = ""
            if language == CPP:
                factor = "about 25 times "
            warnings.warn(
                f"{reason}. It runs uncompiled: {factor}slower, with the same bits.", stacklevel=4
            )
        return reason


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed. On a CPU PyTorch raises a RuntimeError."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if "can't allocate memory" in str(error):
        return True
    return error.__cause__ is not None and _is_out_of_memory(error.__cause__)


def can_compile(place: Literal["cpu", "gpu", "library"]) -> bool:
    """Return whether functions for a CPU or GPU can be compiled here, or a library of C++.

    Warn once if not.
    """
    missing = ""  # a library may be built already
    if place == "gpu":
        missing = gpu_compiler_missing()
    elif place == "cpu":
        missing = compiler_missing()
    missing = switched_off() or missing
    if missing:
        _warn_once(missing)
    return not missing


@lru_cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"{reason}: steps and casts run uncompiled. They are slower and give the same bits; an "
        "audit's sums may differ in their last digits.",
        stacklevel=4,
    )
