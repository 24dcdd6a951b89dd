"""What ranks must have in common before the first step: settings, code and environment.

A rank with another learning rate, another version or another CPU's rounding does not fail; it makes the run a different one, on
all ranks. So everything that the numbers depend on is compared before the first step. With one rank that costs nothing.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import narrowgauge
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import RankError
from narrowgauge.spec.frameworks import installed_version

VARIABLES = (
    "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
    "NCCL_ALGO", "NCCL_PROTO", "NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA",
    "TORCHDYNAMO_DISABLE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_COMPILE_DISABLE",
    "TORCH_MKLDNN_MATMUL_MIN_DIM",
)  # fmt: skip
"""Environment variables that change bits or the order of collectives."""
_PACKAGES = ("transformers", "tokenizers", "numpy")
_ADVICE = "Start every rank with the same command, version and environment."


def describe_rank() -> dict[str, str]:
    """What the numbers of a run depend on beside its settings: versions, source, processor, variables.

    Cost: about 10 ms, once: one read of the package's source.
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    return {
        "narrowgauge": narrowgauge.__version__,
        "source of narrowgauge": source_digest(Path(narrowgauge.__file__).parent),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: installed_version(name) or "not installed" for name in _PACKAGES},
        "processor": f"{platform.machine()} {device}",
        "number of threads": str(torch.get_num_threads()),
        **{name: os.environ.get(name, "not set") for name in VARIABLES},
    }


@functools.cache
def source_digest(folder: Path) -> str:
    """A digest of the Python files below a folder: 16 hexadecimal digits."""
    state = hashlib.blake2b(digest_size=8)
    for file in sorted(folder.rglob("*.py")):
        state.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return state.hexdigest()


def first_difference(described: Sequence[Mapping[str, object]]) -> str:
    """The first rank that differs from rank 0, and at most three differences, as a clause; empty if there is none.

    Example:
        >>> first_difference([{"lr": 0.1}, {"lr": 0.1}, {"lr": 0.2}])
        'rank 2 has lr = 0.2, and rank 0 has 0.1'
    """
    first = described[0]
    for rank, other in enumerate(described):
        names = [name for name in (*first, *(n for n in other if n not in first)) if first.get(name) != other.get(name)]
        if names:
            parts = [f"{name} = {other.get(name)}, and rank 0 has {first.get(name)}" for name in names[:3]]
            more = f" (and {len(names) - 3} more)" if len(names) > 3 else ""
            return f"rank {rank} has {'; '.join(parts)}{more}"
    return ""


def require_same(described: Mapping[str, object]) -> None:
    """Refuse, on every rank, ranks that differ in something the numbers depend on; all of them call it. Values are pickled."""
    if difference := first_difference(all_ranks().gather(dict(described))):
        raise RankError(f"{difference}.", _ADVICE)
