"""States of other libraries and storages, read: which library wrote a state, and what it means.

=====================  ===========================================================================
torch.optim            moments of any float format, as they are; SGD's ``momentum_buffer`` too
bitsandbytes           8-bit codes of a map, times the largest value of each block
torchao                tensors of its own class: 8-bit or 4-bit codes of a map, or float8, times a
                       scale per block
FusedAdam              TransformerEngine's and Apex's: one step for a group. TransformerEngine keeps
                       float32 masters, or the 16 bits that the bfloat16 weight lacks
narrowgauge            of any storage and rule
=====================  ===========================================================================

Decoding is exact in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import DataError
from narrowgauge.numerics.rounding import at_least_float32
from narrowgauge.optim.loading import states_of, tensors_of, unnamed
from narrowgauge.optim.validation import known_row, sizes_of
from narrowgauge.spec.storages import STATE_NAMES

Entry = Mapping[str, Any]
Moments = dict[str, Tensor | int]
OPTIONS = ("lr", "betas", "eps", "weight_decay")
_8BIT = "__bnb_optimizer_quant_state__"
_ADVICE = (
    "Give the state of torch's SGD, or of an Adam or AdamW of torch, bitsandbytes, torchao, "
    "TransformerEngine or Apex."
)


def resume_from(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load weights, moments and options of another library.

    This is ``load_state_dict`` of its state.
    """
    groups = state["param_groups"]
    if sizes_of(groups) != sizes_of(optimizer.param_groups):
        raise DataError(
            "The state's param groups have other sizes than the optimizer's.",
            "Call ng.load_states.",
        )
    adopt(optimizer, state)
    for ours, theirs in zip(optimizer.param_groups, groups, strict=True):
        for name in (*OPTIONS, "initial_lr"):
            if name in theirs:
                ours[name] = theirs[name]


def adopt(optimizer: Any, state: Mapping[str, Any]) -> str:
    """Store the weights and moments of a foreign state. Return the name of its library."""
    if not {"state", "param_groups"} <= set(state):
        raise DataError(
            "The state has no 'state' and 'param_groups'.", "Give the optimizer's state_dict()."
        )
    for group in state["param_groups"]:
        maximize = bool(group.get("maximize", optimizer.maximize))
        if maximize != optimizer.maximize:
            raise DataError(
                f"Cannot load a state of maximize = {maximize}: this optimizer steps the other "
                "way.",
                f"Make it with maximize={maximize}.",
            )
    values: dict[Tensor, Tensor] = {}
    moments: dict[Tensor, Moments] = {}
    library = "torch.optim"  # others leave small tensors to torch
    for parameter, name, key, group in matched(optimizer, state["param_groups"]):
        entry = dict(state["state"].get(key) or {})
        if not entry or entry.get("momentum_buffer", entry) is None:  # SGD without momentum
            continue
        entry |= entry.pop(_8BIT, {})
        writer = _library(entry, group)
        if writer != "torch.optim":
            library = writer
        if writer == "narrowgauge":
            weight, states = _of_narrowgauge(entry, group, optimizer, parameter)
        else:
            states = _moments(writer, entry, group, parameter, name)
            weight = _weight(entry, optimizer, parameter)
        values[parameter] = weight
        moments[parameter] = states
    if state["state"] and not moments:
        raise DataError(
            "The keys of the state's 'state' are no numbers of its parameters.", _ADVICE
        )
    optimizer.adopt(values, moments)
    return library


def matched(optimizer: Any, groups: list[Any]) -> list[tuple[Tensor, str, Any, Entry]]:
    """Return each parameter with its name, its key in the foreign state, and its foreign group."""
    names: dict[Tensor, str] = optimizer.parameter_names()
    keys: list[tuple[Any, Entry]] = []
    theirs: list[str] = []
    for group in groups:
        theirs += group.get("param_names") or ()
        for key in group["params"]:
            keys.append((key, group))
    if len(keys) != len(names):
        raise DataError(
            f"The state has {len(keys)} parameters, and the optimizer has {len(names)}.",
            "Make the optimizer with the same parameters in the same order.",
        )
    ours = list(names.values())
    if len(theirs) == len(keys) and ours != [unnamed(place) for place in range(len(ours))]:
        if set(theirs) == set(ours):
            by_name = dict(zip(theirs, keys, strict=True))
            keys = [by_name[name] for name in ours]
        elif not all(a.endswith(b) or b.endswith(a) for a, b in zip(theirs, ours, strict=True)):
            raise DataError(
                "The state's parameters have other names than the optimizer's, or another order.",
                "Make the optimizer with the same names, or save the state without 'param_names'.",
            )
    result = []
    for (parameter, name), (key, group) in zip(names.items(), keys, strict=True):
        result.append((parameter, name, key, group))
    return result


def _of_narrowgauge(
    entry: Entry, group: Entry, optimizer: Any, parameter: Tensor
) -> tuple[Tensor, Moments]:
    """Return the weight and the states of another storage.

    They are read over the same visible weight.
    """
    tensors = tensors_of(entry)
    dtype = getattr(torch, known_row(group["storage"]).visible)
    if tensors.keys() == {"step", *STATE_NAMES} and tensors["exp_avg"].dtype is torch.float32:
        dtype = torch.float32  # all in float32, whatever the storage of its group
    elif torch.float32 not in (dtype, parameter.dtype):
        dtype = parameter.dtype
    weight = optimizer.stored(parameter)
    seen = parameter.detach() if parameter.dtype is dtype else weight.to(dtype)
    state = states_of(optimizer, group, {seen: tensors})[seen]
    if state.storage.beside:
        weight = state.stored("weight")
    moments: Moments = {"step": state.step}
    for name in state.shapes_of_states:
        moments[name] = state.stored(name)
    return weight, moments


def _library(entry: Entry, group: Entry) -> str:
    if "storage" in group:
        return "narrowgauge"
    if "state1" in entry:
        return "bitsandbytes"
    if any(hasattr(entry.get(kind), "codes") for kind in STATE_NAMES):
        return "torchao"
    return "FusedAdam" if "bias_correction" in group else "torch.optim"


_ADAM = {"step", *STATE_NAMES}
_KEYS = {
    "torch.optim": _ADAM | {"momentum_buffer"},
    "bitsandbytes": {"step", "state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2"},
    "torchao": _ADAM,
    "FusedAdam": _ADAM | {"master_param"},
}


def _moments(library: str, entry: Entry, group: Entry, weight: Tensor, name: str) -> Moments:
    """Return the step and the moments, float32 or float64."""
    odd = sorted(set(entry) - _KEYS[library])
    if odd:
        raise DataError(f"The state of '{name}' contains '{odd[0]}'.", _ADVICE)
    kinds: tuple[str, ...] = STATE_NAMES
    step = entry.get("step")
    if "momentum_buffer" in entry:
        kinds = ("momentum_buffer",)
        step = 1  # SGD counts none; any step but the first is like another
    elif library == "FusedAdam":
        step = group.get("step")  # of the group
    if step is None:
        raise DataError(f"The state of '{name}' lacks 'step'.", _ADVICE)
    moments: Moments = {"step": int(step)}
    for kind in kinds:
        try:
            moment = _moment(library, entry, kind).contiguous()
        except KeyError as error:
            raise DataError(f"The state of '{name}' lacks {error}.", _ADVICE) from None
        if moment.shape != weight.shape:
            raise DataError(
                f"'{name}' has shape {tuple(weight.shape)}, and its state has shape "
                f"{tuple(moment.shape)}.",
                "Make the optimizer with the same parameters in the same order.",
            )
        moments[kind] = moment
    return moments


def _moment(library: str, entry: Entry, kind: str) -> Tensor:
    if library == "bitsandbytes":
        return _bitsandbytes(entry, str(1 + STATE_NAMES.index(kind)))
    if library == "torchao" and hasattr(entry[kind], "codes"):  # small tensors have none
        return _torchao(entry[kind])
    return at_least_float32(entry[kind])


def _weight(entry: Entry, optimizer: Any, parameter: Tensor) -> Tensor:
    """Return the float32 weight: the state's if it has one, else what the optimizer has stored."""
    master: Tensor | None = entry.get("master_param")
    if master is None:
        stored: Tensor = optimizer.stored(parameter)
        return stored
    if master.dtype is not torch.int16:
        return master.float()
    # TransformerEngine, multi_tensor/adam.cu: the weight was rounded up where the remainder is
    # negative.
    upper = (
        parameter.detach().to(torch.bfloat16).contiguous().view(torch.int16).int()
        - (master < 0).int()
    )
    return ((upper << 16) | (master.int() & 0xFFFF)).view(torch.float32)


def _scaled_blocks(values: Tensor, scales: Tensor, size: int) -> Tensor:
    scaled: Tensor = values.flatten() * scales.float().repeat_interleave(size)[: values.numel()]
    return scaled


def _bitsandbytes(entry: Entry, number: str) -> Tensor:
    """Return the value of each code in the map, times the absmax of its block (Dettmers et al.,
    ICLR 2022).
    """
    codes: Tensor = entry[f"state{number}"]
    if codes.dtype is not torch.uint8:
        return codes.float()  # small tensors stay in float32
    table = entry[f"qmap{number}"]
    scales = entry[f"absmax{number}"]
    if -(-codes.numel() // 256) != scales.numel():
        raise DataError(
            f"An 8-bit state has {scales.numel()} scales for {codes.numel()} values.",
            "Blocks of 256 are known, of bitsandbytes from 0.44 on.",
        )
    return _scaled_blocks(table.float()[codes.flatten().long()], scales, 256).reshape(codes.shape)


def _torchao(value: Any) -> Tensor:
    """Decode an optimizer state of torchao 0.18 (``optim/subclass_8bit.py``, ``subclass_4bit.py``,
    ``subclass_fp8.py``).
    """
    codes = value.codes
    scales = value.scale
    if codes.dtype is torch.float8_e4m3fn:
        values = codes.float()
    elif type(value).__name__.endswith("4bit"):
        values = value.qmap[torch.stack([codes >> 4, codes & 15], -1).flatten().long()]
    else:
        values = value.qmap[codes.flatten().long()]
    return _scaled_blocks(values, scales, values.numel() // scales.numel()).reshape(value.shape)
