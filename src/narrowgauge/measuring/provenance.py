"""Describe everything on which the bits of a run may depend: versions, the machine and its arithmetic.

``run.toml`` holds them as they were at the start of the run. ``narrowgauge diagnose`` prints
what differs between two runs.
"""

import platform
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from statistics import mode
from typing import Any

import torch
from torch import nn

import narrowgauge
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import RecipeError
from narrowgauge.matmul.linear import Linear
from narrowgauge.measuring.arithmetic import measure_arithmetic
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import STORAGES
from narrowgauge.torch_support.machine import installed_version, processor_name

_PLAIN = (bool, int, float, str)


def describe_process(device: torch.device) -> dict[str, Any]:
    """Return the tables ``versions``, ``machine`` and ``arithmetic`` of ``run.toml``.

    Cost: about 10 ms.
    Example:
        >>> sorted(describe_process(torch.device("cpu")))
        ['arithmetic', 'machine', 'versions']
    """
    ranks = all_ranks()
    versions = {"narrowgauge": narrowgauge.__version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "tokenizers", "numpy"):
        version = installed_version(name)
        if version:
            versions[name] = version
    machine = {
        "system": platform.platform(),
        "processor": processor_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "device": device.type,
        "ranks": ranks.size,
        "threads": torch.get_num_threads(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type == "cuda":
        reduced = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        machine |= {
            "device": torch.cuda.get_device_name(device),
            "cuda": str(torch.version.cuda or torch.version.hip),
            "cudnn": str(torch.backends.cudnn.version()),
            "reduced sums of bfloat16": reduced,
        }
    arithmetic = measure_arithmetic(device)
    tables = {"versions": versions, "machine": machine, "arithmetic": arithmetic}
    unlike = unlike_ranks(ranks.gather(arithmetic))
    return tables | {"unlike_ranks": unlike} if unlike else tables


def unlike_ranks(results: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Return the operations in which a rank gives other bits than most ranks, by rank."""
    unlike: dict[str, list[str]] = {}
    for name in results[0]:
        bits = [result[name] for result in results]
        usual = mode(bits)
        for rank, x in enumerate(bits):
            if x != usual and 2 * bits.count(usual) > len(bits):
                unlike.setdefault(str(rank), []).append(name)
    return unlike


def describe_run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the content of ``run.toml``."""
    parameters = list(model.parameters())
    options, *others = map(_options_of, optimizer.param_groups)
    for number, other in enumerate(others, 1):
        unlike = {name: x for name, x in other.items() if x != options.get(name)}
        if unlike:
            options[f"group{number}"] = unlike
    return {
        "config": {
            "recipe": _recipe_in_use(model, optimizer),
            "model": type(model).__name__,
            "seed": optimizer.param_groups[0].get("seed", 0),
            **settings,
        },
        "start": _start(),
        **describe_process(parameters[0].device),
        "optimizer": {"class": type(optimizer).__name__, **options},
        "model": {
            "class": type(model).__name__,
            "num_parameters": sum(p.numel() for p in parameters),
            "dtypes": ", ".join(sorted({dtype_name(p.dtype) for p in parameters})),
        },
    }


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group, those of several numbers as lists."""
    options = {}
    for name, value in group.items():
        if isinstance(value, tuple):
            value = [x if isinstance(x, _PLAIN) else str(x) for x in value]
        if isinstance(value, (*_PLAIN, list)) and name != "params":
            options[name] = value
    return options


def _start() -> dict[str, str]:
    """Return the time, and the commit of the folder in which the program was started."""
    start = {"time": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")}
    words = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        git = subprocess.run(words, capture_output=True, text=True, timeout=2, check=True)
        start["commit"] = git.stdout.strip()
    return start


def _recipe_in_use(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Return the name of the recipe of a model in a user's loop; ``None`` if unknown."""
    if not isinstance(optimizer, Optimizer):
        return None
    storage = STORAGES.get(optimizer.param_groups[0]["storage"])
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    compute = linears[0].compute if linears else COMPUTES["bfloat16"]
    with suppress(RecipeError):
        return None if storage is None else Recipe(compute, storage).name
    return None
