"""This machine's arithmetic: measured, or read from the cache of an earlier measurement under the same settings.

Bits depend on the processor, the versions, the number of threads and the switches, and on nothing else here. So a measurement is
cached under these (``NARROWGAUGE_CACHE``), and later runs read it.

Measuring draws no random numbers and changes no setting of PyTorch. So a run has the same bits with and without it. Only
``narrowgauge show arithmetic`` changes the number of threads, for the one probe that compares them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.gauges.probes.roundings import FUNCTIONS, ROUNDINGS, SUMS, measure_function, measure_sum
from narrowgauge.machine import cache_folder, instruction_sets, processor_name
from narrowgauge.runs.arithmetic import PROBES, UNAVAILABLE, Arithmetic
from narrowgauge.runs.atomic_io import write_whole

_VARIABLES = (
    "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
    "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE",
)  # fmt: skip
# Variables by which the libraries choose their kernels.
_SETS = (
    "sse4_2", "avx", "fma", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8",
    "asimd", "bf16", "sve", "sve2",
)  # fmt: skip
_LIBRARIES = {"mkl": r"Math Kernel Library Version (\S+)", "onednn": r"MKL-DNN v(\S+)"}


def settings_in_force(device: torch.device) -> dict[str, str]:
    """Return the settings of a device. They are the key of its cached arithmetic, and explain differences.

    Cost: less than a millisecond.
    Example:
        >>> settings_in_force(torch.device("cpu"))["torch"] == torch.__version__
        True
    """
    built_with = torch.__config__.show()
    libraries = {name: re.search(pattern, built_with) for name, pattern in _LIBRARIES.items()}
    sets, cuda = instruction_sets(), dict[str, str]()
    if device.type == "cuda":
        reduced = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        cuda = {
            "cuda": str(torch.version.cuda or torch.version.hip),
            "cudnn": str(torch.backends.cudnn.version()),
            "reduced sums of bfloat16": str(reduced).lower(),
        }
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processor": processor_name(),
        "instruction sets": " ".join(name for name in _SETS if name in sets) or "unknown",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        **{name: match[1] for name, match in libraries.items() if match},
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()).lower(),
        # No function returns this mode, but a product shows it.
        "subnormals set": "flushed" if float(torch.tensor(2.0**-100, dtype=torch.float32) * 2.0**-40) == 0 else "kept",
        **cuda,
        **{name: os.environ[name] for name in _VARIABLES if os.environ.get(name)},
    }


# ── results, measured or cached ────────────────────────────────────────────────────────────────────────────────────────


_VERSION = 3  # of the probes: one more where a probe's text changes
_measured: dict[Path, Arithmetic] = {}


def arithmetic_of_run(device: torch.device) -> Arithmetic:
    """Return the arithmetic of a device for the record of a run: measured in this process, cached, or measured now.

    Cost: a second under settings that are not cached, otherwise less than a millisecond.
    """
    with _plain_mode():
        settings = settings_in_force(device)
        file = _cache_file(settings)
        if file not in _measured:
            names = [name for name, probe in PROBES.items() if probe.in_runs]
            _measured[file] = _cached(file) or _measure(device, settings, names)
        return _measured[file]


def measure_arithmetic(device: torch.device) -> Arithmetic:
    """Return the whole arithmetic of a device, measured anew and then cached.

    Cost: about 2 s on an idle CPU.
    """
    with _plain_mode():
        return _measure(device, settings_in_force(device), list(PROBES))


def _measure(device: torch.device, settings: dict[str, str], names: Sequence[str]) -> Arithmetic:
    arithmetic = Arithmetic(settings, {name: _result(name, device) for name in names})
    file = _cache_file(settings)
    with contextlib.suppress(OSError, NarrowgaugeError):  # an unwritable folder costs the next run a second
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, (json.dumps(arithmetic.to_toml(), indent=1) + "\n").encode())
    return arithmetic


def _cache_file(settings: dict[str, str]) -> Path:
    key = hashlib.sha256(json.dumps([_VERSION, settings], sort_keys=True).encode()).hexdigest()[:24]
    return cache_folder() / "arithmetic" / f"{key}.json"


def _cached(file: Path) -> Arithmetic | None:
    with contextlib.suppress(OSError, ValueError, NarrowgaugeError):
        return Arithmetic.from_toml(json.loads(file.read_text(encoding="utf-8")), str(file))
    return None


@contextlib.contextmanager
def _plain_mode() -> Iterator[None]:
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _result(name: str, device: torch.device) -> str:
    """Return the result of one probe. If PyTorch refuses the operation on this device, say so."""
    try:
        return _MEASUREMENTS[name](device)
    except (RuntimeError, NotImplementedError) as error:
        return f"{UNAVAILABLE}: {(str(error).splitlines() or [type(error).__name__])[0][:80]}"


def _sums_by_threads(device: torch.device) -> str:
    """Return the sums whose bits differ between 1 and 2 threads."""
    if device.type != "cpu":
        return f"{UNAVAILABLE}: of a CPU only"
    before, sums = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            sums.append({name: measure_sum(name, device) for name in SUMS})
    finally:
        torch.set_num_threads(before)
    return ", ".join(name for name in SUMS if sums[0][name] != sums[1][name]) or "none"


_MEASUREMENTS: dict[str, Callable[[torch.device], str]] = {
    **ROUNDINGS,
    **{f"function {name}": partial(measure_function, name) for name in FUNCTIONS},
    **{name: partial(measure_sum, name) for name in SUMS},
    "sums by threads": _sums_by_threads,
}
