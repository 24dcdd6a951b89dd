"""Whether PyTorch's compiler can work here: it writes C++, so it needs a C++ compiler, headers and a writable folder.

For a GPU it writes Triton, which needs a C compiler, and headers of Python.

PyTorch itself finds out in the first training step, in 150 lines of error, though everything that is compiled here can also
run uncompiled. So this module checks first: it compiles three lines in a quarter of a second, without loading PyTorch.

Source: torch._inductor.cpp_builder (the compiler and its flags), torch._inductor.runtime.cache_dir_utils (the folder).
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

_SWITCHES = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
"""Variables whose value 1 makes PyTorch compile nothing, silently."""
LIMIT_SECONDS = 60


def compiler_name() -> str:
    """The C++ compiler that PyTorch calls: ``CXX``, or the platform's."""
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


def compiler_missing() -> str:
    """Why no C++ can be compiled here, or an empty string."""
    # PyTorch's compiler does not quote the paths that it hands to the C++ compiler.
    found = find_spec("torch")
    folder = "" if found is None or found.origin is None else str(Path(found.origin).parent)
    if " " in folder:
        return f"PyTorch's compiler cannot work from '{folder}'"
    if sys.platform == "win32":
        return "" if shutil.which(os.environ.get("CXX", "cl")) else "no C++ compiler ('cl') is on PATH"
    if not shutil.which(compiler_name()):
        return f"no C++ compiler ('{compiler_name()}') is on PATH"
    # Where the headers of Python are missing, code that is loaded without them can still be compiled.
    if not _failure(compiler_name(), "Python.h"):
        return ""
    reason = _failure(compiler_name(), "")
    return f"the C++ compiler '{compiler_name()}' does not work ({reason})" if reason else ""


def compiler_version() -> str:
    """What the C++ compiler says of itself, or an empty string where there is none; asked once per process."""
    return _version(compiler_name()) if sys.platform != "win32" else _version(os.environ.get("CXX", "cl"))


@lru_cache
def _version(compiler: str) -> str:
    command = (
        [compiler] if sys.platform == "win32" else [compiler, "--version"]
    )  # cl prints its version when it is run without arguments
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (said.stdout or said.stderr).partition("\n")[0].strip()


def switched_off() -> str:
    """Which environment variable switches ``torch.compile`` off, as a sentence, or an empty string."""
    return next((f"{name}=1 switches PyTorch's compiler off" for name in _SWITCHES if os.environ.get(name) == "1"), "")


def model_compiler_missing() -> str:
    """Why ``torch.compile`` cannot compile a model here (it builds Python extension modules), or an empty string."""
    if missing := switched_off() or compiler_missing():
        return missing
    if sys.platform != "win32" and (reason := _failure(compiler_name(), "Python.h")):
        return f"the C++ compiler '{compiler_name()}' cannot make modules of Python ({reason})"
    folder = compiled_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"PyTorch's compiler cannot write to {folder} ({error.strerror or error})"


def gpu_compiler_missing() -> str:
    """Why no kernel for a GPU can be compiled here, or an empty string; no CUDA toolkit is needed.

    Source: triton.runtime.build (the C compiler that builds what launches a kernel).
    """
    if find_spec("triton") is None:
        return "Triton is not installed, which PyTorch's wheels for CUDA bring (pip install triton)"
    named = os.environ.get("CC")
    names = [named] if named else ["gcc", "clang"]
    if not any(map(shutil.which, names)):
        return f"no C compiler ({' or '.join(map(repr, names))}) is on PATH, with which Triton builds what launches a kernel"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if header.is_file() else f"the headers of Python are not installed ({header})"


def compiled_folder() -> Path:
    """Where PyTorch keeps compiled code: ``TORCHINDUCTOR_CACHE_DIR``, or the user's folder beside temporary files."""
    if chosen := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(chosen).absolute()
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):
        user = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    return Path(tempfile.gettempdir()) / ("torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def is_torn(path: Path) -> bool:
    """Whether compiled code is truncated, as a killed linker leaves it: a process that loads it is killed by SIGBUS.

    Only the ELF format is examined, by its last part: the table of sections. Call it once nothing writes the file any more.

    Example:
        >>> is_torn(Path(sys.executable).resolve())
        False

    Source: elf(5), of 64 bits.
    """
    with path.open("rb") as file:
        head = file.read(64)
    if sys.platform == "linux" and (len(head) < 64 or not head.startswith(b"\x7fELF")):
        return True
    if head[4:6] != b"\x02\x01" or not head.startswith(b"\x7fELF"):  # 64 bits, little-endian
        return False
    table, entry_size, num_entries = int.from_bytes(head[40:48], "little"), *struct.unpack("<HH", head[58:62])
    return bool(path.stat().st_size < table + entry_size * num_entries)


@lru_cache
def _failure(compiler: str, header: str) -> str:
    """The first error of compiling a library that uses OpenMP and, if named, a header of Python's; else an empty string."""
    # Apple's compiler needs a library for OpenMP, whose place PyTorch knows.
    openmp = [] if sys.platform == "darwin" else ["-fopenmp"]
    lines = [
        "#include <cmath>",
        *(["#include <omp.h>"] if openmp else []),
        *([f"#include <{header}>"] if header else []),
    ]
    # Symbols of the interpreter are resolved when it loads the module.
    link = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    source = "\n".join([*lines, 'extern "C" double narrowgauge(double x) { return std::sqrt(x); }', ""])
    with tempfile.TemporaryDirectory(prefix="narrowgauge-") as folder:
        command = [compiler, "-x", "c++", "-", "-shared", "-fPIC", *openmp, *link, "-o", str(Path(folder) / "probe.so")]
        command += [f"-I{sysconfig.get_path('include')}", f"-I{sysconfig.get_path('platinclude')}"]
        try:
            ended = subprocess.run(
                command, input=source, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    if not ended.returncode:
        return ""
    said = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
    return next((line for line in said if "error" in line), said[0] if said else f"status {ended.returncode}")[:200]
