"""Libraries built from a text of C++.

No function is taken from PyTorch's headers: a file is built in a second. A library is named by a
hash of its text, flags and processor, whatever compiler built it: what it computes is proved in
each process. One process builds it, and others wait for its lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch

from narrowgauge.torch_support.machine import (
    compiler_missing,
    compiler_name,
    instruction_sets,
    processor_name,
)

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


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
_locks_lock = threading.Lock()
_locks: dict[str, threading.Lock] = {}
_libraries: dict[str, ctypes.CDLL] = {}


@lru_cache
def _command(compiler: str) -> tuple[str, ...]:
    """Return the command that builds a library, without the flags that this compiler refuses."""
    command = [*shlex.split(compiler), *_FLAGS, "-march=native"]
    command += _BY_CAPABILITY.get(torch.backends.cpu.get_cpu_capability(), [])
    threads = ["-Xclang", "-fopenmp"] if sys.platform == "darwin" else ["-fopenmp"]
    for optional in (threads, _TUNING):
        if _accepts([*command, *optional]):
            command += optional
    return tuple(command)


def _accepts(command: list[str]) -> bool:
    try:
        tried = [*command, "-fsyntax-only", "-x", "c++", os.devnull]
        return subprocess.run(tried, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def cache_folder() -> Path:
    """Return the folder of built libraries: ``NARROWGAUGE_CACHE``, or ``narrowgauge`` in the user's
    folder of caches.
    """
    candidates = []
    chosen = os.environ.get("NARROWGAUGE_CACHE")
    home = os.environ.get("XDG_CACHE_HOME")
    if chosen:
        candidates.append(Path(chosen))
    if home:
        candidates.append(Path(home) / "narrowgauge")
    with contextlib.suppress(RuntimeError):  # a user without a home
        candidates.append(Path.home() / ".cache" / "narrowgauge")
    for folder in candidates:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK) and _allows_programs(folder):
                return folder
    return _own_folder()


def _allows_programs(folder: Path) -> bool:
    """Return whether a library may run from a folder.

    Administrators often mount homes and ``/tmp`` without.
    """
    if not hasattr(os, "statvfs"):  # Windows
        return True
    return not os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0)


@lru_cache(None)
def _own_folder() -> Path:
    """Return a new folder of this process, where no cache can be written."""
    return Path(tempfile.mkdtemp(prefix="narrowgauge-"))


def build(text: str) -> ctypes.CDLL:
    """Return the library of a text. Build it, unless this machine has done so before.

    Raises:
        CompilerError: a compiler is missing, or it refuses the text.
        OSError: the disk is full, or no folder allows a library to run.
    """
    folder = cache_folder()
    if not _allows_programs(folder):
        raise OSError(
            f"no library may run from {folder}, which is mounted noexec: set NARROWGAUGE_CACHE to "
            "another folder"
        )
    machine = [processor_name(), *sorted(instruction_sets())]
    flags = [word for word in shlex.split(compiler_name()) if word.startswith("-")]
    flags += [*_FLAGS, torch.backends.cpu.get_cpu_capability()]
    name = hashlib.sha256("\0".join([*flags, *machine, text]).encode()).hexdigest()[:32]
    with _locks_lock:
        lock = _locks.setdefault(name, threading.Lock())
    with lock:
        if name not in _libraries:
            _libraries[name] = _load(folder / f"{name}.so", text)
        return _libraries[name]


def _token() -> str:
    """Return a name that no other process takes.

    Machines and containers that share a folder have equal process ids.
    """
    return secrets.token_hex(8)


def _write(file: Path, text: str) -> None:
    """Write a file beside, and rename it."""
    part = file.with_suffix(f".{_token()}.part")
    part.write_text(text)
    os.replace(part, file)


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Wait until no other process builds a library. A process that ends gives its lock back."""
    with file.with_suffix(".lock").open("w") as lock:
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a file system without locks: both build
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _load(file: Path, text: str) -> ctypes.CDLL:
    """Load a library, or build it: one that is damaged, or half written by a process that was
    killed, is built again.
    """
    library = _loaded(file)
    if library is None:
        with _alone(file):
            library = _loaded(file)
            if library is None:
                _remove_leftovers(file)
                _compile(file, text)
                library = ctypes.CDLL(str(file))
    return library


def _loaded(file: Path) -> ctypes.CDLL | None:
    """Return a library that an earlier process has built, if it is whole."""
    with contextlib.suppress(OSError):
        checksum = file.with_suffix(".sha256").read_text()
        if hashlib.sha256(file.read_bytes()).hexdigest() == checksum:
            return ctypes.CDLL(str(file))
    return None


def _remove_leftovers(file: Path) -> None:
    """Remove what builds of this library have left that were killed."""
    for leftover in file.parent.glob(f"{file.stem}.*.*"):
        leftover.unlink(missing_ok=True)


def _compile(file: Path, text: str) -> None:
    missing = compiler_missing(by_pytorch=False)
    if missing:
        raise CompilerError(missing)
    part = file.with_suffix(f".{_token()}.cpp")
    library = part.with_suffix(".so")
    try:
        part.write_text(text)
        tried = [*_command(compiler_name()), "-o", str(library), str(part)]
        result = subprocess.run(tried, capture_output=True, check=False, text=True)
        if result.returncode:
            line = next(
                (x for x in result.stderr.splitlines() if "error" in x), result.stderr[:200]
            )
            raise CompilerError(f"{shlex.join(tried[:1])} fails: {line}")
        digest = hashlib.sha256(library.read_bytes()).hexdigest()
        os.replace(library, file)
        _write(file.with_suffix(".sha256"), digest)
        os.replace(part, file.with_suffix(".cpp"))
    finally:
        for leftover in (part, library):
            leftover.unlink(missing_ok=True)
