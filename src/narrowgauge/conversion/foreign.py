"""Training states of other libraries: ``torch.optim``, bitsandbytes, Hugging Face.

Such a file is read with ``weights_only``, so nothing in it runs. A state of ``torch.optim`` numbers its parameters; it says
their names only if the optimizer was given them. Where it does not, the order in which the model lists its parameters must
do: that of a ``state_dict``, or of the model that a Hugging Face ``config.json`` describes, never that of a safetensors
file, which sorts. Every shape is checked, and what cannot be told is refused.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from narrowgauge.conversion.source import Source, matched, numbers_of
from narrowgauge.errors import DataError
from narrowgauge.optim.checks import known_row
from narrowgauge.storages import STATE_NAMES, for_vectors

_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_MODEL_KEYS = ("model", "model_state_dict", "state_dict")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict")
_UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError)

# bitsandbytes: one scale for so many neighbours in memory order, from version 0.44 on and before.
_BLOCK_SIZES = (256, 2048)
_8BIT = "__bnb_optimizer_quant_state__"
_8BIT_KEYS = {"step", "state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2"}


def read_foreign(path: Path, optimizer: Path | None) -> Source:
    """Weights, and the state of an Adam or AdamW in the same file or another.

    Args:
        path: a folder or a file.
        optimizer: where the state lies, if apart.
    Raises:
        DataError: what cannot be read, matched or converted.
    """
    if optimizer is None and path.is_dir() and (path / "optimizer.pt").is_file():
        raise DataError(
            f"{path} holds an optimizer.pt beside its weights.",
            f"Give --optimizer {path / 'optimizer.pt'}, or name the file of the weights to leave its state out.",
        )
    weights, saved, order = _weights(path)
    if optimizer is not None:
        if saved is not None:
            raise DataError(
                f"{path} holds the state of an optimizer, and {optimizer} was given too.", "Give one of them."
            )
        content = _load(optimizer)
        saved = next((content[key] for key in _OPTIMIZER_KEYS if key in content), content)
    numbers, others = numbers_of(weights)
    if not numbers:
        raise DataError(f"{path} holds no weights.", "Name a file or folder with a model's state.")
    if saved is None:
        return Source("weights", numbers, others=others)
    return _with_state(numbers, others, saved, order, optimizer or path)


def _with_state(
    weights: dict[str, Tensor], others: dict[str, Tensor], saved: Any, order: Callable[[], list[str]], where: Path
) -> Source:
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= set(saved):
        raise DataError(f"{where} holds no state of an optimizer.", "It must be what optimizer.state_dict() gave.")
    groups, found = saved["param_groups"], saved["state"]
    for group in groups:
        _require_adam(group, where)
    names = _names(groups, found, weights, order, where)
    weights = matched(weights, list(names.values()), where)
    states = {name: dict(found[key]) for key, name in names.items() if key in found}
    if any("storage" in group for group in groups):
        rows = {names[key]: known_row(group["storage"], {}) for group in groups for key in group["params"]}
        rows = {name: for_vectors(row) if weights[name].ndim < 2 else row for name, row in rows.items()}
        return Source("narrowgauge", weights, states, rows, others)
    origin = "bitsandbytes" if any(_8BIT in entry or "state1" in entry for entry in states.values()) else "torch.optim"
    moments = {name: _moments(name, entry, weights[name], where) for name, entry in states.items()}
    return Source(origin, weights, moments, others=others)


def _require_adam(group: Mapping[str, Any], where: Path) -> None:
    if not {"betas", "eps"} <= set(group) or {"momentum", "rank"} & set(group):
        options = ", ".join(str(key) for key in group if key not in ("params", "param_names"))
        raise DataError(
            f"{where} holds the state of another optimizer than AdamW or Adam: its options are {options}.",
            "Convert the weights alone.",
        )


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _names(
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[Any, Mapping[str, Any]],
    weights: Mapping[str, Tensor],
    order: Callable[[], list[str]],
    where: Path,
) -> dict[Any, str]:
    """The parameter's name for each key of a state: as said, else by the order in which the model lists them."""
    keys = [key for group in groups for key in group["params"]]
    said = [name for group in groups for name in group.get("param_names") or group["params"]]
    if len(said) == len(keys) and all(isinstance(name, str) for name in said):
        return dict(zip(keys, said, strict=True))
    shapes = {key: _shape(states[key]) for key in keys if key in states}
    listed = _by_group(groups, shapes, weights, [name for name in order() if name in weights])
    fits = len(listed) == len(keys) and all(
        shapes.get(key, weights[name].shape) == weights[name].shape for key, name in zip(keys, listed, strict=True)
    )
    if not fits:
        raise DataError(
            f"{where} numbers {len(keys)} parameters without their names, and they cannot be told apart by the order and "
            f"shapes of {len(weights)} weights.",
            "Save the state of an optimizer that was given model.named_parameters().",
        )
    return dict(zip(keys, listed, strict=True))


def _by_group(
    groups: Iterable[Mapping[str, Any]],
    shapes: Mapping[Any, torch.Size],
    weights: Mapping[str, Tensor],
    order: list[str],
) -> list[str]:
    """Names in the order of the groups: one of all, or one of the matrices and one of the vectors, as decay asks."""
    kinds = [{len(shapes[key]) > 1 for key in group["params"] if key in shapes} for group in groups if group["params"]]
    if len(kinds) == 1:
        return order
    if kinds in ([{True}, {False}], [{False}, {True}]):
        return [name for kind in kinds for name in order if (weights[name].ndim > 1) in kind]
    return []


def _shape(entry: Mapping[str, Any]) -> torch.Size:
    """Of the parameter that a state belongs to."""
    entry = _unnested(entry)
    first = entry.get("exp_avg", entry.get("state1"))
    if first is None:  # ours, packed: anything but the scales of its rows
        planes = [t for name, t in entry.items() if isinstance(t, Tensor) and name != "step" and "_bound" not in name]
        first = planes[0] if planes else torch.empty(0, dtype=torch.float32)
    shape: torch.Size = first.shape
    return shape


def _unnested(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state; bitsandbytes keeps most of it one level further down, where FSDP leaves it alone."""
    return {**{key: value for key, value in entry.items() if key != _8BIT}, **entry.get(_8BIT, {})}


def _order_of_model(folder: Path) -> list[str]:
    """Parameter names of the model that a ``config.json`` describes; none where it describes none that can be built."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        kind = getattr(transformers, (config.architectures or [""])[0], None)
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            return []
        with torch.device("meta"):
            return [name for name, _ in kind(config).named_parameters()]
    except (*_UNREADABLE, TypeError, AttributeError, ImportError):
        return []


# ── values ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _moments(name: str, entry: dict[str, Any], weight: Tensor, where: Path) -> dict[str, Any]:
    """The float32 moments of a parameter and its number of steps."""
    entry = _unnested(entry)
    is_8bit = "state1" in entry
    known = _8BIT_KEYS if is_8bit else {"step", *STATE_NAMES}
    needed = {"step", "state1", "state2"} if is_8bit else known
    if odd := sorted(set(entry) - known) or sorted(needed - set(entry)):
        raise DataError(
            f"the state of '{name}' in {where} {'holds' if odd[0] in entry else 'lacks'} '{odd[0]}'.",
            f"Only states of Adam and AdamW can be converted: {' and '.join(STATE_NAMES)}.",
        )
    if is_8bit:
        first, second = (_dequantized(entry, part, f"'{name}' in {where}") for part in "12")
    else:
        first, second = (entry[state].float() for state in STATE_NAMES)
    for value in (first, second):
        if value.shape != weight.shape:
            raise DataError(
                f"'{name}' has a state of shape {tuple(value.shape)} in {where} and is of shape {tuple(weight.shape)}.",
                "Give weights and state of one model.",
            )
    return {"step": int(entry["step"]), "exp_avg": first, "exp_avg_sq": second}


def _dequantized(entry: Mapping[str, Any], part: str, whose: str) -> Tensor:
    """A moment of bitsandbytes: of each code its value in the map, times the largest of its block.

    Source: Dettmers et al., ICLR 2022 (2110.02861), block-wise dynamic quantisation.
    """
    codes: Tensor = entry[f"state{part}"]
    if codes.dtype is not torch.uint8:
        return codes.float()  # small tensors are left in float32
    table, scales = entry.get(f"qmap{part}"), entry.get(f"absmax{part}")
    if table is None or scales is None:
        raise DataError(
            f"the 8-bit state of {whose} is not block-wise.", "bitsandbytes writes it with block_wise=True."
        )
    size = next((size for size in _BLOCK_SIZES if -(-codes.numel() // size) == scales.numel()), 0)
    if not size:
        raise DataError(
            f"the 8-bit state of {whose} has {scales.numel()} scales for {codes.numel()} values; blocks of "
            f"{' or '.join(map(str, _BLOCK_SIZES))} are known."
        )
    values: Tensor = table.float()[codes.flatten().long()] * scales.float().repeat_interleave(size)[: codes.numel()]
    return values.reshape(codes.shape)


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _weights(path: Path) -> tuple[dict[str, Tensor], Any, Callable[[], list[str]]]:
    """The weights, the optimizer's state where the file holds one, and what tells the model's order."""
    if path.is_dir():
        name = next((name for name in _FILES if (path / name).is_file()), None)
        if name is None:
            raise DataError(f"{path} holds neither a run nor weights.", f"Weights lie in {' or '.join(_FILES)}.")
        return _tensors(_indexed(path / name), path), None, lambda: _order_of_model(path)
    if path.suffix == ".safetensors":
        return _tensors(_load(path), path), None, list
    content = _load(path)
    model = next((content[key] for key in _MODEL_KEYS if isinstance(content.get(key), Mapping)), content)
    saved = next((content[key] for key in _OPTIMIZER_KEYS if key in content), None) if model is not content else None
    return _tensors(model, path), saved, lambda: list(model)


def _indexed(file: Path) -> dict[str, Any]:
    """The content of a file of weights, or of all those that an index names."""
    if file.suffix != ".json":
        return _load(file)
    try:
        parts = sorted(set(json.loads(file.read_bytes())["weight_map"].values()))
    except (*_UNREADABLE, TypeError, AttributeError) as error:
        raise _unreadable(file, error) from error
    return {name: value for part in parts for name, value in _load(file.parent / part).items()}


def _load(file: Path) -> dict[str, Any]:
    """A safetensors file, or one of ``torch.save``, of which nothing is run."""
    try:
        if file.suffix == ".safetensors":
            return dict(load_file(file))
        content = torch.load(file, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise _unreadable(file, error) from error
    if not isinstance(content, Mapping):
        raise DataError(
            f"{file} holds a {type(content).__name__}.", 'It must hold {"model": …, "optimizer": …}, or one.'
        )
    return dict(content)


def _unreadable(file: Path, error: Exception) -> DataError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return DataError(
        f"{file} cannot be read: {reason}.", "It must be a safetensors file, or tensors that torch.save wrote."
    )


def _tensors(content: Mapping[str, Any], where: Path) -> dict[str, Tensor]:
    for name, value in content.items():
        if not isinstance(value, Tensor):
            raise DataError(
                f"{where} holds under '{name}' no tensor, but a {type(value).__name__}.",
                f"Weights are a state_dict, alone or under {' or '.join(map(repr, _MODEL_KEYS))}.",
            )
    return dict(content)
