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
        if (state := optimizer.state_of(parameter)) is not None:
            tensors.update(
                {f"optimizer.{name}.{key}": value for key, value in state.saved().items()}
            )
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

    saved = described(path)
    owners: dict[str, Tensor] = {}
    for name, parameter in named_parameters:
        tensor = saved.get(f"model.{name}")
        if tensor is None or tuple(tensor.size) != tuple(parameter.shape):
            of = (
                ""
                if tensor is None
                else f" of shape {tuple(parameter.shape)} (it is {tuple(tensor.size)} there)"
            )
            raise RecordError(
                f"checkpoint {path.name} of {path.parents[1]} holds no '{name}'{of}.",
                f"The model has changed: restore {model} as it was when the run started.",
            )
        owners[f"model.{name}"] = parameter
    states = _by_owner(saved)
    for parameter, name in optimizer.parameter_names().items():
        unsharded = ("step", *whole_states(optimizer, parameter))
        of_parameter = states.get(f"optimizer.{name}", {})
        owners |= {
            f"optimizer.{name}.{state}": parameter
            for state in of_parameter
            if state not in unsharded
        }
    targets = {
        name: _empty(name, tuple(tensor.size), tensor.properties.dtype, owners.get(name))
        for name, tensor in saved.items()
    }
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
    choices = range(1, owner.ndim + 1) if name.endswith("_bound") else (0,)
    for row_dims in choices:
        kept = owner.ndim - row_dims
        if shape == (*owner.shape[:kept], *[1] * row_dims):
            local = (*shard.shape[:kept], *[1] * row_dims)
            part = torch.empty(local, dtype=dtype, device=shard.device)
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
    entries = {trained: states.get(f"optimizer.{name}") for trained, name in names.items()}
    optimizer.load_states({trained: entry for trained, entry in entries.items() if entry})
    for trained, name in names.items():
        if (window := tensors.get(f"audit.{name}")) is not None:
            optimizer.auditor.restore(trained, window)
