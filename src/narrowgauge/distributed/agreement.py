"""What ranks agree on: the same settings, code and environment at the start, and in each step whether to stop after it.

A rank with another learning rate, another version or another CPU's rounding does not fail; it makes the run a different one, on
all ranks. So everything that the numbers depend on is compared before the first step. All functions are collective: every rank
calls them in the same order. With one rank they cost nothing.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import narrowgauge
from narrowgauge.distributed.world import gather_objects, world
from narrowgauge.errors import NarrowgaugeError, RankError, ReportedError

Result = TypeVar("Result")

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

    Returns:
        Texts by name.
    Cost: about 10 ms, once: one read of the package's source.
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    return {
        "narrowgauge": narrowgauge.__version__,
        "source of narrowgauge": source_digest(Path(narrowgauge.__file__).parent),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _version(name) for name in _PACKAGES},
        "processor": f"{platform.machine()} {device}",
        "number of threads": str(torch.get_num_threads()),
        **{name: os.environ.get(name, "not set") for name in VARIABLES},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@functools.cache
def source_digest(folder: Path) -> str:
    """A digest of the Python files below a folder: 16 hexadecimal digits.

    Args:
        folder: of a package.
    """
    state = hashlib.blake2b(digest_size=8)
    for file in sorted(folder.rglob("*.py")):
        state.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return state.hexdigest()


def first_difference(described: Sequence[Mapping[str, object]]) -> str:
    """The first rank that differs from rank 0, and where, as a clause; empty if there is none.

    Args:
        described: of each rank, values by name.
    Returns:
        At most three names, with both values.
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
    """Refuse ranks that differ in something the numbers depend on.

    Args:
        described: values by name, that can be pickled.
    Raises:
        RankError: on every rank, with the first rank that differs and how.
    Cost: one small all-gather.
    """
    if difference := first_difference(gather_objects(dict(described))):
        raise RankError(f"{difference}.", _ADVICE)


def on_first_rank(function: Callable[[], Result]) -> Result:
    """Call a function on rank 0 alone, and give every rank its result.

    Args:
        function: what checks or writes files, say.
    Returns:
        Its result, which can be pickled.
    Raises:
        NarrowgaugeError: the function's, on rank 0; on the others a :class:`ReportedError`, which prints nothing.
    Cost: a broadcast.
    """
    if world().size == 1:
        return function()
    message: list[Any] = [None, 0]
    failure: BaseException | None = None
    if dist.get_rank() == 0:
        try:
            message = [function(), 0]
        except BaseException as error:
            failure, message = error, [None, _status_of(error)]
    dist.broadcast_object_list(message, src=0)
    if failure is not None:
        raise failure
    result, status = message
    if status:
        raise ReportedError(status)
    found: Result = result
    return found


def _status_of(error: BaseException) -> int:
    if isinstance(error, (RankError, ReportedError)):
        return error.status
    return 2 if isinstance(error, NarrowgaugeError) else 1


def agree_to_stop(signal_number: int) -> int:
    """The signal after which all ranks stop: the largest number that any of them has received.

    A signal reaches ranks at different times, some in one step and some in the next. Asked once a step, all ranks stop after
    the same one.

    Args:
        signal_number: received by this rank; 0 for none.
    Returns:
        The same number on every rank; 0 to go on.
    Cost: an all-reduce of 8 bytes.
    """
    if world().size == 1:
        return signal_number
    number = torch.tensor(signal_number, dtype=torch.int64, device=_object_device())
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return int(number)


def _object_device() -> torch.device:
    """The CPU, unless the group can only communicate GPU tensors."""
    is_cpu = "gloo" in str(dist.get_backend_config())
    return torch.device("cpu") if is_cpu else torch.device("cuda", torch.cuda.current_device())
