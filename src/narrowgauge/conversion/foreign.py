"""Training states of other libraries: ``torch.optim``, bitsandbytes, Hugging Face.

A state of ``torch.optim`` numbers its parameters; it says
their names only if the optimizer was given them. Where it does not, the order in which the model lists its parameters must
do: that of a ``state_dict``, or of the model that a Hugging Face ``config.json`` describes, never that of a safetensors
file, which sorts. Every shape is checked, and what cannot be told is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowgauge.conversion.files import find
from narrowgauge.conversion.source import Source, matched, numbers_of
from narrowgauge.errors import DataError
from narrowgauge.optim.validation import known_row
from narrowgauge.spec.storages import STATE_NAMES, for_vectors

# bitsandbytes: one scale for so many neighbours in memory order, from version 0.44 on and before.
_BLOCK_SIZES = (256, 2048)
_8BIT = "__bnb_optimizer_quant_state__"
_8BIT_KEYS = {"step", "state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2"}


def read_foreign(path: Path, optimizer: Path | None, names: Sequence[str] = ()) -> Source:
    """Weights, and the state of an Adam or AdamW in the same file or another.

    Args:
        path: a folder or a file.
        optimizer: where the state lies, if apart.
        names: of the parameters in the model's order, where the files do not tell it.
    Raises:
        DataError: what cannot be read, matched or converted.
    """
    found = find(path, optimizer)
    numbers, others = numbers_of(found.weights)
    if not numbers:
        raise DataError(f"{path} holds no weights.", "Name a file or folder with a model's state.")
    if found.state is None:
        return Source("weights", numbers, others=others, left_out=found.left_out)
    source = _with_state(numbers, others, found.state, (lambda: list(names)) if names else found.order, found.where)
    return replace(source, left_out=(*found.left_out, *_options(found.state["param_groups"])))


def _options(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the groups of an optimizer say beside their parameters: its new one is made with options of its own."""
    names = ("lr", "betas", "eps", "weight_decay")
    found = [name for name in names if any(name in group for group in groups)]
    return [f"{', '.join(found)} of the optimizer"] if found else []


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
    listed = listed or _by_shape(keys, shapes, weights)
    fits = len(listed) == len(keys) and all(
        shapes.get(key, weights[name].shape) == weights[name].shape for key, name in zip(keys, listed, strict=True)
    )
    if not fits:
        raise DataError(
            f"{where} numbers {len(keys)} parameters without their names, and they cannot be told apart by the order and "
            f"shapes of {len(weights)} weights.",
            "Give --names FILE: the names in the order of model.named_parameters(), a line each.",
        )
    return dict(zip(keys, listed, strict=True))


def _by_shape(keys: Sequence[Any], shapes: Mapping[Any, torch.Size], weights: Mapping[str, Tensor]) -> list[str]:
    """Names in the order of the keys, where each has a shape that no other has."""
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
