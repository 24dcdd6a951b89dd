"""``optimizer.state``: the state of each parameter under torch's names, for hooks and users to read and write.

The state is stored as packed words. Reading an entry unpacks a float32 tensor of the parameter's shape; writing to it, by
assignment or in place, packs it again before the words are next used, so the next step and ``state_dict()`` see the write.
An entry thus behaves as torch's does, with one difference: a tensor that was read before a step is not updated by it.
Nothing is unpacked unless somebody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.shards import local_of, placed_like
from narrowgauge.optim.external_writes import snapshot_adopted
from narrowgauge.optim.registry import Registry
from narrowgauge.optim.stores import Store

WEIGHT = "master"
"""The name of the stored float32 weight, in storages that store more than the visible one."""


class States(MutableMapping[Any, Any]):
    """The mapping from parameters to entries, and from any other key to what a hook or user stores there.

    Args:
        registry: of the optimizer's stores.
        settle: finishes the last step, whose decision to skip may still be on a device.
    """

    def __init__(self, registry: Registry, settle: Callable[[], None]) -> None:
        self._registry, self._settle = registry, settle
        self.free: dict[Any, Any] = {}
        self._handed: dict[Store, dict[str, tuple[Tensor, int]]] = {}

    def _is_parameter(self, key: object) -> bool:
        return isinstance(key, Tensor) and self._registry.group_of(key) is not None

    def store_of(self, parameter: Tensor) -> Store | None:
        """The store of a parameter, with all that was written to it; ``None`` where there is none."""
        self._settle()
        return self._registry.get(parameter)

    def begin(self, parameter: Tensor, name: str) -> Store:
        """Make the store of a parameter, with a state called ``name`` if the rule has one."""
        return self._registry.begin(parameter, name)

    def discard(self, parameters: Iterable[Tensor]) -> None:
        """Remove the states of parameters: they start again from their visible weights."""
        self._settle()
        self.take_writes()
        for store in self._registry.remove(list(parameters)):
            self.forget(store)

    def __getitem__(self, key: Any) -> Any:
        if self._is_parameter(key):
            return Entry(self, key)
        return self.free[key] if key in self.free else self.free.setdefault(key, {})  # as torch's defaultdict

    def __setitem__(self, key: Any, value: Any) -> None:
        if not self._is_parameter(key):
            self.free[key] = value
        elif entries := dict(value):
            Entry(self, key).update(entries)
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
        self.discard(self._registry.stores)

    def __repr__(self) -> str:
        return repr({key: dict(value) if isinstance(value, Entry) else value for key, value in self.items()})

    # ── tensors that were read ─────────────────────────────────────────────────────────────────────────────────────────

    def read(self, parameter: Tensor, store: Store, name: str) -> Tensor:
        """A state as a tensor, the same one until a step; :meth:`take_writes` packs what is done to it in place."""
        if name in store.extras:
            return store.extras[name]
        handed = self._handed.setdefault(store, {})
        if name not in handed:
            if name == "step":
                value = torch.tensor(float(store.step), dtype=torch.float32)
            elif name in _packed(store):
                value = placed_like(parameter, store.in_parameter_order()[name])
            else:
                value = placed_like(parameter, store.stored("weight" if name == WEIGHT else name))
            handed[name] = value, value._version
        return handed[name][0]

    def take_writes(self) -> None:
        """Pack all tensors that were modified in place after they were read."""
        for store, handed in self._handed.items():
            for name, (value, version) in handed.items():
                if value._version != version:
                    write(store, name, value)
                    handed[name] = value, value._version

    def is_what_was_read(self, store: Store, name: str, value: Any) -> bool:
        """Whether a value is put back as it was read: frameworks move each state to where it is already.

        Storing it again would cut it again, and a pair of bfloat16 can hold more than the float32 that was read.
        """
        read, version = self._handed.get(store, {}).get(name, (None, 0))
        return read is not None and value is read and read._version == version

    def forget(self, store: Store | None = None) -> None:
        """Forget the tensors that were read: the words have changed."""
        if store is None:
            self._handed.clear()
        else:
            self._handed.pop(store, None)


class Entry(MutableMapping[str, Any]):
    """The state of one parameter: ``step``, the rule's states, ``master`` where more than the visible weight is stored, notes.

    The packed tensors that ``state_dict()`` saves are there too, under the same names, but for storages with scales by row: a
    distributed checkpoint that flattens its state takes the names from an entry, not from ``state_dict()``.

    Args:
        states: the mapping that it belongs to.
        parameter: the parameter; one without states has an empty entry, and the first write makes all of them.
    """

    def __init__(self, states: States, parameter: Tensor) -> None:
        self._states, self._parameter = states, parameter

    @property
    def _store(self) -> Store | None:
        return self._states.store_of(self._parameter)

    def __getitem__(self, name: str) -> Any:
        store = self._store
        if store is None or name not in _names(store):
            raise KeyError(name)
        return store.notes[name] if name in store.notes else self._states.read(self._parameter, store, name)

    def __setitem__(self, name: str, value: Any) -> None:
        if (known := self._store) is not None and self._states.is_what_was_read(known, name, value):
            return
        store = self._store or self._states.begin(self._parameter, name)
        self._states.take_writes()
        if name in _names(store) and name not in store.notes:
            write(store, name, value)
            self._states.forget(store)
        else:
            store.notes[name] = value

    def __delitem__(self, name: str) -> None:
        store = self._store
        if store is None or name not in _names(store):
            raise KeyError(name)
        if name in store.notes:
            del store.notes[name]
            return
        shown = local_of(self._parameter).detach().float()
        self[name] = 0 if name == "step" else shown if name == WEIGHT else torch.zeros_like(local_of(self[name]))

    def __iter__(self) -> Iterator[str]:
        store = self._store
        return iter([] if store is None else _names(store))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        """Remove the state: the parameter starts again from its visible weight."""
        self._states.discard([self._parameter])

    def __repr__(self) -> str:
        return repr(dict(self))


def _names(store: Store) -> list[str]:
    return [*_readable(store), *_packed(store), *store.extras, *store.notes]


def _readable(store: Store) -> list[str]:
    """Names of entries that are read as float32 values."""
    return ["step", *(name for name, _ in store.storage.states), *([WEIGHT] if store.storage.beside else [])]


def _packed(store: Store) -> list[str]:
    """Names of entries that are read packed; none where they have no meaning without the scales of their rows."""
    return [] if store.bounds else [name for name in store.words if name not in _readable(store)]


def write(store: Store, name: str, value: Any) -> None:
    """Pack a value into a store.

    Raises:
        RecipeError: it has another shape than the state.
    """
    if name == "step":
        store.step = int(value)
        return
    given = local_of(value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float32))
    if name in _packed(store):
        store.take({**store.in_parameter_order(), name: given.detach()})
        return
    shape = store.extras[name].shape if name in store.extras else store.parameter.shape
    if given.shape != shape:
        raise RecipeError(
            f"'{name}' of shape {tuple(given.shape)} was written to the state of a parameter whose own has {tuple(shape)}.",
            "Give a tensor of that shape.",
        )
    with torch.no_grad():
        given = given.detach().to(store.parameter.device)
        if name == WEIGHT:
            store.adopt(given)
            snapshot_adopted(store)
        else:
            store.put(name, given)


def notes_of(store: Store, entry: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a saved entry that hooks and users added."""
    own = {"step", *store.words, *(f"{name}_bound" for name in store.bounds), *store.extras}
    return {name: value for name, value in entry.items() if name not in own}
