"""Training states of other libraries: of single files, whose values ``encodings`` decodes, and of sharded checkpoints.

``torch.optim`` states index their parameters by number; they contain names only if the optimizer was given named
parameters. Otherwise parameters are matched by the model's order: that of a ``state_dict``, or of the model that a Hugging
Face ``config.json`` describes, but not of a safetensors file, which sorts its keys. Every shape is checked, and an
ambiguous match is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowgauge.assembly.resumption import KEY
from narrowgauge.checkpoints.conversion.deepspeed_zero import is_zero, open_zero
from narrowgauge.checkpoints.conversion.encodings import decoded, encoding_of, shape_of, unnested
from narrowgauge.checkpoints.conversion.files import UNREADABLE, find
from narrowgauge.checkpoints.conversion.megatron import is_megatron, open_megatron
from narrowgauge.checkpoints.conversion.nanotron import is_nanotron, open_nanotron
from narrowgauge.checkpoints.conversion.sharded import Sharded
from narrowgauge.checkpoints.conversion.source import Source, matched, numbers_of, under_names
from narrowgauge.errors import DataError, NarrowgaugeError
from narrowgauge.optim.validation import known_row
from narrowgauge.spec.storages import for_vectors

# Checkpoints of frameworks that divide parameters over ranks: how each is recognized and opened; see spec/frameworks.py.
SHARDED: dict[str, tuple[Callable[[Path], bool], Callable[..., Sharded]]] = {
    "DeepSpeed ZeRO": (is_zero, open_zero),
    "Megatron-Core": (is_megatron, open_megatron),
    "nanotron": (is_nanotron, open_nanotron),
}


def read_foreign(path: Path, optimizer: Path | None, names: Sequence[str] = ()) -> Source:
    """Read weights, and the state of Adam or AdamW from the same or another file.

    Args:
        optimizer: the file with the optimizer state, if separate.
        names: parameter names in the model's order, where the files do not contain it.
    """
    if (row := sharded_format(path)) is not None:
        if optimizer is not None:
            raise DataError(
                f"{path} contains its own optimizer state, and {optimizer} was given too.", "Give one of them."
            )
        return open_sharded(row, path).source()
    found = find(path, optimizer)
    numbers, others = numbers_of(found.weights)
    if not numbers:
        raise DataError(f"{path} contains no weights.", "Give a file or folder with a model's state_dict.")
    if found.state is None:
        return Source("weights", numbers, others=others, left_out=found.left_out)
    source = _with_state(numbers, others, found.state, (lambda: list(names)) if names else found.order, found.where)
    return replace(source, left_out=(*found.left_out, *_options(found.state["param_groups"])))


def sharded_format(path: Path) -> str | None:
    """The framework that divided a checkpoint over files of ranks, a key of :data:`SHARDED`."""
    return next((name for name, (is_it, _) in SHARDED.items() if is_it(path)), None) if path.is_dir() else None


def open_sharded(framework: str, path: Path, *, writable: bool = False) -> Sharded:
    """Open a checkpoint of a framework, a result of :func:`sharded_format`; a ``writable`` one is written in place."""
    try:
        return SHARDED[framework][1](path, writable=writable)
    except NarrowgaugeError:
        raise
    except UNREADABLE as error:
        raise DataError(
            f"{path} is not laid out as {framework} does it ({type(error).__name__}: {error}).",
            "narrowgauge show frameworks lists the versions that are known.",
        ) from error


def _options(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """The options of the source's parameter groups, which are not converted: the new optimizer has its own."""
    names = ("lr", "betas", "beta1", "beta2", "eps", "weight_decay")
    found = [name for name in names if any(name in group for group in groups)]
    found += [name for group in groups for name in group.get(KEY, ())]
    return [f"{', '.join(found)} of the optimizer"] if found else []


def _with_state(
    weights: dict[str, Tensor], others: dict[str, Tensor], saved: Any, order: Callable[[], list[str]], where: Path
) -> Source:
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= set(saved):
        raise DataError(f"{where} contains no optimizer state.", "Save optimizer.state_dict() in it.")
    groups, found = saved["param_groups"], saved["state"]
    for group in groups:
        _require_adam(group, where)
    given = _given_names(groups)
    listed = given or order()
    weights = under_names(weights, listed)
    names = _names(groups, found, weights, listed, is_given=bool(given), where=where)
    weights = matched(weights, list(names.values()), where)
    states = {name: dict(found[key]) for key, name in names.items() if key in found}
    if any("storage" in group for group in groups):
        storages = {names[key]: known_row(group["storage"], {}) for group in groups for key in group["params"]}
        storages = {n: for_vectors(storage) if weights[n].ndim < 2 else storage for n, storage in storages.items()}
        return Source("narrowgauge", weights, states, storages, others)
    options = {names[key]: group for group in groups for key in group["params"]}
    origin, read = "torch.optim", dict(weights)
    moments: dict[str, dict[str, Any]] = {}
    for name, nested in states.items():
        entry = unnested(nested)
        row = encoding_of(entry, options[name])
        read[name], moments[name] = decoded(row, entry, options[name], weights[name], name, where)
        origin = row.origin if row.origin != "torch.optim" else origin
    return Source(origin, read, moments, others=others)


def _require_adam(group: Mapping[str, Any], where: Path) -> None:
    betas = {"beta1", "beta2"} if "beta2" in group else {"betas"}  # optimi names them one by one
    if not betas | {"eps"} <= set(group) or {"momentum", "rank"} & set(group):
        options = ", ".join(str(key) for key in group if key not in ("params", "param_names"))
        raise DataError(
            f"{where} contains the state of an optimizer other than AdamW or Adam: its options are {options}.",
            "Convert the weights alone.",
        )


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _given_names(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """The parameter names that a state itself has, one for each of its keys; empty where it has none."""
    named = [name for group in groups for name in group.get("param_names") or group["params"]]
    fits = len(named) == sum(len(group["params"]) for group in groups)
    return named if fits and all(isinstance(name, str) for name in named) else []


def _names(
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[Any, Mapping[str, Any]],
    weights: Mapping[str, Tensor],
    order: list[str],
    *,
    is_given: bool,
    where: Path,
) -> dict[Any, str]:
    """The parameter name of each key of a state: from the state itself, else by the model's order."""
    keys = [key for group in groups for key in group["params"]]
    if is_given:
        return dict(zip(keys, order, strict=True))
    shapes = {key: shape_of(states[key]) for key in keys if key in states}
    listed = _by_group(groups, shapes, weights, [name for name in order if name in weights])
    listed = listed or _by_shape(keys, shapes, weights)
    fits = len(listed) == len(keys) and all(
        shapes.get(key, weights[name].shape) == weights[name].shape for key, name in zip(keys, listed, strict=True)
    )
    if not fits:
        raise DataError(
            f"{where} has {len(keys)} parameters without names, which cannot be matched by order or shape with the "
            f"{len(weights)} weights.",
            "Give --names FILE: the names in the order of model.named_parameters(), one per line.",
        )
    return dict(zip(keys, listed, strict=True))


def _by_shape(keys: Sequence[Any], shapes: Mapping[Any, torch.Size], weights: Mapping[str, Tensor]) -> list[str]:
    """Names in the order of the keys, where all shapes are distinct."""
    by_shape = {value.shape: name for name, value in weights.items()}
    if len(by_shape) < len(weights) or any(shapes.get(key) not in by_shape for key in keys):
        return []
    return [by_shape[shapes[key]] for key in keys]


def _by_group(
    groups: Iterable[Mapping[str, Any]],
    shapes: Mapping[Any, torch.Size],
    weights: Mapping[str, Tensor],
    order: list[str],
) -> list[str]:
    """Names in the order of the groups: one group, or one of matrices and one of vectors, as for weight decay."""
    kinds = [{len(shapes[key]) > 1 for key in group["params"] if key in shapes} for group in groups if group["params"]]
    if len(kinds) == 1:
        return order
    if kinds in ([{True}, {False}], [{False}, {True}]):
        return [name for kind in kinds for name in order if (weights[name].ndim > 1) in kind]
    return []
