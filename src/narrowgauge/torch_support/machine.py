"""The machine: the number formats that its processor multiplies, its compiler, devices, and
installed packages.

AVX512-BF16 or AMX (x86) and FEAT_BF16 (ARM) multiply bfloat16. VNNI, AMX and I8MM multiply int8.
All processors multiply float32. PyTorch multiplies other formats in scalar loops, many times slower
than float32. So callers multiply them as float32.
"""

import contextlib
import os
import platform
from functools import cache
from pathlib import Path

# Instruction sets that multiply a format; any of them suffices.
_MULTIPLYING = {
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "int8": {"avx512_vnni", "avx_vnni", "amx_int8", "i8mm"},
}


def multiplies(format: str) -> bool:
    """Return whether PyTorch multiplies a format, such as ``"bfloat16"``, with native instructions
    of this processor.
    """
    return format in ("float32", "float64") or bool(_usable & _MULTIPLYING.get(format, set()))


@cache
def instruction_sets(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return this processor's instruction sets by Linux's names, none elsewhere."""
    return frozenset((_cpuinfo("flags", cpuinfo) or _cpuinfo("features", cpuinfo)).split())


def processor_name() -> str:
    """Return the name of this processor, as the operating system gives it."""
    return (
        _cpuinfo("model name", Path("/proc/cpuinfo")) or platform.processor() or platform.machine()
    )


def _cpuinfo(key: str, file: Path) -> str:
    with contextlib.suppress(OSError), file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip().lower() == key and value.strip():
                return value.strip()
    return ""


def installed_version(package: str) -> str | None:
    """Return the version of a package without importing it, or ``None`` if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def compiler_name() -> str:
    """Return the C++ compiler: ``CXX``, as PyTorch has it, or g++."""
    return os.environ.get("CXX") or "g++"


_usable = instruction_sets()
