"""C++, the language of CPUs: the text of each operation, on vectors and on scalars, and libraries
built from a text.

The vector types are those of g++ and clang (``vector_size``), on every processor. ``+``, ``&``,
``<<`` and ``==`` are operators of the language, so that no loop depends on what a compiler
recognizes. No function is taken from PyTorch's headers: a file is built in a second. A library is
named by a hash of its text, flags and processor, whatever compiler built it: what it computes is
proved in each process. One process builds it, and others wait for its lock.
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
from typing import Any

import numpy as np
import torch

from narrowgauge.torch_support.machine import (
    compiler_missing,
    compiler_name,
    instruction_sets,
    processor_name,
)
from narrowgauge.torch_support.printer import CompilerError, Language

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_OPERATIONS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "rsub": "{1} - {0}",
    "mul": "{0} * {1}",
    "neg": "-{0}",
    "div": "{0} / {1}",
    "reciprocal": "1.0f / {0}",
    "sqrt": "root({0})",
    "abs": "float_of(int_of({0}) & 0x7FFFFFFF)",
    "sign": "where({0} > 0.0f, 1.0f, where({0} < 0.0f, -1.0f, 0.0f))",
    "bitwise_and": "{0} & {1}",
    "bitwise_or": "{0} | {1}",
    "bitwise_xor": "{0} ^ {1}",
    "__lshift__": "{0} << {1}",
    "__rshift__": "{0} >> {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "isnan": "{0} != {0}",
    "logical_not": "{0} == 0",
    "where": "where({0}, {1}, {2})",
    "masked_fill": "where({1}, {2}, {0})",
    "maximum": "larger({0}, {1})",
    "minimum": "smaller({0}, {1})",
    "view": "{type}_of({0})",
    "_to_copy": "to_{type}({0})",
}
_TYPES = {torch.float32: "float", torch.int32: "int", torch.bool: "bool"}


def _literal(value: Any, dtype: torch.dtype) -> str:
    """Return a number as an argument of an operation in a dtype.

    A float is hexadecimal, hence exact.
    """
    if value is None or dtype is torch.bool:
        return str(value)
    if dtype is torch.int32:
        number = (int(value) + (1 << 31)) % (1 << 32) - (1 << 31)
        return "INT32_MIN" if number == -(1 << 31) else str(number)
    rounded = np.float32(value)
    if np.isfinite(rounded):
        return f"{float(rounded).hex()}f"
    sign = "-" if rounded < 0 else ""
    return f"{sign}__builtin_inff()"


CPP = Language(
    name="C++",
    operations=_OPERATIONS,
    types=_TYPES,
    literal=_literal,
    assignment="const auto {name} = {value};",
    comment="//",
    device="cpu",
)

VECTORS = """\
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define INLINE static inline __attribute__((always_inline))
#define ALWAYS __attribute__((always_inline))
// Two vectors at a time: while one waits for a division, the other goes on.
#define GROUP (2 * LANES)

// Vectors of 32-bit integers and floats.
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef float Floats __attribute__((vector_size(4 * LANES)));

// Load elements of 1, 2 or 4 bytes at any address, widened by zeros. Store two vectors, cut to their low bits.
template <int BYTES> struct Elements;
template <> struct Elements<1> { typedef uint8_t Vector __attribute__((vector_size(LANES))); };
template <> struct Elements<2> { typedef uint16_t Vector __attribute__((vector_size(2 * LANES))); };
template <> struct Elements<4> { typedef int32_t Vector __attribute__((vector_size(4 * LANES))); };
template <class X> INLINE X at_address(const char* p) {
  X x;
  memcpy(&x, p, sizeof x);
  return x;
}
// g++ converts vectors one element after the other.
#if defined(__clang__) || LANES == 4
#define TO_INTS(BYTES, p) __builtin_convertvector(at_address<typename Elements<BYTES>::Vector>(p), Ints)
template <int BYTES> INLINE Ints load(const char* p) { return TO_INTS(BYTES, p); }
template <int BYTES> INLINE void store(char* p, Ints a, Ints b) {
  const auto low = __builtin_convertvector(a, typename Elements<BYTES>::Vector);
  const auto high = __builtin_convertvector(b, typename Elements<BYTES>::Vector);
  memcpy(p, &low, sizeof low);
  memcpy(p + sizeof low, &high, sizeof high);
}
#else
typedef char Bytes16 __attribute__((vector_size(16)));
typedef long long Longs2 __attribute__((vector_size(16)));
typedef long long Longs4 __attribute__((vector_size(32)));
typedef short Halves8 __attribute__((vector_size(16)));
typedef short Halves16 __attribute__((vector_size(32)));
template <int BYTES> INLINE Ints load(const char* p) {
#if LANES == 16
  if constexpr (BYTES == 1) return __builtin_ia32_pmovzxbd512_mask(at_address<Bytes16>(p), Ints{}, -1);
  if constexpr (BYTES == 2) return __builtin_ia32_pmovzxwd512_mask(at_address<Halves16>(p), Ints{}, -1);
#else
  if constexpr (BYTES == 1) return __builtin_ia32_pmovzxbd256((Bytes16)(Longs2){at_address<int64_t>(p), 0});
  if constexpr (BYTES == 2) return __builtin_ia32_pmovzxwd256(at_address<Halves8>(p));
#endif
  return at_address<Ints>(p);
}
template <int BYTES> INLINE void store(char* p, Ints a, Ints b) {
  if constexpr (BYTES == 4) {
    memcpy(p, &a, sizeof a);
    memcpy(p + sizeof a, &b, sizeof b);
    return;
  }
#if LANES == 16
  if constexpr (BYTES == 2) {
    const auto low = __builtin_ia32_pmovdw512_mask(a, Halves16{}, -1), high = __builtin_ia32_pmovdw512_mask(b, Halves16{}, -1);
    memcpy(p, &low, sizeof low);
    memcpy(p + sizeof low, &high, sizeof high);
  } else {
    const auto low = __builtin_ia32_pmovdb512_mask(a, Bytes16{}, -1), high = __builtin_ia32_pmovdb512_mask(b, Bytes16{}, -1);
    memcpy(p, &low, sizeof low);
    memcpy(p + sizeof low, &high, sizeof high);
  }
#else
  const int mask = BYTES == 2 ? 0xFFFF : 0xFF;
  const auto halves = __builtin_ia32_permdi256((Longs4)__builtin_ia32_packusdw256(a & mask, b & mask), 0xD8);
  if constexpr (BYTES == 2) {
    memcpy(p, &halves, sizeof halves);
  } else {
    const auto low = __builtin_ia32_extract128i256(halves, 0), high = __builtin_ia32_extract128i256(halves, 1);
    const auto bytes = __builtin_ia32_packuswb128((Halves8)low, (Halves8)high);
    memcpy(p, &bytes, sizeof bytes);
  }
#endif
}
#endif
template <int BYTES> INLINE void prefetch(const char* p) {
  for (int k = 0; k < BYTES * GROUP; k += 64) __builtin_prefetch(p + k);
}

// One number in all lanes. A sum with +0 would lose the sign of -0.
INLINE Floats splat(Floats x) { return x; }
INLINE Ints splat(Ints x) { return x; }
INLINE Floats splat(float x) { return x - Floats{}; }
INLINE Ints splat(int32_t x) { return x | Ints{}; }

INLINE Floats float_of(Ints x) { return (Floats)x; }
INLINE Ints int_of(Floats x) { return (Ints)x; }
INLINE float float_of(int32_t x) { return __builtin_bit_cast(float, x); }
INLINE int32_t int_of(float x) { return __builtin_bit_cast(int32_t, x); }
INLINE Floats to_float(Ints mask) { return mask ? splat(1.0f) : splat(0.0f); }
INLINE float to_float(bool x) { return x ? 1.0f : 0.0f; }

// g++ writes two instructions for a < b ? a : b.
#if defined(__clang__)
INLINE Floats root(Floats x) { return __builtin_elementwise_sqrt(x); }
INLINE Ints smaller(Ints a, Ints b) { return __builtin_elementwise_min(a, b); }
INLINE Ints larger(Ints a, Ints b) { return __builtin_elementwise_max(a, b); }
#elif LANES == 16
INLINE Floats root(Floats x) { return __builtin_ia32_sqrtps512_mask(x, x, -1, 4); }
INLINE Ints smaller(Ints a, Ints b) { return __builtin_ia32_pminsd512_mask(a, b, a, -1); }
INLINE Ints larger(Ints a, Ints b) { return __builtin_ia32_pmaxsd512_mask(a, b, a, -1); }
#elif LANES == 8
INLINE Floats root(Floats x) { return __builtin_ia32_sqrtps256(x); }
INLINE Ints smaller(Ints a, Ints b) { return __builtin_ia32_pminsd256(a, b); }
INLINE Ints larger(Ints a, Ints b) { return __builtin_ia32_pmaxsd256(a, b); }
#else
INLINE Floats root(Floats x) {
  Floats y;
  for (int k = 0; k < LANES; k++) y[k] = __builtin_sqrtf(x[k]);
  return y;
}
INLINE Ints smaller(Ints a, Ints b) { return a < b ? a : b; }
INLINE Ints larger(Ints a, Ints b) { return a > b ? a : b; }
#endif
INLINE Ints smaller(Ints a, int32_t b) { return smaller(a, splat(b)); }
INLINE Ints larger(Ints a, int32_t b) { return larger(a, splat(b)); }
INLINE float root(float x) { return __builtin_sqrtf(x); }
INLINE int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }
INLINE int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

template <class A, class B> INLINE auto where(Ints c, A a, B b) { return c ? splat(a) : splat(b); }
// A branch would keep a compiler from mixing the operations of two vectors.
template <class A, class B> INLINE auto where(bool c, A a, B b) { return where(splat(-(int32_t)c), a, b); }
INLINE float where(bool c, float a, float b) { return c ? a : b; }
INLINE int32_t where(bool c, int32_t a, int32_t b) { return c ? a : b; }

// PyTorch returns NaN if either is NaN.
template <class B> INLINE Floats larger(Floats a, B b) { return where((a > b) | (a != a), a, b); }
template <class B> INLINE Floats smaller(Floats a, B b) { return where((a < b) | (a != a), a, b); }
INLINE float larger(float a, float b) { return a > b || a != a ? a : b; }
INLINE float smaller(float a, float b) { return a < b || a != a ? a : b; }

INLINE Ints places() {
  Ints x;
  for (int k = 0; k < LANES; k++) x[k] = k;
  return x;
}
INLINE float sum_of(Floats x) {
  float sum = 0;
  for (int k = 0; k < LANES; k++) sum += x[k];
  return sum;
}
INLINE int32_t largest_of(Ints x) {
  int32_t largest = x[0];
  for (int k = 1; k < LANES; k++) largest = larger(largest, x[k]);
  return largest;
}
"""
"""The vector types, and the functions that :data:`CPP` names."""

# ── building ──────────────────────────────────────────────────────────────────────────────────────

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
