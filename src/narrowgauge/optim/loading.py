"""Saved states: those of the same storage and rule bit for bit, and the moments of torch's Adam and
AdamW. A state of another storage goes by torch's (:mod:`narrowgauge.optim.export`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import DataError, RecipeError
from narrowgauge.numerics.dtensor import local_of
from narrowgauge.numerics.rounding import at_least_float32
from narrowgauge.optim.pairing import Group, Kernels
from narrowgauge.optim.state import State, check_tensor
from narrowgauge.optim.validation import check_options
from narrowgauge.spec.storages import STATE_NAMES, WINDOW

OPTIONS = ("lr", "betas", "eps", "weight_decay", "initial_lr")


def loaded_state(kernels: Kernels, group: Group, parameter: Tensor, entry: Group) -> State:
    """Return a new state under a group's options, with the tensors of a saved one.

    Refuse tensors of another storage, rule or shape. What other code has put beside them stays.
    """
    state = kernels.new_state(group, parameter)
    for name, target in state.items():
        into = local_of(target)
        value: Any = local_of(entry.get(name))
        if isinstance(value, int | float):
            value = torch.tensor(value, dtype=torch.float32, device="cpu")
        if isinstance(value, Tensor) and (value.dtype, into.dtype) == (torch.int32, torch.int16):
            value = value.to(torch.int16)  # in which no DTensor is sent
        if name == "window" and (value is None or value != into):
            raise RecipeError(
                f"Cannot load a state whose codes begin at {value}, not at 2^{WINDOW}.",
                "Load it by the version that has saved it.",
            )
        check_tensor(name, value, into.dtype, into.shape, kernels.kernel_of(group, parameter))
        into.copy_(value)
    for name, value in entry.items():
        if name not in state and value != {}:  # torch's sign of what a flat checkpoint lacks
            state[name] = value
    return state


def saved_states(
    kernels: Kernels, groups: list[Group], state_dict: dict[str, Any]
) -> tuple[dict[Tensor, State], dict[str, Any]]:
    """Return the states of a ``state_dict``, and the rest of it, for PyTorch to load.

    PyTorch would cast states to the dtype of their parameters.
    """
    saved = copy.deepcopy(state_dict["param_groups"])
    # Keys are numbers, or names from a distributed checkpoint.
    members: dict[Any, tuple[Group, Tensor]] = {}
    for theirs, ours in zip(saved, groups, strict=True):
        if theirs["storage"] != ours["storage"]:
            raise RecipeError(
                f"Cannot load a state of storage '{theirs['storage']}' into an optimizer of "
                f"storage '{ours['storage']}'.",
                "Build the optimizer with the storage of the state, or load "
                "ng.to_torch_state(old), beside ng.full_weights(model, old).",
            )
        check_options({**theirs, "params": ours["params"]}, kernels.rule)
        for key, parameter in zip(theirs["params"], ours["params"], strict=True):
            members[key] = {**ours, **theirs}, parameter
    states = {}
    rest = {}
    for key, entry in state_dict["state"].items():
        if key not in members:
            rest[key] = entry
        elif entry:
            states[members[key][1]] = loaded_state(kernels, *members[key], entry)
    return states, {"state": rest, "param_groups": saved}


def torch_states(
    groups: list[Group], state_dict: Mapping[str, Any]
) -> dict[Tensor, dict[str, Tensor | int]]:
    """Return the moments of a state of torch's Adam or AdamW, by the parameters of our groups."""
    states: dict[Tensor, dict[str, Tensor | int]] = {}
    for ours, theirs in zip(groups, state_dict["param_groups"], strict=True):
        for parameter, key in zip(ours["params"], theirs["params"], strict=True):
            entry = state_dict["state"].get(key)
            if not entry:
                continue
            if (
                set(entry) != {"step", *STATE_NAMES}
                or type(local_of(entry["exp_avg"])) is not Tensor
            ):
                raise DataError(
                    f"Cannot load a state of {', '.join(sorted(entry))}.",
                    "Give the state of torch's Adam or AdamW, in plain tensors.",
                )
            states[parameter] = {"step": int(entry["step"])}
            for name in STATE_NAMES:
                states[parameter][name] = at_least_float32(entry[name]).contiguous()
    return states
