"""Saved states: those of the same storage and rule bit for bit, and the moments of torch's Adam and
AdamW. A state of another storage goes by torch's (:mod:`narrowgauge.optim.torch_state`).
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import DataError, RecipeError
from narrowgauge.numerics.dtensor import local_of
from narrowgauge.numerics.rounding import at_least_float32
from narrowgauge.optim.kernel_choice import Group, KernelChoice
from narrowgauge.optim.rules.matrix import AnyRule
from narrowgauge.optim.step.state import check_tensor
from narrowgauge.optim.validation import check_options
from narrowgauge.spec.storages import STATE_NAMES, WINDOW
from narrowgauge.torch_support.torch_names import host_tensor

Members = dict[Any, tuple[Group, Tensor]]
"""The group and the parameter of each key of a saved state."""


def matched(
    rule: AnyRule, groups: list[Group], state_dict: Mapping[str, Any]
) -> tuple[list[Group], Members]:
    """Return our groups with the options of a saved state, and the group and the parameter of each of
    its keys: a number, or a name from a distributed checkpoint.

    Refuse other groups, with torch's sentences, another storage, options that the rule cannot obey,
    and a state without the numbers of its parameters.
    """
    saved = state_dict["param_groups"]
    if len(saved) != len(groups):
        raise ValueError("loaded state dict has a different number of parameter groups")
    loaded = []
    members = {}
    for theirs, ours in zip(saved, groups, strict=True):
        if len(theirs["params"]) != len(ours["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of "
                "optimizer's group"
            )
        group = {**ours, **copy.deepcopy(theirs), "params": ours["params"]}
        if group["storage"] != ours["storage"]:
            raise RecipeError(
                f"Cannot load a state of storage '{group['storage']}' into an optimizer of "
                f"storage '{ours['storage']}'.",
                "Build the optimizer with the storage of the state, or load "
                "ng.to_torch_state(old), beside ng.full_weights(model, old).",
            )
        check_options(group, rule)
        loaded.append(group)
        for key, parameter in zip(theirs["params"], ours["params"], strict=True):
            members[key] = group, parameter
    if state_dict["state"] and state_dict["state"].keys().isdisjoint(members):
        raise DataError(
            "Cannot load a state whose keys are not numbers of its parameters.",
            "Give the optimizer's state_dict().",
        )
    return loaded, members


def loaded_state(kernels: KernelChoice, group: Group, parameter: Tensor, entry: Group) -> Group:
    """Return a new state under a group's options, with the tensors of a saved one.

    Refuse tensors of another storage, rule or shape. Notes of other code stay.
    """
    new = kernels.local_state(group, parameter)
    state = new.entry
    for name, target in state.items():
        into = local_of(target)
        value: Any = local_of(entry.get(name))
        if isinstance(value, int | float):
            value = host_tensor(value)
        if isinstance(value, Tensor) and (value.dtype, into.dtype) == (torch.int32, torch.int16):
            value = value.to(torch.int16)  # in which no DTensor is sent
        if name == "window" and (value is None or value != into):
            raise RecipeError(
                f"Cannot load a state whose codes begin at {value}, not at 2^{WINDOW}.",
                "Load it by the version that has saved it.",
            )
        check_tensor(name, value, into.dtype, into.shape, new.kernel)
        into.copy_(value)
    for name, value in entry.items():
        if name not in state and value != {}:  # torch's sign of what a flat checkpoint lacks
            state[name] = value
    return state


def saved_states(
    kernels: KernelChoice, entries: Mapping[Any, Any], members: Members
) -> dict[Any, Any]:
    """Return the states of a state of ours. Entries of other keys stay as they are."""
    states = {}
    for key, entry in entries.items():
        if key not in members:
            states[key] = entry
        elif entry:
            group, parameter = members[key]
            states[parameter] = loaded_state(kernels, group, parameter, entry)
    return states


def torch_states(entries: Mapping[Any, Any], members: Members) -> dict[Tensor, dict[str, Any]]:
    """Return the moments of a state of torch's Adam or AdamW, by our parameters."""
    states: dict[Tensor, dict[str, Any]] = {}
    for key, (_, parameter) in members.items():
        entry = entries.get(key)
        if not entry:
            continue
        if set(entry) != {"step", *STATE_NAMES} or type(local_of(entry["exp_avg"])) is not Tensor:
            raise DataError(
                f"Cannot load a state of {', '.join(sorted(entry))}.",
                "Give the state of torch's Adam or AdamW, in plain tensors.",
            )
        states[parameter] = {"step": int(entry["step"])}
        for name in STATE_NAMES:
            states[parameter][name] = at_least_float32(entry[name]).contiguous()
    return states
