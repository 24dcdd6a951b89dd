"""This machine: a description for issue reports, and its arithmetic beside that of a run or of another machine.

The description is read from files, package metadata and the environment, so the answer is immediate, and works where PyTorch
cannot be imported. :func:`collect_from_torch` adds what only PyTorch knows.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

import narrowgauge
from narrowgauge.errors import ChipError
from narrowgauge.machine.cache_folder import cache_folder
from narrowgauge.machine.cpp_compiler import compiler_name
from narrowgauge.machine.processor import instruction_sets, multiplies, processor_name
from narrowgauge.runs.arithmetic import Arithmetic, changed_settings, differences, not_compared, read_arithmetic
from narrowgauge.spec import tables
from narrowgauge.spec.chips import get_chip
from narrowgauge.spec.formats import FORMATS
from narrowgauge.spec.frameworks import TESTED_TORCH, installed_version, untested_torch
from narrowgauge.spec.tables import Column, Row, Table

Environment = dict[str, Any]

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
# In this order; others do not matter here.
_INSTRUCTION_SETS = (
    "sse4_2", "avx", "fma", "f16c", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile",
    "amx_int8", "amx_bf16", "amx_fp16", "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2",
)  # fmt: skip
_PREFIXES = (
    "NARROWGAUGE_", "OMP_", "KMP_", "MKL_", "ONEDNN_", "DNNL_", "ATEN_", "TORCH", "PYTORCH_", "CUDA_", "CUBLAS_", "HIP_",
    "ROCR_",
)  # fmt: skip
_NAMES = ("CXX", "LD_PRELOAD", "XDG_CACHE_HOME")
_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)


def collect(root: Path = Path("/")) -> Environment:
    """Describe this machine and installation without importing PyTorch; ``root`` is the folder of ``proc``.

    Returns:
        ``narrowgauge``, ``python``, ``packages``, ``system``, ``processor``, ``num_cpus`` (usable by this process),
        ``memory_bytes``, ``instruction_sets``, ``native_formats`` (multiplied by this CPU), ``gpus`` (``name``, ``chip``),
        ``gpu_driver``, ``compiler``, ``kernel_cache`` (``folder``, ``num_kernels``, ``bytes``) and ``variables``. The home
        folder is written as ``~``.

    Cost: milliseconds; no process is started except on macOS.
    Example:
        >>> collect()["narrowgauge"] == narrowgauge.__version__
        True
    """
    sets = instruction_sets()
    return {
        "narrowgauge": narrowgauge.__version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "packages": {name: installed_version(name) for name in PACKAGES} | {"torch": _torch_version()},
        "system": platform.platform(),
        "processor": processor_name(root),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(root),
        "instruction_sets": [name for name in _INSTRUCTION_SETS if name in sets],
        "native_formats": [name for name in FORMATS if multiplies(name)],
        "gpus": _gpus(root),
        "gpu_driver": _first_match(root / "proc/driver/nvidia/version", r"^NVRM version:.*?\b(\d+(?:\.\d+)+)\b"),
        "compiler": compiler_name() if shutil.which(compiler_name()) else None,
        "kernel_cache": _kernel_cache(),
        "variables": {name: _without_home(os.environ[name]) for name in sorted(os.environ) if _is_relevant(name)},
    }


def collect_from_torch() -> Environment:
    """What PyTorch itself reports: ``cpu_capability``, ``num_threads``, ``cuda`` and its ``devices``, ``mkl`` and ``onednn``.

    Cost: the import of PyTorch, some seconds.
    """
    import torch

    devices = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        devices.append({"name": found.name, "capability": f"{found.major}.{found.minor}", "bytes": found.total_memory})
    return {
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "devices": devices,
        "mkl": torch.backends.mkl.is_available(),
        "onednn": torch.backends.mkldnn.is_available(),
    }


def describe(found: Environment) -> str:
    """The result of :func:`collect` as plain text, one line per property, to be pasted into an issue.

    The key ``torch`` may hold the result of :func:`collect_from_torch`.
    """
    cache, torch = found["kernel_cache"], found.get("torch")
    lines = {
        "narrowgauge": found["narrowgauge"],
        "python": found["python"],
        **{name: version or "not installed" for name, version in found["packages"].items()},
        "torch": _tested(found["packages"]["torch"]),
        "system": found["system"],
        "processor": f"{found['processor']}, {found['num_cpus']} usable CPUs, {_gib(found['memory_bytes'])} of memory",
        "instruction sets": " ".join(found["instruction_sets"]) or "unknown",
        "native formats": f"{' '.join(found['native_formats'])} (all others are emulated on this CPU)",
        "GPUs": "; ".join(map(_gpu_line, found["gpus"])) or "none found",
        "GPU driver": found["gpu_driver"],
        "compiler": found["compiler"] or "none: optimizer steps and casts run uncompiled",
        "kernel cache": f"{cache['folder']}: {cache['num_kernels']} kernels, {cache['bytes'] / 1e6:.1f} MB",
        "variables": " ".join(f"{name}={value}" for name, value in found["variables"].items()) or "none set",
    }
    if torch is not None:
        cuda = f"CUDA {torch['cuda']}" if torch["cuda"] else "built without CUDA"
        backends = ", ".join(name for name in ("mkl", "onednn") if torch[name])
        lines["torch reports"] = f"{torch['cpu_capability']}, {torch['num_threads']} threads, {cuda}, {backends}"
        lines["torch devices"] = "; ".join(
            f"{d['name']} (sm {d['capability']}, {_gib(d['bytes'])})" for d in torch["devices"]
        )
    width = max(map(len, lines))
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in lines.items() if text)


def _torch_version() -> str | None:
    """The version with its build, as in 2.13.0+cu130, which the package's metadata may lack."""
    with suppress(ImportError, ValueError):
        found = find_spec("torch")  # which imports nothing
        if found is not None and found.origin:
            return _first_match(
                Path(found.origin).with_name("version.py"), r"^__version__ = '(.+)'$"
            ) or installed_version("torch")
    return None


def _tested(version: str | None) -> str:
    if not version:
        return "not installed"
    releases = f"{TESTED_TORCH[0]} to {TESTED_TORCH[-1]}"
    how = (
        f"NEWER than what narrowgauge was tested with, {releases}"
        if untested_torch(version)
        else f"tested with {releases}"
    )
    return f"{version} ({how})"


def _read(file: Path) -> str:
    with suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace")
    return ""


def _first_match(file: Path, pattern: str) -> str | None:
    found = re.search(pattern, _read(file), re.MULTILINE)
    return found[1].strip() if found else None


def _memory_bytes(root: Path) -> int | None:
    kibibytes = _first_match(root / "proc/meminfo", r"^MemTotal:\s*(\d+) kB")
    return int(kibibytes) * 1024 if kibibytes else None


def _gpus(root: Path) -> list[dict[str, str | None]]:
    """The GPUs that NVIDIA's driver lists, each with its entry in the table of chips."""
    names = (
        _first_match(file, r"^Model:\s*(.+)$") for file in sorted(root.glob("proc/driver/nvidia/gpus/*/information"))
    )
    return [{"name": name, "chip": _chip(name)} for name in names if name]


def _chip(name: str) -> str | None:
    """The entry of ``narrowgauge show chips`` for a name reported by the driver; ``None`` unless exactly one entry matches."""
    bare = re.sub(r"^(NVIDIA|Tesla|GeForce)\s+", "", re.sub(r"^NVIDIA\s+", "", name))
    with suppress(ChipError):
        return get_chip(bare.replace(" ", "-")).name
    return None


def _kernel_cache() -> dict[str, Any]:
    folder, sizes = cache_folder() / "kernels", []
    with suppress(OSError):
        sizes = [file.stat().st_size for file in folder.glob("*.pt2")]
    return {"folder": _without_home(str(folder)), "num_kernels": len(sizes), "bytes": sum(sizes)}


def _is_relevant(name: str) -> bool:
    return (name.startswith(_PREFIXES) or name in _NAMES) and not _SECRET.search(name)


def _without_home(text: str) -> str:
    """The text with ``~`` for the home folder, which contains the user's name."""
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text


def _gib(num_bytes: int | None) -> str:
    return "an unknown amount" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"


def _gpu_line(gpu: dict[str, str | None]) -> str:
    return f"{gpu['name']} ({gpu['chip'] or 'not in narrowgauge show chips'})"


# ── arithmetic ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def print_arithmetic(others: tuple[Path, ...], device: str | None, as_json: bool) -> None:
    """Print the arithmetic of this machine, or what differs between two.

    Args:
        others: run folders, or files of ``--json``; with two of them nothing is measured.
        device: what to measure; ``None`` for the one that runs train on.
    """
    if len(others) > 2:
        raise click.UsageError("Two machines are compared at most.", click.get_current_context())
    if len(others) == 2 and device is not None:
        raise click.UsageError("--device was given, and nothing is measured.", click.get_current_context())
    read = [read_arithmetic(path) for path in others]
    if len(read) < 2:
        read = [_measure(device), *read]
    names = (["this machine"] if len(others) < 2 else []) + [str(path) for path in others]
    if len(read) == 1:
        return tables.write_object(read[0].to_toml()) if as_json else click.echo(describe_arithmetic(read[0]))
    if as_json:
        return tables.write_object(comparison(read[0], read[1]))
    _write_comparison(read[0], read[1], names[0], names[1])
    return None


def _measure(device: str | None) -> Arithmetic:
    import torch

    from narrowgauge.gauges.probes.measured_arithmetic import measure_arithmetic

    if device == "cuda" and not torch.cuda.is_available():
        raise ChipError(
            'no CUDA device here, and device = "cuda" was asked for.', "Leave --device out to measure this CPU."
        )
    return measure_arithmetic(torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))


def describe_arithmetic(found: Arithmetic) -> str:
    """The settings and the results as plain text, a line for each."""
    width = max(map(len, [*found.settings, *found.results]))
    parts = [
        "\n".join(f"{name.ljust(width)}  {text}" for name, text in entries.items())
        for entries in (found.settings, found.results)
    ]
    return "\n\n".join(parts)


def comparison(one: Arithmetic, other: Arithmetic) -> Row:
    """What differs, for JSON: ``differences`` (probe, both results, what it affects, settings that may be why), ``settings``
    (all that differ) and ``not_compared``."""
    return {
        "differences": [
            {
                "probe": found.probe.name,
                "results": [found.one, found.other],
                "affects": found.probe.affects,
                "settings": _by_name(found.settings),
            }
            for found in differences(one, other)
        ],
        "settings": _by_name(changed_settings(one, other)),
        "not_compared": not_compared(one, other),
    }


def _by_name(settings: tuple[tuple[str, str, str], ...]) -> dict[str, list[str]]:
    return {name: [one, other] for name, one, other in settings}


def _write_comparison(one: Arithmetic, other: Arithmetic, name: str, other_name: str) -> None:
    found = comparison(one, other)
    rows: list[dict[str, Any]] = [
        {**row, "one": row["results"][0], "other": row["results"][1], "why": ", ".join(row["settings"])}
        for row in found["differences"]
    ]
    columns = (
        Column("probe", "probe", code=True), Column(name, "one"), Column(other_name, "other"),
        Column("what it affects", "affects"), Column("settings that differ", "why"),
    )  # fmt: skip
    if rows:
        tables.write(Table(columns, rows))
    compared = len(one.results.keys() & other.results.keys())
    click.echo(
        f"{len(rows)} of {compared} measured properties differ."
        if rows
        else f"All {compared} measured properties agree."
    )
    if found["settings"]:
        changed = "; ".join(f"{key} {left} and {right}" for key, (left, right) in found["settings"].items())
        click.echo(f"Settings that differ: {changed}.")
    if found["not_compared"]:
        click.echo(f"Measured on one of them only: {', '.join(found['not_compared'])}.")
