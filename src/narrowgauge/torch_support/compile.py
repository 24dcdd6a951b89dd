"""Run functions of tensors as ``torch.compile`` compiles them, and as they are where that gives
other bits.

At the first use of each pattern of dtypes, compiled code runs on ordinary and on edge values. If
its bits differ from the function's, the function runs uncompiled, with one warning.

Options of ``torch._inductor.config`` make a GPU round as eager mode does. A release may lack some
of them.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from narrowgauge.torch_support.edge_values import draw, same_numbers
from narrowgauge.torch_support.machine import (
    compiler_missing,
    gpu_compiler_missing,
    switched_off,
)
from narrowgauge.torch_support.torch_names import is_traced

COMPILE_ELEMENTS = 1 << 18
"""On a CPU, compile for at least this many elements.

Fewer do not win back the seconds of compiling.
"""
SMALL_SIDE = 256
"""Shorten longer sides to about this to compare compiled code with its function."""

# On CUDA the defaults divide approximately and flush subnormals.
_ON_GPU = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}


def fused(size: int, function: Callable[..., Any], *arguments: Tensor | None) -> Any:
    """Call a function, compiled if ``size`` elements are enough to pay for it.

    Pass the same function object for the same lines and constants: each is compiled once.
    """
    # Before sizes are compared: a comparison would bind a traced length to one side of the bound.
    if is_traced():
        return function(*arguments)
    place = place_of(arguments)
    is_small = place == "cpu" and size < COMPILE_ELEMENTS
    if is_small or not can_compile(place):
        return function(*arguments)
    return compiled(function, place)(*arguments)


@lru_cache(None)
def compiled(function: Callable[..., Any], place: Literal["cpu", "gpu"] = "cpu") -> Compiled:
    """Return a function compiled for arguments of any size. Its first call takes seconds.

    Args:
        function: pure except for writing into its arguments, without Python branches on values.
    """
    return Compiled(function, options() if place == "gpu" else {})


class Compiled:
    """Call compiled code where it has the bits of its function, and elsewhere the function."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        def call(*arguments: Tensor | None) -> Any:
            return function(*arguments)

        # Code that was compiled before is looked up, and counted, by the code object.
        alone = types.FunctionType(
            call.__code__.replace(co_name=_name(function)),
            globals(),
            _name(function),
            None,
            call.__closure__,
        )
        self.function = function
        self.run: Callable[..., Any] = torch.compile(alone, dynamic=True, options=options)
        self._is_equal: dict[tuple[Any, ...], bool] = {}  # by the pattern of the arguments

    def __call__(self, *arguments: Tensor | None) -> Any:
        # A Parameter would be compiled anew.
        plain = [x if x is None else x.detach() for x in arguments]
        with torch.no_grad():
            if self.is_equal(plain):
                return self.run(*plain)
            return self.function(*plain)

    def is_equal(self, arguments: Sequence[Tensor | None]) -> bool:
        """Return whether compiled code gives the function's bits. Compare at the first use."""
        pattern = tuple([x if x is None else (x.dtype, x.ndim) for x in arguments])
        if pattern not in self._is_equal:
            try:
                self._is_equal[pattern] = self._compare(arguments)
            except Exception as error:  # a broken compiler or a full disk must not stop a run
                if _is_out_of_memory(error):
                    raise  # not the compiler's fault: another call may have the memory
                why = "a signal stopped the compiler"
                if not _is_stopped(error):
                    line = str(error).partition("\n")[0][:160]
                    why = f"{type(error).__name__}: {line}"
                _warn_once(f"Cannot compile {_name(self.function)} ({why})")
                return False
            if not self._is_equal[pattern]:
                name = _name(self.function)
                _warn_once(f"PyTorch compiles {name} to code that gives other bits")
        return self._is_equal[pattern]

    def _compare(self, arguments: Sequence[Tensor | None]) -> bool:
        with quiet():
            cut = _cut if _takes_shorter(self.function, arguments) else int
            for edges in (False, True):
                if not matches(self.run, self.function, _case(arguments, edges, cut)):
                    return False
        return True


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
        "audit's sums may differ in "
        "their last digits.",
        stacklevel=4,
    )


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed. On a CPU PyTorch raises a RuntimeError."""
    is_memory = isinstance(
        error, MemoryError | torch.OutOfMemoryError
    ) or "can't allocate memory" in str(error)
    return is_memory or (error.__cause__ is not None and _is_out_of_memory(error.__cause__))


def _is_stopped(error: BaseException) -> bool:
    """Return whether a signal ended the compiler's process: an interruption of the run reaches it
    too.
    """
    is_signal = isinstance(error, subprocess.CalledProcessError) and error.returncode < 0
    return is_signal or (error.__cause__ is not None and _is_stopped(error.__cause__))


def options() -> dict[str, Any]:
    """Return Inductor's options for a GPU, without those that this release lacks."""
    from torch._inductor import config

    present = {}
    for name, value in _ON_GPU.items():
        folder, _, option = name.rpartition(".")
        if hasattr(getattr(config, folder, None) if folder else config, option):
            present[name] = value
    return present


# ── the comparison ────────────────────────────────────────────────────────────────────────────────


def matches(
    run: Callable[..., Any], function: Callable[..., Any], case: Sequence[Tensor | None]
) -> bool:
    """Return whether compiled code returns and writes the same bits as its function.

    NaN bits of a float may differ. The arguments of the case do not change.
    """
    ours = [x if x is None else x.clone() for x in case]
    theirs = [x if x is None else x.clone() for x in case]
    expected = [*_tensors(function(*ours)), *present(ours)]
    actual = [*_tensors(run(*theirs)), *present(theirs)]
    return all(same_numbers(x, y) for x, y in zip(actual, expected, strict=True))


def _tensors(result: Any) -> list[Tensor]:
    """Return the tensors of a result.

    A function that only writes into its arguments returns ``None``.
    """
    return present(torch.utils._pytree.tree_leaves(result))


def present(values: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the values that are not ``None``."""
    return [value for value in values if value is not None]


def _takes_shorter(function: Callable[..., Any], arguments: Sequence[Tensor | None]) -> bool:
    """Return whether a function takes arguments whose long sides are shortened, each by itself."""
    try:
        function(*_case(arguments, False, _cut))
    except (RuntimeError, ValueError):
        return False
    return True


def _case(
    arguments: Sequence[Tensor | None], edges: bool, cut: Callable[[int], int]
) -> list[Tensor | None]:
    case: list[Tensor | None] = []
    with usual_defaults():
        for seed, x in enumerate(arguments):
            case.append(x if x is None else _drawn_like(x, edges, seed, cut))
    return case


def _drawn_like(like: Tensor, edges: bool, seed: int, cut: Callable[[int], int]) -> Tensor:
    """Draw a tensor with another's dtype and memory order, with sides that are cut.

    Keep tensors with few values, such as scales and seeds.
    """
    if like.numel() <= 16:
        return like.clone()
    order = sorted(range(like.ndim), key=like.stride, reverse=True)
    values = draw(like.dtype, [cut(like.shape[dim]) for dim in order], edges=edges, seed=seed)
    return values.to(like.device).permute([order.index(dim) for dim in range(like.ndim)])


def _cut(side: int) -> int:
    if side <= 2 * SMALL_SIDE:
        return side
    return SMALL_SIDE + side % SMALL_SIDE


def place_of(arguments: Sequence[Tensor | None]) -> Literal["cpu", "gpu"]:
    return "cpu" if present(arguments)[0].is_cpu else "gpu"


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the compiler's own deprecation warnings and banners."""
    level = logging.getLogger("torch").level
    logging.getLogger("torch").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.getLogger("torch").setLevel(level)


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
