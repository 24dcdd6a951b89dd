"""Libraries built from a text of C++.

No function is taken from PyTorch's headers: a file is built in a second. A library is named by a
hash of its text, flags and processor, whatever compiler built it: what it computes is proved in
each process. It is built beside its place and renamed, so that no process loads half of one.
"""

import contextlib
import ctypes
import hashlib
import os
import shlex
import subprocess
import tempfile
from functools import cache, lru_cache
from pathlib import Path

import torch

from narrowgauge.torch_support.machine import (
    compiler_name,
    instruction_sets,
    processor_name,
)


class CompilerError(RuntimeError):
    """Say that a compiler refuses a text, or that there is none. It is not asked again."""


_FLAGS = [
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-shared",
    "-w",
    "-ffp-contract=off",  # no fused multiply-add
    "-fwrapv",  # the hash of random bits overflows
    "-fno-math-errno",
    "-fno-trapping-math",
]
# For g++ on x86: load constants instead of building them in each iteration, and run independent
# chains side by side.
_TUNING = [
    "-fno-ipa-cp",  # or each body is compiled twice
    "-mprefer-vector-width=512",
    "-fschedule-insns",
    "-fsched-pressure",
    "-mtune-ctrl=^inter_unit_moves_to_vec",
]
_BY_CAPABILITY = {"DEFAULT": ["-mno-avx2", "-mno-avx512f"], "AVX2": ["-mno-avx512f"]}
"""Flags by PyTorch's name of the instructions that it uses here, which ``ATEN_CPU_CAPABILITY`` may
limit.
"""


@lru_cache
def _command(compiler: str) -> tuple[str, ...]:
    """Return the command that builds a library, without the flags that this compiler refuses."""
    command = [*shlex.split(compiler), *_FLAGS]
    limits = _BY_CAPABILITY.get(torch.backends.cpu.get_cpu_capability(), [])
    # A compiler for ARM has no AVX to leave out, and an old clang there does not know the native one.
    for optional in (["-march=native"], limits, ["-fopenmp"], _TUNING):
        tried = [*command, *optional, "-fsyntax-only", "-x", "c++", os.devnull]
        if subprocess.run(tried, capture_output=True, check=False).returncode == 0:
            command += optional
    return tuple(command)


@cache
def cache_folder(chosen: str) -> Path:
    """Return the folder of built libraries: the chosen one, or ``narrowgauge`` in the user's folder
    of caches; or one of this process, where none can be written.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    folder = Path(chosen or Path(caches) / "narrowgauge")
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix="narrowgauge-"))


@cache
def build(text: str) -> ctypes.CDLL:
    """Return the library of a text. Build it, unless this machine has done so before.

    Raises:
        CompilerError: a compiler is missing, or it refuses the text.
        OSError: the disk is full, or no folder allows a library to run.
    """
    folder = cache_folder(os.environ.get("NARROWGAUGE_CACHE", ""))
    machine = [processor_name(), *sorted(instruction_sets())]
    flags = [word for word in shlex.split(compiler_name()) if word.startswith("-")]
    flags += [*_FLAGS, torch.backends.cpu.get_cpu_capability()]
    name = hashlib.sha256("\0".join([*flags, *machine, text]).encode()).hexdigest()[:32]
    library = folder / f"{name}.so"
    with contextlib.suppress(OSError):  # it is not there, or damaged
        return ctypes.CDLL(str(library))
    _compile(library, text)
    return ctypes.CDLL(str(library))


def _compile(library: Path, text: str) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        source = Path(folder) / "step.cpp"
        source.write_text(text)
        part = source.with_suffix(".so")
        try:
            command = [*_command(compiler_name()), "-o", str(part), str(source)]
        except FileNotFoundError as error:
            raise CompilerError(f"no C++ compiler ('{compiler_name()}') is on PATH") from error
        result = subprocess.run(command, capture_output=True, check=False, text=True)
        if result.returncode:
            lines = [line for line in result.stderr.splitlines() if "error" in line]
            raise CompilerError(f"{command[0]} fails: {(*lines, result.stderr[:200])[0]}")
        os.replace(part, library)
