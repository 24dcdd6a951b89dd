"""Name the tensors of a training state in a checkpoint, take them from an optimizer, and set them
again.

::

    model.NAME              the visible weight of a parameter
    optimizer.NAME.STATE    its packed states, parameter-shaped; ``STATE_bound`` by rows
    audit.NAME              the sums of its audits

A state is placed like its parameter, so each rank saves and loads its own shard. The number of
ranks may change.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from narrowgauge.errors import RecordError
from narrowgauge.numerics.dtensor import local_of, sendable
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.atomic_io import disk_errors


def state_tensors(
    named_parameters: Iterable[tuple[str, Tensor]], optimizer: Optimizer
) -> dict[str, Tensor]:
    """Return weights, states and audits by name, without copying.

    Sharded parameters give DTensors.
    """
    tensors: dict[str, Tensor] = {f"model.{name}": p.detach() for name, p in named_parameters}
    names = optimizer.parameter_names()
    optimizer.settle()
    for parameter, name in names.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{name}.{key}"] = sendable(value, value)
    for parameter, window in optimizer.auditor.windows.items():
        tensors[f"audit.{names[parameter]}"] = window
    return tensors


@torch.no_grad()
def load_states(
    path: Path,
    named_parameters: Iterable[tuple[str, Tensor]],
    optimizer: Optimizer,
    model: str = "the model",
) -> None:
    """Set weights, states and audits to those of a checkpoint with verified checksums.

    Each rank reads its own shards: a tensor is placed as the one that it replaces.

    Raises:
        RecordError: the checkpoint lacks a weight, or has it in another shape. ``model`` names the
            model in the message.
    """
    from narrowgauge.checkpoints.dcp_files import described, fill

    named = dict(named_parameters)
    for group in optimizer.param_groups:
        optimizer.make_missing(group, group["params"], fills=False)
    present = state_tensors(named.items(), optimizer)
    tensors = {}
    with disk_errors(path):
        saved = described(path)
        for name, parameter in named.items():
            weight = saved.get(f"model.{name}")
            if weight is None or weight.size != parameter.shape:
                there = "" if weight is None else f" (it is {tuple(weight.size)} there)"
                raise RecordError(
                    f"checkpoint {path.name} of {path.parents[1]} holds no '{name}' of shape "
                    f"{tuple(parameter.shape)}{there}.",
                    f"The model has changed: restore {model} as it was when the run started.",
                )
        for name, entry in saved.items():
            dtype = entry.properties.dtype
            tensors[name] = torch.empty(entry.size, dtype=dtype, device="cpu")
            if name in present and present[name].shape == entry.size:
                tensors[name] = torch.empty_like(present[name], dtype=dtype)
        fill(path, tensors)
    for name, parameter in named.items():
        local_of(parameter).copy_(local_of(tensors[f"model.{name}"]))
    entries: dict[Tensor, dict[str, Tensor]] = {}
    names = optimizer.parameter_names()
    trained = {name: parameter for parameter, name in names.items()}
    for key, tensor in tensors.items():
        kind, _, rest = key.partition(".")
        name, _, state = rest.rpartition(".")
        if kind == "optimizer" and name in trained:
            entries.setdefault(trained[name], {})[state] = tensor
    optimizer.load_states(entries)
    for parameter, name in names.items():
        if f"audit.{name}" in tensors:
            optimizer.auditor.restore(parameter, tensors[f"audit.{name}"])
