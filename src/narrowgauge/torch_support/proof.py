"""Proof at first use: a kernel, or compiled code, is compared with its definition once.

A compiler may flush subnormals, drop a rounding, fuse a multiplication with an addition, divide
approximately or reorder a comparison. On most values this changes at most the last bit. *Edge
values* expose it: random bits, which have every magnitude and sign; half have short
mantissas: so many are ties between two values of a lower-precision format.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import warn_caller
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
    """
    generator = torch.Generator().manual_seed(seed)

    def below(limit: int) -> Tensor:
        return torch.randint(limit, tuple(shape), generator=generator)

    if not dtype.is_floating_point:
        bits = below(1 << 62) << 2 ^ below(1 << 62)
        return bits & 1 == 1 if dtype is torch.bool else bits.to(dtype)
    if not edges:
        return torch.randn(*shape, generator=generator).to(dtype)
    if dtype.itemsize == 1:
        return draw(torch.bfloat16, shape, edges=True, seed=seed, finite=finite).to(dtype)
    kind = INTEGERS[dtype.itemsize]
    bits = draw(kind, shape, edges=True, seed=seed)
    short = below(8 * dtype.itemsize - 2).to(kind)
    bits = torch.where(below(2) == 0, bits, bits >> short << short)
    infinity = int(torch.tensor(torch.inf, dtype=dtype).view(kind))
    last = torch.iinfo(kind).max
    listed = torch.tensor([0, 1, infinity - 1, infinity, infinity + 1, last], dtype=kind)
    chosen = listed[below(len(listed))] | (bits & torch.iinfo(kind).min)
    values = torch.where(below(8) == 0, chosen, bits).view(dtype)
    return torch.where(values.isfinite() | (not finite), values, 1)


def first_difference(name: str, actual: Tensor, expected: Tensor) -> str:
    """Return where a tensor first differs from its definition, both values, and how many elements
    differ; an empty string if it has the same bits.

    Any NaN of a float tensor equals any other.

    Example:
        >>> first_difference("exp_avg", torch.tensor([1.0, 0.5]), torch.tensor([1.0, 0.25]))
        "exp_avg[1] is 0.5 and the definition's 0.25; 1 of 2 differ"
    """
    if actual.dtype is not expected.dtype or actual.shape != expected.shape:
        return f"{name} has another dtype or shape than the definition's"
    kind = INTEGERS[expected.dtype.itemsize]
    differs = actual.view(kind) != expected.view(kind)
    if expected.is_floating_point():
        differs &= ~(actual.isnan() & expected.isnan())
    if not differs.any():
        return ""
    place = differs.nonzero()[0].tolist()
    values = [x.double()[tuple(place)].item() for x in (actual, expected)]
    return (
        f"{name}{place or ''} is {values[0]:.9g} and the definition's {values[1]:.9g}; "
        f"{int(differs.sum())} of {differs.numel()} differ"
    )


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


def why_not(name: str, key: Any, device: torch.device, compare: Callable[[], str]) -> str:
    """Return why a kernel cannot be used on a device, or an empty string.

    ``compare`` returns its first difference from its definition. It is called once for a ``key``.
    """
    language = language_on(device)
    if not language:
        return f"a kernel for {device.type} is missing"
    return prove(name, (key, device, language), language, compare)


def prove(name: str, key: Any, language: str, compare: Callable[[], str]) -> str:
    """Return why a kernel cannot be used, or an empty string: compare it with its definition, once
    for a ``key``. Warn if it cannot be used.

    A full disk may pass: then the next call compares again.
    """
    with _lock:
        if key in _reasons:
            return _reasons[key]
        is_final = True
        try:
            with usual_defaults():
                reason = compare()
            if reason:
                reason = f"{language} and the definition differ in {name}: {reason}"
        except Exception as error:  # a broken compiler must not stop a training run
            if isinstance(error, MemoryError | torch.OutOfMemoryError):
                raise  # another call may have the memory
            is_final = not isinstance(error, OSError)
            line = str(error).partition("\n")[0][:160]
            reason = f"Cannot run {name} ({type(error).__name__}: {line})"
        if is_final:
            _reasons[key] = reason
        if reason:
            factor = ""
            if language == CPP:
                factor = "about 25 times "
            warn_caller(f"{reason}. The definition runs: {factor}slower, with its own bits.")
        return reason
