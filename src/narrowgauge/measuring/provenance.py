"""Describe and compare everything on which the bits of a run may depend: versions, the machine and
its arithmetic.

``run.toml`` holds them as they were at the start of the run. Other versions or another machine may
change bits. A resume notes the differences and continues.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import narrowgauge
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import RecordError
from narrowgauge.measuring.arithmetic import measure_arithmetic
from narrowgauge.measuring.settings import settings_diff
from narrowgauge.runs.finding import told
from narrowgauge.runs.schema import Row
from narrowgauge.spec.formats import FORMATS, dtype_name
from narrowgauge.spec.recipes import Recipe
from narrowgauge.torch_support.machine import installed_version
from narrowgauge.torch_support.torch_names import graph_dtypes

_PACKAGES = ("transformers", "tokenizers", "numpy")


def describe_process(device: torch.device, num_ranks: int = 1) -> dict[str, Any]:
    """Return the tables ``versions``, ``machine`` and ``arithmetic`` of ``run.toml``.

    Leave out missing packages.

    Cost: about 10 ms.
    Example:
        >>> sorted(describe_process(torch.device("cpu")))
        ['arithmetic', 'machine', 'versions']
    """
    versions = {
        "narrowgauge": narrowgauge.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name in _PACKAGES:
        version = installed_version(name)
        if version:
            versions[name] = version
    machine: dict[str, Any] = {
        "system": platform.platform(),
        "processor": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
    }
    if num_ranks > 1:
        machine["ranks"] = num_ranks
    machine["device"] = "cpu"
    if device.type == "cuda":
        machine["device"] = torch.cuda.get_device_name(device)
    return {"versions": versions, "machine": machine, "arithmetic": measure_arithmetic(device)}


def describe_model(model: nn.Module) -> dict[str, Any]:
    """Return the table ``model`` of ``run.toml``: its class, its number of parameters, and their
    dtypes.

    Example:
        >>> describe_model(nn.Linear(4, 2))
        {'class': 'Linear', 'num_parameters': 10, 'dtypes': 'float32'}
    """
    return {
        "class": type(model).__name__,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "dtypes": ", ".join(sorted({dtype_name(p.dtype) for p in model.parameters()})),
    }


def describe_run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe | None,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the content of ``run.toml``."""
    group = optimizer.param_groups[0]
    config = {"model": type(model).__name__, "seed": group.get("seed", 0)}
    if recipe is not None:
        config = {"recipe": recipe.name, **config}
    described = {"class": type(optimizer).__name__}
    for name, value in group.items():
        if _is_plain(value):
            described[name] = value
    device = next(model.parameters()).device
    return {
        "config": {**config, **settings},
        **describe_process(device, all_ranks().size),
        "optimizer": described,
        "model": describe_model(model),
        "recorder": {"program": Path(sys.argv[0]).name},
    }


def _is_plain(value: object) -> bool:
    """Return whether TOML can hold a value. ``Adafactor`` has an epsilon of ``None`` in a tuple."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str))


def formats_of(output: Any) -> Row:
    """Return the formats in which a forward pass computed. Empty if no output has a graph.

    Dtypes of parameters do not show these formats: autocast, a wrapper or a cast in the model's
    code may use others. The graph that autograd builds has the dtype of every result.

    Args:
        output: of a model: a tensor, or tensors in a tuple or a mapping.
    Returns:
        ``formats``, the dtypes of all results as names with commas.

    Example:
        >>> formats_of(nn.Linear(4, 2)(torch.ones(1, 4)))
        {'formats': 'float32'}
    """
    names = sorted(map(dtype_name, graph_dtypes(output)))
    if not names:
        return {}
    return {"formats": ", ".join(filter(FORMATS.__contains__, names))}


_BITS_DEPEND_ON = ("narrowgauge", "torch", "transformers", "device", "capability", "num_threads")


def differences(recorded: dict[str, Any], present: dict[str, Any]) -> list[str]:
    """Describe changes since a run began that may change its bits: a sentence each, without a full
    stop.

    ``recorded`` is the run's ``run.toml``. Its missing entries are not compared. ``present`` is
    :func:`describe_process` here.

    Example:
        >>> differences({"versions": {"torch": "2.12.1"}}, {"versions": {"torch": "2.13.0"}})
        ['the run started with torch 2.12.1 and resumes with 2.13.0: bits may differ from an uninterrupted run']
    """
    sentences = []
    results = []
    with suppress(RecordError):  # a table that cannot be read
        for difference in settings_diff(recorded, present):
            name = difference.name
            before, now = difference.values
            if difference.table.startswith("arithmetic"):
                results.append(name)
            elif difference.table in ("versions", "machine") and name in _BITS_DEPEND_ON:
                change = f"the run started with {name} {before} and resumes with {now}"
                sentences.append(f"{change}: bits may differ from an uninterrupted run")
    if results:
        sentences.append(
            f"this machine's arithmetic is not that of the run's start, in: {told(results, 5)}"
        )
    return sentences
