"""Which number formats this processor multiplies natively.

It depends on the instruction sets: AVX512-BF16 or AMX (x86) and FEAT_BF16 (ARM) multiply bfloat16; VNNI, AMX and I8MM multiply
int8; all processors multiply float32. PyTorch multiplies other formats in loops that are 8 to 180 times slower than float32's
(``docs/log/matmuls.md``), so callers multiply those formats as float32.

PyTorch calls oneDNN for these matmuls. oneDNN does not use instruction sets above ``ONEDNN_MAX_CPU_ISA``, and neither does this
module. ``ATEN_CPU_CAPABILITY`` limits PyTorch's own vector code, which does not multiply these formats.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

OVERRIDE = "NARROWGAUGE_CPU"
"""Environment variable with instruction sets to assume instead of the processor's, such as ``avx2,fma``: for tests, and for
systems that do not list them."""

# Instruction sets that multiply a format; any of them suffices.
_MULTIPLYING = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    "int8": frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "i8mm"}),
}
# Values of ONEDNN_MAX_CPU_ISA in ascending order, each with the sets above that it adds; x86 only.
_LEVELS: dict[str, frozenset[str]] = {
    "SSE41": frozenset(),
    "AVX": frozenset(),
    "AVX2": frozenset(),
    "AVX2_VNNI": frozenset({"avx_vnni"}),
    "AVX2_VNNI_2": frozenset(),
    "AVX512_CORE": frozenset(),
    "AVX512_CORE_VNNI": frozenset({"avx512_vnni"}),
    "AVX512_CORE_BF16": frozenset({"avx512_bf16"}),
    "AVX512_CORE_FP16": frozenset(),
    "AVX10_1_512": frozenset(),
    "AVX512_CORE_AMX": frozenset({"amx_bf16", "amx_int8"}),
}
# oneDNN reads both names; the first takes precedence.
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_WINDOWS_FEATURES = {39: "avx", 40: "avx2", 41: "avx512f"}


def multiplies(format: str) -> bool:
    """Whether PyTorch multiplies a format, such as ``"bfloat16"``, with native instructions of this processor.

    Always true for float32 and float64; for bfloat16 and int8 where their instruction sets are present; never for others. The
    processor is read once, on import.

    Example:
        >>> multiplies("float32"), multiplies("float8_e4m3fn")
        (True, False)
    """
    return format in _multiplied


def care_for(format: str) -> None:
    """Record that a model's matmuls in a format are emulated by float32 products where they are not native."""
    _cared_for.add(format)


def is_left_slow(format: str) -> bool:
    """Whether matmuls in a format are slow here and no model's are emulated (see :func:`care_for`)."""
    return not multiplies(format) and format not in _cared_for


@lru_cache(None)
def instruction_sets() -> frozenset[str]:
    """All instruction sets of this processor, named as in ``/proc/cpuinfo``; Windows lists AVX, AVX2 and AVX512 only.

    Environment variables do not change the result, since code compiled for this machine may use all of them.
    """
    if sys.platform == "linux":
        return _of_linux(Path("/proc/cpuinfo"))
    if sys.platform == "darwin":
        return _of_macos()
    if sys.platform == "win32":
        import ctypes

        present = ctypes.windll.kernel32.IsProcessorFeaturePresent
        return frozenset(name for number, name in _WINDOWS_FEATURES.items() if present(number))
    return frozenset()


@lru_cache(None)
def processor_name(root: Path = Path("/")) -> str:
    """The name of this processor, as the operating system tells it; ``root`` is where ``proc`` lies."""
    with contextlib.suppress(OSError), (root / "proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    if sys.platform == "darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    return platform.processor() or platform.machine()


@contextlib.contextmanager
def pretending(*sets: str) -> Iterator[None]:
    """Assume these instruction sets within the block, for tests.

    Example:
        >>> with pretending("avx2"):
        ...     multiplies("bfloat16")
        False
    """
    global _multiplied
    before = _multiplied
    _multiplied = _multiplied_by(frozenset(sets))
    try:
        yield
    finally:
        _multiplied = before


def _multiplied_by(sets: frozenset[str]) -> frozenset[str]:
    return frozenset({"float32", "float64", *(name for name, any_of in _MULTIPLYING.items() if sets & any_of)})


def _usable_sets() -> frozenset[str]:
    named = os.environ.get(OVERRIDE)
    if named is not None:
        return frozenset(name.strip().lower() for name in named.split(","))
    if sys.platform == "darwin":
        return frozenset()  # PyTorch is built without oneDNN there, and its own kernels do not multiply these formats
    return instruction_sets() - _forbidden(next((os.environ[name] for name in _LIMITS if os.environ.get(name)), ""))


def _forbidden(level: str) -> frozenset[str]:
    """The sets above a value of ``ONEDNN_MAX_CPU_ISA``; empty for an unknown value."""
    names = list(_LEVELS)
    above = names[names.index(level.upper()) + 1 :] if level.upper() in names else []
    return frozenset().union(*(_LEVELS[name] for name in above))


def _of_linux(cpuinfo: Path) -> frozenset[str]:
    with contextlib.suppress(OSError), cpuinfo.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip().lower() in ("flags", "features"):
                return frozenset(value.split())
    return frozenset()


def _of_macos() -> frozenset[str]:
    names = "hw.optional" if platform.machine() == "arm64" else "machdep.cpu"
    try:
        output = subprocess.run(["sysctl", names], capture_output=True, text=True, check=False, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    if names == "machdep.cpu":
        lines = [line.partition(":")[2] for line in output.splitlines() if "features:" in line]
        return frozenset(" ".join(lines).lower().split())
    present = [line.partition(":")[0] for line in output.splitlines() if line.endswith(": 1")]
    return frozenset(name.rpartition(".")[2].removeprefix("FEAT_").lower() for name in present)


_multiplied = _multiplied_by(_usable_sets())
_cared_for: set[str] = set()
