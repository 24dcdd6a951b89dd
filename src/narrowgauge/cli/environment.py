"""Describe this machine for an issue report, and compare its arithmetic with a run's or another machine's."""

from __future__ import annotations

import os
from pathlib import Path

import click

import narrowgauge
from narrowgauge.errors import ChipError
from narrowgauge.machine import installed_version, instruction_sets, processor_name
from narrowgauge.runs.arithmetic import PROBES, Arithmetic, differences, read_arithmetic
from narrowgauge.spec import tables


def collect() -> dict[str, str]:
    """Return our version, the processor, the packages, and the output of ``torch.utils.collect_env``. Takes some seconds."""
    from torch.utils.collect_env import get_pretty_env_info

    packages = ("transformers", "tokenizers", "safetensors")
    home = str(Path.home())  # contains the user's name
    report = get_pretty_env_info()
    return {
        "narrowgauge": narrowgauge.__version__,
        "processor": f"{processor_name()}, {os.cpu_count()} CPUs: {' '.join(sorted(instruction_sets()))}",
        **{name: installed_version(name) or "not installed" for name in packages},
        "torch.utils.collect_env": report.replace(home, "~") if len(home) > 1 else report,
    }


def print_arithmetic(paths: tuple[Path, ...], device: str | None, as_json: bool) -> None:
    """Print the arithmetic of this machine, or the differences between two machines.

    Args:
        paths: run folders, or files of ``--json``. With two of them nothing is measured.
        device: the device to measure; ``None`` for the training device.
    """
    if len(paths) > 2:
        raise click.UsageError("Two machines are compared at most.", click.get_current_context())
    if len(paths) == 2 and device is not None:
        raise click.UsageError("--device was given, and nothing is measured.", click.get_current_context())
    machines = [read_arithmetic(path) for path in paths]
    if len(machines) < 2:
        machines.insert(0, _measure(device))
    if len(machines) == 1:
        table = machines[0].to_toml()
        lines = [f"{name}: {text}" for name, text in {**table["settings"], **table["results"]}.items()]
        return tables.write_json(table) if as_json else click.echo("\n".join(lines))
    parted = differences(*machines)
    affects = {name: PROBES[name].affects if name in PROBES else "" for name in parted.results}
    if as_json:
        rows = [{"probe": name, "results": texts, "affects": affects[name]} for name, texts in parted.results.items()]
        return tables.write_json({"differences": rows, "settings": parted.settings})
    for name, (first, second) in parted.results.items():
        click.echo(f"{name}: {first} and {second}. It affects {affects[name]}.")
    click.echo(f"{len(parted.results) or 'None'} of {parted.num_compared} measured properties differ.")
    for name, (first, second) in parted.settings.items():
        click.echo(f"setting {name}: {first} and {second}")
    return None


def _measure(device: str | None) -> Arithmetic:
    import torch

    from narrowgauge.gauges.arithmetic import measure_arithmetic

    if device == "cuda" and not torch.cuda.is_available():
        raise ChipError(
            'no CUDA device here, and device = "cuda" was asked for.', "Leave --device out to measure this CPU."
        )
    return measure_arithmetic(torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
