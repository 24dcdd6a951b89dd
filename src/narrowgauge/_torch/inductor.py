"""Every name of PyTorch's compiler that we use and that PyTorch does not promise to keep, with the reason and the way out.

``torch._inductor.aoti_compile_and_package``
    One fused loop from the definition, 3 us a call where ``torch.compile`` takes 20. The way out: ``torch.compile``.
``torch._inductor.aoti_load_package(…).loader.boxed_run``
    Calls the package without 10 us of tree flattening. The way out: calling the package itself.
Option names of ``torch._inductor.config``
    Keep every reduction in one loop; round as eager mode does on CUDA; separate the cache on disk by the length of vectors. The
    way out: eager kernels, and a ``TORCHINDUCTOR_CACHE_DIR`` for each value of ``ATEN_CPU_CAPABILITY``.
``types.CodeType.replace`` under ``torch.compile``
    Dynamo counts how often it recompiled a *code object* and gives up after eight; one definition compiled for many casts
    needs a code object for each. The way out: raising ``torch._dynamo.config.recompile_limit``.
``torch._dynamo.config.skip_nnmodule_hook_guards``, ``torch._dynamo.config.recompile_limit``
    By default code that was compiled before a hook was attached ignores the hook, and is compiled eight times at most. The way
    out: attaching before compiling; ``torch.compiler.reset`` between models.
``torch._inductor.exc.InductorError`` (``inner_exception``: ``CppCompileError.output``, ``InvalidCxxCompiler``)
    What the C++ compiler said, out of PyTorch's report of 150 lines. The way out: the whole report.
``torch.utils._filelock.FileLock``, and ``locks/KEY.lock`` in Inductor's folder
    Held while a file whose name begins with the key is compiled, so that no unfinished file is mistaken for a torn one. The way
    out: leaving torn files, which end the process that loads them by SIGBUS.
``torch.backends.cpu.get_cpu_capability``
    Which vector instructions PyTorch uses here: kernels are compiled for exactly those. The way out: Inductor's default, code
    for this very processor, and a kernel cache for each kind of processor.
``torch._inductor.cpu_vec_isa.valid_vec_isa_list``, ``VecAVX2``, ``VecAVX512``; ``torch._inductor.cpp_builder.get_cpp_compiler``
    Where Inductor looks up vector instructions and the compiler flags that go with them. The way out: as above.
``torch._inductor.codegen.cpp.CppVecOverrides``, ``torch._inductor.virtualized.V`` (``kernel``, ``interpreter``)
    What Inductor writes for an operation on vectors, and the graph it writes from: shifts and casts become single
    instructions. The way out: what it writes by itself, a third slower with AVX2.

Where a release has renamed one of these, its way out is taken, or the kernel's definition runs uncompiled with one warning
that names what is missing. All compiled code is compared with its definition before it is used.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import logging
import os
import platform
import re
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge._torch import many_tensors, triton_code
from narrowgauge._torch.aligned import Loaded
from narrowgauge.machine.cpp_compiler import compiled_folder, is_torn
from narrowgauge.machine.processor import instruction_sets

if TYPE_CHECKING:
    from torch.export import ExportedProgram

# One loop of any length: each threshold makes Inductor write an intermediate to memory, and a fresh buffer of a
# large tensor's size costs more in page faults than the whole step (measured: 4 to 10 times).
_ONE_LOOP: dict[str, Any] = {
    "realize_reads_threshold": 1000,
    "realize_acc_reads_threshold": 1000,
    "realize_opcount_threshold": 100_000,
    "cpp.max_horizontal_fusion_size": 128,
}
# Inductor otherwise compiles three test programs to see whether the compiler knows the vector instructions that the
# processor reports, 3.5 s once per process; a compiler that does not know them fails, and the kernel is compiled again.
_TRUST_COMPILER: dict[str, Any] = {"cpp.vec_isa_ok": True}
# What ATEN_CPU_CAPABILITY limits Inductor's vectors to, in bits; 1 for none.
_LIMITED_VECTORS = {"default": 1, "avx2": 256}
# On CUDA the defaults divide approximately and flush subnormals; the definition does neither.
_AS_EAGER: dict[str, Any] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}
# A kernel of a GPU, besides: no constant computed on the device; and one choice of blocks, whatever the user has set for other
# code, since what measured several would step the weights that it is given.
_GPU_KERNEL: dict[str, Any] = {
    **_AS_EAGER,
    "joint_graph_constant_folding": False,
    "triton.autotune_pointwise": False,
    "triton.multi_kernel": 0,
    "triton.enable_pdl": False,
    "max_autotune": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "dynamic_scale_rblock": False,
    "combo_kernels": False,
    "profile_bandwidth": False,
}


@dataclass(frozen=True, slots=True)
class _Level:
    """Vector instructions that kernels are compiled for.

    Args:
        march: what g++ and clang call a processor that has exactly these.
        vectors: the class of ``torch._inductor.cpu_vec_isa``.
        tuning: more flags for g++ 12 and later; other compilers need none. Copy a vector by one move: for an unknown
            processor g++ copies two halves, and a load of the whole then waits for both stores, 4 times the time of a
            step. Keep constants in memory: g++ otherwise builds them in each iteration of a loop that has more of them
            than there are registers, by three instructions each.
    """

    march: str
    vectors: str
    tuning: tuple[str, ...]


_LEVELS = {
    "AVX2": _Level(
        "x86-64-v3", "VecAVX2", ("-mmove-max=256", "-mstore-max=256", "-mtune-ctrl=^inter_unit_moves_to_vec")
    ),
    "AVX512": _Level("x86-64-v4", "VecAVX512", ("-mmove-max=512", "-mstore-max=512")),
}
"""By what PyTorch calls them."""


def _level() -> _Level | None:
    """What kernels are compiled for here; ``None`` for all that this processor has."""
    x86 = sys.platform == "linux" and platform.machine() == "x86_64"
    return _LEVELS.get(torch.backends.cpu.get_cpu_capability()) if x86 else None


def _built_for() -> str:
    """Every instruction set that the compiler may use in a kernel: that of a level, or all that the processor has."""
    if level := _level():
        return level.march
    return " ".join(sorted(instruction_sets())) or platform.processor()


def machine_key(device: torch.device) -> str:
    """What compiled code depends on besides its source: torch, and instruction sets and number of threads, or the GPU."""
    if device.type != "cpu":
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        return f"{torch.__version__} {device} {name}"
    capability = torch.backends.cpu.get_cpu_capability()
    instructions = f"{platform.machine()} {capability} {_built_for()}"
    return f"{torch.__version__} {instructions} {torch.get_num_threads()}"


@dataclass(frozen=True)
class Program:
    """A traced function, whose dynamic lengths are symbols, and Inductor's options."""

    exported: ExportedProgram
    options: Mapping[str, Any]
    device: torch.device

    def key(self, compiler: str) -> str:
        """A hash of what is compiled: the graph, the options, this machine, and what this module changes in Inductor.

        ``compiler`` is :func:`narrowgauge.machine.cpp_compiler.compiler_version`'s.

        Raises:
            ValueError: the graph holds what :func:`graph_text` cannot write.
        """
        place = machine_key(self.device)
        parts = [
            *graph_text(self.exported),
            repr(sorted(self.options.items())),
            place,
            own_code(self.device.type),
            compiler,
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def trace(
    function: Callable[..., Tensor],
    example: Sequence[Tensor],
    lengths: Sequence[tuple[int | None, ...]],
    one_loop: bool = True,
) -> Program:
    """Trace ``function`` to a graph that takes tensors of any length.

    Args:
        function: pure but for writing into its arguments.
        example: arguments; those of dynamic length must be at least 2 long.
        lengths: for each argument and each of its dims, which dynamic length it has (equal numbers, equal lengths),
            ``None`` for fixed; ``()`` where all are.
        one_loop: write no intermediate to memory. The compiler goes over an expression once for each path through it, so
            deep ones with many reused values take it hours; those are cut into loops, for arguments that fit the cache.
    Raises:
        RuntimeError: it cannot be traced here, or this release has renamed what traces it.
    Cost: 0.3 to 1.5 s, the first in a process 2 s more.
    """
    device = example[0].device
    dims = {k: torch.export.Dim(f"n{k}", min=2, max=1 << 40) for own in lengths for k in own if k is not None}
    shapes = tuple({dim: dims[k] for dim, k in enumerate(own) if k is not None} or None for own in lengths)
    with quiet(), _names_kept():
        general = {} if device.type == "cpu" else _GPU_KERNEL
        options = known_options({**general, **(_ONE_LOOP if one_loop else {})})
        exported = torch.export.export(_Module(function), tuple(example), dynamic_shapes=(shapes,))
    return Program(exported, options, device)


def compile_ahead(program: Program, path: Path) -> None:
    """Compile a program to a package at ``path``: native code for a CPU, the text of Triton kernels for a GPU.

    Raises:
        RuntimeError: it cannot be compiled here, or this release has renamed what compiles it.
    """
    options = dict(program.options)
    if program.device.type != "cpu":
        with quiet(), _names_kept():
            path.write_text(triton_code.triton_code(program.exported, options), encoding="utf-8")
        return
    with quiet(), _names_kept(), _for_level(), _few_instructions():
        torch._inductor.aoti_compile_and_package(program.exported, package_path=str(path), inductor_configs=options)


def graph_text(exported: ExportedProgram) -> list[str]:
    """A traced graph as lines of text, equal only for equal graphs.

    Each line holds an operation, its arguments and constants, and the dtype, shape, strides and device of its result. The
    example's shapes are part of it, since Inductor's choice of loops depends on them. Where the traced functions are defined,
    and what they and their variables are called, is not.

    Raises:
        ValueError: the graph holds a subgraph, or an argument or constant of an unknown type.
    """
    values: dict[torch.fx.Node, str] = {}
    symbols: dict[str, str] = {}

    def lengths(value: object) -> str:
        """With dynamic lengths numbered in order of appearance."""
        return re.sub(r"\b[su]\d+\b", lambda found: symbols.setdefault(found[0], f"n{len(symbols)}"), str(value))

    def result(value: object) -> str:
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(result, value))}]"
        if isinstance(value, Tensor):
            return f"{value.dtype} {lengths(tuple(value.shape))} {lengths(value.stride())} {value.device}"
        return lengths(value)

    def argument(value: object) -> str:
        if isinstance(value, torch.fx.Node):
            return values[value]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(argument, value))}]"
        if isinstance(value, Mapping):
            return f"{{{', '.join(f'{name}: {argument(each)}' for name, each in value.items())}}}"
        if value is None or isinstance(value, _PLAIN):
            return repr(value)
        raise ValueError(f"a graph with an argument of {type(value)}")

    lines = []
    for node in exported.graph.nodes:
        values[node] = f"%{len(values)}"
        operation = node.op if node.op in ("placeholder", "output") else _operation(node.target)
        lines.append(f"{operation} {argument(node.args)} {argument(node.kwargs)} -> {result(node.meta.get('val'))}")
    signature = exported.graph_signature
    lines += [str(spec.kind) for spec in (*signature.input_specs, *signature.output_specs)]
    for constant in (*exported.constants.values(), *exported.state_dict.values()):
        if not isinstance(constant, Tensor):
            raise ValueError(f"a graph with a constant of {type(constant)}")
        lines.append(f"{result(constant)} {constant.detach().cpu().flatten().view(torch.uint8).tolist()}")
    lines.append(lengths(dict(exported.range_constraints)))
    example, _ = exported.example_inputs or ((), {})
    return [*lines, *map(result, example)]


_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _operation(target: Any) -> str:
    """The full name of an operation; arithmetic of lengths is Python's."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if inspect.isbuiltin(target) and target.__module__ in ("_operator", "math"):
        return f"{target.__module__}.{target.__name__}"
    raise ValueError(f"a graph with {target}")


@lru_cache
def own_code(device_type: str) -> str:
    """The modules that change what Inductor writes for a device, without comments and docstrings."""
    modules = [sys.modules[__name__], *([] if device_type == "cpu" else [triton_code, many_tensors])]
    tree = ast.parse("\n".join(map(inspect.getsource, modules)))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body[:1] = [] if len(node.body) > 1 else [ast.Pass()]
    return ast.unparse(tree)


def load_ahead(path: Path) -> Loaded:
    """The function in a package: takes a list of tensors (and empties it), returns the list of results.

    A tensor that it writes to is passed twice, as what is read and as where to write; see
    :func:`narrowgauge._torch.aligned.on_aligned`.

    Raises:
        RuntimeError: the package cannot be loaded here, or this release has renamed what loads it.
    """
    if not zipfile.is_zipfile(path):
        with quiet(), _names_kept():
            return triton_code.load_triton(path)
    with quiet(), _names_kept(), _for_level():
        run: Loaded = torch._inductor.aoti_load_package(str(path)).loader.boxed_run
    return run


@contextlib.contextmanager
def _names_kept() -> Iterator[None]:
    """Say what is missing where this release of PyTorch has renamed what we use of its compiler: the caller does without it."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"PyTorch {torch.__version__} lacks what narrowgauge uses of its compiler: {error}"
        ) from error


def known_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those options of Inductor that this release has; it refuses to compile with any other."""
    from torch._inductor import config

    def is_known(name: str) -> bool:
        folder, _, option = name.rpartition(".")
        return hasattr(getattr(config, folder, None) if folder else config, option)

    return {name: value for name, value in options.items() if is_known(name)}


def gpu_options() -> dict[str, Any]:
    """Inductor's options for :func:`compile_any_shape` on a GPU: what bits depend on, and no constant made on the device."""
    return known_options({**_AS_EAGER, "joint_graph_constant_folding": False})


def compile_any_shape(function: FunctionType, name: str) -> Callable[..., Any]:
    """``torch.compile`` of a function for tensors of any shape, apart from what else was compiled of the same lines.

    Args:
        function: pure; tensors to tensors.
        name: what profiles and logs call it.
    Returns:
        The function itself, with a warning, where this release lacks an option without which the bits on CUDA may differ:
        nothing compares these with their definitions.
    """
    has_gpu = torch.cuda.is_available()
    options = gpu_options() if has_gpu else known_options(_TRUST_COMPILER)
    if has_gpu and (lacking := sorted(_AS_EAGER.keys() - options.keys())):
        warnings.warn(
            f"PyTorch {torch.__version__} lacks the option {' and '.join(lacking)} of its compiler: casts run uncompiled, with "
            "the same bits but slower.",
            stacklevel=2,
        )
        return function
    own = FunctionType(
        function.__code__.replace(co_name=name),
        function.__globals__,
        name,
        function.__defaults__,
        function.__closure__,
    )
    remove_torn_files()
    return torch.compile(own, fullgraph=True, dynamic=True, options=options)


@contextlib.contextmanager
def graphs_announced(tell: Callable[[], None]) -> Iterator[None]:
    """Call ``tell`` before each graph that ``torch.compile`` compiles within the block."""

    def begin(*_: object) -> None:  # older releases pass nothing
        tell()

    handler = torch._dynamo.callback.callback_handler
    handler.register_start_callback(begin)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # a reset of the compiler has removed it
            handler.remove_start_callback(begin)


def why_compiling_failed(error: BaseException) -> str:
    """What a C++ compiler or the operating system said in an error of ``torch.compile``, or an empty string.

    PyTorch reports it with the whole command and its own stack, on 150 lines. An error of another kind is a fault of the code
    that was compiled, or of PyTorch, and needs all of them.
    """
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, OSError):
        return str(inner)
    if type(inner).__name__ == "InvalidCxxCompiler":
        return str(inner).splitlines()[0]
    if type(inner).__name__ != "CppCompileError":
        return ""
    said = [line.strip() for line in str(getattr(inner, "output", "")).splitlines() if line.strip()]
    return next((line for line in said if "error" in line), said[0] if said else "C++ compile error")


@lru_cache
def remove_torn_files() -> None:
    """Remove compiled code that lacks its end from PyTorch's folder, once per process, so that it is compiled again.

    A killed linker leaves it, and PyTorch loads whatever exists, which ends the process by SIGBUS. Cost: about 20 µs a file.
    """
    from torch.utils._filelock import FileLock

    folder = compiled_folder()
    for path in list(folder.glob("*/*.so")):
        with contextlib.suppress(OSError):
            # Another process may be writing it, and holds PyTorch's lock then.
            if is_torn(path) and (folder / "locks").is_dir():
                with FileLock(str(folder / "locks" / f"{path.name.partition('.')[0]}.lock"), timeout=600):
                    if is_torn(path):
                        path.unlink()


MANY_VERSIONS = 64
"""How often one piece of code may be recompiled, where several rows or several models share it."""


def heed_hooks() -> None:
    """Let code that is compiled from now on be recompiled where a module's hooks have changed.

    A watched model has two versions of each, and a process may train several models of one class.
    """
    config = torch._dynamo.config
    config.skip_nnmodule_hook_guards = False
    config.recompile_limit = max(config.recompile_limit, MANY_VERSIONS)


class _Module(torch.nn.Module):
    """What ``torch.export`` takes."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Tensor) -> Tensor:
        return self.function(*arguments)


@contextlib.contextmanager
def _for_level() -> Iterator[None]:
    """Make Inductor use the vector instructions of :func:`_level` alone, and compile for a processor that has no others.

    It would find out by itself, by compiling and running test programs for 3.5 s.
    """
    from torch._inductor import cpu_vec_isa

    level, real = _level(), cpu_vec_isa.valid_vec_isa_list
    if level is None:
        yield
        return
    base = getattr(cpu_vec_isa, level.vectors)
    own = {"build_arch_flags": lambda _: _arch_flags(level), "__bool__": lambda _: True, "__hash__": base.__hash__}
    sets = [type(level.vectors, (base,), own)()]
    cpu_vec_isa.valid_vec_isa_list = lambda: sets  # type: ignore[assignment]
    try:
        yield
    finally:
        cpu_vec_isa.valid_vec_isa_list = real


@contextlib.contextmanager
def _few_instructions() -> Iterator[None]:
    """Make Inductor write casts of bits and shifts by constants of int32 vectors as single instructions.

    By itself it casts bits through an array on the stack, and shifts by vectors of counts, each of which the compiler makes
    again in every iteration of a loop that has more constants than there are registers.
    """
    from torch._inductor.codegen.cpp import CppVecOverrides

    own: dict[str, Callable[..., str]] = {
        "to_dtype_bitcast": _cast_bits,
        "bitwise_left_shift": _shift_left,
        "bitwise_right_shift": _shift_right,
        "bitwise_and": _mask,
    }
    real = {name: method for name, method in vars(CppVecOverrides).items() if name in own}

    def either(name: str) -> staticmethod[..., Any]:
        def write(*arguments: Any) -> Any:
            return own[name](*arguments) or real[name].__func__(*arguments)

        write.__name__ = name
        return staticmethod(write)

    for name in real:
        setattr(CppVecOverrides, name, either(name))
    try:
        yield
    finally:
        for name, method in real.items():
            setattr(CppVecOverrides, name, method)


def _cast_bits(x: Any, dtype: torch.dtype, src_dtype: torch.dtype) -> str:
    names = {torch.float32: "float", torch.int32: "int32_t"}
    whole = {dtype, src_dtype} == names.keys() and _intrinsic("") != ""
    return f"at::vec::cast<{names[dtype]}>({x})" if whole else ""


def _shift_left(a: Any, b: Any) -> str:
    return _shift("slli", a, _constant(_operands()[1]))


def _shift_right(a: Any, b: Any) -> str:
    return _shift("srai", a, _constant(_operands()[1]))


def _mask(a: Any, b: Any) -> str:
    """``(x >> count) & mask`` where the mask only removes the copies of the sign is one shift of another kind."""
    shifted, mask = _operands()
    if getattr(shifted, "target", "") != "bitwise_right_shift":
        return ""
    source, count = shifted.args[1], _constant(shifted.args[2])
    if count is None or _constant(mask) != (1 << (32 - count)) - 1:
        return ""
    return _shift("srli", _value(source), count)


def _shift(name: str, x: Any, count: int | None) -> str:
    intrinsic = _intrinsic(f"{name}_epi32")
    fits = x.dtype is torch.int32 and count is not None and 0 <= count < 32
    return f"at::vec::Vectorized<int32_t>({intrinsic}({x}, {count}))" if intrinsic and fits else ""


def _intrinsic(name: str) -> str:
    """An instruction on whole vectors of 32-bit values; empty where the present loop has none."""
    from torch._inductor.virtualized import V

    prefix = {256: "_mm256_", 512: "_mm512_"}.get(V.kernel.vec_isa.bit_width(), "")
    one = V.kernel.tiling_factor * 32 == V.kernel.vec_isa.bit_width()
    return prefix + name if prefix and one else ""


def _operands() -> tuple[Any, Any]:
    """The two operands of the operation that is being written, as nodes of the loop's graph."""
    from torch._inductor.virtualized import V

    return tuple(V.interpreter.current_node.args[1:3])


def _constant(node: Any) -> int | None:
    return node.args[1] if getattr(node, "target", "") == "constant" else None


def _value(node: Any) -> Any:
    from torch._inductor.virtualized import V

    return V.interpreter.env[node]


@lru_cache
def _arch_flags(level: _Level) -> str:
    """The compiler's flags for a level. They come after Inductor's own ``-march=native``, which they undo."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    compiler = get_cpp_compiler()

    def knows(flag: str) -> bool:
        command = [compiler, flag, "-fsyntax-only", "-x", "c++", os.devnull]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    return " ".join([f"-march={level.march}", *filter(knows, level.tuning)])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the compiler's own deprecation warnings and banners, which do not concern users of an optimizer."""
    level = logging.getLogger("torch").level
    logging.getLogger("torch").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.getLogger("torch").setLevel(level)


def _part_caches() -> None:
    """Let Inductor's cache on disk distinguish vectors that ``ATEN_CPU_CAPABILITY`` limits from the processor's own.

    Its key names Inductor's options and not that variable: code written for vectors of one length is found by a process that
    compiles it for another, leaves out every second value (NaN) or writes past the end of buffers. The option that says the
    same as the variable is part of the key.
    """
    bits = _LIMITED_VECTORS.get(os.environ.get("ATEN_CPU_CAPABILITY", ""))
    if bits is None:
        return
    from torch._inductor import config

    if config.cpp.simdlen is None:
        config.cpp.simdlen = bits


_part_caches()
