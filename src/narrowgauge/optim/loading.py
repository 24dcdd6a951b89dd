"""Saved states, in and out.

A state of the same storage and rule is loaded bit for bit, by :func:`loaded_state`. The moments of
torch's Adam and AdamW are rounded once, by :func:`load_torch_state`. :func:`to_torch_state`
and :func:`full_weights` give states and weights back to torch; a state of another storage goes that
way.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import DataError, RecipeError
from narrowgauge.numerics.dtensor import local_of
from narrowgauge.numerics.rounding import at_least_float32
from narrowgauge.optim.state import State, check_tensor
from narrowgauge.optim.validation import agree, sizes_of
from narrowgauge.spec.storages import STATE_NAMES, WINDOW

if TYPE_CHECKING:
    from narrowgauge.optim.optimizer import Optimizer

Entry = Mapping[str, Any]
OPTIONS = ("lr", "betas", "eps", "weight_decay")
_ADVICE = "Give the state of torch's Adam or AdamW, in plain tensors."


# ── bit for bit ───────────────────────────────────────────────────────────────────────────────────


def loaded_state(optimizer: Optimizer, group: Entry, parameter: Tensor, entry: Entry) -> State:
    """Return a new state under a group's options, with the tensors of a saved one.

    Refuse tensors of another storage, rule or shape. What other code has put beside them stays.
    """
    options = dict(group)
    state = optimizer.new_state(options, parameter)
    kernel = optimizer.kernel_of(options, parameter)
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
    optimizer: Optimizer, state_dict: dict[str, Any]
) -> tuple[dict[Tensor, State], dict[str, Any]]:
    """Return the states of a ``state_dict``, and the rest of it, for PyTorch to load.

    PyTorch would cast states to the dtype of their parameters.
    """
    saved = copy.deepcopy(state_dict["param_groups"])
    agree(optimizer.param_groups, saved, optimizer.rule)
    # Keys are numbers, or names from a distributed checkpoint.
    members: dict[Any, tuple[Entry, Tensor]] = {}
    for theirs, ours in zip(saved, optimizer.param_groups, strict=True):
        for key, parameter in zip(theirs["params"], ours["params"], strict=True):
            members[key] = theirs, parameter
    states = {}
    rest = {}
    for key, entry in state_dict["state"].items():
        if key in members:
            group, parameter = members[key]
            if entry:
                states[parameter] = loaded_state(optimizer, group, parameter, entry)
        elif isinstance(key, int) or isinstance(entry, Mapping):
            raise RecipeError(
                f"Cannot load the state because no param group lists its entry {key!r}."
            )
        else:
            rest[key] = entry
    return states, {"state": rest, "param_groups": saved}


# ── of torch.optim ────────────────────────────────────────────────────────────────────────────────


def load_torch_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load moments and options of torch's Adam or AdamW. Weights stay as they are stored.

    This is ``load_state_dict`` of such a state. A refused one changes nothing.
    """
    if not {"state", "param_groups"} <= set(state):
        raise DataError(
            "The state has no 'state' and 'param_groups'.", "Give the optimizer's state_dict()."
        )
    groups = state["param_groups"]
    if sizes_of(groups) != sizes_of(optimizer.param_groups):
        raise DataError(
            f"The state's param groups have {sizes_of(groups)} parameters, and the optimizer's "
            f"{sizes_of(optimizer.param_groups)}.",
            "Make the optimizer with the same parameters in the same order.",
        )
    names = optimizer.parameter_names()
    weights: dict[Tensor, Tensor] = {}
    states: dict[Tensor, dict[str, Tensor | int]] = {}
    num_entries = 0
    for ours, theirs in zip(optimizer.param_groups, groups, strict=True):
        _check_group(optimizer, ours, theirs)
        for parameter, key in zip(ours["params"], theirs["params"], strict=True):
            entry = state["state"].get(key) or {}
            num_entries += bool(entry)
            if entry:
                states[parameter] = _read_entry(parameter, names[parameter], entry)
                weights[parameter] = optimizer.stored(parameter)
    if state["state"] and not num_entries:
        raise DataError(
            "The keys of the state's 'state' are not numbers of its parameters.", _ADVICE
        )
    optimizer.adopt(weights, states)
    for ours, theirs in zip(optimizer.param_groups, groups, strict=True):
        for name in (*OPTIONS, "initial_lr"):
            if name in theirs:
                ours[name] = theirs[name]


def _check_group(optimizer: Optimizer, ours: Entry, theirs: Entry) -> None:
    """Refuse a group of the other direction, or with other names. Prefixes may differ."""
    maximize = bool(theirs.get("maximize", optimizer.maximize))
    if maximize != optimizer.maximize:
        raise DataError(
            f"Cannot load a state of maximize = {maximize}: this optimizer steps the other way.",
            f"Make it with maximize={maximize}.",
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


# ── out ───────────────────────────────────────────────────────────────────────────────────────────


def to_torch_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the states as the ``state_dict()`` of ``torch.optim.Adam`` or ``AdamW``, with moments
    in float32.

    Their parameters must be float32, as :func:`full_weights` gives them: torch casts moments to the
    parameters' format.

    Args:
        optimizer: ours, of the rule Adam or AdamW.
    Returns:
        The state, with the optimizer's options.
    Raises:
        DataError: the optimizer has another rule.
    Example:
        >>> import torch, narrowgauge as ng
        >>> weight = torch.nn.Parameter(torch.ones(2, 2))
        >>> ours = ng.AdamW([weight], storage="float32")
        >>> weight.sum().backward(), ours.step()
        (None, None)
        >>> theirs = torch.optim.AdamW([weight])
        >>> theirs.load_state_dict(ng.to_torch_state(ours))
    """
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}.get(optimizer.rule.name)
    if kind is None:
        raise DataError(
            f"Cannot give the states of rule '{optimizer.rule.name}' to torch.optim.",
            "Only Adam's have a counterpart.",
        )
    defaults = kind([torch.zeros(1)]).state_dict()["param_groups"][0]
    defaults["maximize"] = optimizer.maximize
    states: dict[int, dict[str, Any]] = {}
    groups = []
    number = 0
    for group in optimizer.param_groups:
        options = dict(defaults)
        for name in (*defaults, "initial_lr", "param_names", "swa_lr"):
            if name in group:
                options[name] = group[name]
        options["params"] = []
        for parameter in group["params"]:
            options["params"].append(number)
            count = optimizer.num_steps(parameter)
            if optimizer.has_state(parameter):
                states[number] = {"step": torch.tensor(float(count), device="cpu")}
                for name in STATE_NAMES:
                    states[number][name] = optimizer.stored(parameter, name)
            number += 1
        groups.append(options)
    return {"state": states, "param_groups": groups}


def full_weights(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return a model's ``state_dict()`` with the weights that the optimizer has stored, in float32.

    Args:
        model: with parameters of the optimizer. Its other tensors are as they are.
        optimizer: ours.
    Returns:
        The tensors by name. Tied weights are one tensor under both names.
    Example:
        >>> import torch, narrowgauge as ng
        >>> model = torch.nn.Linear(4, 4)
        >>> before = model.weight.detach().clone()
        >>> optimizer = ng.AdamW(model.parameters(), storage="exact")
        >>> torch.equal(ng.full_weights(model, optimizer)["weight"], before)
        True
        >>> model.save_pretrained("out", state_dict=ng.full_weights(model, optimizer))  # doctest: +SKIP
    """
    optimizer.settle()
    stored: dict[Any, Tensor] = {}
    for parameter in optimizer.parameter_names():
        stored[parameter] = optimizer.stored(parameter)
    weights: dict[str, Tensor] = model.state_dict()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in weights and parameter in stored:
            weights[name] = stored[parameter]
    return weights


# ── names and tensors ─────────────────────────────────────────────────────────────────────────────


def kept_tensors(optimizer: Optimizer) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, tensor, parameter) for all tensors of model and optimizer that must not change
    between steps.

    Inputs of an update come before its outputs, so the first of several damaged tensors is the
    cause. Tensors are packed words. For DTensors they are this rank's part.
    """
    optimizer.settle()
    for parameter, name in optimizer.parameter_names().items():
        state = optimizer.local_state(parameter)
        if state is None:
            yield name, local_of(parameter).detach(), parameter
            continue
        late = []
        for plane in state.kernel.planes:
            field = plane.fields[0][0]
            if len(plane.fields) == 1 and field in state.storage.beside:
                late.append(plane.name)
        tensors = state.tensors
        for key, tensor in tensors.items():
            if key not in late:
                yield f"{key} of {name}", tensor, parameter
        yield name, local_of(parameter).detach(), parameter
        for key in late:
            yield f"{key} of {name}", tensors[key], parameter


def unnamed(place: int) -> str:
    """Return the name of a parameter without a name, by its place in the optimizer."""
    return f"param {place}"
