"""Saved states: those of the same storage and rule bit for bit, and the moments of torch's Adam and
AdamW. A state of another storage goes by torch's (:mod:`narrowgauge.optim.export`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import DataError, RecipeError
from narrowgauge.numerics.dtensor import local_of
from narrowgauge.numerics.rounding import at_least_float32
from narrowgauge.optim.pairing import Kernels
from narrowgauge.optim.state import State, check_tensor
from narrowgauge.optim.validation import agree, sizes_of
from narrowgauge.spec.storages import STATE_NAMES, WINDOW

Entry = Mapping[str, Any]
OPTIONS = ("lr", "betas", "eps", "weight_decay", "initial_lr")
_ADVICE = "Give the state of torch's Adam or AdamW, in plain tensors."


# ── bit for bit ───────────────────────────────────────────────────────────────────────────────────


def loaded_state(kernels: Kernels, group: Entry, parameter: Tensor, entry: Entry) -> State:
    """Return a new state under a group's options, with the tensors of a saved one.

    Refuse tensors of another storage, rule or shape. What other code has put beside them stays.
    """
    options = dict(group)
    state = kernels.new_state(options, parameter)
    kernel = kernels.kernel_of(options, parameter)
    for name, target in state.items():
        into = local_of(target)
        value: Any = local_of(entry.get(name))
        if isinstance(value, int | float):
            value = torch.tensor(value, dtype=torch.float32, device="cpu")
        if isinstance(value, Tensor) and (value.dtype, into.dtype) == (torch.int32, torch.int16):
            value = value.to(torch.int16)  # in which no DTensor is sent
        if name == "window" and (value is None or value != into):
            place = "at another place" if value is None else f"at 2^{int(value)}"
            raise RecipeError(
                f"Cannot load a state whose codes begin {place}, not at 2^{WINDOW}.",
                "Load it by the version that has saved it.",
            )
        check_tensor(name, value, into.dtype, into.shape, kernel)
        into.copy_(value)
    for name, value in entry.items():
        if name not in state and value != {}:  # torch's sign of what a flat checkpoint lacks
            state[name] = value
    return state


def saved_states(
    kernels: Kernels, groups: list[dict[str, Any]], state_dict: dict[str, Any]
) -> tuple[dict[Tensor, State], dict[str, Any]]:
    """Return the states of a ``state_dict``, and the rest of it, for PyTorch to load.

    PyTorch would cast states to the dtype of their parameters.
    """
    saved = copy.deepcopy(state_dict["param_groups"])
    agree(groups, saved, kernels.rule)
    # Keys are numbers, or names from a distributed checkpoint.
    members: dict[Any, tuple[Entry, Tensor]] = {}
    for theirs, ours in zip(saved, groups, strict=True):
        for key, parameter in zip(theirs["params"], ours["params"], strict=True):
            members[key] = theirs, parameter
    states = {}
    rest = {}
    for key, entry in state_dict["state"].items():
        if key in members:
            group, parameter = members[key]
            if entry:
                states[parameter] = loaded_state(kernels, group, parameter, entry)
        elif isinstance(key, int) or isinstance(entry, Mapping):
            raise RecipeError(
                f"Cannot load the state because no param group lists its entry {key!r}."
            )
        else:
            rest[key] = entry
    return states, {"state": rest, "param_groups": saved}


# ── of torch.optim ────────────────────────────────────────────────────────────────────────────────


def torch_states(
    groups: list[dict[str, Any]],
    state: Mapping[str, Any],
    names: Mapping[Tensor, str],
    maximize: bool,
) -> dict[Tensor, dict[str, Tensor | int]]:
    """Return the moments of a state of torch's Adam or AdamW, by the parameters of our groups.

    Refuse what does not fit them.
    """
    if not {"state", "param_groups"} <= set(state):
        raise DataError(
            "The state has no 'state' and 'param_groups'.", "Give the optimizer's state_dict()."
        )
    saved = state["param_groups"]
    if sizes_of(saved) != sizes_of(groups):
        raise DataError(
            f"The state's param groups have {sizes_of(saved)} parameters, and the optimizer's "
            f"{sizes_of(groups)}.",
            "Make the optimizer with the same parameters in the same order.",
        )
    states = {}
    for ours, theirs in zip(groups, saved, strict=True):
        _check_group(maximize, ours, theirs)
        for parameter, key in zip(ours["params"], theirs["params"], strict=True):
            entry = state["state"].get(key)
            if entry:
                states[parameter] = _read_entry(parameter, names[parameter], entry)
    if state["state"] and not states:
        raise DataError(
            "The keys of the state's 'state' are not numbers of its parameters.", _ADVICE
        )
    return states


def _check_group(maximize: bool, ours: Entry, theirs: Entry) -> None:
    """Refuse a group of the other direction, or with other names. Prefixes may differ."""
    saved_maximize = bool(theirs.get("maximize", maximize))
    if saved_maximize != maximize:
        raise DataError(
            f"Cannot load a state of maximize = {saved_maximize}: this optimizer steps the other way.",
            f"Make it with maximize={saved_maximize}.",
        )
    pairs = zip(ours.get("param_names") or (), theirs.get("param_names") or (), strict=False)
    for name, saved in pairs:
        if not (name.endswith(saved) or saved.endswith(name)):
            raise DataError(
                "The state's parameters have other names than the optimizer's, or another order.",
                "Make the optimizer with the same names, or save the state without 'param_names'.",
            )


def _read_entry(parameter: Tensor, name: str, entry: Entry) -> dict[str, Tensor | int]:
    """Read a state of torch's Adam."""
    if set(entry) != {"step", *STATE_NAMES}:
        raise DataError(f"The state of '{name}' is of {', '.join(sorted(entry))}.", _ADVICE)
    states: dict[str, Tensor | int] = {"step": int(entry["step"])}
    for kind in STATE_NAMES:
        moment = entry[kind]
        if type(local_of(moment)) not in (Tensor, nn.Parameter):
            raise DataError(f"The state of '{name}' is packed as {type(moment).__name__}.", _ADVICE)
        if moment.shape != parameter.shape:
            raise DataError(
                f"'{name}' has shape {tuple(parameter.shape)}, and its state has shape "
                f"{tuple(moment.shape)}.",
                "Make the optimizer with the same parameters in the same order.",
            )
        states[kind] = at_least_float32(moment).contiguous()
    return states
