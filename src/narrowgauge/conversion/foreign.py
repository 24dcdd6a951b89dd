"""Training states of other libraries: ``torch.optim``, bitsandbytes, Hugging Face.

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

from narrowgauge.conversion.files import find
from narrowgauge.conversion.source import Source, matched, numbers_of, under_names
from narrowgauge.errors import DataError
from narrowgauge.optim.validation import known_row
from narrowgauge.spec.storages import STATE_NAMES, for_vectors

# Values per scale of bitsandbytes, in memory order: from version 0.44 on, and before it.
_BLOCK_SIZES = (256, 2048)
_8BIT = "__bnb_optimizer_quant_state__"
_8BIT_KEYS = {"step", "state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2"}


def read_foreign(path: Path, optimizer: Path | None, names: Sequence[str] = ()) -> Source:
    """Read weights, and the state of Adam or AdamW from the same or another file.

    Args:
        path: a folder or a file.
        optimizer: the file with the optimizer state, if separate.
        names: parameter names in the model's order, where the files do not contain it.
    Raises:
        DataError: files that cannot be read, matched or converted.
    """
    found = find(path, optimizer)
    numbers, others = numbers_of(found.weights)
    if not numbers:
        raise DataError(f"{path} contains no weights.", "Give a file or folder with a model's state_dict.")
    if found.state is None:
        return Source("weights", numbers, others=others, left_out=found.left_out)
    source = _with_state(numbers, others, found.state, (lambda: list(names)) if names else found.order, found.where)
    return replace(source, left_out=(*found.left_out, *_options(found.state["param_groups"])))


def _options(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """The options of the source's parameter groups, which are not converted: the new optimizer has its own."""
    names = ("lr", "betas", "eps", "weight_decay")
    found = [name for name in names if any(name in group for group in groups)]
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
    origin = "bitsandbytes" if any(_8BIT in entry or "state1" in entry for entry in states.values()) else "torch.optim"
    moments = {name: _moments(name, entry, weights[name], where) for name, entry in states.items()}
    return Source(origin, weights, moments, others=others)


def _require_adam(group: Mapping[str, Any], where: Path) -> None:
    if not {"betas", "eps"} <= set(group) or {"momentum", "rank"} & set(group):
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
    shapes = {key: _shape(states[key]) for key in keys if key in states}
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


def _shape(entry: Mapping[str, Any]) -> torch.Size:
    """The shape of the parameter that a state belongs to."""
    entry = _unnested(entry)
    first = entry.get("exp_avg", entry.get("state1"))
    if first is None:  # ours, packed: any plane except the scales of rows
        planes = [t for name, t in entry.items() if isinstance(t, Tensor) and name != "step" and "_bound" not in name]
        first = planes[0] if planes else torch.empty(0, dtype=torch.float32)
    shape: torch.Size = first.shape
    return shape


def _unnested(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state; bitsandbytes nests most of it one level deeper, where FSDP does not touch it."""
    return {**{key: value for key, value in entry.items() if key != _8BIT}, **entry.get(_8BIT, {})}


# ── values ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _moments(name: str, entry: dict[str, Any], weight: Tensor, where: Path) -> dict[str, Any]:
    """The float32 moments and the step count of a parameter."""
    entry = _unnested(entry)
    is_8bit = "state1" in entry
    known = _8BIT_KEYS if is_8bit else {"step", *STATE_NAMES}
    needed = {"step", "state1", "state2"} if is_8bit else known
    if odd := sorted(set(entry) - known) or sorted(needed - set(entry)):
        raise DataError(
            f"the state of '{name}' in {where} {'contains' if odd[0] in entry else 'lacks'} '{odd[0]}'.",
            f"Only states of Adam and AdamW can be converted: {' and '.join(STATE_NAMES)}.",
        )
    if is_8bit:
        first, second = (_dequantized(entry, part, f"'{name}' in {where}") for part in "12")
    else:
        first, second = (entry[state].float() for state in STATE_NAMES)
    for value in (first, second):
        if value.shape != weight.shape:
            raise DataError(
                f"'{name}' has shape {tuple(weight.shape)}, and its state in {where} has shape {tuple(value.shape)}.",
                "Give weights and state of one model.",
            )
    return {"step": int(entry["step"]), "exp_avg": first, "exp_avg_sq": second}


def _dequantized(entry: Mapping[str, Any], part: str, whose: str) -> Tensor:
    """Dequantize a moment of bitsandbytes: the value of each code in the map, times the absmax of its block.

    Source: Dettmers et al., ICLR 2022 (2110.02861), block-wise dynamic quantization.
    """
    codes: Tensor = entry[f"state{part}"]
    if codes.dtype is not torch.uint8:
        return codes.float()  # small tensors stay in float32
    table, scales = entry.get(f"qmap{part}"), entry.get(f"absmax{part}")
    if table is None or scales is None:
        raise DataError(
            f"the 8-bit state of {whose} is not block-wise.", "bitsandbytes writes it with block_wise=True."
        )
    size = next((size for size in _BLOCK_SIZES if -(-codes.numel() // size) == scales.numel()), 0)
    if not size:
        raise DataError(
            f"the 8-bit state of {whose} has {scales.numel()} scales for {codes.numel()} values; blocks of "
            f"{' or '.join(map(str, _BLOCK_SIZES))} values are supported."
        )
    values: Tensor = table.float()[codes.flatten().long()] * scales.float().repeat_interleave(size)[: codes.numel()]
    return values.reshape(codes.shape)
