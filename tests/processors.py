"""Which processor this is, and a processor of other instruction sets."""

import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import transformers

from narrowgauge.torch_support import machine

# A processor's level is the first of these that it has; oneDNN, MKL and the ARM libraries select
# their matmul kernels by them.
LEVELS = (
    "amx_bf16", "avx512_fp16", "avx512_bf16", "avx512_vnni", "avx512f", "avx_vnni", "avx2", "sve2", "sve", "bf16", "asimd",
)  # fmt: skip
LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")


def processor_kind() -> str:
    """What bits depend on in a processor: its vendor and level, and variables that limit it."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else ""
    match = re.search(
        r"^(?:vendor_id|CPU implementer)\s*:\s*(\S+)", text, re.MULTILINE
    )  # MKL selects its kernels by it too
    vendor = match[1] if match else platform.system()
    sets = machine.instruction_sets()
    level = next((name for name in LEVELS if name in sets), "baseline")
    limits = []
    for name in LIMITS:
        if os.environ.get(name):
            limits.append(f"{name}={os.environ[name]}")
    own = f"{platform.machine()} {vendor} {level}"
    return ", ".join([own, *limits, f"ATen {torch.backends.cpu.get_cpu_capability()}"])


def machine_key() -> str:
    """What bits depend on: the kind of processor, versions of PyTorch and transformers."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{processor_kind()}, {versions}"


@contextmanager
def pretending(*sets: str) -> Iterator[None]:
    """Multiply as a processor with these instruction sets alone."""
    with mock.patch.object(machine, "_usable", frozenset(sets)):
        yield
