"""The tensors of a training state under the names that they have in a checkpoint, taken from an optimizer and given back.

::

    model.NAME              the visible weight of a parameter
    optimizer.NAME.STATE    its packed states, parameter-shaped; ``STATE_bound`` by rows
    audit.NAME              the sums of its audits
    matmul.LAYER            the histories of delayed scales

A state is placed like its parameter, so each rank saves and loads its own shard; more or fewer ranks may load than saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowgauge.checkpoints.checkpoint_files import SavedTensor, load_whole
from narrowgauge.errors import RecordError
from narrowgauge.numerics.shards import is_sharded, local_of, placed_like
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.state_dict import replicated_states


def state_tensors(named_parameters: Iterable[tuple[str, Tensor]], optimizer: Optimizer) -> dict[str, Tensor]:
    """Weights, states and audits, by name, not copied; DTensors where parameters are."""
    tensors: dict[str, Tensor] = {f"model.{name}": p.detach() for name, p in named_parameters}
    names = optimizer.parameter_names()
    for parameter, entry in optimizer.states().items():
        tensors.update({f"optimizer.{names[parameter]}.{key}": value for key, value in entry.items()})
    for parameter, window in optimizer.auditor.windows.items():
        tensors[f"audit.{names[parameter]}"] = torch.stack(list(window))
    return tensors


def load_tensors(
    path: Path, saved: Mapping[str, SavedTensor], named_parameters: Iterable[tuple[str, Tensor]], optimizer: Optimizer
) -> dict[str, Tensor]:
    """All tensors of a checkpoint; of what belongs to a sharded parameter, each rank's own shard.

    The checksums must have been verified, and the model's weights have the shapes of those saved.
    """
    owners: dict[str, Tensor] = {f"model.{name}": p for name, p in named_parameters}
    for parameter, name in optimizer.parameter_names().items():
        whole = {f"optimizer.{name}.{state}" for state in ("step", *replicated_states(optimizer, parameter))}
        own = [key for key in saved if key.rpartition(".")[0] == f"optimizer.{name}"]
        owners |= {key: parameter for key in own if key not in whole}
    sharded = {name: owner for name, owner in owners.items() if name in saved and is_sharded(owner)}
    tensors = load_whole(path, [name for name in saved if name not in sharded])
    if sharded:
        # Imported here: it takes a second, and one process needs none of it.
        from narrowgauge.checkpoints.sharded_checkpoints import load_into

        targets = {name: _empty(name, saved[name], owner) for name, owner in sharded.items()}
        load_into(path, targets)
        tensors |= targets
    return tensors


def _empty(name: str, saved: SavedTensor, owner: Any) -> Tensor:
    """A tensor to be filled: placed like its parameter if it has its shape or one value for each of its rows."""
    own = local_of(owner)
    is_by_rows = name.endswith("_bound")
    if saved.shape != ((*owner.shape[:-1], 1) if is_by_rows else tuple(owner.shape)):
        return torch.empty(saved.shape, dtype=saved.dtype)  # the optimizer refuses it
    shape = (*own.shape[:-1], 1) if is_by_rows else tuple(own.shape)
    return placed_like(owner, torch.empty(shape, dtype=saved.dtype, device=own.device))


def restore_tensors(
    tensors: Mapping[str, Tensor], named_parameters: Iterable[tuple[str, Tensor]], optimizer: Optimizer
) -> None:
    """Set weights, states and audits to those of :func:`load_tensors`."""
    with torch.no_grad():
        for name, parameter in named_parameters:
            local_of(parameter).copy_(local_of(tensors[f"model.{name}"]))
    entries: dict[Tensor, dict[str, Tensor]] = {}
    names = optimizer.parameter_names()
    for trained, name in names.items():
        prefix = f"optimizer.{name}."
        entry = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if entry:
            entries[trained] = entry
    optimizer.load_states(entries)
    for trained, name in names.items():
        if (window := tensors.get(f"audit.{name}")) is not None:
            optimizer.auditor.restore(trained, window)


def require_same_model(
    saved: Mapping[str, SavedTensor], named_parameters: Iterable[tuple[str, Tensor]], where: str, model: str
) -> None:
    """Refuse a checkpoint that lacks a weight of the model or has it in another shape; ``where`` and ``model`` name the two."""
    for name, parameter in named_parameters:
        found = saved.get(f"model.{name}")
        if found is None or found.shape != tuple(parameter.shape):
            of = "" if found is None else f" of shape {tuple(parameter.shape)} (it is {found.shape} there)"
            raise RecordError(
                f"{where} holds no '{name}'{of}.",
                f"The model has changed: restore {model} as it was when the run started.",
            )
