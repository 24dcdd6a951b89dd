"""Load saved states: bit for bit from a Narrowgauge optimizer, rounded from ``torch.optim``.

A ``torch.optim`` state holds each moment as a tensor of the parameter's shape, and no tails. Its moments are rounded to the
storage's codes, with a warning. The weight does not change. A state of another rule or library is refused.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.dtensor import local_of
from narrowgauge.numerics.hashing import step_seed
from narrowgauge.optim import codes
from narrowgauge.optim.rules.elementwise import LION, PLAIN_SGD, SGD
from narrowgauge.optim.rules.matrix import MUON, MatrixRule
from narrowgauge.optim.state import ParameterState, extra_code
from narrowgauge.optim.validation import agree

_ADVICE = "ng.load_states takes states of Adam and AdamW from other libraries; any other restarts."
# These rules ignore the number of steps, and torch does not count their steps.
_COUNTLESS = {SGD.name, PLAIN_SGD.name, LION.name, MUON.name}
_MOMENTA = {name for rule in (SGD, LION) for name in rule.states}


def make_loaded_states(
    optimizer: Any, entries: Mapping[Tensor, Mapping[str, Any]], saved_groups: Sequence[Mapping[str, Any]]
) -> dict[Tensor, ParameterState]:
    """Return new states with the values of saved ones. The optimizer's own states do not change.

    ``saved_groups`` hold the options of the saved states. A group without ``storage`` is from ``torch.optim``.

    Raises:
        RecipeError: a state was saved from another storage, rule or shape.
    """
    states: dict[Tensor, ParameterState] = {}
    lossy: dict[str, None] = {}
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
        values = {p: _tensors(entries[p]) for p in group["params"] if p in entries}
        values = {p: entry for p, entry in values.items() if entry}
        states |= optimizer.make_states({**group, **saved, "params": group["params"]}, values, values)
        for index, (parameter, entry) in enumerate(values.items()):
            state = states[parameter]
            if "storage" in saved:
                state.take(entry)
                if strange := sorted(entry.keys() - set(state.keys())):
                    raise _refusal(state, entry, f"'{strange[0]}' is unknown")
            else:
                _take_plain(state, entry, optimizer.state_of(parameter), seed_of(group, state, index), lossy)
            state.step = _num_steps(state, entry)
    if lossy:
        warnings.warn(f"The state that was loaded is torch.optim's, and was cut: {', '.join(lossy)}.", stacklevel=6)
    return states


def _tensors(entry: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return this rank's tensors. Drop ``None`` (torch's momentum 0) and ``{}`` (missing in a flattened checkpoint)."""
    return {
        name: torch.tensor(value, dtype=torch.float32) if isinstance(value, int | float) else local_of(value)
        for name, value in entry.items()
        if value is not None and value != {}
    }


def _num_steps(state: ParameterState, entry: Mapping[str, Tensor]) -> int:
    if "step" in entry:
        return int(entry["step"])
    if state.kernel.rule.name in _COUNTLESS and entry.keys() <= _MOMENTA:
        return int(bool(entry))
    raise _refusal(state, entry, "'step' is missing")


def _take_plain(
    state: ParameterState,
    entry: Mapping[str, Tensor],
    old: ParameterState | None,
    seed: Tensor,
    lossy: dict[str, None],
) -> None:
    """Take moments from a state of ``torch.optim`` and the tail from the parameter's ``old`` state."""
    names, needed = entry.keys() - {"step"}, state.shapes_of_states
    if strange := sorted(names - needed.keys()):
        raise _refusal(state, entry, f"'{strange[0]}' is unknown")
    if missing := sorted(needed.keys() - names):
        raise _refusal(state, entry, f"'{missing[0]}' is missing")
    if old is not None and old.storage == state.storage:
        state.take(old.in_parameter_order())
    for name in needed:
        shape, value = tuple(state.stored(name).shape), entry[name].to(state.parameter.device)
        if tuple(value.shape) != shape or not value.is_floating_point():
            raise RecipeError(
                f"Cannot load the state because its '{name}' is {value.dtype} of shape {tuple(value.shape)}, not a float of "
                f"shape {shape}.",
                _ADVICE,
            )
        value = value.to(codes.value_dtype(state.storage))
        state.put(name, value, seed)
        if not torch.equal(state.stored(name), value):
            lossy[f"{name} to {state.code(name).bits} bits in '{state.storage.name}'"] = None


def _refusal(state: ParameterState, entry: Mapping[str, Tensor], reason: str) -> RecipeError:
    rule, needed = state.kernel.rule.name, sorted(state.shapes_of_states)
    return RecipeError(
        f"Cannot load a state with {sorted(entry)} into rule '{rule}', which has {needed}: {reason}.", _ADVICE
    )


def seed_of(group: Mapping[str, Any], state: ParameterState, index: int) -> Tensor:
    """Return the seed that rounds a group's parameter state on loading. No step uses it."""
    return torch.tensor(step_seed(group["seed"], -1 - index), dtype=torch.int32, device=state.parameter.device)


# ── torch.optim's protocol ──────────────────────────────────────────────────────────────────────────────────────────────


def show_states(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Replace packed states by tensors in the parameter's shape. This is a hook on ``state_dict``."""
    state_dict["state"] = {
        key: value.saved() if isinstance(value, ParameterState) else value for key, value in state_dict["state"].items()
    }


def take_states(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Replace saved tensors by states. This is a hook on ``load_state_dict``, which stores them in the optimizer."""
    saved = copy.deepcopy(state_dict["param_groups"])
    is_plain = ["storage" not in group for group in saved]
    agree(optimizer.param_groups, saved, optimizer.rule)
    options = [
        {name: value for name, value in group.items() if name != "storage" or not plain}
        for group, plain in zip(saved, is_plain, strict=True)
    ]
    # Keys are numbers, or names from a distributed checkpoint.
    numbers = [key for group in saved for key in group["params"]]
    parameters = dict(zip(numbers, (p for group in optimizer.param_groups for p in group["params"]), strict=True))
    entries = {parameters[key]: entry for key, entry in state_dict["state"].items() if key in parameters}
    states = make_loaded_states(optimizer, entries, options)
    extra_entries = {key: value for key, value in state_dict["state"].items() if key not in parameters}
    if strange := [key for key, value in extra_entries.items() if isinstance(key, int) or isinstance(value, Mapping)]:
        raise RecipeError(f"Cannot load the state because no param group lists its entry {strange[0]!r}.")
    return {
        "state": {**extra_entries, **{key: states[p] for key, p in parameters.items() if p in states}},
        "param_groups": saved,
    }


# ── names and tensors ───────────────────────────────────────────────────────────────────────────────────────────────────


def whole_states(optimizer: Any, parameter: Tensor) -> set[str]:
    """Return the saved names of a matrix rule's own states. Every rank has them whole, whatever the sharding."""
    group = optimizer.group_of(parameter)
    rule, row = optimizer.rule_in(group, parameter), optimizer.storage_of(parameter)
    if not isinstance(rule, MatrixRule):
        return set()
    states = rule.states(tuple(parameter.shape), group)
    meta = torch.device("meta")
    return {
        part
        for name, state in states.items()
        for part in codes.alone_zeros(name, extra_code(row, state.role), state.shape, meta)
    }


def kept_tensors(optimizer: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, tensor, parameter) for all tensors of model and optimizer that must not change between steps.

    Inputs of an update come before its outputs, so the first of several damaged tensors is the cause. Tensors are packed words.
    For DTensors they are this rank's part.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> optimizer = ng.AdamW(model.named_parameters(), lr=1e-3, storage="float32")
        >>> model(torch.ones(2)).sum().backward(), optimizer.step()
        (None, None)
        >>> [name for name, _, _ in kept_tensors(optimizer)]
        ['exp_avg of weight', 'exp_avg_sq of weight', 'weight']
    """
    optimizer.settle()
    for parameter, name in optimizer.parameter_names().items():
        state = optimizer.state_of(parameter)
        tensors = [("", local_of(parameter).detach())] if state is None else state.named_tensors()
        for field, tensor in tensors:
            yield f"{field} of {name}" if field else name, tensor, parameter
