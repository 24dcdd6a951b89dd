"""Saving and loading states: our own, lossless, and those of plain ``torch.optim`` optimizers.

A state of ours is saved packed and loaded bit for bit. A state of ``torch.optim`` holds each moment as a tensor of the
parameter's shape, under torch's names, and no tails. So its moments are cut to the storage's codes, with a warning, and the
weight stays as it is. A state of another rule, or of another library's formats, is refused.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.rounding import step_seed
from narrowgauge.numerics.shards import local_of, placed_like
from narrowgauge.optim.external_writes import snapshot_of
from narrowgauge.optim.registry import Group, Registry
from narrowgauge.optim.rules.elementwise import LION, PLAIN_SGD, SGD
from narrowgauge.optim.rules.matrix import MUON, MatrixRule
from narrowgauge.optim.state_view import notes_of
from narrowgauge.optim.stores import Store
from narrowgauge.optim.validation import agree

Entry = Mapping[str, Tensor]
_ADVICE = "ng.convert takes states of Adam and AdamW from other libraries and storages; any other restarts."
# What these do does not depend on how many steps they have taken, and torch does not count them.
_COUNTLESS = {SGD.name, PLAIN_SGD.name, LION.name, MUON.name}
_MOMENTA = {name for rule in (SGD, LION) for name in rule.states}


@dataclass
class Losses:
    """The states that lost bits when they were loaded.

    Args:
        cut: ``(storage, state, bits)`` of each state that did not fit its code.
    """

    cut: dict[tuple[str, str, int], None] = field(default_factory=dict)

    def warn(self) -> None:
        """Warn of them, in one sentence."""
        if self.cut:
            kept = ", ".join(f"{state} to {bits} bits in '{storage}'" for storage, state, bits in self.cut)
            warnings.warn(f"The state that was loaded is torch.optim's, and was cut: {kept}.", stacklevel=6)


def taken_steps(entry: Entry, rule: str) -> int:
    """The number of steps that a state was saved after.

    Raises:
        RecipeError: the state has no ``step``, and the rule depends on it.
    """
    if "step" in entry:
        return int(entry["step"])
    if rule in _COUNTLESS and entry.keys() <= _MOMENTA:
        return int(bool(entry))
    raise RecipeError(f"the state to load holds {sorted(entry)}, and rule '{rule}' needs 'step'.", _ADVICE)


def take_plain(store: Store, entry: Entry, old: Store | None, seed: Tensor, losses: Losses) -> None:
    """Take a parameter's state of ``torch.optim``: moments are cut, stochastically where their code is.

    Args:
        store: a new one; it takes the weight of ``old`` where that is still the visible one.
        entry: moments by name.
        old: the parameter's store until now.
        seed: 0-d int32, of the stochastic rounding.
        losses: collects what lost bits.
    Raises:
        RecipeError: other names or shapes than the rule's.
    """
    given, wanted = entry.keys() - {"step"}, store.shapes_of_states
    if strange := sorted(given - wanted.keys()) or sorted(wanted.keys() - given):
        what = "which it does not have" if strange[0] in given else "which is missing"
        raise RecipeError(
            f"the state to load holds {sorted(given)}, and rule '{store.kernel.rule.name}' has {sorted(wanted)}: "
            f"'{strange[0]}', {what}.",
            _ADVICE,
        )
    if old is not None:
        _keep_weight(store, old.stored("weight"))
    for name in wanted:
        value = entry[name].to(store.parameter.device)
        if value.shape != store.stored(name).shape or not value.is_floating_point():
            raise RecipeError(
                f"'{name}' to load is {value.dtype} of shape {tuple(value.shape)}, and a parameter's is a float of shape "
                f"{tuple(store.stored(name).shape)}.",
                _ADVICE,
            )
        store.put(name, value.float(), seed)
        if name not in store.extras and not torch.equal(store.stored(name), value.float()):
            losses.cut[store.storage.name, name, store.storage.code(name).bits] = None


def _keep_weight(store: Store, value: Tensor) -> None:
    """Store a weight where it is still the visible one; elsewhere the parameter was modified, and its value stands."""
    shown = store.parameter.detach().clone()
    store.adopt(value)
    moved = store.parameter.detach() != shown
    if bool(moved.any()):
        store.adopt(torch.where(moved, shown.float(), value))


def without_none(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry without the names that have no value.

    ``None`` is torch's buffer of a momentum that is 0; an empty dict stands in a state that a distributed checkpoint had
    flattened for what it did not find.
    """
    return {
        name: torch.tensor(value, dtype=torch.float32) if isinstance(value, int | float) else value
        for name, value in entry.items()
        if value is not None and value != {}
    }


def seed_of(group: Group, store: Store, index: int) -> Tensor:
    """The seed by which the state of a group's parameter is cut when it is loaded: no step has it."""
    return torch.tensor(step_seed(group["seed"], -1 - index), dtype=torch.int32, device=store.parameter.device)


def save_states(registry: Registry) -> dict[Tensor, dict[str, Any]]:
    """The state of every parameter that has one, lossless: see :meth:`narrowgauge.Optimizer.state_dict`."""
    registry.adopt_writes(registry.stores.values(), loaded=False)
    result: dict[Tensor, dict[str, Any]] = {}
    for parameter, store in registry.stores.items():
        values = {
            name: value if name in store.extras else placed_like(parameter, value)
            for name, value in store.in_parameter_order().items()
        }
        result[parameter] = {"step": torch.tensor(float(store.step), dtype=torch.float32), **values, **store.notes}
    return result


def replicated_states(optimizer: Any, parameter: Tensor) -> set[str]:
    """The states of a parameter that every rank has whole, however the parameter is sharded: a matrix rule's own."""
    registry: Registry = optimizer._registry
    group = registry.group_of(parameter)
    assert group is not None
    rule = registry.rule_of(group, parameter)
    if not isinstance(rule, MatrixRule):
        return set()
    return {name for name, kept in rule.states(tuple(parameter.shape), group).items() if kept.role is None}


def load_states(
    registry: Registry,
    groups: Sequence[Group],
    entries: Mapping[Tensor, Mapping[str, Any]],
    saved_groups: Sequence[Group],
) -> None:
    """Replace all states by loaded ones; a state that is refused changes nothing.

    Args:
        registry: of the optimizer's stores.
        groups: the optimizer's param groups.
        entries: the state of each parameter, from :func:`save_states` or a plain ``torch.optim``.
        saved_groups: the options that the states were saved under; a group without ``storage`` is of a plain ``torch.optim``.
    Raises:
        RecipeError: a state was saved from another storage, rule or shape.
    """
    if any("storage" not in group for group in saved_groups):
        registry.adopt_writes(registry.stores.values(), loaded=False)  # a plain state leaves weights as they are
    before = registry.stores, registry.buckets
    registry.stores, registry.buckets = {}, []
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
                store = registry.stores[parameter]
                if is_plain:
                    take_plain(store, entry, before[0].get(parameter), seed_of(group, store, index), losses)
                else:
                    store.take(entry)
                    store.notes = notes_of(store, entry)
                store.step = taken_steps(entry, store.kernel.rule.name)
                # The weights that belong to it may have been loaded before, or will be after.
                store.snapshot = snapshot_of(store, bound=False)
    except BaseException:
        registry.stores, registry.buckets = before
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
