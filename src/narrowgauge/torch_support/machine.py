"""The machine: the number formats that its processor multiplies, its compilers, devices, and
installed packages.

AVX512-BF16 or AMX (x86) and FEAT_BF16 (ARM) multiply bfloat16. VNNI, AMX and I8MM multiply int8.
All processors multiply float32. PyTorch multiplies other formats in scalar loops, many times slower
than float32. So callers multiply them as float32.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterable
from functools import lru_cache
from importlib.util import find_spec
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


# ── compilers ─────────────────────────────────────────────────────────────────────────────────────
#
# PyTorch's compiler writes C++, and Triton for a GPU. Without a compiler it fails in the first
# training step, with 150 lines of error.


def compiler_name() -> str:
    """Return the C++ compiler that PyTorch calls: ``CXX``, or the platform's."""
    return os.environ.get("CXX") or {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")


def switched_off() -> str:
    """Return a sentence with the environment variable that disables ``torch.compile``, or an empty
    string.
    """
    names = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
    return next(
        (
            f"{name}=1 switches PyTorch's compiler off"
            for name in names
            if os.environ.get(name) == "1"
        ),
        "",
    )


def compiler_missing(*, by_pytorch: bool = True) -> str:
    """Return why no C++ can be compiled here, ``by_pytorch`` or by us, or an empty string.

    PyTorch takes one word as its compiler. We take ``CXX="ccache g++"`` too.
    """
    name = compiler_name()
    if by_pytorch:
        torch = find_spec("torch")
        if torch is not None and " " in (torch.origin or ""):  # it does not quote paths
            return f"PyTorch's compiler cannot work from '{torch.origin}'"
    else:
        name = shlex.split(name)[0]
    if shutil.which(name):
        return ""
    return f"no C++ compiler ('{name}') is on PATH"


def gpu_compiler_missing() -> str:
    """Return why no kernel for a GPU can be compiled here, or an empty string.

    No CUDA toolkit is needed.

    Source: triton.runtime.build (the C compiler that builds a kernel's launcher).
    """
    if find_spec("triton") is None:
        return "Triton is not installed, which PyTorch's wheels for CUDA bring (pip install triton)"
    names = ["gcc", "clang"]
    if os.environ.get("CC"):
        names = [os.environ["CC"]]
    if not any(map(shutil.which, names)):
        return f"no C compiler ({' or '.join(map(repr, names))}) is on PATH, with which Triton builds what launches a kernel"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        return f"the headers of Python are not installed ({header})"
    return ""


_usable = instruction_sets()
