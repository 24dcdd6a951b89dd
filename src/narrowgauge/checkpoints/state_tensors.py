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

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from narrowgauge.errors import RecordError
from narrowgauge.numerics.dtensor import is_sharded, local_of, placed_like
from narrowgauge.optim.loading import whole_states
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.atomic_io import disk_errors

T = TypeVar("T")


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
        state = optimizer.state_of(parameter)
        for key, value in state.saved().items() if state is not None else ():
            tensors[f"optimizer.{name}.{key}"] = value
    for parameter, window in optimizer.auditor.windows.items():
        tensors[f"audit.{names[parameter]}"] = window
    return tensors


def load_tensors(
    path: Path,
    named_parameters: Iterable[tuple[str, Tensor]],
    optimizer: Optimizer,
    model: str = "the model",
) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint with verified checksums.

    For sharded parameters, each rank reads its own shards.

    Raises:
        RecordError: the checkpoint lacks a weight, or has it in another shape. ``model`` names the
            model in the message.
    """
    from narrowgauge.checkpoints.dcp_files import described, fill

    with disk_errors(path):
        saved = described(path)
        owners: dict[str, Tensor] = {}
        for name, parameter in named_parameters:
            tensor = saved.get(f"model.{name}")
            if tensor is None or tensor.size != parameter.shape:
                there = "" if tensor is None else f" (it is {tuple(tensor.size)} there)"
                raise RecordError(
                    f"checkpoint {path.name} of {path.parents[1]} holds no '{name}' of shape "
                    f"{tuple(parameter.shape)}{there}.",
                    f"The model has changed: restore {model} as it was when the run started.",
                )
            owners[f"model.{name}"] = parameter
        states = _by_owner(saved)
        for parameter, name in optimizer.parameter_names().items():
            unsharded = ("step", *whole_states(optimizer, parameter))
            for state in states.get(f"optimizer.{name}", {}):
                if state not in unsharded:
                    owners[f"optimizer.{name}.{state}"] = parameter
        targets = {}
        for name, tensor in saved.items():
            shape = tuple(tensor.size)
            targets[name] = _empty(name, shape, tensor.properties.dtype, owners.get(name))
        fill(path, targets)
    return targets


def _by_owner(entries: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Group entries by the part of their name before the last dot."""
    groups: dict[str, dict[str, T]] = {}
    for name, entry in entries.items():
        owner, _, state = name.rpartition(".")
        groups.setdefault(owner, {})[state] = entry
    return groups


def _empty(name: str, shape: tuple[int, ...], dtype: torch.dtype, owner: Any) -> Tensor:
    """Return a tensor to be filled.

    It is placed like its parameter if it has its shape or one value per row.
    """
    if owner is None or not is_sharded(owner):
        return torch.empty(shape, dtype=dtype, device="cpu")
    shard = local_of(owner)
    # A bound has 1 in place of the last dimensions.
    most = owner.ndim if name.endswith("_bound") else 0
    for row_dims in range(min(1, most), most + 1):
        num_kept = owner.ndim - row_dims
        unit_dims = (1,) * row_dims
        if shape == (*owner.shape[:num_kept], *unit_dims):
            part = torch.empty(
                (*shard.shape[:num_kept], *unit_dims), dtype=dtype, device=shard.device
            )
            return placed_like(owner, part, row_dims=row_dims)
    return torch.empty(shape, dtype=dtype, device="cpu")


def restore_tensors(
    tensors: Mapping[str, Tensor],
    named_parameters: Iterable[tuple[str, Tensor]],
    optimizer: Optimizer,
) -> None:
    """Set weights, states and audits to the result of :func:`load_tensors`."""
    with torch.no_grad():
        for name, parameter in named_parameters:
            local_of(parameter).copy_(local_of(tensors[f"model.{name}"]))
    names = optimizer.parameter_names()
    states = _by_owner(tensors)
    entries = {}
    for trained, name in names.items():
        if f"optimizer.{name}" in states:
            entries[trained] = states[f"optimizer.{name}"]
    optimizer.load_states(entries)
    for trained, name in names.items():
        if f"audit.{name}" in tensors:
            optimizer.auditor.restore(trained, tensors[f"audit.{name}"])
