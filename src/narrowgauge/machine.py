"""The machine: the number formats that its processor multiplies, its compilers, devices, folders, and installed packages.

AVX512-BF16 or AMX (x86) and FEAT_BF16 (ARM) multiply bfloat16. VNNI, AMX and I8MM multiply int8. All processors multiply
float32. PyTorch multiplies other formats in loops that are 8 to 180 times slower than float32's (``RESULTS.md``). So callers
multiply them as float32. PyTorch calls oneDNN for these matmuls. It does not use instruction sets above ``ONEDNN_MAX_CPU_ISA``.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from narrowgauge.errors import ChipError

TESTED_TORCH = ("2.11", "2.13", "2.15")
"""The tested releases of PyTorch: the oldest that this package allows, the one that ``./dev`` installs, and the newest."""
OVERRIDE = "NARROWGAUGE_CPU"
"""Environment variable with instruction sets to assume instead of the processor's, such as ``avx2,fma``."""

# Instruction sets that multiply a format; any of them suffices.
_MULTIPLYING = {
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "int8": {"avx512_vnni", "avx_vnni", "amx_int8", "i8mm"},
}
# Values of ONEDNN_MAX_CPU_ISA in ascending order, each with the sets above that it adds; x86 only.
_LEVELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("SSE41", ()), ("AVX", ()), ("AVX2", ()), ("AVX2_VNNI", ("avx_vnni",)), ("AVX2_VNNI_2", ()), ("AVX512_CORE", ()),
    ("AVX512_CORE_VNNI", ("avx512_vnni",)), ("AVX512_CORE_BF16", ("avx512_bf16",)), ("AVX512_CORE_FP16", ()),
    ("AVX10_1_512", ()), ("AVX512_CORE_AMX", ("amx_bf16", "amx_int8")),
)  # fmt: skip
# oneDNN reads both names; the first takes precedence.
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_emulated: set[str] = set()


def multiplies(format: str) -> bool:
    """Return whether PyTorch multiplies a format, such as ``"bfloat16"``, with native instructions of this processor.

    Example:
        >>> multiplies("float32"), multiplies("float8_e4m3fn")
        (True, False)
    """
    return format in ("float32", "float64") or bool(_usable & _MULTIPLYING.get(format, set()))


def care_for(format: str) -> None:
    """Record that matmuls of a model in a format are emulated in float32 if they are not native."""
    _emulated.add(format)


def is_left_slow(format: str) -> bool:
    """Return whether matmuls in a format are slow here and no model emulates them (see :func:`care_for`)."""
    return not multiplies(format) and format not in _emulated


@contextlib.contextmanager
def pretending(*sets: str) -> Iterator[None]:
    """Assume these instruction sets within the block, for tests.

    Example:
        >>> with pretending("avx2"):
        ...     multiplies("bfloat16")
        False
    """
    global _usable
    before, _usable = _usable, frozenset(sets)
    try:
        yield
    finally:
        _usable = before


def usable_sets() -> frozenset[str]:
    """Return the instruction sets that PyTorch uses for matmuls."""
    if (named := os.environ.get(OVERRIDE)) is not None:
        return frozenset(name.strip().lower() for name in named.split(","))
    return instruction_sets() - forbidden_by(next((os.environ[name] for name in _LIMITS if os.environ.get(name)), ""))


def forbidden_by(level: str) -> frozenset[str]:
    """Return the sets above a value of ``ONEDNN_MAX_CPU_ISA``, none for an unknown value."""
    names = [name for name, _ in _LEVELS]
    above = _LEVELS[names.index(level.upper()) + 1 :] if level.upper() in names else ()
    return frozenset(name for _, added in above for name in added)


@lru_cache(None)
def instruction_sets(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return this processor's instruction sets by Linux's names, none elsewhere. Ignore environment variables."""
    return frozenset((_cpuinfo("flags", cpuinfo) or _cpuinfo("features", cpuinfo)).split())


def processor_name() -> str:
    """Return the name of this processor, as the operating system gives it."""
    return _cpuinfo("model name", Path("/proc/cpuinfo")) or platform.processor() or platform.machine()


def _cpuinfo(key: str, file: Path) -> str:
    with contextlib.suppress(OSError), file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip().lower() == key and value.strip():
                return value.strip()
    return ""


def require_float64(tensors: Iterable[Any]) -> None:
    """Refuse tensors on a device without float64, such as a Mac's GPU. Norms, audits and delayed scales need it.

    Raises:
        ChipError: a tensor is on the device ``mps``.
    """
    if any(tensor is not None and tensor.device.type == "mps" for tensor in tensors):
        raise ChipError(
            "Cannot use device 'mps', a Mac's GPU: it has no float64, in which norms of gradients and audits are summed.",
            "Train on the Mac's CPU: model.to('cpu'); use_cpu=True in Hugging Face's TrainingArguments, accelerator='cpu' in "
            "Lightning.",
        )


def untested_torch(version: str) -> str:
    """Return a warning for a release of PyTorch newer than the tested ones, else an empty string.

    Example:
        >>> untested_torch("2.15.1+cpu"), untested_torch("2.9.0")
        ('', '')
        >>> untested_torch("3.0.0a0").partition(":")[0]
        'narrowgauge was tested with PyTorch 2.11 to 2.15, and this is 3.0.0a0'
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or tuple(map(int, numbers.groups())) <= tuple(map(int, TESTED_TORCH[-1].split("."))):
        return ""
    return (
        f"narrowgauge was tested with PyTorch {TESTED_TORCH[0]} to {TESTED_TORCH[-1]}, and this is {version}: compiled kernels "
        "are compared with their definitions before they are used; nothing else of it was tested."
    )


def installed_version(package: str) -> str | None:
    """Return the version of a package without importing it, or ``None`` if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


# ── folders and compilers ───────────────────────────────────────────────────────────────────────────────────────────────
#
# PyTorch's compiler writes C++, and Triton for a GPU. Without a compiler or the headers of Python it fails in the first
# training step, with 150 lines of error. Compiling three lines first takes a quarter of a second.


def cache_folder() -> Path:
    """Return the shared folder of runs: ``NARROWGAUGE_CACHE``, or ``narrowgauge`` in the platform's cache folder."""
    if chosen := os.environ.get("NARROWGAUGE_CACHE"):
        return Path(chosen)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "narrowgauge"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "narrowgauge"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "narrowgauge"


LIMIT_SECONDS = 60


def compiler_name() -> str:
    """Return the C++ compiler that PyTorch calls: ``CXX``, or the platform's."""
    return os.environ.get("CXX") or {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")


def switched_off() -> str:
    """Return a sentence with the environment variable that disables ``torch.compile``, or an empty string."""
    names = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
    return next((f"{name}=1 switches PyTorch's compiler off" for name in names if os.environ.get(name) == "1"), "")


def compiler_missing() -> str:
    """Return why no C++ can be compiled here, or an empty string."""
    torch = find_spec("torch")
    if torch is not None and " " in (torch.origin or ""):  # PyTorch's compiler does not quote paths
        return f"PyTorch's compiler cannot work from '{torch.origin}'"
    name = compiler_name()
    if not shutil.which(name):
        return f"no C++ compiler ('{name}') is on PATH"
    reason = "" if sys.platform == "win32" else _failure(name)
    return f"the C++ compiler '{name}' does not work ({reason})" if reason else ""


def gpu_compiler_missing() -> str:
    """Return why no kernel for a GPU can be compiled here, or an empty string. No CUDA toolkit is needed.

    Source: triton.runtime.build (the C compiler that builds a kernel's launcher).
    """
    if find_spec("triton") is None:
        return "Triton is not installed, which PyTorch's wheels for CUDA bring (pip install triton)"
    names = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    if not any(map(shutil.which, names)):
        return f"no C compiler ({' or '.join(map(repr, names))}) is on PATH, with which Triton builds what launches a kernel"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if header.is_file() else f"the headers of Python are not installed ({header})"


@lru_cache
def _failure(compiler: str) -> str:
    """Return the first error of compiling a library that uses Python and OpenMP, or an empty string."""
    # Apple's compiler needs a library for OpenMP. PyTorch knows its path.
    on_mac = sys.platform == "darwin"
    flags, includes = (["-undefined", "dynamic_lookup"], "") if on_mac else (["-fopenmp"], "#include <omp.h>\n")
    source = f'#include <Python.h>\n{includes}extern "C" int narrowgauge() {{ return 0; }}\n'
    with tempfile.TemporaryDirectory(prefix="narrowgauge-") as folder:
        command = [compiler, "-x", "c++", "-", "-shared", "-fPIC", *flags, "-o", str(Path(folder) / "probe.so")]
        command += [f"-I{sysconfig.get_path(name)}" for name in ("include", "platinclude")]
        try:
            result = subprocess.run(command, input=source, capture_output=True, text=True, timeout=LIMIT_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()] or [f"status {result.returncode}"]
    return next((line for line in lines if "error" in line), lines[0])[:200] if result.returncode else ""


_usable = usable_sets()
