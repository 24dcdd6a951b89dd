"""``optimizer.state``: what is kept of each parameter, under torch's names, to be read and written by hooks and users.

What is kept are packed words; a reading makes float32 tensors of them, shaped like the parameter. What is written to such a
tensor, by assignment or in place, is put into the words before anything else looks at them: it is obeyed by the next step,
and saved. So an entry behaves as torch's does, with one difference: a tensor that was read before a step is not that of
after it. Nothing of this runs, or takes memory, unless somebody reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.optim.outside import mark
from narrowgauge.optim.shards import local_of, placed_like
from narrowgauge.optim.stores import Store

if TYPE_CHECKING:
    from narrowgauge.optim.keeping import Keeping

WEIGHT = "master"
"""The name of the float32 weight that is kept, where something is kept of it beside the visible one."""


class States(MutableMapping[Any, Any]):
    """The mapping from parameters to entries, and from any other key to what a hook or user keeps there.

    Args:
        optimizer: whose.
    """

    def __init__(self, optimizer: Keeping) -> None:
        self.optimizer = optimizer
        self.free: dict[Any, Any] = {}
        self._handed: dict[Store, dict[str, tuple[Tensor, int]]] = {}

    def __getitem__(self, key: Any) -> Any:
        if self.optimizer.holds(key):
            return Entry(self, key)
        return self.free[key] if key in self.free else self.free.setdefault(key, {})  # as torch's defaultdict

    def __setitem__(self, key: Any, value: Any) -> None:
        if not self.optimizer.holds(key):
            self.free[key] = value
        elif entries := dict(value):
            Entry(self, key).update(entries)
        else:
            self.optimizer.drop([key])

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        if key in self.free:
            del self.free[key]
        else:
            self.optimizer.drop([key])

    def __iter__(self) -> Iterator[Any]:
        yield from self.optimizer.kept_parameters()
        yield from list(self.free)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        return key in (self.optimizer.kept_parameters() if self.optimizer.holds(key) else self.free)

    def get(self, key: Any, default: Any = None) -> Any:
        """The entry of a parameter that has one, else ``default``."""
        if key not in self:
            return default
        return self[key]

    def clear(self) -> None:
        """Forget everything: each parameter begins anew, its weight as it is seen."""
        self.free.clear()
        self.optimizer.drop()

    def __repr__(self) -> str:
        return repr({key: dict(value) if isinstance(value, Entry) else value for key, value in self.items()})

    # ── what was handed out ─────────────────────────────────────────────────────────────────────────────────────────

    def read(self, parameter: Tensor, store: Store, name: str) -> Tensor:
        """A state as a tensor, the same one until a step: what is done to it in place is taken by :meth:`take_writes`."""
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
        """Put what was done in place to tensors that were handed out into the words."""
        for store, handed in self._handed.items():
            for name, (value, version) in handed.items():
                if value._version != version:
                    write(store, name, value)
                    handed[name] = value, value._version

    def forget(self, store: Store | None = None) -> None:
        """Hand out other tensors from now on: the words have changed."""
        if store is None:
            self._handed.clear()
        else:
            self._handed.pop(store, None)


class Entry(MutableMapping[str, Any]):
    """What is kept of one parameter: ``step``, the rule's states, ``master`` where more is kept than is seen, and notes.

    The packed tensors that ``state_dict()`` saves are there too, under the names that they have in it, but for storages with
    scales by row: a distributed checkpoint that flattens its state asks an entry, not the ``state_dict()``, what to look up.

    Args:
        states: of which it is one.
        parameter: whose; without states it is empty, and the first thing written gives it all of them.
    """

    def __init__(self, states: States, parameter: Tensor) -> None:
        self._states, self._parameter = states, parameter

    @property
    def _store(self) -> Store | None:
        return self._states.optimizer.store_of(self._parameter)

    def __getitem__(self, name: str) -> Any:
        store = self._store
        if store is None or name not in _names(store):
            raise KeyError(name)
        return store.notes[name] if name in store.notes else self._states.read(self._parameter, store, name)

    def __setitem__(self, name: str, value: Any) -> None:
        store = self._store or self._states.optimizer.begin(self._parameter, name)
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
        """Forget it: the parameter begins anew."""
        self._states.optimizer.drop([self._parameter])

    def __repr__(self) -> str:
        return repr(dict(self))


def _names(store: Store) -> list[str]:
    return [*_readable(store), *_packed(store), *store.extras, *store.notes]


def _readable(store: Store) -> list[str]:
    """Names of what is handed out as values."""
    return ["step", *(name for name, _ in store.storage.states), *([WEIGHT] if store.storage.beside else [])]


def _packed(store: Store) -> list[str]:
    """Names of what is handed out as it is saved; none where scales belong to it, without which it says nothing."""
    return [] if store.bounds else [name for name in store.words if name not in _readable(store)]


def write(store: Store, name: str, value: Any) -> None:
    """Put a value into the words of a store.

    Raises:
        RecipeError: it has another shape than what is kept there.
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
            mark(store)
        else:
            store.put(name, given)


def notes_of(store: Store, entry: Mapping[str, Any]) -> dict[str, Any]:
    """What of a saved entry is not the storage's own."""
    own = {"step", *store.words, *(f"{name}_bound" for name in store.bounds), *store.extras}
    return {name: value for name, value in entry.items() if name not in own}
