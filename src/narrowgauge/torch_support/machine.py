"""The machine: the number formats that its processor multiplies, its compiler, devices, and
installed packages.

AVX512-BF16 or AMX (x86) and FEAT_BF16 (ARM) multiply bfloat16. VNNI, AMX and I8MM multiply int8.
All processors multiply float32. PyTorch multiplies other formats in scalar loops, many times slower
than float32. So callers multiply them as float32.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from narrowgauge.errors import ChipError

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


@lru_cache(None)
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


def require_float64(tensors: Iterable[Any]) -> None:
    """Refuse tensors on a device without float64, such as a Mac's GPU. Norms and audits need it.

    Raises:
        ChipError: a tensor is on the device ``mps``.
    """
    if any(tensor is not None and tensor.device.type == "mps" for tensor in tensors):
        raise ChipError(
            "Cannot use device 'mps', a Mac's GPU: it has no float64, in which norms of gradients "
            "and audits are summed.",
            "Train on the Mac's CPU: model.to('cpu'); use_cpu=True in Hugging Face's "
            "TrainingArguments, accelerator='cpu' in "
            "Lightning.",
        )


def installed_version(package: str) -> str | None:
    """Return the version of a package without importing it, or ``None`` if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def compiler_name() -> str:
    """Return the C++ compiler that PyTorch calls: ``CXX``, or the platform's."""
    return os.environ.get("CXX") or {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")


_usable = instruction_sets()
