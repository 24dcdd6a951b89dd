"""The state of an optimizer as others see it: ``state_dict()``, ``optimizer.state`` and the tensors themselves.

*Saved and loaded.* A state of ours is saved packed and loaded bit for bit. A state of ``torch.optim`` holds each moment as
a tensor of the parameter's shape, under torch's names, and no tails. So its moments are cut to the storage's codes, with a
warning, and the weight stays as it is. A state of another rule, or of another library's formats, is refused.

*Read and written.* ``optimizer.state`` holds the state of each parameter under torch's names, for hooks and users. Reading
an entry unpacks a float32 tensor of the parameter's shape; writing to it, by assignment or in place, packs it again before
the words are next used, so the next step and ``state_dict()`` see the write. An entry thus behaves as torch's does, with
one difference: a step does not update a tensor that was read before it. Nothing is unpacked before it is read.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.rounding import step_seed
from narrowgauge.numerics.shards import local_of, placed_like, sendable
from narrowgauge.optim import codec
from narrowgauge.optim.reconcile import Group, Registry, snapshot_adopted, snapshot_of
from narrowgauge.optim.replicated_state import ReplicatedState
from narrowgauge.optim.rules.elementwise import LION, PLAIN_SGD, SGD
from narrowgauge.optim.rules.matrix import MUON, MatrixRule
from narrowgauge.optim.state import ParameterState
from narrowgauge.optim.validation import agree

SavedEntry = Mapping[str, Tensor]
_ADVICE = "ng.convert takes states of Adam and AdamW from other libraries and storages; any other restarts."
# What these do does not depend on how many steps they have taken, and torch does not count them.
_COUNTLESS = {SGD.name, PLAIN_SGD.name, LION.name, MUON.name}
_MOMENTA = {name for rule in (SGD, LION) for name in rule.states}


@dataclass
class Losses:
    """The states that did not fit their code when they were loaded: ``(storage, state, bits)`` of each."""

    cut: dict[tuple[str, str, int], None] = field(default_factory=dict)

    def warn(self) -> None:
        if self.cut:
            kept = ", ".join(f"{state} to {bits} bits in '{storage}'" for storage, state, bits in self.cut)
            warnings.warn(f"The state that was loaded is torch.optim's, and was cut: {kept}.", stacklevel=6)


def taken_steps(entry: SavedEntry, rule: str) -> int:
    """The number of steps that a state was saved after."""
    if "step" in entry:
        return int(entry["step"])
    if rule in _COUNTLESS and entry.keys() <= _MOMENTA:
        return int(bool(entry))
    raise RecipeError(f"the state to load holds {sorted(entry)}, and rule '{rule}' needs 'step'.", _ADVICE)


def take_plain(
    state: ParameterState, entry: SavedEntry, old: ParameterState | None, seed: Tensor, losses: Losses
) -> None:
    """Take a parameter's moments, by name, from a state of ``torch.optim``; they are cut, stochastically where their code is.

    The new ``state`` takes the weight of ``old``, the parameter's until now, where that is still the visible one. ``losses``
    collects what lost bits.

    Raises:
        RecipeError: other names or shapes than the rule's.
    """
    given, wanted = entry.keys() - {"step"}, state.shapes_of_states
    if strange := sorted(given - wanted.keys()) or sorted(wanted.keys() - given):
        what = "which it does not have" if strange[0] in given else "which is missing"
        raise RecipeError(
            f"the state to load holds {sorted(given)}, and rule '{state.kernel.rule.name}' has {sorted(wanted)}: "
            f"'{strange[0]}', {what}.",
            _ADVICE,
        )
    if old is not None:
        _keep_weight(state, old.stored("weight"))
    for name in wanted:
        value = entry[name].to(state.parameter.device)
        if value.shape != state.stored(name).shape or not value.is_floating_point():
            raise RecipeError(
                f"'{name}' to load is {value.dtype} of shape {tuple(value.shape)}, and a parameter's is a float of shape "
                f"{tuple(state.stored(name).shape)}.",
                _ADVICE,
            )
        value = value.to(state.stored(name).dtype)
        state.put(name, value, seed)
        if not torch.equal(state.stored(name), value):
            losses.cut[state.storage.name, name, state.code(name).bits] = None


def _keep_weight(state: ParameterState, value: Tensor) -> None:
    """Store a weight where it is still the visible one; elsewhere the parameter was modified, and its value stands."""
    shown = state.parameter.detach().clone()
    state.adopt(value)
    moved = state.parameter.detach() != shown
    if bool(moved.any()):
        state.adopt(torch.where(moved, shown.to(value.dtype), value))


def without_none(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry without the names that have no value.

    ``None`` is torch's buffer of a momentum that is 0; a distributed checkpoint that flattened the states leaves an empty
    dict where an entry was missing.
    """
    return {
        name: torch.tensor(value, dtype=torch.float32) if isinstance(value, int | float) else value
        for name, value in entry.items()
        if value is not None and value != {}
    }


def seed_of(group: Group, state: ParameterState, index: int) -> Tensor:
    """The seed by which the state of a group's parameter is cut when it is loaded: no step has it."""
    return torch.tensor(step_seed(group["seed"], -1 - index), dtype=torch.int32, device=state.parameter.device)


def save_states(registry: Registry) -> dict[Tensor, dict[str, Any]]:
    """The state of every parameter that has one, lossless: see :meth:`narrowgauge.Optimizer.state_dict`."""
    registry.for_reading(registry.states)
    result: dict[Tensor, dict[str, Any]] = {}
    for parameter, state in registry.states.items():
        whole = state.tensors_of_extras()
        values = {
            name: sendable(parameter, value) if name in whole else placed_like(parameter, value)
            for name, value in state.in_parameter_order().items()
        }
        result[parameter] = {"step": torch.tensor(float(state.step), dtype=torch.float32), **values, **state.notes}
    return result


def replicated_states(optimizer: Any, parameter: Tensor) -> set[str]:
    """The states of a parameter that every rank has whole, however the parameter is sharded: a matrix rule's own."""
    registry: Registry = optimizer._registry
    group = registry.group_of(parameter)
    assert group is not None
    rule = registry.rule_of(group, parameter)
    if not isinstance(rule, MatrixRule):
        return set()
    row, meta = registry.storage_of(group, parameter), torch.device("meta")
    return {
        part
        for name, kept in rule.states(tuple(parameter.shape), group).items()
        if not kept.beside
        for part in ReplicatedState.zeros(name, kept.shape, kept.role, row, meta).tensors
    }


def load_states(
    registry: Registry,
    groups: Sequence[Group],
    entries: Mapping[Tensor, Mapping[str, Any]],
    saved_groups: Sequence[Group],
) -> None:
    """Replace all states by those from :func:`save_states` or a plain ``torch.optim``; a state that is refused changes nothing.

    ``saved_groups`` hold the options that the states were saved under; one without ``storage`` is of a plain ``torch.optim``.

    Raises:
        RecipeError: a state was saved from another storage, rule or shape.
    """
    if any("storage" not in group for group in saved_groups):
        registry.for_reading(registry.states)  # a plain state leaves weights as they are
    before = registry.states, registry.buckets
    registry.states, registry.buckets = {}, []
    losses = Losses()
    try:
        for mine, saved in zip(groups, saved_groups, strict=True):
            group, is_plain = {**mine, **saved, "params": mine["params"]}, "storage" not in saved
            given = {p: without_none(entries[p]) for p in group["params"] if p in entries}
            loaded = {
                p: {name: local_of(value) for name, value in entry.items()} for p, entry in given.items() if entry
            }
            registry.make(group, loaded, loaded)
            for index, (parameter, entry) in enumerate(loaded.items()):
                state = registry.states[parameter]
                if is_plain:
                    take_plain(state, entry, before[0].get(parameter), seed_of(group, state, index), losses)
                else:
                    state.take(entry)
                    state.notes = notes_of(state, entry)
                state.step = taken_steps(entry, state.kernel.rule.name)
                # The weights that belong to it may have been loaded before, or will be after.
                state.snapshot = snapshot_of(state, bound=False)
    except BaseException:
        registry.states, registry.buckets = before
        raise
    losses.warn()


def numbered(states: Mapping[Tensor, dict[str, Any]], registry: Registry) -> dict[int, dict[str, Any]]:
    """States by the numbers that ``state_dict()`` gives to their parameters."""
    index = {p: k for k, p in enumerate(registry.parameters())}
    return {index[p]: entry for p, entry in states.items()}


def show_states(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """A hook: parameter-shaped states in place of packed words."""
    state_dict["state"] = {**numbered(optimizer.states(), optimizer._registry), **optimizer.state.free}


def take_states(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A hook: load what belongs to parameters, uncast, and leave the groups to torch."""
    saved = copy.deepcopy(state_dict["param_groups"])
    plain = ["storage" not in group for group in saved]
    agree(optimizer.param_groups, saved, optimizer.rule)
    # By numbers, or by names where a distributed checkpoint has put them.
    listed = [key for group in saved for key in group["params"]]
    members = dict(zip(listed, optimizer._registry.parameters(), strict=True))
    free = {key: value for key, value in state_dict["state"].items() if key not in members}
    if strange := [key for key, value in free.items() if isinstance(key, int) or isinstance(value, Mapping)]:
        raise RecipeError(f"the state to load has an entry {strange[0]!r}, which none of its param groups lists.")
    options = [
        {name: value for name, value in group.items() if name != "storage" or not is_plain}
        for group, is_plain in zip(saved, plain, strict=True)
    ]
    entries = {members[key]: entry for key, entry in state_dict["state"].items() if key in members}
    optimizer.load_states(entries, options)
    return {"state": free, "param_groups": saved}


# ── optimizer.state ─────────────────────────────────────────────────────────────────────────────────────────────────────

WEIGHT = "master"
"""The name of the stored float32 weight, in storages that keep more than the visible one."""


class StateView(MutableMapping[Any, Any]):
    """The mapping from parameters to entries, and from any other key to what a hook or user keeps there.

    ``settle`` finishes the last step, whose decision to skip may still be on a device.
    """

    def __init__(self, registry: Registry, settle: Callable[[], None]) -> None:
        self._registry, self._settle = registry, settle
        self.free: dict[Any, Any] = {}
        self.handed: dict[ParameterState, dict[str, tuple[Tensor, int]]] = {}

    def _is_parameter(self, key: object) -> bool:
        return isinstance(key, Tensor) and self._registry.group_of(key) is not None

    def state_of(self, parameter: Tensor) -> ParameterState | None:
        """The state of a parameter, with all that was written to it; ``None`` where there is none."""
        self._settle()
        return self._registry.get(parameter)

    def begin(self, parameter: Tensor, name: str) -> ParameterState:
        return self._registry.begin(parameter, name)

    def discard(self, parameters: Iterable[Tensor]) -> None:
        self._settle()
        self.take_writes()
        for state in self._registry.remove(list(parameters)):
            self.forget(state)

    def __getitem__(self, key: Any) -> Any:
        if self._is_parameter(key):
            return StateEntry(self, key)
        return self.free[key] if key in self.free else self.free.setdefault(key, {})  # as torch's defaultdict

    def __setitem__(self, key: Any, value: Any) -> None:
        if not self._is_parameter(key):
            self.free[key] = value
        elif entries := dict(value):
            StateEntry(self, key).update(entries)
        else:
            self.discard([key])

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        if key in self.free:
            del self.free[key]
        else:
            self.discard([key])

    def __iter__(self) -> Iterator[Any]:
        yield from self._registry.with_states()
        yield from list(self.free)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        return key in (self._registry.with_states() if self._is_parameter(key) else self.free)

    def get(self, key: Any, default: Any = None) -> Any:
        """The entry of a parameter that has one, else ``default``."""
        if key not in self:
            return default
        return self[key]

    def clear(self) -> None:
        """Remove all states: parameters start again from their visible weights."""
        self.free.clear()
        self.discard(self._registry.states)

    def __repr__(self) -> str:
        return repr({key: dict(value) if isinstance(value, StateEntry) else value for key, value in self.items()})

    # ── tensors that were read ─────────────────────────────────────────────────────────────────────────────────────────

    def read(self, parameter: Tensor, state: ParameterState, name: str) -> Tensor:
        """A state as a tensor, the same one until a step; :meth:`take_writes` packs what is done to it in place."""
        handed = self.handed.setdefault(state, {})
        if name not in handed:
            if name == "step":
                value = torch.tensor(float(state.step), dtype=torch.float32)
            elif name in state.extras:
                value = state.stored(name)
            elif name in state.tensors_of_extras():
                value = state.tensors_of_extras()[name]
            elif name in _packed(state):
                value = placed_like(parameter, state.in_parameter_order()[name])
            else:
                value = placed_like(parameter, state.stored("weight" if name == WEIGHT else name))
            handed[name] = value, value._version
        return handed[name][0]

    def take_writes(self) -> None:
        """Pack all tensors that were modified in place after they were read."""
        for state, handed in self.handed.items():
            for name, (value, version) in handed.items():
                if value._version != version:
                    write(state, name, value)
                    handed[name] = value, value._version

    def is_what_was_read(self, state: ParameterState, name: str, value: Any) -> bool:
        """Whether a value is put back as it was read: frameworks move each state to where it is already.

        Storing it again would cut it again, and a pair of bfloat16 can hold more than the float32 that was read.
        """
        read, version = self.handed.get(state, {}).get(name, (None, 0))
        return read is not None and value is read and read._version == version

    def flush(self) -> None:
        """Pack what was done to the tensors that were read, and forget them: a step changes the words."""
        self.take_writes()
        self.handed.clear()

    def forget(self, state: ParameterState) -> None:
        """Forget what was read of a state whose words have changed."""
        self.handed.pop(state, None)


class StateEntry(MutableMapping[str, Any]):
    """The state of one parameter: ``step``, the rule's states, ``master`` where more than the visible weight is stored, notes.

    The packed tensors that ``state_dict()`` saves are there too, under the same names, but for storages with scales by row: a
    distributed checkpoint that flattens its state takes the names from an entry, not from ``state_dict()``. A parameter without
    states has an empty entry, and the first write makes all of them.
    """

    def __init__(self, view: StateView, parameter: Tensor) -> None:
        self._view, self._parameter = view, parameter

    @property
    def _state(self) -> ParameterState | None:
        return self._view.state_of(self._parameter)

    def __getitem__(self, name: str) -> Any:
        state = self._state
        if state is None or name not in _names(state):
            raise KeyError(name)
        return state.notes[name] if name in state.notes else self._view.read(self._parameter, state, name)

    def __setitem__(self, name: str, value: Any) -> None:
        if (known := self._state) is not None and self._view.is_what_was_read(known, name, value):
            return
        state = self._state or self._view.begin(self._parameter, name)
        self._view.take_writes()
        if name in _names(state) and name not in state.notes:
            write(state, name, value)
            self._view.forget(state)
        else:
            state.notes[name] = value

    def __delitem__(self, name: str) -> None:
        state = self._state
        if state is None or name not in _names(state):
            raise KeyError(name)
        if name in state.notes:
            del state.notes[name]
            return
        shown = local_of(self._parameter).detach().float()
        self[name] = 0 if name == "step" else shown if name == WEIGHT else torch.zeros_like(local_of(self[name]))

    def __iter__(self) -> Iterator[str]:
        state = self._state
        return iter([] if state is None else _names(state))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        """Remove the state: the parameter starts again from its visible weight."""
        self._view.discard([self._parameter])

    def __repr__(self) -> str:
        return repr(dict(self))


def _names(state: ParameterState) -> list[str]:
    return [
        *_readable(state),
        *_packed(state),
        *dict.fromkeys([*state.extras, *state.tensors_of_extras()]),
        *state.notes,
    ]


def _readable(state: ParameterState) -> list[str]:
    """Names of entries that are read as float32 values."""
    return ["step", *(name for name, _ in state.storage.states), *([WEIGHT] if state.storage.beside else [])]


def _packed(state: ParameterState) -> list[str]:
    """Names of entries that are read packed; none where they have no meaning without the scales of their rows."""
    return [] if state.bounds else [name for name in state.words if name not in _readable(state)]


def write(state: ParameterState, name: str, value: Any) -> None:
    """Pack a value, of the shape of a state, into it."""
    if name == "step":
        state.step = int(value)
        return
    given = local_of(value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float32))
    if name in _packed(state) or (name in state.tensors_of_extras() and name not in state.extras):
        state.take({**state.in_parameter_order(), name: given.detach()})
        return
    shape = state.extras[name].shape if name in state.extras else state.parameter.shape
    if given.shape != shape:
        raise RecipeError(
            f"'{name}' of shape {tuple(given.shape)} was written to the state of a parameter whose own has {tuple(shape)}.",
            "Give a tensor of that shape.",
        )
    with torch.no_grad():
        given = given.detach().to(state.parameter.device)
        if name == WEIGHT:
            state.adopt(given)
            snapshot_adopted(state)
        else:
            state.put(name, given)


def notes_of(state: ParameterState, entry: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a saved entry that hooks and users have added."""
    own = {"step", *state.words, *(f"{name}_bound" for name in state.bounds), *state.tensors_of_extras()}
    return {name: value for name, value in entry.items() if name not in own}


# ── the tensors in memory ───────────────────────────────────────────────────────────────────────────────────────────────


def kept_tensors(optimizer: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Every tensor of the model and of the optimizer's state that must not change between steps.

    Returns:
        Of each tensor its name, itself and its parameter: planes of states by the fields that they hold (``"exp_avg of
        layer.weight"``), the visible weight under the parameter's name, and its tail. What an update reads comes before what it
        writes, so the first of several damaged ones is the cause. Packed words, and of DTensors this rank's part.

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
    known = optimizer._registry.states
    for parameter, name in optimizer.parameter_names().items():
        state = known.get(parameter)
        moments, tails = ({}, {}) if state is None else _planes(state)
        for what, tensor in (*moments.items(), ("", local_of(parameter).detach()), *tails.items()):
            yield f"{what} of {name}" if what else name, tensor, parameter


def _planes(state: ParameterState) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a state: those that hold states, and those that belong to the weight alone."""
    kept: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
    for plane in codec.planes(state.storage):
        fields = [field for field, _, _ in plane.fields]
        kept[set(fields) <= set(state.storage.beside)][", ".join(fields)] = state.words[plane.name].view(plane.dtype)
    for name, bound in state.bounds.items():
        kept[name == "weight"][f"{name} bound"] = bound
    kept[0].update(state.tensors_of_extras())
    return kept
