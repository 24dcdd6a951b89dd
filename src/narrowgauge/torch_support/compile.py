"""Compile functions of tensors into one loop, and check the result against the function before use.

A function is traced with symbolic sizes and compiled by PyTorch's Inductor, without Dynamo. A call
then costs 10 µs, with ``torch.compile`` 30, and the loop is the same. Inductor caches compiled code
on disk. At the first use of each pattern of arguments, compiled code runs on ordinary and on edge
values. If its bits differ from the function's, the function runs uncompiled, with one warning.

Private names of PyTorch, why, and alternatives:

``torch._inductor.compile``, ``torch.fx.experimental.proxy_tensor.make_fx``
    Compile a graph that Dynamo did not capture. Instead: ``torch.compile(function, dynamic=True)``,
    20 µs more a call.
``torch._subclasses.FakeTensorMode``, ``FakeTensor.fake_device``, ``ShapeEnv.produce_guards_expression``
    Trace without memory, give each size its own symbol, and find the sizes that the graph supports.
    Instead: as above.
Options of ``torch._inductor.config``
    One loop for each function; the roundings of eager mode. Options that a release lacks are
    omitted.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from narrowgauge.torch_support.edge_values import draw, same_numbers
from narrowgauge.torch_support.inductor import quiet
from narrowgauge.torch_support.machine import (
    compiler_missing,
    compiler_name,
    gpu_compiler_missing,
    switched_off,
)
from narrowgauge.torch_support.torch_names import is_traced

COMPILE_ELEMENTS = 1 << 18
"""On a CPU, compile for at least this many elements.

Fewer do not win back the seconds of compiling.
"""
MOST_VERSIONS = 8
"""Compiled versions of one function for one pattern of arguments, each for other sizes.

With more, it runs uncompiled.
"""
SMALL_SIDE = 256
"""Shorten longer sides to about this to compare compiled code with its function."""

_ON_CPU: dict[str, Any] = {
    "size_asserts": False,  # 3 µs a call
    "cpp.vec_isa_ok": True,  # otherwise three test programs are compiled, 3.5 s; a wrong answer fails to compile
    "cpp.min_chunk_size": 1,  # sizes are symbols: use all threads whatever the first call's size
}
# On CUDA the defaults divide approximately and flush subnormals.
_AS_EAGER: dict[str, Any] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}
# Make no constant on the device. Do not time variants: they would step the weights.
_ON_GPU: dict[str, Any] = {
    **_AS_EAGER,
    "joint_graph_constant_folding": False,
    "triton.autotune_pointwise": False,
    "max_autotune": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
}
_VECTOR_BITS = {"DEFAULT": 1, "AVX2": 256, "AVX512": 512}
"""By PyTorch's name of the instructions it uses here, which ``ATEN_CPU_CAPABILITY`` may limit.

Part of Inductor's cache key.
"""


class Compiled:
    """Hold a compiled function and the sizes that its trace supports."""

    def __init__(self, call: Callable[..., Any], guards: str) -> None:
        self._call = call
        self._guards = compile(guards or "True", "<sizes>", "eval")
        self._accepted: set[tuple[torch.Size, ...]] = set()

    def __call__(self, *arguments: Tensor) -> Any:
        return self._call(*arguments)

    def accepts(self, arguments: Sequence[Tensor]) -> bool:
        """Return whether the trace supports arguments of these sizes."""
        sizes = tuple([argument.shape for argument in arguments])
        if sizes in self._accepted:
            return True
        from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

        names = {f"t{k}": argument for k, argument in enumerate(arguments)}
        if not eval(self._guards, SYMPY_INTERP, {"L": names}):
            return False
        self._accepted.add(sizes)
        return True


_COMPILED: dict[tuple[Any, ...], list[Compiled | None]] = {}
_lock = threading.RLock()  # Inductor compiles in one thread at a time


class Outcome(NamedTuple):
    """Hold compiled code, or ``None``.

    An error may pass, so it ``is_final`` only if the code was compared.
    """

    code: Compiled | None
    is_final: bool


def fused(size: int, function: Callable[..., Any], *arguments: Tensor | None) -> Any:
    """Call a function, compiled if ``size`` elements are enough to pay for it.

    Each function is compiled once for a pattern. So pass the same function object for the same
    lines and constants.
    """
    if is_traced():  # before sizes are compared: a comparison makes a symbol a constant
        return function(*arguments)
    place = place_of(arguments)
    is_small = place == "cpu" and size < COMPILE_ELEMENTS
    if is_small or not can_compile(place):
        return function(*arguments)
    return compiled_for_pattern(function, *arguments)


def compiled_for_pattern(function: Callable[..., Any], *arguments: Tensor | None) -> Any:
    """Call a function compiled for this pattern of arguments and any size."""
    tensors = present(arguments)
    run = compiled(function, arguments)
    with torch.no_grad():
        return function(*arguments) if run is None else run(*tensors)


def compiled(function: Callable[..., Any], arguments: Sequence[Tensor | None]) -> Compiled | None:
    """Return a function of tensors compiled for arguments like these, or ``None`` if that fails.

    Args:
        function: pure except for writing into its arguments, without Python branches on values.
        arguments: arguments of the first call. A compiled function takes those that are not
            ``None``.
    Cost: 5 to 15 s the first time on a machine, under a second from Inductor's cache.
    """
    tensors = present(arguments)
    versions = _COMPILED.setdefault((function, _pattern(arguments), torch.get_num_threads()), [])
    for version in versions:
        if version is None or version.accepts(tensors):
            return version
    with _lock:
        for version in versions:  # another thread may have compiled it
            if version is None or version.accepts(tensors):
                return version
        if len(versions) == MOST_VERSIONS:
            versions[:] = [None]
            _warn_once(f"{_name(function)} was compiled for {MOST_VERSIONS} kinds of sizes")
            return None
        outcome = _compile_and_compare(function, arguments)
        if outcome.is_final:
            versions.append(outcome.code)
        return outcome.code


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


def _compile_and_compare(
    function: Callable[..., Any], arguments: Sequence[Tensor | None]
) -> Outcome:
    if not can_compile(place_of(arguments)):
        return Outcome(None, False)
    tensors = present(arguments)

    def of_tensors(*values: Tensor) -> Any:
        queue = list(values)
        filled = []
        for argument in arguments:
            filled.append(None if argument is None else queue.pop(0))
        return function(*filled)

    is_same = True
    try:
        with torch.no_grad(), quiet(), usual_defaults():  # the first call still compiles
            run = _compiled_code(of_tensors, tensors)
            for case in _cases(run, tensors):
                is_same &= matches(run, of_tensors, case)
    except Exception as error:  # a broken compiler or a full disk must not stop a training run
        if _is_out_of_memory(error):
            raise  # not the compiler's fault: another call may have the memory
        why = "a signal stopped the compiler"
        if not _is_stopped(error):
            line = str(error).partition("\n")[0][:160]
            why = f"{type(error).__name__}: {line}"
        _warn_once(f"Cannot compile {_name(function)} ({why})")
        return Outcome(None, False)
    if is_same:
        return Outcome(run, True)
    _warn_once(
        f"PyTorch {torch.__version__} compiles {_name(function)} to code that gives other bits"
    )
    return Outcome(None, True)


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


def _compiled_code(function: Callable[..., Any], arguments: Sequence[Tensor]) -> Compiled:
    """Trace a function with symbolic sizes and compile the graph.

    Trace tensors without memory, of the arguments' sizes and strides. Compiled code reads a tensor
    at its own address, so guards on the offset in a storage say nothing.
    """
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    sizes = ShapeEnv(duck_shape=False)  # sides of equal length are different symbols
    mode = FakeTensorMode(shape_env=sizes)
    fakes: list[Any] = []
    for argument in arguments:
        empty = torch.empty_strided(
            argument.shape, argument.stride(), dtype=argument.dtype, device="meta"
        )
        fakes.append(mode.from_tensor(empty))
        fakes[-1].fake_device = argument.device
    graph = make_fx(function, tracing_mode="symbolic")(*fakes)
    call = torch._inductor.compile(graph, list[Any](fakes), options=options(arguments[0].device))
    guards = sizes.produce_guards_expression(fakes, ignore_static=False) or ""
    kept_guards = [guard for guard in guards.split(" and ") if "storage_offset" not in guard]
    return Compiled(call, " and ".join(kept_guards))


def options(device: torch.device) -> dict[str, Any]:
    """Return Inductor's options for a device, without those that this release lacks."""
    from torch._inductor import config

    chosen = dict(_ON_GPU)
    if device.type == "cpu":
        bits = _VECTOR_BITS.get(torch.backends.cpu.get_cpu_capability())
        chosen = {**_ON_CPU, "cpp.threads": torch.get_num_threads()}
        if bits:
            chosen["cpp.simdlen"] = bits
        flags = _machine_flags(bits)
        if flags:
            chosen["cpp.march"] = flags
    for name in list(chosen):
        folder, _, option = name.rpartition(".")
        place = getattr(config, folder, None) if folder else config
        if not hasattr(place, option):
            del chosen[name]
    return chosen


@lru_cache
def _machine_flags(bits: int | None) -> str:
    """Return the value of ``-march=``, with flags for g++ 12 and later that loops of many constants
    need.

    Copy a vector by one move: g++ may copy two halves, and a load of the whole waits for both (4
    times the time of a step). Keep constants in memory, since g++ rebuilds them in each iteration.
    Schedule, since independent chains follow one another.
    """
    if not bits or bits < 256:
        return ""
    flags = [
        f"-mmove-max={bits}",
        f"-mstore-max={bits}",
        "-mtune-ctrl=^inter_unit_moves_to_vec",
        "-fschedule-insns",
        "-fsched-pressure",
    ]
    command = [compiler_name(), *flags, "-fsyntax-only", "-x", "c++", "/dev/null"]
    with contextlib.suppress(OSError):
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return " ".join(["native", *flags])
    return ""


# ── the comparison ────────────────────────────────────────────────────────────────────────────────


def matches(run: Callable[..., Any], function: Callable[..., Any], case: Sequence[Tensor]) -> bool:
    """Return whether compiled code returns and writes the same bits as its function.

    NaN bits of a float may differ. The arguments of the case do not change.
    """
    ours = [argument.clone() for argument in case]
    theirs = [argument.clone() for argument in case]
    expected = [*_tensors(function(*ours)), *ours]
    actual = [*_tensors(run(*theirs)), *theirs]
    return all(same_numbers(x, y) for x, y in zip(actual, expected, strict=True))


def _tensors(result: Any) -> list[Tensor]:
    """Return the tensors of a result.

    A function that only writes into its arguments returns ``None``.
    """
    return present(torch.utils._pytree.tree_leaves(result))


def present(values: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the values that are not ``None``."""
    return [value for value in values if value is not None]


def _cases(run: Compiled, arguments: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Draw ordinary and edge values of the arguments' dtypes.

    Shorten sides if the trace supports it.
    """
    for edges in (False, True):
        case = []
        for seed, x in enumerate(arguments):
            case.append(_drawn_like(x, list(map(_cut, x.shape)), edges, seed))
        if not run.accepts(case):
            case = []
            for seed, x in enumerate(arguments):
                case.append(_drawn_like(x, x.shape, edges, seed))
        yield case


def _cut(side: int) -> int:
    if side <= 2 * SMALL_SIDE:
        return side
    return SMALL_SIDE + side % SMALL_SIDE


def _drawn_like(like: Tensor, shape: Sequence[int], edges: bool, seed: int) -> Tensor:
    """Draw a tensor with another's memory order.

    Keep tensors with few values, such as scales and seeds.
    """
    if like.numel() <= 16:
        return like.clone()
    order = sorted(range(like.ndim), key=like.stride, reverse=True)
    values = draw(like.dtype, [shape[dim] for dim in order], edges=edges, seed=seed)
    return values.to(like.device).permute([order.index(dim) for dim in range(like.ndim)])


# ── patterns and surroundings ─────────────────────────────────────────────────────────────────────


def _pattern(arguments: Sequence[Tensor | None]) -> tuple[Any, ...]:
    patterns: list[Any] = []
    for x in arguments:
        if x is None:
            patterns.append(None)
            continue
        sides = tuple([min(side, 2) for side in x.shape])
        patterns.append((x.dtype, x.device, sides, x.is_contiguous()))
    return tuple(patterns)


def place_of(arguments: Sequence[Tensor | None]) -> Literal["cpu", "gpu"]:
    return "cpu" if present(arguments)[0].is_cpu else "gpu"


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


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
