"""The versions, the machine and its arithmetic, as ``run.toml`` holds them: what the bits of a run may depend on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

import narrowgauge
from narrowgauge.distributed.launch.placement import read_placement
from narrowgauge.machine.measured_arithmetic import arithmetic_of_run
from narrowgauge.runs.arithmetic import TABLE

_PACKAGES = ("transformers", "tokenizers", "numpy")


def describe_process(device: torch.device, num_ranks: int = 1, packages: tuple[str, ...] = _PACKAGES) -> dict[str, Any]:
    """The tables ``versions``, ``machine`` and ``arithmetic`` of ``run.toml``.

    Args:
        device: of the model.
        num_ranks: processes that train together.
        packages: whose versions are recorded beside those of PyTorch and Python; those that are missing are left out.
    Cost: a second where this machine's arithmetic was not measured before under these settings, else milliseconds.
    Example:
        >>> sorted(describe_process(torch.device("cpu")))
        ['arithmetic', 'machine', 'versions']
    """
    return {
        "versions": {
            "narrowgauge": narrowgauge.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: found for name in packages if (found := _version(name))},
        },
        "machine": {
            "system": platform.platform(),
            "processor": platform.machine(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "num_threads": torch.get_num_threads(),
            **({"ranks": num_ranks} if num_ranks > 1 else {}),
            **({"job": job} if (job := read_placement().job) else {}),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        },
        TABLE: arithmetic_of_run(device).to_toml(),
    }


_SHAPE = {
    "hidden_size": "hidden_size", "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size", "vocab_size": "vocab_size",
}  # fmt: skip
"""By entry of the table ``model``: the field of a configuration of transformers."""


def describe_model(model: nn.Module) -> dict[str, Any]:
    """The table ``model`` of ``run.toml``: its size, and its shape as far as its ``config`` tells it.

    Args:
        model: of any kind; without a configuration its class and its number of parameters are told.
    Returns:
        ``class``, ``num_parameters``, and where they are known ``hidden_size``, ``num_layers``, ``num_heads``,
        ``intermediate_size``, ``vocab_size`` and ``mlp``, which is "gated" or "plain".
    Example:
        >>> describe_model(nn.Linear(4, 2))
        {'class': 'Linear', 'num_parameters': 10}
    """
    config = getattr(model, "config", None)
    found = {name: getattr(config, field, None) for name, field in _SHAPE.items()}
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    mlp = (
        "gated"
        if names & {"gate_proj", "gate_up_proj", "w3"}
        else "plain"
        if isinstance(found["num_layers"], int)
        else None
    )
    return {
        "class": type(model).__name__,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        **{name: value for name, value in found.items() if isinstance(value, int)},
        **({"mlp": mlp} if mlp else {}),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
