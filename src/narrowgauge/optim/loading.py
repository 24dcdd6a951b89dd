"""Saved states, in and out.

A state of the same storage and rule is loaded bit for bit, by :func:`take_states`. Any other one is
read as a float32 weight, moments and a number of steps, and rounded once, by :func:`adopt`:

===========  ==================================================================================
torch.optim  Adam's and AdamW's moments, SGD's ``momentum_buffer``, in any float format
narrowgauge  of any storage and rule
===========  ==================================================================================

:func:`to_torch_state` and :func:`full_weights` give states and weights back to torch.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from narrowgauge.errors import DataError, RecipeError
from narrowgauge.numerics.dtensor import local_of
from narrowgauge.numerics.rounding import at_least_float32
from narrowgauge.optim.state import ParameterState
from narrowgauge.optim.validation import agree, known_row, sizes_of
from narrowgauge.optim.values import stored
from narrowgauge.spec.storages import STATE_NAMES

if TYPE_CHECKING:
    from narrowgauge.optim.optimizer import Optimizer

Entry = Mapping[str, Any]
OPTIONS = ("lr", "betas", "eps", "weight_decay")
NOTES = "notes"
"""The saved name of what other code keeps beside a state."""
_ADVICE = "Give the state of torch's SGD, Adam or AdamW, in plain tensors."


# ── bit for bit ───────────────────────────────────────────────────────────────────────────────────


def make_loaded_states(
    optimizer: Optimizer, entries: Mapping[Tensor, Entry], saved_groups: Sequence[Entry]
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
    for parameter, state in states.items():
        state.notes.update(entries[parameter].get(NOTES) or {})
    return states


def states_of(
    optimizer: Optimizer, group: Entry, entries: Mapping[Tensor, Mapping[str, Tensor]]
) -> dict[Tensor, ParameterState]:
    """Return new states under a group's options, with the values of saved ones."""
    states = optimizer.make_states(dict(group), entries)
    for parameter, entry in entries.items():
        state = states[parameter]
        names = set(state.keys())
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


def tensors_of(entry: Entry) -> dict[str, Tensor]:
    """Return this rank's tensors.

    Leave out values ``{}``: torch sets them for what a flattened checkpoint lacks.
    """
    tensors = {}
    for name, value in entry.items():
        if name == NOTES:
            continue
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
            if value.notes:
                entries[key][NOTES] = dict(value.notes)
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
    optimizer._taken = {}


# ── by value ──────────────────────────────────────────────────────────────────────────────────────


class Foreign(NamedTuple):
    """Hold what a foreign state says of a parameter: its name, its entry, and the entry's group."""

    parameter: Tensor
    name: str
    entry: Entry
    group: Entry


class Values(NamedTuple):
    """Hold the wide values of a foreign state. ``weight`` is ``None`` where it has none."""

    weight: Tensor | None
    states: dict[str, Tensor | int]


def load_states(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load weights and moments from torch's Adam, AdamW or SGD, or from another storage.

    Load the model's weights first. If the state knows a weight more precisely (a tail, a float32
    master), the optimizer takes that weight. Moments and weights are rounded once, as the storage
    rounds. Parameters are matched by ``param_names`` if both have the same names, otherwise by the
    order of the groups. Names may differ by a prefix then. Options stay the optimizer's own, and a
    warning names those that differ. ``optimizer.load_state_dict(state)`` takes the state's options.

    Args:
        optimizer: ours, with the parameters in the same order.
        state: ``optimizer.state_dict()`` of the other library or storage.
    Raises:
        DataError: states of another library, rule or direction, or shapes that do not fit.
    Example:
        >>> import torch, narrowgauge as ng
        >>> weight = torch.nn.Parameter(torch.ones(2, 2))
        >>> theirs = torch.optim.AdamW([weight])
        >>> weight.sum().backward(), theirs.step()
        (None, None)
        >>> ours = ng.AdamW([torch.nn.Parameter(weight.detach().bfloat16())], storage="exact")
        >>> ng.load_states(ours, theirs.state_dict())
        >>> ours.num_steps(ours.param_groups[0]["params"][0])
        1
    """
    matches = adopt(optimizer, state)
    differ = set()
    for match in matches:
        ours = optimizer.group_of(match.parameter)
        for name in OPTIONS:
            if name in match.group and name in ours:
                was = _shown(match.group[name])
                now = _shown(ours[name])
                if was != now:
                    differ.add(f"{name} {was}, not {now}")
    if differ:
        warnings.warn(f"The state was trained with {'; '.join(sorted(differ))}.", stacklevel=2)


def _shown(option: Any) -> str:
    numbers = option if isinstance(option, tuple | list) else [option]
    return ", ".join(f"{float(number):g}" for number in numbers)


def resume_from(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
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


def adopt(optimizer: Optimizer, state: Mapping[str, Any]) -> list[Foreign]:
    """Store the weights and moments of a foreign state. Return what it says of each parameter."""
    if not {"state", "param_groups"} <= set(state):
        raise DataError(
            "The state has no 'state' and 'param_groups'.", "Give the optimizer's state_dict()."
        )
    matches = _matched(optimizer, state)
    weights: dict[Tensor, Tensor] = {}
    states: dict[Tensor, dict[str, Tensor | int]] = {}
    for match in matches:
        maximize = bool(match.group.get("maximize", optimizer.maximize))
        if maximize != optimizer.maximize:
            raise DataError(
                f"Cannot load a state of maximize = {maximize}: this optimizer steps the other "
                "way.",
                f"Make it with maximize={maximize}.",
            )
        if not match.entry or match.entry.get("momentum_buffer", 0) is None:  # plain SGD
            continue
        if "storage" in match.group:
            values = _read_ours(optimizer, match)
        else:
            values = _read_torchs(match)
        weight = values.weight
        weights[match.parameter] = optimizer.stored(match.parameter) if weight is None else weight
        states[match.parameter] = values.states
    if state["state"] and not any(match.entry for match in matches):
        raise DataError(
            "The keys of the state's 'state' are not numbers of its parameters.", _ADVICE
        )
    optimizer.adopt(weights, states)
    return matches


def _matched(optimizer: Optimizer, state: Mapping[str, Any]) -> list[Foreign]:
    """Return each parameter with its entry in a foreign state: by name, else in order."""
    names = optimizer.parameter_names()
    keys: list[tuple[Any, Entry]] = []
    theirs: list[str] = []
    for group in state["param_groups"]:
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
    matches = []
    for (parameter, name), (key, group) in zip(names.items(), keys, strict=True):
        matches.append(Foreign(parameter, name, state["state"].get(key) or {}, group))
    return matches


def _read_ours(optimizer: Optimizer, match: Foreign) -> Values:
    """Read a state of another storage over the same visible weight."""
    parameter = match.parameter
    tensors = tensors_of(match.entry)
    dtype = getattr(torch, known_row(match.group["storage"]).visible)
    if tensors.keys() == {"step", *STATE_NAMES} and tensors["exp_avg"].dtype is torch.float32:
        dtype = torch.float32  # all in float32, whatever the storage of its group
    elif torch.float32 not in (dtype, parameter.dtype):
        dtype = parameter.dtype
    seen = parameter.detach()
    if parameter.dtype is not dtype:
        seen = optimizer.stored(parameter).to(dtype)
    state = states_of(optimizer, match.group, {seen: tensors})[seen]
    states: dict[str, Tensor | int] = {"step": state.step}
    for name in state.shapes_of_states:
        states[name] = stored(state, name)
    return Values(stored(state, "weight") if state.storage.beside else None, states)


def _read_torchs(match: Foreign) -> Values:
    """Read a state of ``torch.optim``. SGD counts no steps: any but the first is like another."""
    entry = match.entry
    kinds: tuple[str, ...] = ("step", *STATE_NAMES)
    if "momentum_buffer" in entry:
        entry = {"step": 1, **entry}
        kinds = ("step", "momentum_buffer")
    strange = sorted(set(entry) - set(kinds))
    if strange:
        raise DataError(f"The state of '{match.name}' contains '{strange[0]}'.", _ADVICE)
    states: dict[str, Tensor | int] = {}
    for kind in kinds:
        if kind not in entry:
            raise DataError(f"The state of '{match.name}' lacks '{kind}'.", _ADVICE)
        if kind == "step":
            states[kind] = int(entry[kind])
            continue
        moment = entry[kind]
        if type(local_of(moment)) not in (Tensor, nn.Parameter):
            raise DataError(
                f"The state of '{match.name}' is packed as {type(moment).__name__}.", _ADVICE
            )
        if moment.shape != match.parameter.shape:
            raise DataError(
                f"'{match.name}' has shape {tuple(match.parameter.shape)}, and its state has shape "
                f"{tuple(moment.shape)}.",
                "Make the optimizer with the same parameters in the same order.",
            )
        states[kind] = at_least_float32(moment).contiguous()
    return Values(None, states)


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
            if optimizer.state_of(parameter) is not None:
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
        state = optimizer.state_of(parameter)
        if state is None:
            yield name, local_of(parameter).detach(), parameter
            continue
        for field, tensor in state.named_tensors():
            yield f"{field} of {name}" if field else name, tensor, parameter


def unnamed(place: int) -> str:
    """Return the name of a parameter without a name, by its place in the optimizer."""
    return f"param {place}"
