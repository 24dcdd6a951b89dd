"""Describe this machine for an issue report, and measure its arithmetic."""

from __future__ import annotations

import os
from pathlib import Path

import click

import narrowgauge
from narrowgauge.errors import ChipError
from narrowgauge.machine import installed_version, instruction_sets, processor_name
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


def print_arithmetic(device: str | None, as_json: bool) -> None:
    """Print the arithmetic of this machine, measured on ``device``; ``None`` for the training device."""
    import torch

    from narrowgauge.gauges.arithmetic import measure_arithmetic

    if device == "cuda" and not torch.cuda.is_available():
        raise ChipError(
            'no CUDA device here, and device = "cuda" was asked for.', "Leave --device out to measure this CPU."
        )
    table = measure_arithmetic(torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    if as_json:
        return tables.write_json(table)
    return click.echo("\n".join(f"{name}: {text}" for part in table.values() for name, text in part.items()))
