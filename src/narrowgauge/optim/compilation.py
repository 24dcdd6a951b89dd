"""From definitions to compiled functions, cached in the process and on disk.

A kernel is compiled ahead of time, once per (graph, torch release, C++ compiler, processor, number of threads). Its package in
the user's cache folder is loaded by any later process in milliseconds. The name of a package is a hash of the traced graph and
of all else that it depends on. So an edited definition never runs an old kernel, and an edit that leaves the graph as it was
compiles nothing. A hash of the source's bytes says whether it was edited; an unchanged definition is not traced either.

A kernel is *proved* before it is cached: on values that occur and on edge values, it must give the same bits as its definition.
If it does not, whichever release of PyTorch or of the C++ compiler made it, the definition itself runs, and the cache remembers
that.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

import narrowgauge
from narrowgauge._torch.aligned import Loaded
from narrowgauge._torch.inductor import compile_ahead, load_ahead, machine_key, trace
from narrowgauge._torch.many_tensors import ManyTensors
from narrowgauge.machine.cache_folder import cache_folder
from narrowgauge.machine.child_processes import start_tied
from narrowgauge.machine.cpp_compiler import compiler_missing, compiler_version, gpu_compiler_missing
from narrowgauge.numerics.edge_values import edge_values, same_numbers, with_nan
from narrowgauge.optim.kernel_cache import (
    add_alias,
    add_package,
    alone,
    discard,
    find_key,
    find_package,
    is_refuted,
    marked,
    packages_folder,
    refute,
)

Compiled = Loaded


SOURCES = (
    "*.py",
    "_torch/*.py",
    *(f"machine/{name}.py" for name in ("cache_folder", "child_processes", "cpp_compiler", "processor")),
    *(f"spec/{name}.py" for name in ("formats", "frameworks", "rows", "significance", "storages", "sums")),
    "numerics/*.py",
    "optim/**/*.py",
)


def source_files() -> list[Path]:
    """Every file whose text a kernel is made from."""
    root = Path(narrowgauge.__file__).parent
    return sorted(path for pattern in SOURCES for path in root.glob(pattern))


@lru_cache
def source_key() -> str:
    digest = hashlib.sha256()
    for path in source_files():
        digest.update(path.read_bytes())
    return digest.hexdigest()


@lru_cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"{reason}: optimizer steps run uncompiled. They are slower and leave the same bits in weights and states; "
        "the audit's sums are added in another order, so its readings differ in their last digits.",
        stacklevel=3,
    )


@dataclass(frozen=True)
class Definition:
    """What a kernel is compiled from.

    Args:
        example: arguments to compile with, and to compare the loaded function with its definition on: values that occur.
        lengths: which arguments share a dynamic length, see :func:`narrowgauge._torch.inductor.trace`.
        one_loop: whether it is to be one loop, see there.
        edges: makes more arguments to prove a new kernel on: zeros, subnormals, ties, the largest, infinities, NaN.
        outputs: which arguments, by number, are given once more as the last ones, to be written in place. In an example these
            have memory of their own; a kernel is proved with theirs, since it must not read anew what it has written.
    """

    function: Callable[..., Tensor]
    example: Sequence[Tensor]
    lengths: Sequence[tuple[int | None, ...]]
    one_loop: bool = True
    edges: Callable[[], Sequence[Tensor]] | None = None
    outputs: Sequence[int] = ()

    def in_place(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """Copies of arguments, with the outputs where they are in use."""
        copies = [argument.clone() for argument in arguments]
        return [*copies[: len(copies) - len(self.outputs)], *(copies[number] for number in self.outputs)]


_KERNELS: dict[tuple[str, int, str], Compiled | None] = {}
"""The kernels of this process, by name, number of threads and device; ``None`` where one could not be compiled."""


def compiled(name: str, device: torch.device, define: Callable[[], Definition]) -> Compiled | None:
    """The compiled function of that name: of this process, else from the cache on disk, else compiled now.

    With the package's own source, the name (rule, storage, variant) identifies the function. ``define`` is called at most once
    per process. Where nothing can be compiled the result is ``None``, and one warning says why.

    Cost: 5 to 10 s the first time on a machine; milliseconds from the cache.
    """
    key = _kernel_of(name, device)
    if key not in _KERNELS:
        _KERNELS[key] = _load_or_compile(name, define())
    return _KERNELS[key]


def run_each(run: Compiled, batch: Sequence[list[Tensor]]) -> None:
    """Run a compiled function for the arguments of many tensors, in one launch where it can."""
    if isinstance(run, ManyTensors):
        run.each(batch)
    else:
        for arguments in batch:
            run(arguments)


def _kernel_of(name: str, device: torch.device) -> tuple[str, int, str]:
    return name, torch.get_num_threads(), str(device)


def alias_of(name: str, example: Sequence[Tensor]) -> str:
    """What finds a kernel without tracing: a hash of source code, the dtypes of its arguments, and this machine."""
    kinds = " ".join(f"{argument.dtype}" for argument in example)
    text = f"{name} {kinds} {source_key()} {machine_key(example[0].device)}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def example_words(device: torch.device) -> int:
    """The length of an example. Inductor chooses the blocks of a GPU, and how many share a reduction, by it."""
    return 1 << 10 if device.type == "cpu" else 1 << 18


def normal_words(dtype: torch.dtype, shape: Sequence[int], device: torch.device, seed: int = 0) -> Tensor:
    """Normal values of ``dtype`` as int32 words of ``shape``, for an example."""
    size = 4 // dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape[:-1], shape[-1] * size, dtype=torch.float32, generator=generator)
    return values.to(dtype).view(torch.int32).to(device)


def edge_words(dtype: torch.dtype, shape: Sequence[int], device: torch.device, seed: int = 0) -> Tensor:
    """:func:`normal_words` of edge values and NaNs."""
    values = edge_values(dtype, (*shape[:-1], shape[-1] * 4 // dtype.itemsize), seed=seed)
    return with_nan(values, seed).view(torch.int32).to(device)


def agrees(run: Compiled, definition: Definition, arguments: Sequence[Tensor], *, sums: bool = True) -> bool:
    """Whether a compiled function does what its definition does: writes the same bits, and returns the same result.

    A package may be damaged, or made by a faulty compiler. Two differences are allowed: which NaN a float tensor holds (in words
    it is one), and the last digits of a sum of floats. ``sums=False`` compares no sums of floats at all, for
    arguments whose terms overflow or cancel. The arguments are left as they were.
    """
    mine, theirs = (definition.in_place(arguments) for _ in range(2))
    wanted = definition.function(*mine)
    try:
        (found,) = run(list(theirs))
    except (RuntimeError, OSError):
        raise
    except Exception as error:  # of Triton, which compiles at the first call
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    if not all(map(same_numbers, mine, theirs)):
        return False
    if found.dtype is not wanted.dtype or found.shape != wanted.shape:
        return False
    if not wanted.is_floating_point():
        return torch.equal(found, wanted)
    largest = float(wanted.abs().nan_to_num(posinf=0.0).amax()) if wanted.numel() else 0.0
    return not sums or torch.allclose(found, wanted, rtol=1e-4, atol=1e-4 * largest, equal_nan=True)


def is_proved(run: Compiled, definition: Definition) -> bool:
    """Whether a new kernel :func:`agrees` with its definition, on the example and on edge values: 1 to 20 ms."""
    if not agrees(run, definition, definition.example):
        return False
    return definition.edges is None or agrees(run, definition, definition.edges(), sums=False)


@contextlib.contextmanager
def _float32_by_default() -> Iterator[None]:
    """The compiler gives some constants of a definition the default dtype, which belongs to the user."""
    chosen = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(chosen)


announce: list[Callable[[], None]] = []
"""Callbacks that are called before each kernel that is compiled, which takes seconds."""
_ELSEWHERE: dict[str, subprocess.Popen[bytes]] = {}


def compile_elsewhere(name: str, device: torch.device, define: Callable[[], Definition], statement: str) -> None:
    """Start compiling in another process, which ends with this one, so that a kernel needed later costs no time now.

    ``statement`` is the Python that compiles this kernel there; the rest is as for :func:`compiled`.
    """
    if _kernel_of(name, device) in _KERNELS or _missing(device):
        return
    alias = alias_of(name, define().example)
    if alias in _ELSEWHERE:
        return
    try:
        if (key := _find_key(alias)) and (find_package(key) or is_refuted(key)):
            return
    except OSError:
        return  # reported when the kernel is needed
    try:
        _ELSEWHERE[alias] = start_tied(["import torch", f"torch.set_num_threads({torch.get_num_threads()})", statement])
    except OSError:
        return  # it will be compiled here, when it is needed


def _missing(device: torch.device) -> str:
    """Why no kernel for a device can be compiled here, or an empty string."""
    return compiler_missing() if device.type == "cpu" else gpu_compiler_missing()


def _load_or_compile(name: str, definition: Definition) -> Compiled | None:
    alias = alias_of(name, definition.example)
    if alias in _ELSEWHERE:
        _ELSEWHERE.pop(alias).wait()
    run: Compiled | None = None
    try:
        key = _find_key(alias)
        run = _load(key, definition) if key else None
        if run is None and not (key and is_refuted(key)):
            if missing := _missing(definition.example[0].device):
                _warn_once(missing)
                return None
            run = _trace_and_compile(alias, definition)
        if run is None:
            _warn_once(
                f"PyTorch {torch.__version__} and {compiler_version()} make a kernel that does not match its definition "
                f"(remembered in {cache_folder() / 'kernels'} until either is updated)"
            )
    except (RuntimeError, OSError) as error:
        # A broken compiler or a full disk must not stop a training run: the definition itself still runs.
        reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
        _warn_once(f"compiling into {cache_folder() / 'kernels'} failed ({reason})")
    return run


def _find_key(alias: str) -> str | None:
    """The key under an alias; where nothing can be compiled into the folder, the key of any compiler."""
    key = find_key(alias, compiler_version())
    return key if key or os.access(packages_folder(), os.W_OK) else find_key(alias, "")


def _trace_and_compile(alias: str, definition: Definition) -> Compiled | None:
    """The kernel of a definition without a usable package under its alias; ``None`` where the compiled code is wrong."""
    with _float32_by_default():
        program = trace(definition.function, definition.example, definition.lengths, definition.one_loop)
        try:
            key = program.key(compiler_version())
        except (ValueError, AttributeError):
            key = alias  # of a graph without a text, or in a release that keeps graphs otherwise, only the source is known
        add_alias(alias, compiler_version(), key)
        run = _load(key, definition)
        if run is not None or is_refuted(key):
            return run
        with alone(key) as made:
            run = _load(key, definition)  # another process may have been quicker
            if run is None and not is_refuted(key):
                for tell in announce:
                    tell()
                compile_ahead(program, made)
                run = _prove(key, definition, made)
        return run


def _prove(key: str, definition: Definition, made: Path) -> Compiled | None:
    """The kernel of a new package, which joins the cache; ``None``, for later processes too, where it is wrong."""
    run = load_ahead(made)
    if is_proved(run, definition):
        add_package(key, made)
        return run
    refute(key)
    return None


def _load(key: str, definition: Definition) -> Compiled | None:
    """The kernel of a package on disk; ``None`` where none can be loaded and is right."""
    path = find_package(key)
    if path is None:
        return None
    try:
        with marked(path):
            run = load_ahead(path)
            # It was proved when it was made, and here the libraries may be others: the example shows whether it works.
            if agrees(run, definition, definition.example):
                return run
    except RuntimeError:  # from a machine with other libraries
        pass
    discard(path)
    return None
