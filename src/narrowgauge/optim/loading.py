"""Load saved states, bit for bit.

A state of other moments, another storage or library is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.dtensor import local_of
from narrowgauge.optim import codes
from narrowgauge.optim.rules.matrix import extras_of
from narrowgauge.optim.state import ParameterState, extra_code
from narrowgauge.optim.validation import agree


def make_loaded_states(
    optimizer: Any,
    entries: Mapping[Tensor, Mapping[str, Any]],
    saved_groups: Sequence[Mapping[str, Any]],
) -> dict[Tensor, ParameterState]:
    """Return new states with the values of saved ones.

    Refuse states of another storage, rule or shape.
    """
    states: dict[Tensor, ParameterState] = {}
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
        values = {}
        for parameter in group["params"]:
            entry = tensors_of(entries.get(parameter, {}))
            if entry:
                values[parameter] = entry
        states |= states_of(optimizer, {**saved, "params": group["params"]}, values)
    return states


def states_of(
    optimizer: Any, group: Mapping[str, Any], entries: Mapping[Tensor, Mapping[str, Tensor]]
) -> dict[Tensor, ParameterState]:
    """Return new states under a group's options, with the values of saved ones."""
    states: dict[Tensor, ParameterState] = optimizer.make_states(group, entries)
    for parameter, entry in entries.items():
        state = states[parameter]
        names = set(state.keys()) - ({"window"} - entry.keys())
        if names != entry.keys():
            lost = names - entry.keys()
            if lost:
                reason = f"it has no '{min(lost)}'"
            else:
                reason = f"the rule has no '{min(entry.keys() - names)}'"
            raise RecipeError(
                f"Cannot load a state with {sorted(entry)} into rule '{state.kernel.rule.name}' "
                f"because {reason}.",
                "Load the state of this rule and storage.",
            )
        state.load(entry)
    return states


def tensors_of(entry: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return this rank's tensors.

    Leave out values ``{}``: torch sets them for what a flattened checkpoint lacks.
    """
    tensors = {}
    for name, value in entry.items():
        if isinstance(value, int | float):
            tensors[name] = torch.tensor(value, dtype=torch.float32, device="cpu")
        elif value != {}:
            tensors[name] = local_of(value)
    return tensors


def show_states(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Replace packed states by tensors in the parameter's shape.

    This is a hook on ``state_dict``.
    """
    entries = dict(state_dict["state"])
    for key, value in entries.items():
        if isinstance(value, ParameterState):
            entries[key] = value.saved()
    state_dict["state"] = entries


def take_states(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Make states of saved tensors, for :func:`put_states`: PyTorch would rebuild them.

    This is a hook on ``load_state_dict``.
    """
    saved = copy.deepcopy(state_dict["param_groups"])
    agree(optimizer.param_groups, saved, optimizer.rule)
    # Keys are numbers, or names from a distributed checkpoint.
    parameters: dict[Any, Tensor] = {}
    for theirs, ours in zip(saved, optimizer.param_groups, strict=True):
        parameters.update(zip(theirs["params"], ours["params"], strict=True))
    entries: dict[Tensor, Any] = {}
    unflattened: dict[Any, Any] = {}
    strange = []
    for key, value in state_dict["state"].items():
        if key in parameters:
            entries[parameters[key]] = value
            continue
        unflattened[key] = value
        if isinstance(key, int) or isinstance(value, Mapping):
            strange.append(key)
    optimizer._taken = make_loaded_states(optimizer, entries, saved)
    if strange:
        raise RecipeError(
            f"Cannot load the state because no param group lists its entry {strange[0]!r}."
        )
    return {"state": unflattened, "param_groups": saved}


def put_states(optimizer: Any) -> None:
    """Store the states that :func:`take_states` made. This is a hook after ``load_state_dict``."""
    optimizer.state.update(optimizer._taken)
    optimizer.keep(optimizer._taken)
    optimizer._taken = {}


def whole_states(optimizer: Any, parameter: Tensor) -> set[str]:
    """Return the saved names of a matrix rule's own states.

    Every rank has them whole, whatever the sharding.
    """
    group = optimizer.group_of(parameter)
    row = optimizer.storage_of(parameter)
    states = extras_of(optimizer.rule_in(group, parameter), parameter.shape, group)
    names = set()
    for name, state in states.items():
        code = extra_code(row, state.role)
        names.add(codes.saved_as(name, code))
        if code.scaled:
            names.add(f"{name}_bound")
    return names


def kept_tensors(optimizer: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, tensor, parameter) for all tensors of model and optimizer that must not change
    between steps.

    Inputs of an update come before its outputs, so the first of several damaged tensors is the
    cause. Tensors are packed words. For DTensors they are this rank's part.
    """
    optimizer.settle()
    for parameter, name in optimizer.parameter_names().items():
        state = optimizer.state_of(parameter)
        if state is None:
            yield name, local_of(parameter).detach(), parameter
            continue
        for field, tensor in state.named_tensors():
            yield f"{field} of {name}" if field else name, tensor, parameter


def unnamed(place: int) -> str:
    """Return the name of a parameter without a name, by its place in the optimizer."""
    return f"param {place}"
